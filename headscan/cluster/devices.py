"""Nodes, the free memory of their devices, real or imagined, and the threads of their CPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from headscan.cluster.placement_base import Node, PlacementError
from headscan.errors import first_line

#: Spin count of an idle thread before it sleeps, a few microseconds. OpenMP's default of 300,000 takes the cores from
#: other processes: next to two of them a scan took 1.4 to 2 times as long. On an idle machine both are equally fast.
_SPINS = 3000


def share_cores() -> None:
    """Let torch's idle threads sleep, unless the user set a wait policy. Child processes inherit the setting. Call this
    before torch is imported, because OpenMP reads its variables once.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


def max_threads() -> int | None:
    """Return the thread limit of OMP_NUM_THREADS; None without a number."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None


#: Share of the free memory that a placement may fill. The rest is for the CUDA context, the process and fragmentation.
_GPU_SHARE, _RAM_SHARE = 0.95, 0.9
#: Prints the free bytes of each GPU.
_ASK_GPUS = "import torch\nfor gpu in range(torch.cuda.device_count()): print(torch.cuda.mem_get_info(gpu)[0])"
#: Root of the control groups, and the file that names those of this process.
_CGROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
#: More than any machine has, for a group without a limit.
_UNLIMITED = 1 << 62
#: Timeout in seconds for reading the free memory of all nodes; a node may have to import torch first.
_NODES_TIMEOUT = 120.0
#: Most devices of an imagined cluster, larger than any real one: each is an entry of a list.
MOST_IMAGINED = 100_000


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use; a part of a core in a quota does not count."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _cores_of_groups(_CGROUPS)))


def this_machine() -> Node:
    """Return this machine with its free memory."""
    gpus = tuple(int(_GPU_SHARE * free) for free in _free_of_gpus())
    return Node("this machine", gpus, int(_RAM_SHARE * free_memory()), usable_cores())


def roomiest_gpus(count: int) -> tuple[int, ...]:
    """Return the ``count`` GPUs with the most free memory."""
    if _gpus_here() <= count:
        return tuple(range(count))
    free = _free_of_gpus()
    return tuple(sorted(sorted(range(len(free)), key=lambda gpu: -free[gpu])[:count]))


def roomiest_names(count: int) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for the ``count`` GPUs with the most free memory; None if there are no others."""
    if not count or _gpus_here() <= count:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = visible if visible[0] else [str(gpu) for gpu in range(_gpus_here())]
    return ",".join(names[gpu] for gpu in roomiest_gpus(count))


def roomiest(device: str) -> str:
    """Replace ``cuda`` by the GPU with the most free memory. Placements on ``cuda`` are planned for that GPU, and torch
    would use the first one.
    """
    return f"cuda:{roomiest_gpus(1)[0]}" if device == "cuda" and _gpus_here() > 1 else device


def free_memory() -> int:
    """Return the free bytes of RAM that this process may use: those of the machine, or fewer where one of its control
    groups (a container, a systemd scope, a Slurm job) has a limit.
    """
    return min(_free_of_machine(), _free_of_groups(_CGROUPS))


def _gpus_here() -> int:
    import torch  # placements are also read by the command line's parser, which stays light

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _free_of_gpus() -> list[int]:
    """Return the free bytes of each GPU, read by a subprocess: this process would keep a context of some hundred MB on
    each GPU, and would block GPUs in exclusive mode for Ray's actors.
    """
    if not _gpus_here():
        return []
    asked = subprocess.run([sys.executable, "-P", "-c", _ASK_GPUS], capture_output=True, text=True)
    if asked.returncode:
        # torch appends lines of advice to the CUDA error.
        errors = re.findall(r"^[\w.]+: .*", asked.stderr, re.MULTILINE) or asked.stderr.strip().splitlines()
        last = errors[-1] if errors else f"exit code {asked.returncode}"
        raise PlacementError(
            f"cannot read free GPU memory: {last}. Fix the driver, or set CUDA_VISIBLE_DEVICES to working GPUs"
        )
    return [int(line) for line in asked.stdout.split()]


