"""Replicas as Ray actors, on this machine or on a running cluster.

A worker that dies takes its items with it: they run again elsewhere, at most `MAX_ATTEMPTS` times. An error of the task
itself is not tried again.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cluster.placement import PlacementError, WholePlacement
from cluster.pool import Finished, ModelSpec, Pool, R, T, Task, WorkError, name_of
from cluster.worker import Worker
from headscan.errors import HeadscanError

MAX_ATTEMPTS = 3
#: Items handed to a replica ahead of time, so that it never waits for the driver.
_IN_FLIGHT = 2


@dataclass
class _Job:
    item: Any
    attempts: int = 0


class RayPool(Pool):
    """Whole replicas on Ray.

    A local Ray (on the loopback interface, without a dashboard) is started unless ``address`` names a cluster, and ends
    with the pool if the pool started it.

    Raises:
        PlacementError: No cluster answers at ``address``, or it lacks the devices.
    """

    def __init__(self, spec: ModelSpec, placement: WholePlacement, *, address: str | None = None) -> None:
        if address is None:
            # Ray reads this when it is imported. It is its switch for one machine alone: everything then listens on
            # 127.0.0.1, where a node address of 127.0.0.1 would be replaced by the machine's public one.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        import ray

        self._ray = ray
        self._placement = placement
        self._workers: list[Any] = []
        self._started = not ray.is_initialized()
        if self._started:
            _start(ray, placement, address)
        gpus = 1 if placement.device.startswith("cuda") else 0
        # A cluster shares its CPUs out; here the placement has done so, and a second pool need not wait for the first.
        cpus = 0 if address is None else placement.threads
        self._check_resources(GPU=gpus, CPU=cpus)
        remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=0)(Worker)
        # Inside the actor Ray shows the one GPU it was given as cuda:0.
        device = "cuda" if gpus else placement.device
        self._workers = [remote.remote(spec, device, placement.threads) for _ in range(placement.replicas)]

    @property
    def replicas(self) -> int:
        return len(self._workers)

    def map(self, task: Task[T, R], items: Iterable[T]) -> Iterator[Finished[T, R]]:
        source = iter(items)
        again: deque[_Job] = deque()
        pending: dict[Any, tuple[_Job, Any]] = {}
        load = dict.fromkeys(self._workers, 0)

        def submit() -> bool:
            """Hand the next item to the least busy replica; False when there is no item or no free replica."""
            worker = min(load, key=lambda w: load[w])
            if load[worker] >= _IN_FLIGHT:
                return False
            job = again.popleft() if again else None
            if job is None:
                try:
                    job = _Job(next(source))
                except StopIteration:
                    return False
            job.attempts += 1
            pending[worker.run.remote(task, job.item)] = (job, worker)
            load[worker] += 1
            return True

        try:
            while True:
                while submit():
                    pass
                if not pending:
                    return
                done, _ = self._ray.wait(list(pending), num_returns=1)
                job, worker = pending.pop(done[0])
                load[worker] -= 1
                try:
                    value, seconds, name = self._ray.get(done[0])
                except self._ray.exceptions.RayActorError as death:
                    if job.attempts >= MAX_ATTEMPTS:
                        raise WorkError(
                            f"{name_of(job.item)}: {job.attempts} workers died on it; the last: {_first_line(death)}"
                        ) from death
                    again.append(job)
                    continue
                if isinstance(value, HeadscanError):
                    raise value
                yield Finished(job.item, value, seconds, name)
        finally:
            # Left early (an error, or the caller stopped): nobody will read these.
            for reference in pending:
                self._ray.cancel(reference)

    def close(self) -> None:
        for worker in self._workers:
            self._ray.kill(worker)
        self._workers = []
        if self._started:
            self._ray.shutdown()
            self._started = False

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


def _start(ray: Any, placement: WholePlacement, address: str | None) -> None:
    common = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    try:
        if address is None:
            ray.init(num_cpus=placement.replicas * placement.threads, include_dashboard=False, **common)
        else:
            ray.init(address=address, **common)
    except (ConnectionError, RuntimeError, ValueError) as problem:
        where = f"no Ray cluster answers at {address}" if address else "a local Ray does not start"
        raise PlacementError(f"{where}: {_first_line(problem)}") from problem


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
