"""Nodes and the memory of their devices: of this machine, of a Ray cluster, or imagined."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headscan.cluster.placement.kinds import PlacementError

#: The part of what is free that a placement may fill: the rest is for the CUDA context, the process itself and what
#: allocators leave unused between blocks.
_GPU_SHARE, _RAM_SHARE = 0.95, 0.9
#: Prints the free bytes of each GPU.
_ASK_GPUS = "import torch\nfor gpu in range(torch.cuda.device_count()): print(torch.cuda.mem_get_info(gpu)[0])"
#: Seconds in which every node of a cluster has to tell its memory; a node may have to import torch first.
_TOLD_WITHIN = 120.0
#: Most devices of an imagined cluster. Every one is an entry of a list, and no cluster has more.
MOST_IMAGINED = 100_000


@dataclass(frozen=True)
class Node:
    """One machine.

    Attributes:
        name: For people.
        gpus: Usable bytes of each of its GPUs.
        memory: Usable bytes of RAM.
        cpus: Cores that may be used.
    """

    name: str
    gpus: tuple[int, ...]
    memory: int
    cpus: int


def usable_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def this_machine() -> Node:
    """The machine that this process runs on, and what is free of it now.

    Raises:
        PlacementError: The GPUs do not tell.
    """
    gpus = tuple(int(_GPU_SHARE * free) for free in _free_of_gpus())
    return Node("this machine", gpus, int(_RAM_SHARE * free_memory()), usable_cores())


def roomiest_gpus(count: int) -> tuple[int, ...]:
    """So many of this machine's GPUs, those with most free memory; all where there are no more.

    Raises:
        PlacementError: The GPUs do not tell.
    """
    if _gpus_here() <= count:
        return tuple(range(count))
    free = _free_of_gpus()
    return tuple(sorted(sorted(range(len(free)), key=lambda gpu: -free[gpu])[:count]))


def roomiest(device: str) -> str:
    """Where this process loads what was placed on a device: of ``cuda`` the GPU with most free memory.

    Placements on ``cuda`` are judged by that one, and torch would take the first. It is named where there are several.

    Raises:
        PlacementError: The GPUs do not tell.
    """
    return f"cuda:{roomiest_gpus(1)[0]}" if device == "cuda" and _gpus_here() > 1 else device


def free_memory() -> int:
    """Bytes of RAM that this process and its children may still take: of the machine, and of its container."""
    return min(_free_of_machine(), _free_of_container(Path("/sys/fs/cgroup")))


def _gpus_here() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _free_of_gpus() -> list[int]:
    """Bytes of each GPU that nobody uses.

    They are asked by a process that ends: this one would keep a context on each of them, some hundred MB, and of GPUs
    that serve one process at a time Ray's actors could not have theirs.
    """
    if not _gpus_here():
        return []
    asked = subprocess.run([sys.executable, "-P", "-c", _ASK_GPUS], capture_output=True, text=True)
    if asked.returncode:
        # Below what CUDA says torch gives advice, line by line.
        said = re.findall(r"^[\w.]+: .*", asked.stderr, re.MULTILINE) or asked.stderr.strip().splitlines()
        last = said[-1] if said else f"exit code {asked.returncode}"
        raise PlacementError(
            f"the GPUs do not tell their free memory ({last}): mend that, or set CUDA_VISIBLE_DEVICES to those that do"
        )
    return [int(line) for line in asked.stdout.split()]


def _free_of_machine() -> int:
    table = Path("/proc/meminfo")
    lines = table.read_text().splitlines() if table.exists() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _free_of_container(root: Path) -> int:
    """The container's limit less what it has; files that the system keeps in memory make room when asked."""
    own = [line.split(":", 2) for line in _lines(Path("/proc/self/cgroup"))]
    inside = next((path for _, kinds, path in own if "memory" in kinds.split(",")), None)
    free = 1 << 62
    for folder, limit, used in (
        (root, "memory.max", "memory.current"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        (root / f"memory{inside or ''}", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        allowed, taken = (next(iter(_lines(folder / name)), "") for name in (limit, used))
        if allowed.isdecimal() and taken.isdecimal():
            kept = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
            cached = int(kept.get("total_inactive_file") or kept.get("inactive_file") or 0)
            free = min(free, max(0, int(allowed) - int(taken) + cached))
    return free


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def imagined(nodes: int, gpus: int, gpu_memory: int, cpu_memory: int, cpus: int) -> tuple[Node, ...]:
    """Nodes that are all alike, and are only thought of.

    Args:
        nodes: How many.
        gpus: GPUs of each.
        gpu_memory, cpu_memory: Bytes of one GPU, and of a node's RAM.
        cpus: Cores of a node.

    Raises:
        PlacementError: There are none, fewer than none of something, or more than `MOST_IMAGINED` devices.
    """
    if nodes < 1 or gpus < 0 or cpus < 1:
        raise PlacementError(f"--nodes {nodes}, --gpus {gpus}, --cpus {cpus}: imagine at least one node and one CPU")
    if nodes * max(1, gpus) > MOST_IMAGINED:
        raise PlacementError(
            f"--nodes {nodes} with --gpus {gpus} are {nodes * max(1, gpus):,} devices (limit {MOST_IMAGINED:,}). "
            "Imagine fewer nodes"
        )
    usable = (int(_GPU_SHARE * gpu_memory),) * gpus
    return tuple(Node(f"node {i}", usable, int(_RAM_SHARE * cpu_memory), cpus) for i in range(nodes))


def ray_nodes(ray: Any) -> tuple[Node, ...]:
    """The nodes of the connected cluster that have CPUs, each asked what is free of it.

    Args:
        ray: The module, connected.

    Raises:
        PlacementError: A node does not answer.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    living = [node for node in ray.nodes() if node["Alive"]]
    # The process ends with the task, which changes its environment.
    ask = ray.remote(num_cpus=0, max_calls=1)(_told)
    answers = [
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(n["NodeID"], soft=False)).remote()
        for n in living
    ]
    try:
        told = ray.get(answers, timeout=_TOLD_WITHIN)
    except ray.exceptions.RayError as problem:
        raise PlacementError(f"a node of the Ray cluster does not tell its memory: {problem}") from problem
    found = []
    for node, (gpus, memory) in zip(living, told, strict=True):
        shared = node["Resources"]
        if shared.get("CPU", 0) or shared.get("GPU", 0):
            # Ray may have been given a part of a machine alone.
            gpus = gpus[: int(shared.get("GPU", 0))]
            found.append(Node(node["NodeManagerAddress"], gpus, memory, int(shared.get("CPU", 0))))
    return tuple(found)


def _told() -> tuple[tuple[int, ...], int]:
    """What a node says of itself: bytes of its GPUs, and of its RAM."""
    # Some versions of Ray hide the GPUs from a task that asks for none; whoever started the node may have hidden some.
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]
    here = this_machine()
    return here.gpus, here.memory
