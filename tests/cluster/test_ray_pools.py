"""Pools on a Ray cluster of two nodes give what one process gives, also with failing and stuck workers and nodes."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import headscan
from headscan.cluster import devices
from headscan.cluster.placement_base import PlacementError, Timeouts
from headscan.cluster.placements import PipelinePlacement, WholePlacement
from headscan.cluster.pool import IncompleteError, InProcessPool, Pool, StagingError, WorkError, open_pool
from headscan.cluster.ray_pool import PipelinePool, RayPool
from headscan.cluster.ray_session import import_ray, living_nodes
from headscan.cluster.supervision import MAX_ATTEMPTS
from headscan.errors import HeadscanError
from headscan.model_spec import ModelSpec
from headscan.runs.model_identity import model_facts
from headscan.store.store import Store
from tests.cluster import tasks
from tests.cluster.conftest import ray_nodes, wait_for
from tests.cluster.tasks import Job
from tests.jobs.engine.test_staged import ARMS, MEASURE, SHARDS, answers, assert_same_rows, measured, saved, shard
from tests.small_models import make_model

__all__ = ["saved"]  # a fixture

ONE, TWO = WholePlacement(1, "cpu", 1), WholePlacement(2, "cpu", 2)
STAGES = ((0, 1), (1, 3))


@pytest.fixture(scope="module", autouse=True)
def two_nodes() -> Iterator[Any]:
    """Nodes with room for a replica of `pool` and a stage of a pipeline each."""
    with ray_nodes(3, 3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pool(two_nodes: Any, spec: ModelSpec) -> Iterator[Pool]:
    with RayPool(spec, TWO, timeouts=Timeouts(heartbeat=1.5)) as pool:
        yield pool


def values_of(pool: Pool, task: Any, jobs: Sequence[Job]) -> dict[int, list[float]]:
    done = list(pool.map(task, jobs))
    assert len({finished.item.number for finished in done}) == len(done), "an item came twice"
    return {finished.item.number: finished.value for finished in done}


def test_the_memory_of_every_node_is_read() -> None:
    """Here and not with the other tests of devices, because two nodes take long to start."""
    found = devices.ray_nodes(import_ray(local=True))
    assert [(node.gpus, node.cpus) for node in found] == [((), 3), ((), 3)]  # the head has nothing to share
    assert all(node.memory > 1 << 28 for node in found)


def test_ray_and_in_process_give_the_same(spec: ModelSpec, pool: Pool, jobs: list[Job]) -> None:
    there = list(pool.map(tasks.measure, iter(jobs)))
    assert {done.item.number: done.value for done in there} == tasks.quiet_values(spec, jobs)
    assert pool.replicas == 2
    assert all(done.seconds > 0 for done in there)


def test_a_dead_workers_items_run_again(
    pool: Pool, jobs: list[Job], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture
) -> None:
    assert sorted(done.value for done in pool.map(tasks.die_once, jobs)) == list(range(6))
    assert (Path(jobs[0].folder) / "died").exists()
    assert len([line for line in caplog.messages if "failed and is replaced" in line]) == 1
    assert "A worker died" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_an_item_that_kills_every_worker_is_given_up(pool: Pool, jobs: list[Job]) -> None:
    # The others share a worker with the killer, and are not given up for it.
    done = []
    with pytest.raises(IncompleteError, match=f"job 1: {MAX_ATTEMPTS} workers failed on it") as told:
        for result in pool.map(tasks.always_die, jobs):
            done.append(result.value)
    assert sorted(done) == [0, 2, 3, 4, 5]
    assert (told.value.items, told.value.exit_code) == ([jobs[1]], 3)
    assert (Path(jobs[0].folder) / "failures").read_text() == "x" * MAX_ATTEMPTS
    assert [done.value for done in pool.map(tasks.die_once, [jobs[5]])] == [5]


@pytest.mark.parametrize("kind", ["ray", "local"])
def test_an_error_of_the_task_is_named_and_not_tried_again(
    kind: str, spec: ModelSpec, pool: Pool, jobs: list[Job]
) -> None:
    pool = pool if kind == "ray" else open_pool(spec, ONE)
    with pytest.raises(WorkError, match=r"^job 2: too long: shorten it$"):
        list(pool.map(tasks.user_error, jobs))
    ran = [path.name for path in Path(jobs[0].folder).iterdir() if path.name.startswith("ran-2-")]
    assert len(ran) == 1
    with pytest.raises(ZeroDivisionError, match="in 0"):
        list(pool.map(tasks.bug, jobs[:1]))


def test_items_are_drawn_only_when_somebody_is_free(pool: Pool, jobs: list[Job]) -> None:
    drawn = 0

    def endless() -> Iterator[Job]:
        nonlocal drawn
        while True:
            drawn += 1
            yield jobs[0]

    results = pool.map(tasks.measure, endless())
    for _ in range(4):
        next(results)
    results.close()  # type: ignore[attr-defined]
    assert drawn <= 4 + 2 * pool.replicas


def test_pools_that_cannot_be_opened(spec: ModelSpec, tmp_path: Path) -> None:
    absent = ModelSpec(str(tmp_path / "absent"))
    with RayPool(absent, ONE) as pool, pytest.raises(HeadscanError, match="no such folder"):
        list(pool.map(tasks.measure, [Job(0, "")]))
    with pytest.raises(PlacementError, match=r"`replicas=2` need 2 GPUs .limit 0 of the Ray cluster"):
        RayPool(spec, WholePlacement(2, "cuda", 1))
    for placement in (PipelinePlacement(4, STAGES, "cpu", 1), PipelinePlacement(1, STAGES, "cpu", 1, idle_cpus=3)):
        with pytest.raises(PlacementError, match=r"`replicas=\d` need 8 CPUs .limit 6 of the Ray cluster"):
            PipelinePool(spec, placement)


@contextmanager
def killer(folder: Path, seed: int, kills: int) -> Iterator[list[int]]:
    """Kills workers at random moments while they run `tasks.slow_measure`, no item's twice; yields the killed."""
    generator, killed, left = random.Random(seed), [], threading.Event()

    def run() -> None:
        while len(killed) < kills and not left.wait(generator.uniform(0.05, 0.5)):
            marks = [path.stem.split("-") for path in folder.glob("*.running")]
            if victims := sorted((int(job), int(pid)) for job, pid in marks if int(job) not in killed):
                job, pid = generator.choice(victims)
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # the mark of one that died before
                killed.append(job)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield killed
    finally:
        left.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_workers_killed_at_random_moments(pool: Pool, spec: ModelSpec, tmp_path: Path, seed: int) -> None:
    jobs = [Job(number, str(tmp_path)) for number in range(25)]
    with killer(tmp_path, seed, kills=5) as killed:
        found = values_of(pool, tasks.slow_measure, jobs)
    assert killed
    assert found == tasks.quiet_values(spec, jobs)


