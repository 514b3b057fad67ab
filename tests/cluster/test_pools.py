"""Memory that runs out halves passes, GPUs are those of the placement, and replicas that never start are named."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headscan.cluster import supervision
from headscan.cluster.placement_base import PlacementError, Timeouts
from headscan.cluster.placements import ShardedPlacement, WholePlacement
from headscan.cluster.pool import InProcessPool, PassTask, run_pass
from headscan.cluster.supervision import Replica, SupervisedPool, replicas_that_fit
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel, Sharding
from headscan.models.token_batches import Batch
from tests.cluster import tasks
from tests.cluster.tasks import Job
from tests.small_models import make_loaded


def test_a_replica_here_takes_the_gpus_by_which_it_was_placed(
    two_gpus: None, spec: ModelSpec, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str | Sharding] = []
    monkeypatch.setattr("headscan.cluster.pool.load_spec", lambda _, target: taken.append(target))
    ranges = ((0, 2), (2, 3))
    for placement in (
        WholePlacement(1, "cuda", 1),
        WholePlacement(1, "cuda:0", 1),
        ShardedPlacement(1, 1, ((0, 2),), 1, "cpu"),
        ShardedPlacement(1, 2, ranges, 1),
        ShardedPlacement(1, 0, ((0, 2),), 1, "disk"),
    ):
        InProcessPool(spec, placement).one(lambda lm, job: None, jobs[0])
    assert taken == [
        "cuda:1",
        "cuda:0",
        Sharding((1,), ((0, 2),), "cpu"),
        Sharding((0, 1), ranges),
        Sharding(("cpu",), ((0, 2),), "disk"),
    ]


class _Count(PassTask[None, Batch, int, int]):
    """Adds up sequences; 16 tokens fit."""

    def passes(self, item: None) -> list[Batch]:
        return [Batch((0, 1, 2, 3), 8)]

    def size(self, part: Batch) -> int:
        return part.tokens

    def run(self, lm: LoadedModel, item: None, part: Batch) -> int:
        self.tried.append(len(part))  # type: ignore[attr-defined]
        if part.tokens > 16:
            raise torch.OutOfMemoryError("as if")
        return len(part)

    def halves(self, part: Batch) -> tuple[Batch, ...]:
        return part.halves()

    def join_halves(self, halves):  # type: ignore[no-untyped-def]
        return sum(halves)

    def join(self, item, partials):  # type: ignore[no-untyped-def]
        return sum(sum(ranges) for ranges in partials)


def test_a_loaded_model_remembers_for_all_its_sites() -> None:
    lm, task = make_loaded("llama"), _Count()
    task.tried = []  # type: ignore[attr-defined]
    assert task(lm, None) == 4
    assert run_pass(task, lm.at("self"), None, Batch((0, 1, 2, 3), 8)) == (4, None)
    assert task.tried == [4, 2, 2, 2, 2]  # type: ignore[attr-defined]
    other = replace(lm, limits=make_loaded("llama").limits)
    task(other, None)
    assert task.tried[5:] == [4, 2, 2]  # type: ignore[attr-defined]


def test_how_many_replicas_fit() -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 2.0, "GPU": 1.0}]
    assert replicas_that_fit(nodes, [{"CPU": 2}], 8) == 3
    assert replicas_that_fit(nodes, [{"CPU": 3}], 8) == 1
    assert replicas_that_fit(nodes, [{"CPU": 3}, {"CPU": 2}], 8) == 1  # the stages of a pipeline on two nodes
    assert replicas_that_fit(nodes, [{"CPU": 0, "GPU": 1}], 8) == 1
    assert replicas_that_fit(nodes, [{"CPU": 0}], 8) == 8


class _SilentRay:
    """A replacement of Ray, with a clock: a node has room for an actor, but no actor ever answers."""

    exceptions = SimpleNamespace(
        **{
            name: type(name, (Exception,), {})
            for name in (
                "RayActorError",
                "OutOfMemoryError",
                "ObjectLostError",
                "ActorUnschedulableError",
                "RuntimeEnvSetupError",
            )
        }
    )

    def __init__(self) -> None:
        self.now, self.killed, self.closed = 0.0, 0, False
        self.ray = self  # the session, too

    def monotonic(self) -> float:
        return self.now

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        self.now += 1.1 * timeout
        return [], references

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {}}]

    def available_resources(self) -> dict[str, float]:
        return {}

    def kill(self, actor: Any) -> None:
        self.killed += 1

    def lost(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


class _SilentReplica(Replica):
    def __init__(self, ray: Any) -> None:
        super().__init__(ray, [SimpleNamespace(beat=self)])

    def options(self, **options: Any) -> Any:
        return SimpleNamespace(remote=object)

    def wants_more(self) -> bool:
        return True

    def submit(self, task: Any, job: Any) -> None:
        raise AssertionError("no item is sent before the first heartbeat")

    def references(self) -> list[Any]:
        return []

    def take(self, reference: Any) -> None:
        raise AssertionError("no result can arrive")

    def drop(self) -> None:
        self.jobs.clear()


class _SilentPool(SupervisedPool):
    """A pool whose replicas never start; ``room`` of them can be made."""

    def __init__(self, ray: Any, count: int, room: int) -> None:
        self.room = room
        super().__init__(ray, count, [{"GPU": 0, "CPU": 0}], Timeouts(start=300))

    def new_replica(self) -> Replica:
        if not self.room:
            raise PlacementError("no room")
        self.room -= 1
        return _SilentReplica(self._ray)


def test_every_minute_without_a_replica_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ray = _SilentRay()
    monkeypatch.setattr(supervision, "time", ray)
    pool = _SilentPool(ray, 1, 1)
    for _ in range(2):  # a second map begins to count again
        caplog.clear()
        with pytest.raises(
            PlacementError, match=r"^waiting for a replica on the Ray cluster: 30. s \(limit 300 s; 0 CPU, 0 GPU free\)"
        ):
            list(pool.map(tasks.measure, [Job(0, "")]))
        minutes = [re.search(r"since (\d+) s", message) for message in caplog.messages]
        assert [int(found[1]) // 60 for found in minutes if found is not None] == [1, 2, 3, 4]


def test_a_replica_that_cannot_be_made_closes_the_session() -> None:
    ray = _SilentRay()
    with pytest.raises(PlacementError, match="no room"):
        _SilentPool(ray, 3, 2)
    assert (ray.killed, ray.closed) == (2, True)
