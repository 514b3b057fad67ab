"""Layouts of whole replicas, and what is said when the devices do not allow one."""

import pytest

from cluster.placement import PlacementError, WholePlacement, place_on_cluster, place_whole


def test_replicas_share_the_cores() -> None:
    assert place_whole(None, "cpu", cores=8).replicas == 1
    assert place_whole(None, "cpu", cores=8).threads == 8
    place = place_whole(3, "cpu", cores=8)
    assert (place.replicas, place.threads) == (3, 2)
    assert place.describe() == "placement: whole, 3 replicas on cpu, 2 CPU threads each"


def test_more_replicas_than_devices_are_refused() -> None:
    with pytest.raises(PlacementError, match="at least 1"):
        place_whole(0, "cpu")
    with pytest.raises(PlacementError, match="there are 2 cores; ask for at most 2"):
        place_whole(5, "cpu", cores=2)


def test_more_replicas_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert place_whole(None, "auto").replicas == 4
    assert place_whole(1, "auto").device == "auto"
    with pytest.raises(PlacementError, match="4 GPUs are there"):
        place_whole(5, "cuda")
    with pytest.raises(PlacementError, match="1 GPUs are there"):
        place_whole(2, "cuda:1")


def test_devices_that_are_not_there_are_named() -> None:
    with pytest.raises(PlacementError, match="unknown device 'toaster'"):
        place_whole(None, "toaster")
    with pytest.raises(PlacementError, match="--device cuda: this machine has no GPU"):
        place_whole(None, "cuda")


def test_a_replica_fits_on_one_node_of_a_cluster() -> None:
    nodes = [{"CPU": 4.0}] * 4
    assert place_on_cluster(nodes, None, "auto") == WholePlacement(4, "cpu", 4)
    assert place_on_cluster(nodes, 2, "cpu").threads == 4
    assert place_on_cluster(nodes, 5, "cpu").threads == 2
    assert place_on_cluster(nodes, 16, "cpu").threads == 1
    with pytest.raises(PlacementError, match="the cluster has 16 CPUs"):
        place_on_cluster(nodes, 17, "cpu")
    gpus = [{"CPU": 32.0, "GPU": 8.0}, {"CPU": 64.0, "GPU": 8.0}, {"CPU": 8.0}]
    assert place_on_cluster(gpus, None, "auto") == WholePlacement(16, "cuda", 4)
    with pytest.raises(PlacementError, match="the cluster has 16 GPUs"):
        place_on_cluster(gpus, 17, "cuda")
