"""Replicas as Ray actors, on this machine or on a running cluster.

A worker that dies takes its items with it: they run again elsewhere, each alone on its replica from then on, so that at
most one death is held against an item that only stood beside the one at fault. An item is given up after
`MAX_ATTEMPTS` deaths. An error of the task itself is not tried again.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cluster.placement import PlacementError, WholePlacement
from cluster.pool import Finished, ModelSpec, Pool, R, T, Task, WorkError, name_of
from cluster.worker import Worker
from headscan.errors import HeadscanError

MAX_ATTEMPTS = 3
#: Items handed to a replica ahead of time, so that it never waits for the driver.
_IN_FLIGHT = 2
#: Seconds without any result after which the user is told what is being waited for.
_PATIENCE = 120

_log = logging.getLogger("headscan")


@dataclass
class _Job:
    """An item, and how many workers died with it in hand; after the first death it is worked on alone."""

    item: Any
    deaths: int = 0


@dataclass(eq=False)
class _Replica:
    """An actor and the jobs it was handed, in order, each with Ray's reference to its result."""

    actor: Any
    jobs: deque[tuple[Any, _Job]] = field(default_factory=deque)

    def has_room(self, *, alone: bool) -> bool:
        if alone or any(job.deaths for _, job in self.jobs):
            return not self.jobs
        return len(self.jobs) < _IN_FLIGHT


class RayPool(Pool):
    """Whole replicas on Ray.

    A local Ray (on the loopback interface, without a dashboard) is started unless a cluster is connected already
    (`connect`), and ends with the pool.

    Raises:
        PlacementError: Ray does not start, or the cluster lacks the devices.
    """

    def __init__(self, spec: ModelSpec, placement: WholePlacement) -> None:
        ray = _import_ray(local=True)
        self._ray = ray
        self._placement = placement
        self._replicas: list[_Replica] = []
        self._started = not ray.is_initialized()
        if self._started:
            cores = placement.replicas * placement.threads
            _init(ray, "a local Ray does not start", address="local", num_cpus=cores, include_dashboard=False)
        gpus = 1 if placement.device.startswith("cuda") else 0
        # A cluster shares its CPUs out; here the placement has done so, and a second pool need not wait for the first.
        cpus = 0 if self._started or gpus else placement.threads
        self._check_resources(GPU=gpus, CPU=cpus)
        # An actor that died is replaced, not restarted: calls to one that is restarting fail, calls to a new one wait.
        self._remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0)(Worker)
        # Inside the actor Ray shows the one GPU it was given as cuda:0.
        self._arguments = (spec, "cuda" if gpus else placement.device, placement.threads)
        self._replicas = [self._new_replica() for _ in range(placement.replicas)]

    @property
    def replicas(self) -> int:
        return self._placement.replicas

    def map(self, task: Task[T, R], items: Iterable[T]) -> Iterator[Finished[T, R]]:
        errors = self._ray.exceptions
        source = iter(items)
        again: deque[_Job] = deque()
        try:
            while True:
                while (replica := self._free_replica(alone=bool(again))) and (job := _next_job(again, source)):
                    replica.jobs.append((replica.actor.run.remote(task, job.item), job))
                pending = {reference: replica for replica in self._replicas for reference, _ in replica.jobs}
                if not pending:
                    return
                done, _ = self._ray.wait(list(pending), num_returns=1, timeout=_PATIENCE)
                if not done:
                    free = self._ray.available_resources()
                    resources = f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs free"
                    _log.warning("waiting for a replica since %d s; the Ray cluster has %s", _PATIENCE, resources)
                    continue
                replica = pending[done[0]]
                try:
                    value, seconds, name = self._ray.get(done[0])
                except (errors.RayActorError, errors.OutOfMemoryError, errors.ObjectLostError) as death:
                    again.extend(self._bury(replica, death))
                    continue
                except (errors.ActorUnschedulableError, errors.RuntimeEnvSetupError) as problem:
                    raise PlacementError(f"Ray cannot place a replica: {_first_line(problem)}") from problem
                job = _take(replica, done[0])
                if isinstance(value, HeadscanError):
                    raise value
                yield Finished(job.item, value, seconds, name)
        finally:
            # Left early (an error, or the caller stopped): nobody will read these.
            for replica in self._replicas:
                for reference, _ in replica.jobs:
                    self._ray.cancel(reference)
                replica.jobs.clear()

    def close(self) -> None:
        for replica in self._replicas:
            self._ray.kill(replica.actor)
        self._replicas = []
        if self._started:
            self._ray.shutdown()
            self._started = False

    def _new_replica(self) -> _Replica:
        return _Replica(self._remote.remote(*self._arguments))

    def _free_replica(self, *, alone: bool) -> _Replica | None:
        """The least busy replica that can take one more job, ``alone``: one that has nothing else in hand."""
        free = [replica for replica in self._replicas if replica.has_room(alone=alone)]
        return min(free, key=lambda replica: len(replica.jobs), default=None)

    def _bury(self, replica: _Replica, death: Exception) -> list[_Job]:
        """Put a new replica in the place of a dead one; its jobs, to be run again.

        Raises:
            WorkError: `MAX_ATTEMPTS` workers died on one of them.
        """
        jobs = [job for _, job in replica.jobs]
        replica.jobs.clear()
        self._ray.kill(replica.actor)
        self._replicas[self._replicas.index(replica)] = self._new_replica()
        # Which of them it died on cannot be told: a result may be lost with the worker that had just finished it.
        for job in jobs:
            job.deaths += 1
            if job.deaths >= MAX_ATTEMPTS:
                message = f"{name_of(job.item)}: {MAX_ATTEMPTS} workers died on it; the last: {_first_line(death)}"
                raise WorkError(message) from death
        return jobs

    def _check_resources(self, **each: int) -> None:
        """Refuse what the cluster could never give: an actor it cannot place would be waited for without end."""
        total = self._ray.cluster_resources()
        for kind, amount in each.items():
            wanted = amount * self._placement.replicas
            if wanted > total.get(kind, 0):
                self.close()
                raise PlacementError(
                    f"{wanted} {kind}s are wanted for {self._placement.replicas} replicas, the Ray cluster has "
                    f"{total.get(kind, 0):g}: ask for fewer --replicas"
                    + (", or use --device cpu" if kind == "GPU" else "")
                )


def _next_job(again: deque[_Job], source: Iterator[Any]) -> _Job | None:
    if again:
        return again.popleft()
    return next((_Job(item) for item in source), None)


def _take(replica: _Replica, reference: Any) -> _Job:
    """Remove a finished job from its replica."""
    entry = next(entry for entry in replica.jobs if entry[0] == reference)
    replica.jobs.remove(entry)
    return entry[1]


def connect(address: str) -> list[dict[str, float]]:
    """Connect to a running cluster; the resources of each of its living nodes.

    Raises:
        PlacementError: None answers there.
    """
    ray = _import_ray(local=False)
    if not ray.is_initialized():
        _init(ray, f"no Ray cluster answers at {address}", address=address)
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _import_ray(*, local: bool) -> Any:
    if local:
        # Ray reads this when it is imported. It is its switch for one machine alone: everything then listens on
        # 127.0.0.1, where a node address of 127.0.0.1 would be replaced by the machine's public one.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    return ray


def _init(ray: Any, failure: str, **options: Any) -> None:
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=True, **options)
    except (ConnectionError, RuntimeError, ValueError) as problem:
        raise PlacementError(f"{failure}: {_first_line(problem)}") from problem


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
