"""Sizes as people write them, and the memory of machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from headscan.cluster import devices
from headscan.cluster.devices import MOST_IMAGINED, imagined, roomiest, roomiest_gpus, this_machine, usable_cores
from headscan.cluster.placement_base import ByteSizeError, Node, PlacementError, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 << 30), ("2 GiB", 2 << 30), ("512MiB", 512 << 20), ("80GB", 80 * 10**9), ("1.5kb", 1500), ("7B", 7)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "80 gigs", "0GiB", "0.1B", "1e3", "9" * 400 + "GiB"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ByteSizeError, match="such as 80GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["80", " 1000 ", "0", "1.5"])
def test_a_size_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ByteSizeError, match=f"has no unit: write {text.strip()}GiB"):
        parse_bytes(text)


def test_sizes_are_written() -> None:
    assert [format_bytes(n) for n in (7, 1536, 3 << 20, 80 << 30, 3 << 39)] == [
        "7 B",
        "1.5 KiB",
        "3.0 MiB",
        "80.0 GiB",
        "1.5 TiB",
    ]


def test_this_machine_reports_its_free_memory() -> None:
    here = this_machine()
    assert here.gpus == ()
    assert here.cpus == usable_cores()
    assert 0 < here.memory < 1 << 45


def test_gpu_memory_is_read_in_a_process_that_ends(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: pytest.fail("a context was opened here"))
    assert this_machine().gpus == (950, 1900)
    monkeypatch.setattr(devices, "_ASK_GPUS", "raise RuntimeError('CUDA error: busy\\nCompile with `this`.')")
    with pytest.raises(PlacementError, match=r"free GPU memory: RuntimeError: CUDA error: busy. Fix the driver"):
        this_machine()
    monkeypatch.setattr(devices, "_ASK_GPUS", "raise SystemExit(3)")
    with pytest.raises(PlacementError, match="memory: exit code 3"):
        this_machine()
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert this_machine().gpus == ()  # the real question, where there are none


def test_the_gpus_with_most_room_are_found(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [roomiest(device) for device in ("cuda", "cuda:0", "cpu")] == ["cuda:1", "cuda:0", "cpu"]
    assert roomiest_gpus(1) == (1,)
    monkeypatch.setattr(devices, "_ASK_GPUS", "raise SystemExit(3)")
    assert roomiest_gpus(2) == (0, 1)  # nothing to choose, nothing to ask
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert (roomiest("cuda"), roomiest_gpus(1)) == ("cuda", (0,))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(devices, "_ASK_GPUS", "print(5, 9, 7, 9)")
    assert [roomiest_gpus(count) for count in (1, 2, 3)] == [(1,), (1, 3), (1, 2, 3)]


@pytest.mark.parametrize(("started", "seen"), [("", None), ("2,3", "2,3"), (None, None)])
def test_gpus_that_a_node_was_not_given_stay_hidden(
    started: str | None, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if started is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", started)
    devices._free_here()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_may_have_less_than_the_machine(version: int, tmp_path: Path) -> None:
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    folder = tmp_path / "memory" if version == 1 else tmp_path
    folder.mkdir(exist_ok=True)
    for name, text in zip((*names, "memory.stat"), ("1000", "700", "anon 500\ninactive_file 150\n"), strict=True):
        (folder / name).write_text(text)
    assert devices._free_of_groups(tmp_path) == 450
    (folder / names[0]).write_text("max")
    assert devices._free_of_groups(tmp_path) > 1 << 60


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limited", ["job", "job/step"])
def test_a_group_below_the_root_and_its_ancestors_have_limits(version: int, limited: str, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/job/step\n3:cpu,cpuacct:/job/step\n0::/\n" if version == 1 else "0::/job/step\n")
    if version == 1:
        memory, cpu = tmp_path / "memory" / limited, tmp_path / "cpu" / limited
        texts = {memory / "memory.limit_in_bytes": "1000", memory / "memory.usage_in_bytes": "700"}
        texts |= {cpu / "cpu.cfs_quota_us": "350000", cpu / "cpu.cfs_period_us": "100000"}
    else:
        group = tmp_path / limited
        texts = {group / "memory.max": "1000", group / "memory.current": "700", group / "cpu.max": "350000 100000"}
    other = tmp_path / "other"
    texts |= {other / "memory.max": "10", other / "memory.current": "0", other / "cpu.max": "100000 100000"}
    for file, text in texts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert devices._free_of_groups(tmp_path, own) == 300
    assert devices._cores_of_groups(tmp_path, own) == 3
    own.write_text("0::/../elsewhere\n")
    assert devices._free_of_groups(tmp_path, own) > 1 << 60


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 4), ("50000 100000", 1), ("200000 100000", 2)])
def test_a_quota_limits_the_cores(quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)), raising=False)
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert usable_cores() == cores


def test_imagined_nodes_keep_something_back() -> None:
    assert imagined(2, 3, 1000, 2000, 4) == (Node("node 0", (950,) * 3, 1800, 4), Node("node 1", (950,) * 3, 1800, 4))
    with pytest.raises(PlacementError, match="at least one node"):
        imagined(0, 8, 1, 1, 1)
    assert len(imagined(MOST_IMAGINED, 1, 1000, 2000, 4)) == MOST_IMAGINED
    with pytest.raises(PlacementError, match=r"100,001 devices \(limit 100,000\)"):
        imagined(MOST_IMAGINED + 1, 0, 1000, 2000, 4)
