"""Both pools give the same results, and handle failing tasks and workers. Passes that run out of memory are halved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headscan.cluster.placement_base import PlacementError
from headscan.cluster.placements import ShardedPlacement, WholePlacement
from headscan.cluster.pool import IncompleteError, InProcessPool, PassTask, Pool, WorkError, open_pool, run_pass
from headscan.cluster.ray_pool import RayPool
from headscan.cluster.supervision import MAX_ATTEMPTS
from headscan.errors import HeadscanError
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel, Sharding
from headscan.models.token_batches import Batch
from tests.cluster import tasks
from tests.cluster.tasks import Job
from tests.small_models import make_loaded


@pytest.fixture(scope="module")
def ray_pool(spec: ModelSpec) -> Iterator[Pool]:
    with RayPool(spec, WholePlacement(2, "cpu", 1)) as pool:
        yield pool


def test_ray_and_in_process_give_the_same(spec: ModelSpec, ray_pool: Pool, jobs: list[Job]) -> None:
    with open_pool(spec, WholePlacement(1, "cpu", 1)) as local:
        assert isinstance(local, InProcessPool)
        here = {done.item.number: done.value for done in local.map(tasks.measure, jobs)}
    there = list(ray_pool.map(tasks.measure, iter(jobs)))
    assert {done.item.number: done.value for done in there} == here
    assert ray_pool.replicas == 2
    assert all(done.seconds > 0 for done in there)


def test_a_dead_workers_items_run_again(
    ray_pool: Pool, jobs: list[Job], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture
) -> None:
    assert sorted(done.value for done in ray_pool.map(tasks.die_once, jobs)) == list(range(6))
    assert (Path(jobs[0].folder) / "died").exists()
    assert len([line for line in caplog.messages if "failed and is replaced" in line]) == 1
    assert "A worker died" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_an_item_that_kills_every_worker_is_given_up(ray_pool: Pool, jobs: list[Job]) -> None:
    # The others share a worker with the killer, and are not given up for it.
    done = []
    with pytest.raises(IncompleteError, match=f"job 1: {MAX_ATTEMPTS} workers failed on it") as told:
        for result in ray_pool.map(tasks.always_die, jobs):
            done.append(result.value)
    assert sorted(done) == [0, 2, 3, 4, 5]
    assert (told.value.items, told.value.exit_code) == ([jobs[1]], 3)
    assert (Path(jobs[0].folder) / "failures").read_text() == "x" * MAX_ATTEMPTS
    assert [done.value for done in ray_pool.map(tasks.die_once, [jobs[5]])] == [5]


@pytest.mark.parametrize("kind", ["ray", "local"])
def test_an_error_of_the_task_is_named_and_not_tried_again(
    kind: str, spec: ModelSpec, ray_pool: Pool, jobs: list[Job]
) -> None:
    pool = ray_pool if kind == "ray" else open_pool(spec, WholePlacement(1, "cpu", 1))
    with pytest.raises(WorkError, match=r"^job 2: too long: shorten it$"):
        list(pool.map(tasks.user_error, jobs))
    ran = [path.name for path in Path(jobs[0].folder).iterdir() if path.name.startswith("ran-2-")]
    assert len(ran) == 1
    with pytest.raises(ZeroDivisionError, match="in 0"):
        list(pool.map(tasks.bug, jobs[:1]))


def test_items_are_drawn_only_when_somebody_is_free(ray_pool: Pool, jobs: list[Job]) -> None:
    drawn = 0

    def endless() -> Iterator[Job]:
        nonlocal drawn
        while True:
            drawn += 1
            yield jobs[0]

    results = ray_pool.map(tasks.measure, endless())
    for _ in range(4):
        next(results)
    results.close()
    assert drawn <= 4 + 2 * ray_pool.replicas


def test_a_model_that_does_not_load_is_the_users_error(ray_pool: Pool, tmp_path: Path) -> None:
    absent = ModelSpec(str(tmp_path / "absent"))
    with RayPool(absent, WholePlacement(1, "cpu", 1)) as pool, pytest.raises(HeadscanError, match="no such folder"):
        list(pool.map(tasks.measure, [Job(0, "")]))


def test_gpus_that_a_cluster_lacks_are_refused(ray_pool: Pool, spec: ModelSpec) -> None:
    with pytest.raises(PlacementError, match=r"`replicas=2` need 2 GPUs .limit 0 of the Ray cluster"):
        RayPool(spec, WholePlacement(2, "cuda", 1))


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
