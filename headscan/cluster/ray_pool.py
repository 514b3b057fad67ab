"""Pools on Ray: whole replicas as actors, and replicas whose layers run in actors on any nodes.

The latter serve models that are larger than a node. Several forward passes of an item are in flight, so that every
stage has one to run. Hidden states pass through Ray's object store, in RAM. The last stage joins the partial results of
all stages into one value, so the driver handles whole results only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from headscan.cluster.devices import roomiest_names
from headscan.cluster.placement_base import ReplicaPlacement, Timeouts
from headscan.cluster.placements import PipelinePlacement
from headscan.cluster.pool import Finished, InspectionTask, PassTask, R, T, Task, check_staged, working_on
from headscan.cluster.ray_session import RaySession
from headscan.cluster.supervision import ACTOR, Job, Replica, SupervisedPool
from headscan.cluster.worker import StageWorker, Worker
from headscan.errors import HeadscanError
from headscan.model_spec import ModelSpec

#: Items sent to a replica ahead of time, so that it never waits for the driver.
_ITEMS_PER_REPLICA = 2


class _WholeReplica(Replica):
    def __init__(self, ray: Any, actor: Any) -> None:
        super().__init__(ray, [actor])
        self._results: dict[Any, Job] = {}

    def wants_more(self) -> bool:
        return len(self.jobs) < _ITEMS_PER_REPLICA

    def submit(self, task: Task[T, R], job: Job) -> None:
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


def _cpus(session: RaySession, placement: ReplicaPlacement | PipelinePlacement) -> int:
    """Return the CPUs that Ray reserves for an actor: none beside GPUs, and none on a local Ray. There the placement
    has divided the CPUs, and a second pool would wait for the first.
    """
    return 0 if session.local or placement.gpus else placement.threads + placement.idle_cpus


class RayPool(SupervisedPool):
    """Whole replicas on Ray. The pool starts a local Ray (on the loopback interface, without a dashboard) unless a
    cluster is already connected (`ray_session.connect`), and ends it when it closes. ``worker`` is the class of its
    actors.
    """

    worker: ClassVar[type[Any]] = Worker

    def __init__(self, spec: ModelSpec, placement: ReplicaPlacement, *, timeouts: Timeouts | None = None) -> None:
        gpus = placement.gpus
        session = RaySession(placement.replicas * placement.threads, partial(roomiest_names, placement.replicas * gpus))
        cpus = _cpus(session, placement)
        session.check(placement.replicas, GPU=gpus, CPU=cpus)
        self._remote = session.ray.remote(num_cpus=cpus, num_gpus=gpus, **ACTOR)(self.worker)
        self._spec, self._placement = spec, placement
        super().__init__(session, placement.replicas, [{"GPU": gpus, "CPU": cpus}], timeouts)

    def new_replica(self) -> Replica:
        return _WholeReplica(
            self._ray, self._remote.remote(self._spec, self._placement.actor_target, self._placement.threads)
        )


#: Passes in flight per stage: one runs, one waits.
_PASSES_PER_STAGE = 2


@dataclass(eq=False)
class _ItemInProgress:
    """An item that passes through the stages, with the number of its passes in flight, and Ray references to it and to
    the partial result of each pass in each stage, pass by pass (``partials``).
    """

    job: Job
    task: Any
    reference: Any
    waiting: deque[Any]
    passes_running: int = 0
    partials: list[Any] = field(default_factory=list)
    seconds: float = 0.0


class _PipelineReplica(Replica):
    """The actors of all stages, in the order of their layers; ``release`` is called after they are killed."""

    def __init__(self, ray: Any, stages: Sequence[Any], release: Callable[[], None]) -> None:
        super().__init__(ray, stages)
        self._release = release
        self._items: dict[Job, _ItemInProgress] = {}
        self._passes: dict[Any, tuple[_ItemInProgress, list[Any]]] = {}  # by the last stage's seconds
        self._joins: dict[Any, _ItemInProgress] = {}

    def kill(self) -> None:
        super().kill()
        self._release()

    def wants_more(self) -> bool:
        busy = len(self._passes) + len(self._joins)
        return busy < self._most_passes and not any(item.waiting for item in self._items.values())

    def submit(self, task: Task[T, R], job: Job) -> None:
        self.jobs.append(job)
        if isinstance(task, InspectionTask):
            self._joins[self._actors[0].ask.remote(task, job.item)] = _ItemInProgress(job, task, None, deque())
            return
        assert isinstance(task, PassTask)
        with working_on(job.item):
            passes = task.passes(job.item)
        self._items[job] = _ItemInProgress(job, task, self._ray.put(job.item), deque(passes))
        self._send()

    def references(self) -> list[Any]:
        return [*self._passes, *self._joins]

    def take(self, reference: Any) -> Finished[Any, Any] | None:
        if reference in self._passes:
            item, seconds = self._passes[reference]
            # In the order of the stages, so that the first failure is raised, not one that follows from it.
            item.seconds += sum(self._get(seconds))
            del self._passes[reference]
            item.passes_running -= 1
            self._send()
            return None
        item = self._joins[reference]
        value, name = self._get(reference)
        del self._joins[reference]
        self.jobs.remove(item.job)
        if isinstance(value, HeadscanError):
            raise value
        return Finished(item.job.item, value, item.seconds, name)

    def drop(self) -> None:
        self._items.clear()
        self._passes.clear()
        self._joins.clear()
        self.jobs.clear()

    def _get(self, references: Any) -> Any:
        """Call Ray's `get`; raise the failure of a dead actor, which may be the one that made the call's input."""
        try:
            return self._ray.get(references)
        except self._ray.exceptions.RayTaskError as problem:
            if isinstance(problem.cause, self._ray.exceptions.RayError):
                raise problem.cause from problem
            raise

    @property
    def _most_passes(self) -> int:
        return _PASSES_PER_STAGE * len(self._actors)

    def _send(self) -> None:
        """Start passes while there is room, and join finished items. Passes of the oldest item start first."""
        for item in list(self._items.values()):
            while item.waiting and len(self._passes) < self._most_passes:
                self._start_pass(item)
            if not item.waiting and not item.passes_running:
                join = self._actors[-1].join.remote(item.task, item.reference, *item.partials)
                self._joins[join] = item
                del self._items[item.job]

    def _start_pass(self, item: _ItemInProgress) -> None:
        """Start one pass in all stages. Each stage waits for the hidden states of the previous one."""
        batch = item.waiting.popleft()
        hidden, seconds = None, []
        for actor in self._actors:
            hidden, partial, stage_seconds = actor.run.options(num_returns=3).remote(
                item.task, item.reference, batch, hidden
            )
            item.partials.append(partial)
            seconds.append(stage_seconds)
        item.passes_running += 1
        self._passes[seconds[-1]] = (item, seconds)


class PipelinePool(SupervisedPool):
    """Replicas whose layers run in several actors; they take a `PassTask` only. The pool starts a local Ray unless a
    cluster is already connected (`ray_session.connect`), and ends it when it closes. If a stage fails, all stages of
    its replica are restarted and its items run again.
    """

    def __init__(self, spec: ModelSpec, placement: PipelinePlacement, *, timeouts: Timeouts | None = None) -> None:
        stages = len(placement.stages)
        workers, gpus = placement.replicas * stages, placement.gpus
        session = RaySession(workers * placement.threads, partial(roomiest_names, workers * gpus))
        cpus = _cpus(session, placement)
        session.check(placement.replicas, GPU=gpus * stages, CPU=cpus * stages)
        self._remote = session.ray.remote(num_cpus=cpus, num_gpus=gpus, **ACTOR)(StageWorker)
        self._spec, self._placement = spec, placement
        super().__init__(session, placement.replicas, [{"GPU": gpus, "CPU": cpus}] * stages, timeouts)

    @property
    def staged(self) -> bool:
        return self._placement.staged

    def map(self, task: Task[T, R], items: Iterable[T]) -> Iterator[Finished[T, R]]:
        check_staged(task)
        return super().map(task, items)

    def new_replica(self) -> Replica:
        actor_options, release = self._reserve()
        placement = self._placement
        actors = [
            self._remote.options(**actor_options(index)).remote(
                self._spec, placement.stages, index, placement.device, placement.threads
            )
            for index in range(len(placement.stages))
        ]
        return _PipelineReplica(self._ray, actors, release)

    def _reserve(self) -> tuple[Callable[[int], dict[str, Any]], Callable[[], None]]:
        """Reserve the resources of all stages of a replica together, or none: two replicas that each lack a stage would
        wait for each other. Return a function that gives the Ray options of each stage's actor, and one that releases
        the resources.
        """
        if not any(self._needs):
            return lambda index: {}, lambda: None
        from ray.util import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group([dict(need) for need in self._needs], strategy="PACK")
        return (
            lambda index: {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, index)},
            lambda: remove_placement_group(group),
        )
