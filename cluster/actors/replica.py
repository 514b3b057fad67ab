"""One copy of the model on Ray: its actors, their signs of life, and the items in its hands."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headscan.cluster.tasks.pool import Finished, R, T, Task

#: Ray's concurrency group, a thread of the actor, that answers heartbeats.
_HEARTBEAT = "heartbeat"
#: Ray's options of every actor. One that died is replaced, not restarted: calls to one that is restarting fail, calls
#: to a new one wait.
ACTOR = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {_HEARTBEAT: 1}}
#: Longest time between two heartbeats, in seconds.
_BEAT_EVERY = 10.0


@dataclass(eq=False)
class Job:
    """An item, and how many replicas died with it in hand; after the first failure it is worked on alone."""

    item: Any
    failures: int = 0


class SilentError(Exception):
    """A replica gave no sign of life for too long."""


class _Heartbeat:
    """The signs of life of one actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self.answer: Any = None
        self.worker = "a worker"
        self.heard = False
        self._ask()

    def listen(self, limit: float) -> None:
        """Take an answer that has come, and ask again when it is time.

        Raises:
            SilentError: It was alive once, and has not answered for ``limit`` seconds.
            RayError: It is dead.
        """
        since = time.monotonic() - self._asked
        if self.answer is None:
            if since > min(_BEAT_EVERY, limit / 4):
                self._ask()
        elif self._ray.wait([self.answer], timeout=0)[0]:
            self.worker = self._ray.get(self.answer)
            self.heard, self.answer = True, None
        elif self.heard and since > limit:
            raise SilentError(f"{self.worker} gave no sign of life for {since:.0f} s")

    def _ask(self) -> None:
        self._asked = time.monotonic()
        self.answer = self._actor.beat.options(concurrency_group=_HEARTBEAT).remote()


class Replica(ABC):
    """One copy of the model on Ray: its actors, and the jobs that it was handed."""

    def __init__(self, ray: Any, actors: Sequence[Any]) -> None:
        self.jobs: list[Job] = []
        self.failed_starts = 0
        self._ray, self._actors = ray, actors
        self._heartbeats = [_Heartbeat(ray, actor) for actor in actors]

    @property
    def workers(self) -> list[str]:
        """Names of its actors, as far as they have been heard of."""
        return [heartbeat.worker for heartbeat in self._heartbeats]

    @property
    def started(self) -> bool:
        """Whether all its actors have been heard of."""
        return all(heartbeat.heard for heartbeat in self._heartbeats)

    def awaited(self) -> list[Any]:
        """References to the first signs of life that have not come yet."""
        return [heartbeat.answer for heartbeat in self._heartbeats if not heartbeat.heard]

    def listen(self, limit: float) -> None:
        """Look for signs of life; see `_Heartbeat.listen` for what is raised."""
        for heartbeat in self._heartbeats:
            heartbeat.listen(limit)

    def kill(self) -> None:
        """End its actors; a process that does not answer is ended by force, seconds later."""
        for actor in self._actors:
            self._ray.kill(actor)

    def has_room(self, *, alone: bool) -> bool:
        """Whether it can take one more job, ``alone``: one that stands beside no other."""
        if not self.started:
            return False
        if alone or any(job.failures for job in self.jobs):
            return not self.jobs
        return self.wants_more()

    @abstractmethod
    def wants_more(self) -> bool:
        """Whether it would be idle before long."""

    @abstractmethod
    def hand(self, task: Task[T, R], job: Job) -> None:
        """Let it work on a job."""

    @abstractmethod
    def references(self) -> list[Any]:
        """What Ray is to be asked for, of all its jobs."""

    @abstractmethod
    def take(self, reference: Any) -> Finished[Any, Any] | None:
        """Take what has come; the item that is finished with it, if one is.

        Raises:
            RayError: An actor is dead.
            HeadscanError: What a user can mend.
        """

    @abstractmethod
    def drop(self) -> None:
        """Leave all its jobs, whose results nobody will read.

        They are not cancelled: an actor of which Ray cancels a call that it was just handed may wait for that call, and
        answer nothing any more. What it has in hand is little, and runs to its end.
        """
