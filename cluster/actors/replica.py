"""One replica of the model on Ray: actors, heartbeats and jobs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headscan.cluster.tasks.pool import Finished, R, T, Task

#: Ray's concurrency group (a thread of the actor) that answers heartbeats.
_HEARTBEAT = "heartbeat"
#: Ray options of every actor. A failed actor is replaced, not restarted by Ray: calls to a restarting actor fail, calls
#: to a new one wait.
ACTOR = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {_HEARTBEAT: 1}}
#: Longest time between two heartbeats, in seconds.
_BEAT_EVERY = 10.0


@dataclass(eq=False)
class Job:
    """An item and the number of replicas that failed with it.

    After the first failure it runs alone.
    """

    item: Any
    failures: int = 0


class HeartbeatTimeoutError(Exception):
    """A worker sent no heartbeat within the timeout."""


class _Heartbeat:
    """The heartbeats of one actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self.answer: Any = None
        self.worker = "a worker"
        self.heard = False
        self._ask()

    def listen(self, limit: float) -> None:
        """Read an answer that arrived, and send due requests.

        Raises:
            HeartbeatTimeoutError: It answered before, and not in the last ``limit`` seconds.
            RayError: The actor failed.
        """
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
        """End its actors.

        Ray kills a process that does not answer after some seconds.
        """
        for actor in self._actors:
            self._ray.kill(actor)

    def has_room(self, *, alone: bool) -> bool:
        """Return True if it can take one more job.

        Args:
            alone: The job may not share the replica with another job.
        """
        if not self.started:
            return False
        if alone or any(job.failures for job in self.jobs):
            return not self.jobs
        return self.wants_more()

    @abstractmethod
    def wants_more(self) -> bool:
        """Return True if it would soon be idle."""

    @abstractmethod
    def hand(self, task: Task[T, R], job: Job) -> None:
        """Start a job."""

    @abstractmethod
    def references(self) -> list[Any]:
        """Return the references to wait for, of all its jobs."""

    @abstractmethod
    def take(self, reference: Any) -> Finished[Any, Any] | None:
        """Read a ready reference; return the item that it finishes, or None.

        Raises:
            RayError: An actor failed.
            HeadscanError: The task raised an error of the user.
        """

    @abstractmethod
    def drop(self) -> None:
        """Forget all its jobs and their results.

        The calls are not cancelled: after Ray cancels a call that was just sent, the actor may wait for that call
        forever. The few calls that are left run to their end.
        """
