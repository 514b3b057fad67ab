"""Whole replicas as Ray actors."""

from __future__ import annotations

from typing import Any

from headscan.cluster.actors.session import Session
from headscan.cluster.actors.supervision import ACTOR, Job, Replica, SupervisedPool
from headscan.cluster.actors.timeouts import Timeouts
from headscan.cluster.actors.worker import Worker
from headscan.cluster.placement.placement_base import ReplicaPlacement
from headscan.cluster.tasks.pool import Finished, R, T, Task
from headscan.errors import HeadscanError
from headscan.model_spec import ModelSpec

#: Items sent to a replica ahead of time, so that it never waits for the driver.
_IN_FLIGHT = 2


class _WholeReplica(Replica):
    """An actor with the whole model."""

    def __init__(self, ray: Any, actor: Any) -> None:
        super().__init__(ray, [actor])
        self._results: dict[Any, Job] = {}

    def wants_more(self) -> bool:
        return len(self.jobs) < _IN_FLIGHT

    def hand(self, task: Task[T, R], job: Job) -> None:
        self.jobs.append(job)
        self._results[self._actors[0].run.remote(task, job.item)] = job

    def references(self) -> list[Any]:
        return list(self._results)

    def take(self, reference: Any) -> Finished[Any, Any]:
        value, seconds, name = self._ray.get(reference)
        job = self._results.pop(reference)
        self.jobs.remove(job)
        if isinstance(value, HeadscanError):
            raise value
        return Finished(job.item, value, seconds, name)

    def drop(self) -> None:
        self._results.clear()
        self.jobs.clear()


class RayPool(SupervisedPool):
    """Whole replicas on Ray. The pool starts a local Ray (on the loopback interface, without a dashboard) unless a
    cluster is already connected (`session.connect`), and ends it when it closes.

    Args:
        timeouts: How long to wait for replicas; None uses the defaults.
    """

    def __init__(self, spec: ModelSpec, placement: ReplicaPlacement, *, timeouts: Timeouts | None = None) -> None:
        session = Session(placement.replicas * placement.threads)
        gpus = placement.gpus
        # On a local Ray the placement has already divided the CPUs, so a second pool does not wait for the first.
        cpus = 0 if session.local or gpus else placement.threads
        session.check(placement.replicas, GPU=gpus, CPU=cpus)
        self._remote = session.ray.remote(num_cpus=cpus, num_gpus=gpus, **ACTOR)(Worker)
        self._arguments = (spec, placement.actor_target, placement.threads)
        super().__init__(session, placement.replicas, [{"GPU": gpus, "CPU": cpus}], timeouts)

    def new_replica(self) -> Replica:
        return _WholeReplica(self._ray, self._remote.remote(*self._arguments))