# Either worker sends no heartbeat, so the pool replaces it in the same way.
@pytest.mark.parametrize("task", [pytest.param(tasks.stop_once, marks=pytest.mark.slow), tasks.stick_once])
def test_a_worker_that_hangs_is_replaced(pool: Pool, spec: ModelSpec, jobs: list[Job], task: Any) -> None:
    assert values_of(pool, task, jobs) == tasks.quiet_values(spec, jobs)
    hung = int((Path(jobs[0].folder) / "stopped").read_text())
    wait_for(lambda: not Path(f"/proc/{hung}").exists(), "the hung process is left")


def test_a_worker_that_takes_long_is_left_alone(pool: Pool, jobs: list[Job]) -> None:
    assert sorted(done.value for done in pool.map(tasks.take_long, jobs)) == list(range(6))
    assert len(list(Path(jobs[0].folder).glob("began-1-*"))) == 1


# Pipelines


def pipeline(spec: ModelSpec) -> PipelinePool:
    return PipelinePool(spec, PipelinePlacement(1, STAGES, "cpu", 1))


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_pipeline_gives_what_one_process_gives(family: str, saved: Callable[[str], ModelSpec]) -> None:
    spec = saved(family)
    with InProcessPool(spec, ONE) as local, open_pool(spec, PipelinePlacement(1, STAGES, "cpu", 1)) as pool:
        assert isinstance(pool, PipelinePool) and pool.staged
        assert pool.one(model_facts, None) == local.one(model_facts, None)
        expected, found = measured(local), measured(pool)
        assert found.keys() == expected.keys() == {0, 1, 2}
        for index, rows in expected.items():
            assert_same_rows(found[index], rows)
        for name, ablated in ARMS.items():
            theirs, ours = answers(local, ablated), answers(pool, ablated)
            for one, other in zip(ours.values, theirs.values, strict=True):
                assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-6, rel=1e-6), name
                assert one.greedy_tokens == other.greedy_tokens, name
            assert ours.ablated_shares == pytest.approx(theirs.ablated_shares, abs=1e-12), name
        with pytest.raises(StagingError, match=r"^measure needs all layers of the model at once"):
            next(iter(pool.map(tasks.measure, [Job(0, "")])))


