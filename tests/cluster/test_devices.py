"""Sizes as people write them, and the memory of machines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster import devices
from cluster.devices import Node, format_bytes, imagined, parse_bytes, ray_nodes, this_machine, usable_cores
from cluster.placements import PlacementError
from cluster.session import import_ray
from tests.cluster.conftest import ray_nodes as cluster_of


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 << 30), ("2 GiB", 2 << 30), ("512MiB", 512 << 20), ("80GB", 80 * 10**9), ("1.5kb", 1500), ("7", 7)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "80 gigs", "0", "1e3"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(PlacementError, match="such as 80GiB"):
        parse_bytes(text)


def test_sizes_are_written() -> None:
    assert [format_bytes(n) for n in (7, 1536, 3 << 20, 80 << 30, 3 << 39)] == [
        "7 B",
        "1.5 KiB",
        "3.0 MiB",
        "80.0 GiB",
        "1.5 TiB",
    ]


def test_this_machine_tells_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    here = this_machine()
    assert here.gpus == ()
    assert here.cpus == usable_cores()
    assert 0 < here.memory < 1 << 45
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (1000 * (gpu + 1), 9999))
    assert this_machine().gpus == (950, 1900)


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_may_have_less_than_the_machine(version: int, tmp_path: Path) -> None:
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    folder = tmp_path / "memory" if version == 1 else tmp_path
    folder.mkdir(exist_ok=True)
    for name, text in zip((*names, "memory.stat"), ("1000", "700", "anon 500\ninactive_file 150\n"), strict=True):
        (folder / name).write_text(text)
    assert devices._free_of_container(tmp_path) == 450
    (folder / names[0]).write_text("max")
    assert devices._free_of_container(tmp_path) > 1 << 60


def test_imagined_nodes_keep_something_back() -> None:
    assert imagined(2, 3, 1000, 2000, 4) == (Node("node 0", (950,) * 3, 1800, 4), Node("node 1", (950,) * 3, 1800, 4))
    with pytest.raises(PlacementError, match="at least one node"):
        imagined(0, 8, 1, 1, 1)


def test_every_node_of_a_cluster_is_asked() -> None:
    with cluster_of(1, 1):
        found = ray_nodes(import_ray(local=True))
    assert [(node.gpus, node.cpus) for node in found] == [((), 1), ((), 1)]  # the head has nothing to share
    assert all(node.memory > 1 << 28 for node in found)
