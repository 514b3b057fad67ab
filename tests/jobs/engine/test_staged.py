"""Scans and evaluations in ranges of layers equal those of one process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headscan.ablation.intervention import Intervention
from headscan.ablation.masks import HeadMask, RandomHeads
from headscan.ablation.rules import HeadRule
from headscan.architectures import VOCABULARY
from headscan.catalog import MassWidths, panel_names
from headscan.cluster.placements import StreamedPlacement
from headscan.cluster.pool import InProcessPool, Pool, StagingError, WorkError
from headscan.cluster.streamed_pool import StreamedPool
from headscan.engine.answer import AnsweringSettings, AnswerItem, answer_item
from headscan.engine.replacements import collect_outputs
from headscan.model_spec import ModelSpec
from headscan.runs.model_identity import model_facts
from headscan.steps.run_corpus import ShardTable
from headscan.steps.run_scan import MeasureShard
from headscan.texts import Shard, TokenSequence
from headscan.texts.token_requests import LogLikelihood, Request, Responses
from tests.jobs.conftest import THREADS
from tests.small_models import make_model

#: Two layers in the second range, and a hybrid whose second range, of three, has no heads.
PLACEMENT = StreamedPlacement("cpu", 1, 1 << 30, ((0, 1), (1, 3)))
THREE = replace(PLACEMENT, ranges=((0, 1), (1, 2), (2, 3)))
FAMILIES = {"llama": PLACEMENT, "qwen3": THREE, "gemma3": PLACEMENT, "gpt2": PLACEMENT, "granitemoehybrid": THREE}
ARMS: dict[str, Intervention | None] = {
    "baseline": None,
    "mask": HeadMask([(0, 1), (2, 3), (2, 5)]),
    "rule": HeadRule("output_norm_ln", threshold=0.95),
    "attention rule": HeadRule("first_token_weight", threshold=0.2),
    "random": RandomHeads(0.3, seed=2),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelSpec]:
    root = tmp_path_factory.mktemp("staged")

    def spec(family: str) -> ModelSpec:
        if not (root / family).exists():
            make_model(family).save_pretrained(root / family, max_shard_size="100KB")
        return ModelSpec(str(root / family))

    return spec


def shard(index: int, lengths: tuple[int, ...], seed: int = 0) -> Shard:
    rng = np.random.default_rng([seed, index])
    texts = tuple(
        TokenSequence(10 * index + row, row, "text", rng.integers(5, VOCABULARY, size, dtype=np.int32), False, "")
        for row, size in enumerate(lengths)
    )
    return Shard(index, texts, "")


MEASURE = MeasureShard(tuple(sorted(panel_names("full"))), MassWidths(), 64, False)
SHARDS = [shard(0, (30, 5, 17, 40, 8)), shard(1, (12,)), shard(2, (20, 21, 22))]


def measured(pool: Pool, shards: list[Shard] = SHARDS, task: MeasureShard = MEASURE) -> dict[int, ShardTable]:
    return {done.item.index: done.value for done in pool.map(task, shards)}


def assert_same_rows(ours: ShardTable, theirs: ShardTable, tolerance: float = 1e-6) -> None:
    assert ours.nonfinite_rows == theirs.nonfinite_rows
    assert ours.heads.schema == theirs.heads.schema
    for name in theirs.heads.column_names:
        found, expected = (
            np.array(table.heads[name].to_pylist(), dtype=None if name == "site" else float) for table in (ours, theirs)
        )
        if name in ("sequence", "site", "layer", "head", "kv_head"):
            assert (found == expected).all(), name
        else:
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_streamed_scan_gives_the_same_rows(family: str, saved: Callable[[str], ModelSpec]) -> None:
    with InProcessPool(saved(family), THREADS) as local, StreamedPool(saved(family), FAMILIES[family]) as streamed:
        assert streamed.one(model_facts, None) == local.one(model_facts, None)
        expected, found = measured(local), measured(streamed)
    assert found.keys() == expected.keys() == {0, 1, 2}
    for index, rows in expected.items():
        assert rows.heads.num_rows == len(SHARDS[index].sequences) * (12 if family == "granitemoehybrid" else 18)
        assert_same_rows(found[index], rows)


def requests_of(count: int = 7) -> tuple[Request, ...]:
    rng = np.random.default_rng(5)
    prefix = tuple(rng.integers(5, VOCABULARY, 12).tolist())
    found = [
        Request((*prefix, *rng.integers(5, VOCABULARY, 3 + 4 * number).tolist()), 1 + number % 3)
        for number in range(count)
    ]
    return (*found, found[0]._replace(ids=(*found[0].ids[:-1], 6)))  # the same read, another answer


def item_of(ablated: Intervention | None, headscan_kernels: bool = False) -> AnswerItem:
    return AnswerItem("all", requests_of(), (ablated,), AnsweringSettings(80, False, headscan_kernels))


def answers(pool: Pool, ablated: Intervention | None) -> Responses[LogLikelihood]:
    [result] = pool.one(answer_item, item_of(ablated))
    return result


# The scan above streams the other families, too.
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) if name in ("qwen3", "gpt2") else name for name in FAMILIES]
)
def test_likelihoods_of_all_kinds_of_arms_are_the_same(family: str, saved: Callable[[str], ModelSpec]) -> None:
    with InProcessPool(saved(family), THREADS) as local, StreamedPool(saved(family), FAMILIES[family]) as streamed:
        for name, ablated in ARMS.items():
            expected, found = answers(local, ablated), answers(streamed, ablated)
            assert len(found.values) == len(requests_of())
            for ours, theirs in zip(found.values, expected.values, strict=True):
                assert ours.log_likelihood == pytest.approx(theirs.log_likelihood, abs=1e-6, rel=1e-6), name
                assert ours.greedy_tokens == theirs.greedy_tokens
            assert found.ablated_shares == pytest.approx(expected.ablated_shares, abs=1e-12), name
            if ablated is not None:
                assert 0 < sum(expected.ablated_shares) < len(requests_of()), name


@pytest.mark.parametrize("family", ["llama", "granitemoehybrid"])
def test_in_half_precision_ranges_round_as_arms_with_rules(family: str, saved: Callable[[str], ModelSpec]) -> None:
    spec = replace(saved(family), dtype="bfloat16")
    idle = HeadRule("output_norm", -1.0)
    with StreamedPool(spec, FAMILIES[family]) as streamed:

        def likelihoods(ablated: Intervention | None, headscan_kernels: bool) -> list[float]:
            [found] = streamed.one(answer_item, item_of(ablated, headscan_kernels))
            return [answer.log_likelihood for answer in found.values]

        assert likelihoods(None, True) == likelihoods(idle, True)
        assert likelihoods(None, False) != likelihoods(idle, False)  # another kernel, which rounds otherwise


def test_a_number_that_is_none_is_named_by_its_layer(saved: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    model = make_model("llama")
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    with StreamedPool(ModelSpec(str(tmp_path)), PLACEMENT) as pool:
        with pytest.raises(WorkError, match=r"^shard 0: first_value_norm is not finite in layer 1, self attention"):
            measured(pool)
        keeping = replace(MEASURE, keep_nonfinite=True)
        kept = measured(pool, task=keeping)
    with InProcessPool(ModelSpec(str(tmp_path)), THREADS) as local:
        expected = measured(local, task=keeping)
    for index, rows in expected.items():
        # The three heads that share the KV head, and all of the layer above.
        assert rows.nonfinite_rows == 9 * len(SHARDS[index].sequences)
        assert_same_rows(kept[index], rows)


def test_tasks_travel_and_a_plain_function_is_refused(saved: Callable[[str], ModelSpec]) -> None:
    for task in (MEASURE, answer_item, model_facts):
        assert type(pickle.loads(pickle.dumps(task))) is type(task)
    with (
        StreamedPool(saved("llama"), PLACEMENT) as pool,
        pytest.raises(
            StagingError, match=r"collect outputs needs all layers of the model at once.*=whole` or `placement=sharded`"
        ),
    ):
        pool.one(collect_outputs, None)
