"""Loss increases: their intervals, and the words of pruned models and their controls."""

from __future__ import annotations

import json
from math import inf, isclose, isnan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headscan.errors import HeadscanError, VerdictError
from headscan.store.records import ArmKind, ArmRecord, RunRecord
from headscan.store.store import Store
from headscan.verdicts.arm_verdict import ArmVerdict, Outcome
from headscan.verdicts.bounds import mean_ends
from headscan.verdicts.head_effects import read_baseline
from headscan.verdicts.judge import judge
from headscan.verdicts.metrics import RATES, REACH, Increase, TaskMetric, exceeds, rate_increase, read_losses
from headscan.verdicts.ordered_shares import judge_shares
from headscan.verdicts.ratio_estimates import estimate_ratio
from tests.numbers.conftest import HEADS, LAYERS, answer_table
from tests.stores import begin_arm

LOSS = RATES["loss"]


def test_the_difference_is_that_of_the_pooled_rates() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(5, 50, 12).astype(float)
    base, arm = -rng.random(12) * sizes, -rng.random(12) * sizes
    found = rate_increase(LOSS, base, arm, sizes, np.arange(12))
    assert isclose(found.difference, -arm.sum() / sizes.sum() + base.sum() / sizes.sum())
    assert found.low < found.difference < found.high
    alone = rate_increase(LOSS, base, arm, sizes, np.zeros(12, int))
    assert (alone.documents, alone.low, alone.high) == (1, -inf, inf) and "[" not in alone.words()
    same = rate_increase(LOSS, base, base, sizes, np.arange(12))
    assert (same.difference, same.low, same.high) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("documents", [6, 20, 200])
def test_a_rise_has_the_bound_of_its_documents_and_of_one_that_is_farther(documents: int) -> None:
    """Of one size, and scaled by their share of the tokens if they differ."""
    rng = np.random.default_rng(documents)
    rises, even = rng.normal(0.02, 0.05, documents), np.full(documents, 10.0)
    found = rate_increase(LOSS, np.zeros(documents), -10 * rises, even, np.arange(documents), comparisons=3)
    farthest = rises.mean() + REACH * (np.array([rises.min(), rises.max()]) - rises.mean())
    (low,), (high,) = mean_ends(rises, *farthest, comparisons=3)
    assert found.interval == pytest.approx((low, rises.mean(), high))
    shifted = rate_increase(LOSS, np.zeros(documents), -10 * (rises + 1), even, np.arange(documents), comparisons=3)
    assert shifted.interval == pytest.approx([1 + end for end in found.interval])
    again = rate_increase(LOSS, np.zeros(documents), -20 * rises, 2 * even, np.arange(documents), comparisons=3)
    assert again.interval == pytest.approx(found.interval)


@pytest.mark.parametrize("documents", [6, 8, 20])
@pytest.mark.parametrize(
    ("kind", "below", "above"), [("normal", 0.025, 0.025), ("exponential", 0.01, 0.065), ("lognormal", 0.005, 0.107)]
)
def test_both_ends_of_intervals_miss_as_rarely_as_stated(kind: str, documents: int, below: float, above: float) -> None:
    """Of normal differences each end misses at most 2.5 %. Of skewed ones, the missing documents are those that have
    most. 800 draws leave an error of up to 0.011.
    """
    rng, draws, misses = np.random.default_rng(documents), 800, np.zeros(2)
    mean = {"normal": 0.0, "exponential": 1.0, "lognormal": np.exp(0.5)}[kind]
    for _ in range(draws):
        drawn = {"normal": rng.normal, "exponential": rng.exponential, "lognormal": rng.lognormal}[kind](size=documents)
        sizes = np.exp(0.5 * rng.normal(size=documents))
        found = estimate_ratio(drawn * sizes, sizes, np.arange(documents))
        misses += np.array([mean < found.low, mean > found.high])
    assert misses[0] / draws <= below + 0.012 and misses[1] / draws <= above + 0.02