def test_a_stage_names_the_number_that_is_none(tmp_path: Path) -> None:
    model = make_model("llama")
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    told = r"^shard 0: first_value_norm is not finite in layer 1, self attention"
    with pipeline(ModelSpec(str(tmp_path))) as pool, pytest.raises(WorkError, match=told):
        measured(pool, SHARDS[:1])


@pytest.mark.slow
def test_a_stage_that_is_killed_again_and_again(saved: Callable[[str], ModelSpec]) -> None:
    """The first and the last stage fail during the work; every shard arrives once."""
    spec = saved("llama")
    items = [shard(index, (30, 8)) for index in range(30)]
    with InProcessPool(spec, ONE) as local:
        expected = measured(local, items)
    found = {}
    with pipeline(spec) as pool:
        for number, done in enumerate(pool.map(MEASURE, items)):
            assert done.item.index not in found
            found[done.item.index] = done.value
            if number in (3, 12):
                workers = pool._replicas[0].workers
                assert workers[-1] == done.worker
                os.kill(int(workers[0 if number == 3 else 1].rpartition(":")[2]), signal.SIGKILL)
    assert found.keys() == expected.keys()
    for index, rows in expected.items():
        assert_same_rows(found[index], rows)


@pytest.mark.slow
def test_a_step_of_python_runs_on_a_cluster(two_nodes: Any, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("def twice(number):\n    return 2 * number\n" * 20)
    lines = list[str]()
    texts = headscan.CorpusSpec(str(tmp_path / "texts"))
    found = headscan.Scan(headscan.ModelSpec("demo"), texts, headscan.TokenConfig(64)).run(
        tmp_path / "s.duckdb",
        devices=headscan.PlacementRequest(device="cpu", replicas=1),
        ray_address=two_nodes.address,
        timeouts=headscan.Timeouts(start=120),
        say=lines.append,
    )
    (run,) = Store(tmp_path / "s.duckdb").runs()
    assert (run["run_id"], run["status"]) == (found.run_id, "finished")
    assert lines[0].startswith("placement: whole, 1 replica on cpu")
    workers = Store(tmp_path / "s.duckdb").query("SELECT worker FROM shards")["worker"].to_pylist()
    assert workers and "in-process" not in workers


# Lost nodes, of which the last test leaves none


@pytest.mark.slow
def test_a_lost_node_leaves_the_other_one(
    two_nodes: Any,
    pool: Pool,
    spec: ModelSpec,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture,
) -> None:
    """Lost items run on the other node, which is reported; a later node is used."""
    jobs = [Job(number, str(tmp_path)) for number in range(60)]
    expected = tasks.quiet_values(spec, jobs)
    results = pool.map(tasks.slow_measure, jobs)
    found = {done.item.number: done.value for done in islice(results, 10)}
    lost = next(iter(two_nodes.worker_nodes))
    lost.kill_raylet()
    found |= {done.item.number: done.value for done in results}
    assert found == expected
    assert "room for 1 of 2 replicas; the run continues" in caplog.text
    printed = "".join(capfd.readouterr())
    assert "raylet" not in printed and "state-dump" not in printed and len(printed) < 2000
    two_nodes.remove_node(lost)
    two_nodes.add_node(num_cpus=3)
    workers = set()
    for done in pool.map(tasks.slow_measure, jobs * 5):
        workers.add(done.worker)
        if len(workers) == 2:
            break
    assert len(workers) == 2


def test_without_any_node_the_run_ends_with_one_line(two_nodes: Any, pool: Pool, jobs: list[Job]) -> None:
    for node in list(two_nodes.worker_nodes):
        node.kill_raylet()
    ray = import_ray(local=True)
    wait_for(lambda: not any(node.get("CPU") for node in living_nodes(ray)), "the nodes are not noticed to be lost")
    with pytest.raises(PlacementError, match=r"^no node of the Ray cluster has had room for a replica for \d+ s"):
        list(pool.map(tasks.measure, jobs))
