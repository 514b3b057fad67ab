"""Pipelines over several Ray nodes equal one process, also with failing stages."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headscan
from headscan.cluster.placement_base import PlacementError
from headscan.cluster.placements import PipelinePlacement, WholePlacement
from headscan.cluster.pool import InProcessPool, StagingError, WorkError, open_pool
from headscan.cluster.ray_pool import PipelinePool, RayPool
from headscan.model_spec import ModelSpec
from headscan.runs.model_identity import model_facts
from headscan.store.store import Store
from headscan.texts import Shard
from tests.cluster import tasks
from tests.cluster.conftest import ray_nodes
from tests.cluster.tasks import Job
from tests.jobs.engine.test_staged import ARMS, MEASURE, SHARDS, answers, assert_same_rows, measured, saved, shard
from tests.small_models import make_model

__all__ = ["saved"]  # a fixture

ONE = WholePlacement(1, "cpu", 1)
STAGES = {2: ((0, 1), (1, 3)), 3: ((0, 1), (1, 2), (2, 3))}


@pytest.fixture(scope="module", autouse=True)
def two_nodes() -> Iterator[Any]:
    with ray_nodes(2, 2) as cluster:
        yield cluster


def pipeline(spec: ModelSpec, stages: int, **options: Any) -> PipelinePool:
    return PipelinePool(spec, PipelinePlacement(1, STAGES[stages], "cpu", 1), **options)


@pytest.mark.parametrize(
    ("family", "stages"),
    [
        ("llama", 2),
        *(
            pytest.param(family, stages, marks=pytest.mark.slow)
            for family, stages in [
                ("llama", 3),
                ("qwen3", 2),
                ("qwen3", 3),
                ("gemma3", 2),
                ("gemma3", 3),
                ("gpt2", 2),
                ("gpt2", 3),
            ]
        ),
    ],
)
def test_a_pipeline_gives_what_one_process_gives(family: str, stages: int, saved: Callable[[str], ModelSpec]) -> None:
    spec = saved(family)
    with InProcessPool(spec, ONE) as local, pipeline(spec, stages) as pool:
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen3", "gemma3", "gpt2"))]
)
def test_whole_replicas_on_two_nodes_give_what_one_process_gives(
    family: str, saved: Callable[[str], ModelSpec]
) -> None:
    items = [shard(index, (20, 9)) for index in range(6)]
    with InProcessPool(saved(family), ONE) as local, RayPool(saved(family), WholePlacement(2, "cpu", 2)) as pool:
        expected, found = measured(local, items), measured(pool, items)
    assert found.keys() == expected.keys()
    for index, rows in expected.items():
        assert_same_rows(found[index], rows)


@pytest.mark.slow
def test_a_stage_that_is_killed_again_and_again(saved: Callable[[str], ModelSpec], two_nodes: Any) -> None:
    """The first and the last stage fail during the work; every shard arrives once."""
    spec = saved("llama")
    items: list[Shard] = [shard(index, (30, 8)) for index in range(30)]
    with InProcessPool(spec, ONE) as local:
        expected = measured(local, items)
    found = {}
    with pipeline(spec, 2) as pool:
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
def test_a_pipeline_on_a_node_that_is_lost_is_rebuilt_on_another(
    saved: Callable[[str], ModelSpec], two_nodes: Any
) -> None:
    import ray

    spec = saved("llama")
    items = [shard(index, (30, 8)) for index in range(30)]
    with InProcessPool(spec, ONE) as local:
        expected = measured(local, items)
    found = {}
    with pipeline(spec, 2) as pool:
        for number, done in enumerate(pool.map(MEASURE, items)):
            assert done.item.index not in found
            found[done.item.index] = done.value
            if number == 3:
                used = {n["NodeID"] for n in ray.nodes()} - {
                    node for node, free in ray._private.state.available_resources_per_node().items() if free.get("CPU")
                }
                lost = next(node for node in two_nodes.worker_nodes if node.node_id in used)
                lost.kill_raylet()
    two_nodes.remove_node(lost)
    two_nodes.add_node(num_cpus=2)
    assert found.keys() == expected.keys()
    for index, rows in expected.items():
        assert_same_rows(found[index], rows)


def test_what_a_user_can_get_wrong(saved: Callable[[str], ModelSpec], tmp_path: Any) -> None:
    with open_pool(saved("llama"), PipelinePlacement(1, STAGES[2], "cpu", 1)) as pool:
        assert isinstance(pool, PipelinePool) and pool.staged
        with pytest.raises(StagingError, match=r"^measure needs all layers of the model at once"):
            next(iter(pool.map(tasks.measure, [Job(0, "")])))
    with pytest.raises(PlacementError, match=r"`replicas=2` need 6 CPUs .limit 4 of the Ray cluster"):
        PipelinePool(saved("llama"), PipelinePlacement(2, STAGES[3], "cpu", 1))
    with pytest.raises(PlacementError, match=r"`replicas=1` need 6 CPUs .limit 4 of the Ray cluster"):
        PipelinePool(saved("llama"), PipelinePlacement(1, STAGES[2], "cpu", 1, idle_cpus=2))
    model = make_model("llama")
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    told = r"^shard 0: first_value_norm is not finite in layer 1, self attention"
    with pipeline(ModelSpec(str(tmp_path)), 2) as pool, pytest.raises(WorkError, match=told):
        measured(pool, SHARDS[:1])