def test_passages_of_one_document_count_once() -> None:
    """Repeating every passage within its document changes no interval; as documents of their own it would."""
    rng = np.random.default_rng(2)
    sizes, gained = rng.integers(5, 50, 8).astype(float), rng.normal(size=8)
    documents = np.arange(8)
    once = rate_increase(LOSS, np.zeros(8), gained, sizes, documents)
    doubled = [np.tile(each, 2) for each in (np.zeros(8), gained, sizes)]
    twice = rate_increase(LOSS, *doubled, np.tile(documents, 2))
    assert (once.low, once.high) == (pytest.approx(twice.low), pytest.approx(twice.high))
    apart = rate_increase(LOSS, *doubled, np.arange(16))
    assert apart.high - apart.low < 0.8 * (once.high - once.low)


@pytest.mark.parametrize("documents", [6, 26])
def test_intervals_cover_the_true_increase(documents: int) -> None:
    """With correlated passages of unequal sizes at least 95 of 100 intervals cover."""
    rng, covered, draws = np.random.default_rng(documents), 0, 600
    for _ in range(draws):
        owner = np.repeat(np.arange(documents), rng.integers(1, 4, documents))
        sizes = rng.integers(20, 60, len(owner)).astype(float)
        gained = sizes * (0.05 + 0.04 * rng.normal(size=documents)[owner]) + rng.normal(size=len(owner))
        found = rate_increase(LOSS, np.zeros(len(owner)), -gained, sizes, owner)
        covered += found.low <= 0.05 <= found.high
    assert covered / draws >= 0.97


