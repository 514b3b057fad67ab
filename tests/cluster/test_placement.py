"""Layouts of whole replicas, and what is said when the devices do not allow one."""

import pytest

from cluster.placement import PlacementError, place_whole


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
    with pytest.raises(PlacementError, match="there are 4 GPUs"):
        place_whole(5, "cuda")
    with pytest.raises(PlacementError, match="there are 1 GPUs"):
        place_whole(2, "cuda:1")
