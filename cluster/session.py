"""Ray itself: imported when needed, started on this machine, or reached on a running cluster."""

from __future__ import annotations

import logging
import os
import re
import socket
from typing import Any

from cluster.placements import PlacementError

#: Seconds in which a cluster has to answer.
_REACHED_WITHIN = 10.0


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
        if self.local:
            # Ray would run its workers behind everything else on the machine; here they do the command's own work.
            os.environ.setdefault("RAY_worker_niceness", "0")
            failure = "a local Ray does not start"
            _init(self.ray, failure, address="local", num_cpus=cpus, include_dashboard=False)

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
            self.ray.shutdown()
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


def _init(ray: Any, failure: str, **options: Any) -> None:
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=True, **options)
    except (ConnectionError, RuntimeError, ValueError) as problem:
        raise PlacementError(f"{failure}: {first_line(problem)}") from problem