def _free_of_machine() -> int:
    table = Path("/proc/meminfo")
    lines = table.read_text().splitlines() if table.exists() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _free_of_groups(root: Path, own: Path = _OWN_GROUPS) -> int:
    """Return the smallest limit minus use of this process's control groups. The use is counted without inactive file
    pages, which the kernel can drop.
    """
    free = _UNLIMITED
    for folder in _groups(root, own, "memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            allowed, taken = (next(iter(_lines(folder / name)), "") for name in (limit, used))
            if allowed.isdecimal() and taken.isdecimal():
                kept = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
                cached = int(kept.get("total_inactive_file") or kept.get("inactive_file") or 0)
                free = min(free, max(0, int(allowed) - int(taken) + cached))
    return free


def _cores_of_groups(root: Path, own: Path = _OWN_GROUPS) -> int:
    """Return the whole cores in the smallest CPU quota of this process's control groups."""
    cores = _UNLIMITED
    for folder in _groups(root, own, "cpu"):
        either = _lines(folder / "cpu.max") or [
            " ".join(_lines(folder / "cpu.cfs_quota_us") + _lines(folder / "cpu.cfs_period_us"))
        ]
        quota, _, period = either[0].partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores = min(cores, int(quota) // int(period))
    return cores


def _groups(root: Path, own: Path, controller: str) -> list[Path]:
    """Return the folders of this process's control groups with a controller, and of their ancestors. The folders of
    version 1 lie below the controller's own. A container may see its own group as the root, whatever its path is.
    """
    folders = [root, root / controller]
    for line in _lines(own):
        _, controllers, path = line.split(":", 2)
        parts = [part for part in path.split("/") if part]
        if (not controllers or controller in controllers.split(",")) and ".." not in parts:
            top = root / controller if controllers else root
            folders += [top.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return folders


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def imagined(nodes: int, gpus: int, gpu_memory: int, cpu_memory: int, cpus: int) -> tuple[Node, ...]:
    """Return identical imagined nodes; the memories are bytes of one GPU, and of a node's RAM."""
    if nodes < 1 or gpus < 0 or cpus < 1:
        raise PlacementError(
            f"`nodes={nodes}`, `gpus={gpus}`, `cpus={cpus}`: too few. Imagine at least one node and one CPU"
        )
    if nodes * max(1, gpus) > MOST_IMAGINED:
        raise PlacementError(
            f"`nodes={nodes}` with `gpus={gpus}` are {nodes * max(1, gpus):,} devices (limit {MOST_IMAGINED:,}). "
            "Imagine fewer nodes"
        )
    usable = (int(_GPU_SHARE * gpu_memory),) * gpus
    return tuple(Node(f"node {i}", usable, int(_RAM_SHARE * cpu_memory), cpus) for i in range(nodes))


def machines(ray_address: str | None) -> tuple[Node, ...]:
    """Return the nodes of the Ray cluster at an address, to which this process connects; None returns this machine."""
    if not ray_address:
        return (this_machine(),)
    from headscan.cluster.ray_session import connect, import_ray

    connect(ray_address)
    return ray_nodes(import_ray(local=False))


def ray_nodes(ray: Any) -> tuple[Node, ...]:
    """Return the nodes of the connected cluster with their free memory."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    living = [node for node in ray.nodes() if node["Alive"]]
    # The task changes the environment of its process, so that process serves no other task.
    ask = ray.remote(num_cpus=0, max_calls=1)(_free_here)
    answers = [
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(n["NodeID"], soft=False)).remote()
        for n in living
    ]
    try:
        free = ray.get(answers, timeout=_NODES_TIMEOUT)
    except ray.exceptions.RayError as problem:
        raise PlacementError(
            f"cannot read the free memory of a node of the Ray cluster: {first_line(problem)}. Check the "
            "nodes with `ray status`"
        ) from problem
    nodes = []
    for node, (gpus, memory) in zip(living, free, strict=True):
        shared = node["Resources"]
        if shared.get("CPU", 0) or shared.get("GPU", 0):
            # A Ray node may own only some of the GPUs of its machine.
            gpus = gpus[: int(shared.get("GPU", 0))]
            nodes.append(Node(node["NodeManagerAddress"], gpus, memory, int(shared.get("CPU", 0))))
    return tuple(nodes)


def _free_here() -> tuple[tuple[int, ...], int]:
    """Return the usable bytes of this node's GPUs, and of its RAM."""
    # Some versions of Ray hide all GPUs from a task without GPUs; a list set by the user stays.
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]
    here = this_machine()
    return here.gpus, here.memory
