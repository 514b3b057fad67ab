"""Ray itself: imported when needed, started on this machine, or reached on a running cluster."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import tempfile
from typing import Any

from headscan.cluster.actors.orphans import OrphanWatch
from headscan.cluster.placement.kinds import PlacementError

#: Seconds in which a cluster has to answer.
_REACHED_WITHIN = 10.0
#: Ray's own limit for a start is 30 seconds, which a busy machine may exceed once.
_START_ATTEMPTS = 2
#: Free bytes below which the temporary folder is named as the reason that Ray does not start.
_LEAST_FREE = 64 * 2**20


def import_ray(*, local: bool) -> Any:
    """The module ``ray``.

    Args:
        local: It is to run on this machine alone.

    Raises:
        PlacementError: It is not installed.
    """
    if local:
        # Ray reads this when it is imported. It is its switch for one machine alone: everything then listens on
        # 127.0.0.1, where a node address of 127.0.0.1 would be replaced by the machine's public one.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ImportError as problem:
        raise PlacementError(
            f"Ray cannot be imported ({first_line(problem)}): install it (pip install ray), or run one replica on this "
            "machine, which needs none of it"
        ) from problem
    return ray


class Session:
    """The cluster that is connected (`connect`); else a Ray of this machine alone, on the loopback interface and
    without a dashboard, that ends with the session.

    Args:
        cpus: What such a local Ray shares out.

    Attributes:
        ray: The module.
        local: Whether it was started here.

    Raises:
        PlacementError: Ray is not installed, or does not start.
    """

    def __init__(self, cpus: int) -> None:
        self.ray = import_ray(local=True)
        self.local = not self.ray.is_initialized()
        self._cpus = cpus
        self._watch: OrphanWatch | None = None
        if self.local:
            self._start()

    def lost(self) -> bool:
        """True if this is a local Ray whose node died, which nobody else will start again."""
        return self.local and not living_nodes(self.ray)

    def restart(self) -> None:
        """Start a lost local Ray again; every actor and result of the old one is gone.

        Raises:
            PlacementError: Ray does not start.
        """
        self._stop()
        self._start()

    def _start(self) -> None:
        # Ray would run its workers behind everything else on the machine; here they do the command's own work.
        os.environ.setdefault("RAY_worker_niceness", "0")
        start_local(self.ray, self._cpus)
        self._watch = OrphanWatch()

    def _stop(self) -> None:
        self.ray.shutdown()
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def check(self, replicas: int, **each: float) -> None:
        """Refuse what the cluster could never give; closes the session then.

        Raises:
            PlacementError: All nodes together have less than the replicas need ``each``.
        """
        total = self.ray.cluster_resources()
        for kind, amount in each.items():
            if amount * replicas > total.get(kind, 0):
                self.close()
                raise PlacementError(
                    f"{amount * replicas:g} {kind}s are wanted for {replicas} replicas, the Ray cluster has "
                    f"{total.get(kind, 0):g}: ask for fewer --replicas"
                    + (", or use --device cpu" if kind == "GPU" else "")
                )

    def close(self) -> None:
        """End what was started here."""
        if self.local:
            self._stop()
            self.local = False


def connect(address: str) -> list[dict[str, float]]:
    """Connect to a running cluster; the resources of each of its living nodes.

    Raises:
        PlacementError: None answers there, or Ray is not installed.
    """
    ray = import_ray(local=False)
    if not ray.is_initialized():
        failure = f"no Ray cluster answers at {address}"
        _knock(address, failure)
        _init(ray, failure, address=address)
    return living_nodes(ray)


def living_nodes(ray: Any) -> list[dict[str, float]]:
    """The resources of each living node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def first_line(problem: BaseException) -> str:
    """An error's message without what Ray writes below it."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]


def _knock(address: str, failure: str) -> None:
    """Raise if nobody listens at ``host:port``: Ray itself would try for many minutes."""
    if (named := re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d+)", address)) is None:
        return  # "auto" and the like: Ray finds the cluster, or says that there is none
    try:
        socket.create_connection((named[1], int(named[2])), timeout=_REACHED_WITHIN).close()
    except (OSError, OverflowError) as problem:
        raise PlacementError(
            f"{failure} ({first_line(problem)}): start one there (ray start --head), or leave --ray-address out"
        ) from problem


def start_local(ray: Any, cpus: int) -> None:
    """Start a Ray of this machine alone, on the loopback interface and without a dashboard.

    Raises:
        PlacementError: It does not start; the message names the remedy.
    """
    for attempt in range(1, _START_ATTEMPTS + 1):
        try:
            _init(ray, "a local Ray does not start", address="local", num_cpus=cpus, include_dashboard=False)
            return
        except PlacementError as problem:
            ray.shutdown()
            remedy = _start_remedy(problem)
            if remedy is None and attempt < _START_ATTEMPTS:
                continue
            remedy = remedy or "Run the same command again when the machine is less busy, or use one replica (no Ray)"
            raise PlacementError(f"{problem}. {remedy}") from problem


def _start_remedy(problem: PlacementError) -> str | None:
    """The fix for a start that fails every time; None if another attempt may succeed."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if "AF_UNIX" in str(problem):
        return f"Set TMPDIR to a shorter path than {folder}, for example /tmp"
    free = shutil.disk_usage(folder).free
    if free < _LEAST_FREE:
        return f"{folder} has {free >> 20} MiB free: free some space there, or set TMPDIR to another folder"
    return None


def _init(ray: Any, failure: str, **options: Any) -> None:
    """Call `ray.init` without its output.

    Raises:
        PlacementError: It failed.
    """
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=True, **options)
    except Exception as problem:  # Ray raises bare Exception, RuntimeError, OSError and others for a failed start
        raise PlacementError(f"{failure}: {first_line(problem)}") from problem
