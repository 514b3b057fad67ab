"""A pool on Ray that replaces failed replicas and retries their items.

A replica is made of actors with heartbeats and jobs. It fails if one of its workers ends or sends no heartbeat within
the timeout. Its items are retried on other replicas, from then on alone, so that at most one failure counts against
an item that only shared a replica with the item at fault. After `MAX_ATTEMPTS` failures an item is given up; the
others still run. Errors of the task itself are not retried.

A replica receives items after its first heartbeat. So no item waits for a replica that the cluster has no room for.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headscan.cluster.placement_base import PlacementError, Timeouts
from headscan.cluster.pool import Finished, IncompleteError, Pool, R, T, Task, name_of
from headscan.cluster.ray_session import RaySession, living_nodes
from headscan.errors import first_line

#: Ray's concurrency group (a thread of the actor) that answers heartbeats.
_HEARTBEAT = "heartbeat"
#: Ray options of every actor. A failed actor is replaced, not restarted by Ray: calls to a restarting actor fail, calls
#: to a new one wait.
ACTOR = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {_HEARTBEAT: 1}}
#: Longest time between two heartbeats, in seconds.
_BEAT_EVERY = 10.0


@dataclass(eq=False)
class Job:
    """An item and the number of replicas that failed with it. After the first failure it runs alone."""

    item: Any
    failures: int = 0


class HeartbeatTimeoutError(Exception):
    """A worker sent no heartbeat within the timeout."""


class _Heartbeat:
    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self.answer: Any = None
        self.worker = "a worker"
        self.heard = False
        self._ask()

    def listen(self, limit: float) -> None:
        """Read an answer that arrived, and send due requests."""
        since = time.monotonic() - self._asked
        if self.answer is None:
            if since > min(_BEAT_EVERY, limit / 4):
                self._ask()
        elif self._ray.wait([self.answer], timeout=0)[0]:
            self.worker = self._ray.get(self.answer)
            self.heard, self.answer = True, None
        elif self.heard and since > limit:
            raise HeartbeatTimeoutError(f"no heartbeat from {self.worker} for {since:.0f} s (limit {limit:g} s)")

    def _ask(self) -> None:
        self._asked = time.monotonic()
        self.answer = self._actor.beat.options(concurrency_group=_HEARTBEAT).remote()


class Replica(ABC):
    """One replica of the model on Ray: its actors and its jobs."""

    def __init__(self, ray: Any, actors: Sequence[Any]) -> None:
        self.jobs: list[Job] = []
        self.failed_starts = 0
        self._ray, self._actors = ray, actors
        self._heartbeats = [_Heartbeat(ray, actor) for actor in actors]

    @property
    def workers(self) -> list[str]:
        """Names of its actors; "a worker" before the first heartbeat."""
        return [heartbeat.worker for heartbeat in self._heartbeats]

    @property
    def started(self) -> bool:
        """True if all its actors sent a heartbeat."""
        return all(heartbeat.heard for heartbeat in self._heartbeats)

    def awaited(self) -> list[Any]:
        """Return references to the first heartbeats that are still missing."""
        return [heartbeat.answer for heartbeat in self._heartbeats if not heartbeat.heard]

    def listen(self, limit: float) -> None:
        """Read heartbeats; raises as `_Heartbeat.listen` does."""
        for heartbeat in self._heartbeats:
            heartbeat.listen(limit)

    def kill(self) -> None:
        """End the actors. Ray kills a process that does not answer after some seconds."""
        for actor in self._actors:
            self._ray.kill(actor)

    def has_room(self, *, alone: bool) -> bool:
        """Return True if one more job can run here; a job that runs ``alone`` shares the replica with no other."""
        if not self.started:
            return False
        if alone or any(job.failures for job in self.jobs):
            return not self.jobs
        return self.wants_more()

    @abstractmethod
    def wants_more(self) -> bool:
        """Return True if the replica would soon be idle."""

    @abstractmethod
    def submit(self, task: Task[T, R], job: Job) -> None:
        """Start a job."""

    @abstractmethod
    def references(self) -> list[Any]:
        """Return the references to wait for, of all its jobs."""

    @abstractmethod
    def take(self, reference: Any) -> Finished[Any, Any] | None:
        """Read a ready reference; return the item that it finishes, or None."""

    @abstractmethod
    def drop(self) -> None:
        """Forget all jobs of the replica and their results. The calls are not cancelled: after Ray cancels a call that
        was just sent, the actor may wait for that call forever. The few calls that are left run to their end.
        """


#: Attempts for a replica, an item or a local Ray.
MAX_ATTEMPTS = 3
#: Seconds between checks of the cluster while replicas are missing.
_CHECK_EVERY = 5.0
#: Seconds between two messages while no replica has started.
_WARN_EVERY = 60.0

_log = logging.getLogger("headscan")


class LostRayError(PlacementError):
    """The local Ray failed too often. Finished items are kept, and the run can be resumed."""

    exit_code = 3


class SupervisedPool(Pool):
    """A pool of replicas on Ray, which closes the session. ``needs`` are the Ray resources of each actor of one
    replica; no actor spans nodes. None for ``timeouts`` uses the defaults.
    """

    def __init__(
        self, session: RaySession, count: int, needs: Sequence[dict[str, float]], timeouts: Timeouts | None
    ) -> None:
        self._session, self._ray, self._timeouts = session, session.ray, timeouts or Timeouts()
        self._needs = [{kind: amount for kind, amount in need.items() if amount} for need in needs]
        self._restarts = 0
        self._reported = count  # the number of replicas that was last logged
        self._checked = self._started_last = self._warned_last = time.monotonic()
        self._replicas: list[Replica] = []
        # Of the current map: jobs to run again, and items that are given up, with the reasons.
        self._again: deque[Job] = deque()
        self._given_up: list[tuple[Any, str]] = []
        try:
            for _ in range(count):
                self._replicas.append(self.new_replica())
        except BaseException:
            self.close()
            raise

    @property
    def replicas(self) -> int:
        return len(self._replicas)

    @abstractmethod
    def new_replica(self) -> Replica:
        """Start one more replica."""

    def map(self, task: Task[T, R], items: Iterable[T]) -> Iterator[Finished[T, R]]:
        source = iter(items)
        self._again, self._given_up = deque(), []
        drained = False
        self._started_last = time.monotonic()  # nothing was checked since the last map
        try:
            while True:
                while replica := self._free(alone=bool(self._again)):
                    job = self._again.popleft() if self._again else next((Job(item) for item in source), None)
                    if job is None:
                        drained = True
                        break
                    replica.submit(task, job)
                pending = {reference: replica for replica in self._replicas for reference in replica.references()}
                if drained and not self._again and not pending:
                    break
                starting = [reference for replica in self._replicas for reference in replica.awaited()]
                done, _ = self._ray.wait([*pending, *starting], timeout=min(1.0, self._timeouts.heartbeat / 4))
                for reference in done:
                    if (replica := pending.get(reference)) is None:
                        continue  # a first heartbeat, which `_check_replicas` reads
                    try:
                        finished = replica.take(reference)
                    except self._failures() as failure:
                        self._replace(replica, failure)
                        continue
                    if finished is not None:
                        yield finished
                self._check_replicas()
        finally:
            # After an error, or if the caller stopped early, the remaining results are not read.
            for replica in self._replicas:
                replica.drop()
        if self._given_up:
            raise IncompleteError([item for item, _ in self._given_up], self._given_up[0][1])

    def close(self) -> None:
        for replica in self._replicas:
            replica.kill()
        self._replicas = []
        self._session.close()

    def _free(self, *, alone: bool) -> Replica | None:
        """Return the least busy replica that can take one more job."""
        free = [replica for replica in self._replicas if replica.has_room(alone=alone)]
        return min(free, key=lambda replica: len(replica.jobs), default=None)

    def _failures(self) -> tuple[type[Exception], ...]:
        errors = self._ray.exceptions
        return (errors.RayActorError, errors.OutOfMemoryError, errors.ObjectLostError, HeartbeatTimeoutError)

    def _check_replicas(self) -> None:
        """Read all heartbeats, replace failed replicas, and log missing ones."""
        errors = self._ray.exceptions
        for replica in list(self._replicas):
            try:
                replica.listen(self._timeouts.heartbeat)
            except self._failures() as failure:
                self._replace(replica, failure)
            except (errors.ActorUnschedulableError, errors.RuntimeEnvSetupError) as problem:
                raise PlacementError(
                    f"Ray cannot place a replica: {first_line(problem)}. Check the nodes with `ray status`"
                ) from problem
        started = sum(replica.started for replica in self._replicas)
        now = time.monotonic()
        if started:
            self._started_last = now
        if started == len(self._replicas):
            self._reported = started
        if started < len(self._replicas) and now - self._checked > _CHECK_EVERY:
            self._checked = now
            if self._session.lost():
                self._restart()
            else:
                self._report_room(started, now)

    def _replace(self, replica: Replica, failure: Exception) -> None:
        _log.warning("worker %s failed and is replaced: %s", ", ".join(replica.workers), first_line(failure))
        failed_starts = 0 if replica.started else replica.failed_starts + 1
        jobs = list(replica.jobs)
        replica.drop()
        replica.kill()
        place = self._replicas.index(replica)
        if failed_starts < MAX_ATTEMPTS:
            self._replicas[place] = self.new_replica()
            self._replicas[place].failed_starts = failed_starts
        else:
            del self._replicas[place]
            problem = f"a replica failed to start {MAX_ATTEMPTS} times: {first_line(failure)}"
            if words := self._session.last_lines(failure):
                problem += f" Its last lines: {words}"
            if not self._replicas:
                raise PlacementError(problem)
            self._reported = len(self._replicas)
            _log.warning("%s; the run continues with %d", problem, self._reported)
        self._run_again(jobs, first_line(failure))

    def _restart(self) -> None:
        """Restart the local Ray and its replicas, and retry their jobs."""
        self._restarts += 1
        if self._restarts == MAX_ATTEMPTS:
            raise LostRayError(
                f"the local Ray failed {MAX_ATTEMPTS} times, often for lack of memory. Run the same command again to "
                "resume, with fewer replicas or smaller batches"
            )
        _log.warning("the local Ray failed; restarting it")
        for replica in self._replicas:
            self._run_again(replica.jobs, "the local Ray failed")
            replica.drop()
        self._session.restart()
        self._replicas = [self.new_replica() for _ in self._replicas]
        self._started_last = time.monotonic()

    def _run_again(self, jobs: Sequence[Job], failure: str) -> None:
        """Queue the jobs of a failed replica again, and give up jobs with too many failures. The job that caused the
        failure is unknown, because a finished result may be lost with its worker.
        """
        for job in jobs:
            job.failures += 1
            reason = f"{MAX_ATTEMPTS} workers failed on it; the last: {failure}"
            if job.failures < MAX_ATTEMPTS:
                self._again.append(job)
            else:
                self._given_up.append((job.item, reason))
                _log.warning("%s: %s", name_of(job.item), reason)

    def _report_room(self, started: int, now: float) -> None:
        """Log if the nodes have room for fewer replicas than before."""
        room = replicas_that_fit(living_nodes(self._ray), self._needs, len(self._replicas))
        if room == started != self._reported:
            self._reported = room
            _log.warning("the Ray cluster has room for %d of %d replicas; the run continues", room, len(self._replicas))
        if started:
            return
        seconds, limit = now - self._started_last, self._timeouts.start
        if not room and seconds > min(self._timeouts.heartbeat, limit):
            raise PlacementError(
                f"no node of the Ray cluster has had room for a replica for {seconds:.0f} s. Start a node, then run "
                "the same command again"
            )
        free = self._ray.available_resources()
        resources = f"{free.get('CPU', 0):g} CPU, {free.get('GPU', 0):g} GPU free"
        if seconds > limit:
            raise PlacementError(
                f"waiting for a replica on the Ray cluster: {seconds:.0f} s (limit {limit:g} s; {resources}). Wait "
                "until the cluster has room, then run the same command again, or raise the start timeout"
            )
        if now - max(self._started_last, self._warned_last) >= _WARN_EVERY:
            self._warned_last = now
            _log.warning("waiting for a replica since %.0f s (limit %g s; %s)", seconds, limit, resources)


def replicas_that_fit(nodes: Sequence[dict[str, float]], needs: Sequence[dict[str, float]], most: int) -> int:
    """Return how many replicas, at most ``most``, fit on the nodes; no actor of ``needs`` spans nodes."""
    left = [dict(node) for node in nodes]
    return next((count for count in range(most) if not all(_take(left, need) for need in needs)), most)


def _take(left: list[dict[str, float]], need: dict[str, float]) -> bool:
    """Subtract an actor's resources from a node; False if none fits."""
    for node in left:
        if all(node.get(kind, 0) >= amount for kind, amount in need.items()):
            for kind, amount in need.items():
                node[kind] = node.get(kind, 0) - amount
            return True
    return False
