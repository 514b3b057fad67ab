"""Replicas on Ray that are watched over: what dies or falls silent is replaced, and its items run again.

A replica that dies takes its items with it: they run again elsewhere, each alone on its replica from then on, so that
at most one failure is held against an item that only stood beside the one at fault. An item is given up after
`MAX_ATTEMPTS` failures; the others are done all the same. An error of the task itself is not tried again.

A replica is handed items when it has given its first sign of life. So nobody waits for one that the cluster has no room
for, since a node was lost: the others go on.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from headscan.cluster.actors.replica import Job, Replica, SilentError
from headscan.cluster.actors.session import Session, first_line, living_nodes
from headscan.cluster.actors.timeouts import Timeouts
from headscan.cluster.placement.placement_base import PlacementError
from headscan.cluster.tasks.pool import Finished, IncompleteError, Pool, R, T, Task, name_of

#: How often a replica, an item or a local Ray is tried.
MAX_ATTEMPTS = 3
#: Seconds between looks at the cluster while replicas are missing.
_LOOK_EVERY = 5.0
#: Seconds between two messages about what is being waited for.
_PATIENCE = 60.0

_log = logging.getLogger("headscan")


class LostRayError(PlacementError):
    """The local Ray died again and again; finished items are kept, and the run can be resumed."""

    exit_code = 3


class SupervisedPool(Pool):
    """A pool of replicas on Ray.

    Args:
        session: The Ray they run on; it is closed with the pool.
        count: How many replicas.
        needs: What one of them takes of Ray's resources, actor by actor; none can span nodes.
        timeouts: How long to wait for replicas; None uses the defaults.
    """

    def __init__(
        self, session: Session, count: int, needs: Sequence[dict[str, float]], timeouts: Timeouts | None
    ) -> None:
        self._session, self._ray, self._needs, self._timeouts = session, session.ray, needs, timeouts or Timeouts()
        self._restarts = 0
        self._said = count  # how many replicas the user knows of
        self._looked = self._started_last = time.monotonic()
        self._replicas = [self.new_replica() for _ in range(count)]

    @property
    def replicas(self) -> int:
        return len(self._replicas)

    @abstractmethod
    def new_replica(self) -> Replica:
        """Start one more replica."""

    def map(self, task: Task[T, R], items: Iterable[T]) -> Iterator[Finished[T, R]]:
        source = iter(items)
        again: deque[Job] = deque()
        given_up: list[tuple[Any, str]] = []
        drained = False
        self._started_last = time.monotonic()  # nobody has looked since the last map
        try:
            while True:
                while replica := self._free(alone=bool(again)):
                    job = again.popleft() if again else next((Job(item) for item in source), None)
                    if job is None:
                        drained = True
                        break
                    replica.hand(task, job)
                pending = {reference: replica for replica in self._replicas for reference in replica.references()}
                if drained and not again and not pending:
                    break
                starting = [reference for replica in self._replicas for reference in replica.awaited()]
                done, _ = self._ray.wait([*pending, *starting], timeout=min(1.0, self._timeouts.heartbeat / 4))
                for reference in done:
                    if (replica := pending.get(reference)) is None:
                        continue  # somebody is alive: seen below
                    try:
                        finished = replica.take(reference)
                    except self._failures() as failure:
                        self._bury(replica, failure, again, given_up)
                        continue
                    if finished is not None:
                        yield finished
                self._look_after(again, given_up)
        finally:
            # Left early (an error, or the caller stopped): nobody will read these.
            for replica in self._replicas:
                replica.drop()
        if given_up:
            raise IncompleteError([item for item, _ in given_up], given_up[0][1])

    def close(self) -> None:
        for replica in self._replicas:
            replica.kill()
        self._replicas = []
        self._session.close()

    def _free(self, *, alone: bool) -> Replica | None:
        """The least busy replica that can take one more job."""
        free = [replica for replica in self._replicas if replica.has_room(alone=alone)]
        return min(free, key=lambda replica: len(replica.jobs), default=None)

    def _failures(self) -> tuple[type[Exception], ...]:
        errors = self._ray.exceptions
        return (errors.RayActorError, errors.OutOfMemoryError, errors.ObjectLostError, SilentError)

    def _look_after(self, again: deque[Job], given_up: list[tuple[Any, str]]) -> None:
        """Hear every replica; replace those that are dead or silent, and say when there are fewer than wanted."""
        errors = self._ray.exceptions
        for replica in list(self._replicas):
            try:
                replica.listen(self._timeouts.heartbeat)
            except self._failures() as failure:
                self._bury(replica, failure, again, given_up)
            except (errors.ActorUnschedulableError, errors.RuntimeEnvSetupError) as problem:
                raise PlacementError(f"Ray cannot place a replica: {first_line(problem)}") from problem
        started = sum(replica.started for replica in self._replicas)
        now = time.monotonic()
        if started:
            self._started_last = now
        if started == len(self._replicas):
            self._said = started
        if started < len(self._replicas) and now - self._looked > _LOOK_EVERY:
            self._looked = now
            if self._session.lost():
                self._restart(again, given_up)
            else:
                self._say_room(started, now - self._started_last)

    def _bury(self, replica: Replica, failure: Exception, again: deque[Job], given_up: list[tuple[Any, str]]) -> None:
        """Put a new replica in the place of a dead one, whose jobs run again unless too many died on them.

        Raises:
            PlacementError: No replica starts.
        """
        _log.warning("lost %s, which is replaced: %s", ", ".join(replica.workers), first_line(failure))
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
            problem = f"a replica died {MAX_ATTEMPTS} times as it started: {first_line(failure)}"
            if not self._replicas:
                raise PlacementError(problem)
            self._said = len(self._replicas)
            _log.warning("%s; the run goes on with %d", problem, self._said)
        _run_again(jobs, first_line(failure), again, given_up)

    def _restart(self, again: deque[Job], given_up: list[tuple[Any, str]]) -> None:
        """Start the local Ray again, with new replicas; what the old ones had in hand runs again.

        Raises:
            LostRayError: It died too often.
            PlacementError: It does not start.
        """
        self._restarts += 1
        if self._restarts == MAX_ATTEMPTS:
            raise LostRayError(
                f"the local Ray died {MAX_ATTEMPTS} times, which is often a lack of memory. Run the same command again "
                "to resume, with fewer replicas or smaller batches"
            )
        _log.warning("the local Ray died; starting it again")
        for replica in self._replicas:
            _run_again(list(replica.jobs), "the local Ray died", again, given_up)
            replica.drop()
        self._session.restart()
        self._replicas = [self.new_replica() for _ in self._replicas]
        self._started_last = time.monotonic()

    def _say_room(self, started: int, seconds: float) -> None:
        """Tell the user when the living nodes have room for fewer replicas than before, or for none.

        Raises:
            PlacementError: No replica started within its timeout, or no node had room within the heartbeat timeout.
        """
        room = replicas_that_fit(living_nodes(self._ray), self._needs, len(self._replicas))
        if room == started != self._said:
            self._said = room
            _log.warning("the Ray cluster has room for %d of %d replicas: the run goes on", room, len(self._replicas))
        if started:
            return
        limit = self._timeouts.start
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
        if int(seconds / _PATIENCE) != int((seconds - _LOOK_EVERY) / _PATIENCE):
            _log.warning("waiting for a replica since %.0f s (limit %g s; %s)", seconds, limit, resources)


def _run_again(jobs: Sequence[Job], failure: str, again: deque[Job], given_up: list[tuple[Any, str]]) -> None:
    """Queue the jobs of a dead replica again, except those on which too many replicas died.

    Which of them caused the failure is unknown: a result may be lost with the worker that had just finished it.
    """
    for job in jobs:
        job.failures += 1
        reason = f"{MAX_ATTEMPTS} workers died on it; the last: {failure}"
        if job.failures < MAX_ATTEMPTS:
            again.append(job)
        else:
            given_up.append((job.item, reason))
            _log.warning("%s: %s", name_of(job.item), reason)


def replicas_that_fit(nodes: Sequence[dict[str, float]], needs: Sequence[dict[str, float]], most: int) -> int:
    """How many replicas, of at ``most`` so many, the nodes have room for; every actor lies whole on one node.

    Args:
        nodes: Resources of each node.
        needs: What each actor of one replica takes.
    """
    left = [dict(node) for node in nodes]
    return next((count for count in range(most) if not all(_take(left, need) for need in needs)), most)


def _take(left: list[dict[str, float]], need: dict[str, float]) -> bool:
    """Take what an actor needs from the first node that has it."""
    for node in left:
        if all(node.get(kind, 0) >= amount for kind, amount in need.items()):
            for kind, amount in need.items():
                node[kind] = node.get(kind, 0) - amount
            return True
    return False