QUESTIONS = 1000
RIGHT = np.tile([1, 1, 1, 0], QUESTIONS // 4)
TOKENS = np.arange(100, 124)


def write(
    store: Store,
    arms: dict[str, tuple[str, int, float, dict[str, Any]]],
    *,
    benchmark: bool,
    texts: tuple[str, ...] = ("text",),
) -> str:
    """Write arms: kind, number of lost answers, loss increase, and further fields."""
    results = [(task, metric) for task in texts for metric in ("loss", "next_token_accuracy")]
    with store.one_transaction():
        run_id = store.begin_run(RunRecord("evaluate", "e", "tiny", LAYERS, HEADS)).run_id
        for name, (kind, lost, increase, fields) in arms.items():
            arm_id = begin_arm(store, run_id, name, kind, **fields)
            right = RIGHT.copy()
            right[np.flatnonzero(RIGHT)[:lost]] = 0
            answers = answer_table(np.array(["sums"] * QUESTIONS), right).slice(0, QUESTIONS if benchmark else 0)
            spread = np.linspace(-0.01, 0.01, len(TOKENS)) * (increase > 0)
            sums = -(2.0 + increase + spread) * TOKENS
            text = answer_table(np.array(["text"] * len(TOKENS)), np.full(len(TOKENS), np.nan))
            pairs = [
                {"loss": [s, int(n)], "next_token_accuracy": [n // 2, int(n)]}
                for s, n in zip(sums, TOKENS.tolist(), strict=True)
            ]
            names = {
                "metrics": pa.array(list(map(json.dumps, pairs))),
                "doc_hash": pa.array([f"d{i}" for i in range(len(TOKENS))]),
            }
            for column, values in names.items():
                text = text.set_column(text.column_names.index(column), column, values)
            rows = pa.Table.from_pylist(
                [
                    {"task": task, "is_group": False, "metric": metric, "filter": "none", "value": 2.0 + increase,
                     "standard_error": None, "questions": len(TOKENS)}
                    for task, metric in results
                ]
            )  # fmt: skip
            place = text.column_names.index("task")
            named = [text.set_column(place, "task", pa.array([task] * len(text))) for task in texts]
            table = pa.concat_tables([answers.cast(text.schema), *named], promote_options="permissive")
            store.finish_arm(arm_id, table, results=rows if texts else None, ablated_share=fields.pop("zeroed", 0.0))
        store.finish_run(run_id)
    return run_id


def pruned(kind: str, lost: int, increase: float, share: float = 0.4, selection: str = "head, o+v", **more: Any) -> Any:
    config = {"weights_left": 0.88, "cache_left": 0.58, **more}
    return kind, lost, increase, {"share": share, "selection": selection, "config": config}


def test_a_pruned_model_names_its_size_and_its_controls(tmp_path: Any) -> None:
    arms = {
        "baseline": ("baseline", 0, 0.0, {}),
        "pruned 40%": pruned("pruned", 2, 0.05),
        "pruned 20%": pruned("pruned", 1, 0.02, share=0.2),
        "random": pruned("random_pruned", 100, 0.5),
        "random, other repair": pruned("random_pruned", 90, 0.4, selection="head, mean"),
        "without layers": pruned("layers_dropped", 34, 0.141, layers_dropped=2),
    }
    store = Store(tmp_path / "s.duckdb")
    verdict = judge(store, write(store, arms, benchmark=True), max_loss=0.1)
    by_name = {arm.name: arm for arm in verdict.arms}
    arm = by_name["pruned 40%"]
    assert arm.is_safe
    words = arm.sentence()
    assert words.startswith(
        "pruned 40% (0 % of heads removed; 88 % of the weights and 58 % of the KV cache remain): safe within one point"
    )
    assert "Of 1 random choice with as many heads and the same repair, 1 loses more accuracy (-10.00" in words
    assert "Dropping 2 whole attention layers (0 % of heads) with the same repair: -3.40 points [-4." in words
    assert "loss +0.141" in words and "Random heads with the same repair: loss +0.500" in words
    assert arm.controls is not None and arm.controls.arms == ("random",)
    assert "Measured text loss: 2.05 against 2: +0.050" in words
    assert "text next_token_accuracy: 2.05 against 2: +0.00 [+0.00, +0.00] points" in words
    assert "No random control with as many heads and the same repair." in by_name["pruned 20%"].sentence()
    assert [line.partition(" (")[0] for line in verdict.sentences()] == ["pruned 40%", "pruned 20%"]


@pytest.mark.parametrize("documents", [1, 8])
def test_infinite_amounts_decide_a_ratio_only_if_they_have_one_sign(documents: int) -> None:
    amounts, sizes, owner = np.ones(8), np.full(8, 2.0), np.arange(8) % documents
    for infinite in (inf, -inf):
        amounts[3] = infinite
        found = estimate_ratio(amounts, sizes, owner)
        assert (found.ratio, found.low, found.high, found.p_value) == (infinite, infinite, infinite, 0.0)
    amounts[:2] = inf
    found = estimate_ratio(amounts, sizes, owner)
    assert isnan(found.ratio) and (found.low, found.high, found.p_value, found.documents) == (-inf, inf, 1.0, documents)
    assert not rate_increase(LOSS, np.zeros(8), amounts, sizes, owner).interval.known


def test_an_infinite_loss_exceeds_every_limit(tmp_path: Path) -> None:
    arms = {
        "baseline": ("baseline", 0, 0.0, {}),
        "calm": pruned("pruned", 0, 0.05),
        "infinite": pruned("pruned", 0, inf),
    }
    read, asked = Store(tmp_path / "read.duckdb"), Store(tmp_path / "asked.duckdb")
    losses = read_losses(read, write(read, arms, benchmark=False))
    assert losses["infinite"].interval == (inf, inf, inf) and losses["infinite"].words() == "+inf nats per token"
    shares = [("infinite", 0.4)]
    run_id = write(asked, arms, benchmark=True, texts=())
    (judged,) = judge_shares(judge(asked, run_id, loss_increases=losses, max_loss=1e6), shares)
    assert judged.outcome is Outcome.LOSES and judged.why.startswith("+inf nats per token (limit")
    assert not exceeds(losses["calm"], 0.1)


def test_a_verdict_counts_the_loss_of_text_that_was_read(tmp_path: Path) -> None:
    arms = {
        "baseline": ("baseline", 0, 0.0, {}),
        "infinite": pruned("pruned", 0, inf),
        "above": pruned("pruned", 0, 3.0),
        "across": pruned("pruned", 0, 0.049),
        "within": pruned("pruned", 0, 0.02),
        "both": pruned("pruned", 100, 3.0),
    }
    store = Store(tmp_path / "s.duckdb")
    run_id = write(store, arms, benchmark=True)
    found = {arm.name: arm for arm in judge(store, run_id).arms}
    outcomes = [(arm.outcome, arm.is_safe, arm.label.partition(",")[0]) for arm in found.values()]
    assert outcomes == [
        (Outcome.LOSES, False, "loses"),
        (Outcome.LOSES, False, "loses"),
        (Outcome.NOT_SHOWN, False, "too few texts"),
        (Outcome.SAFE, True, "safe"),
        (Outcome.LOSES, False, "loses"),
    ]
    assert found["infinite"].why == "+inf nats per token (limit 0.05)"
    assert "not safe: it raises the loss of text by +3.000" in found["above"].sentence()
    assert "texts: the loss may rise by 0.05" in found["across"].why
    assert "not shown to be safe: the loss may rise by 0.05" in found["across"].sentence()
    assert found["both"].why == "+3.000 nats per token (limit 0.05) and accuracy (-10.0 points)"
    looser = {arm.name: arm.outcome for arm in judge(store, run_id, max_loss=5.0).arms}
    assert [name for name, outcome in looser.items() if outcome is Outcome.SAFE] == ["above", "across", "within"]


def test_a_loss_that_cannot_be_compared_is_not_safe(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    arms = {"baseline": ("baseline", 0, inf, {}), "arm": pruned("pruned", 0, 0.0)}
    (arm,) = judge(store, write(store, arms, benchmark=True)).arms
    assert arm.label == "not shown" and "cannot be compared" in arm.why


def test_texts_share_the_level_of_their_losses(tmp_path: Path) -> None:
    arms = {"baseline": ("baseline", 0, 0.0, {}), "arm": pruned("pruned", 0, 0.02)}
    widths = []
    for texts, comparisons in ((("text",), 1), (("text", "code"), 1), (("text",), 2)):
        store = Store(tmp_path / f"{len(widths)}.duckdb")
        (arm,) = judge(store, write(store, arms, benchmark=True, texts=texts), comparisons=comparisons).arms
        loss = arm.value("loss")
        assert loss is not None
        widths.append(loss.high - loss.low)
    assert widths[1] == pytest.approx(widths[2]) and widths[1] > 1.1 * widths[0]


def test_losses_of_another_run_are_refused_next_to_those_of_the_run(tmp_path: Path) -> None:
    arms = {"baseline": ("baseline", 0, 0.0, {}), "arm": pruned("pruned", 0, 0.02)}
    losses = {"arm": Increase("nats per token", 20, 0.01, 0.0, 0.02)}
    with_text = Store(tmp_path / "text.duckdb")
    run_id = write(with_text, arms, benchmark=True)
    with pytest.raises(
        VerdictError, match=rf"^run {run_id} has a loss of text of its own .*\. Leave out `loss_increases`$"
    ):
        judge(with_text, run_id, loss_increases=losses)
    without = Store(tmp_path / "none.duckdb")
    (arm,) = judge(without, write(without, arms, benchmark=True, texts=()), loss_increases=losses).arms
    assert arm.value("loss") == losses["arm"].interval


def test_bits_per_byte_that_are_infinite_lose() -> None:
    bits = Increase("bits per byte", 20, inf, inf, inf)
    mask = ArmRecord(name="a", kind=ArmKind.MASK, ablated_share=0.1)
    arm = ArmVerdict(arm=mask, metrics=(TaskMetric("wiki", "bits_per_byte", 1.0, inf, bits),))
    assert "It raises the loss of text by +inf bits per byte" in arm.sentence()


def test_an_infinite_loss_of_the_whole_model_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    arms = {"baseline": ("baseline", 0, inf, {}), "arm": pruned("pruned", 0, inf)}
    run_id = write(store, arms, benchmark=False)
    for read in (read_losses, read_baseline):
        with pytest.raises(HeadscanError, match="the whole model has an infinite loss"):
            read(store, run_id)


def test_without_right_answers_the_controls_are_compared_by_loss(tmp_path: Any) -> None:
    arms = {
        "baseline": ("baseline", 0, 0.0, {}),
        "pruned": pruned("pruned", 0, 0.05),
        "random 0": pruned("random_pruned", 0, 0.5),
        "random 1": pruned("random_pruned", 0, 0.3),
        "without a layer": pruned("layers_dropped", 0, 0.141, layers_dropped=1),
    }
    store = Store(tmp_path / "s.duckdb")
    (sentence,) = judge(store, write(store, arms, benchmark=False)).sentences()
    assert "no task has right answers to count" in sentence
    assert "Dropping 1 whole attention layer (0 % of heads) with the same repair: loss +0.141" in sentence
    assert "Random heads with the same repair: loss +0.3004 to +0.5004 nats per token" in sentence
