"""The report's section on a smaller KV cache, its chart, and the damage map of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headscan.plans import HeadDamage, HeadPlan, make_plan
from headscan.report.answers import CacheHint, Commands, cache_answer
from headscan.report.arm_chart import recall_figure
from headscan.report.head_data import plan_measures
from headscan.report.saving_costs import cache_left, cache_section
from headscan.report.share_chart import ArmPoint, cache_figure
from headscan.store.site_rows import SiteHeads
from headscan.store.store import Store
from headscan.store.verdict_limits import MARGIN, MIN_RETAINED
from headscan.verdicts.judge import judge
from tests.numbers.plan_fixtures import RECENT, SINK, everything, site, write_scan

Evaluate = Callable[..., tuple[Store, str]]

EVIL = "<script>alert('1')</script>"
TASKS = np.repeat(["sums", f"{EVIL}@512"], [400, 200])
BASELINE = np.tile([1, 1, 1, 0], 150)


def losing(count: int) -> np.ndarray:
    answers = BASELINE.copy()
    answers[np.flatnonzero(BASELINE)[::3][:count]] = 0
    return answers


def arm(kind: str, mode: str, method: str, left: float, loss: int, lengths: tuple[int, ...] = (4096, 30000)) -> Any:
    shares = [[tokens, left + 0.01 * i] for i, tokens in enumerate(lengths)]
    config = {"mode": mode, "method": method, "kv_shares": shares}
    return kind, losing(loss), 0.0, {"share": 0.5, "selection": mode, "config": config}


ARMS = {
    "baseline": ("baseline", BASELINE, 0.0, {}),
    f"{EVIL}, forward": arm("plan", "forward", EVIL, 0.6, 12),
    "small, forward": arm("plan", "forward", EVIL, 0.3, 30, (4096, 30000, 70000)),
    "measured, decode": arm("plan", "decode", "measured", 0.6, 3),
    "random a": arm("random_plan", "forward", "random", 0.6, 60),
    "random b": arm("random_plan", "decode", "random", 0.6, 50),
    "mask": ("mask", losing(5), 0.1, {"share": 0.1}),
}


@pytest.fixture
def evaluation(evaluate: Evaluate) -> tuple[Store, str]:
    return evaluate(TASKS, ARMS)


def section_of(store: Store, run_id: str) -> str | None:
    verdict = judge(store, run_id)
    return cache_section(verdict, *cache_left(verdict))


def test_the_section_lists_plans_and_escapes_their_names(evaluation: tuple[Store, str]) -> None:
    store, run_id = evaluation
    html = section_of(store, run_id)
    assert html is not None and EVIL not in html
    assert "KV cache left at 30,000 tokens" in html  # the length nearest to 32k that all plans have
    rows = html.split("<table>")[1].split("<tr>")[2:]
    assert len(rows) == 3  # random plans are in the chart only, and masks are no plans
    assert "&lt;script&gt;" in rows[0] and "61 %" in rows[0]
    assert "31 %" in rows[1] and "61 %" in rows[2]


def test_the_answer_says_of_how_many_plans_the_shown_one_is_the_best(evaluate: Evaluate) -> None:
    losers = {f"plan {loss}": arm("plan", "forward", "measured", 0.6, loss) for loss in (40, 50, 60)}
    store, run_id = evaluate(TASKS, {"baseline": ARMS["baseline"], **losers})
    verdict, hint, commands = judge(store, run_id), CacheHint(4, 256, 512, 6, None), Commands(("MODEL",), store.path)
    several = cache_answer(verdict, dict.fromkeys(losers, 0.6), 4096, None, hint, commands)
    assert "It is one of 3 tested arms; their intervals are not corrected for that." in several.detail
    assert "tested arms" not in cache_answer(verdict, {"plan 40": 0.6}, 4096, None, hint, commands).detail


def test_the_chart_shows_every_plan_by_method_and_mode(evaluation: tuple[Store, str]) -> None:
    store, run_id = evaluation
    arms = {each.name: each for each in judge(store, run_id).arms if each.kind.shrinks_cache}
    assert all(each.accuracy is not None for each in arms.values())
    details = {name: fields[3]["config"] for name, fields in ARMS.items() if name in arms}
    points = [ArmPoint(arms[name], each["method"], each["kv_shares"][0][1]) for name, each in details.items()]
    figure = cache_figure(points, 4096)
    # Accuracy and recall of two plans by one method, one by another, and the controls of each mode.
    assert len(figure.data) == 2 * 4
    named = [trace for trace in figure.data if trace.showlegend]
    assert [trace.name for trace in named] == [
        "&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;, forward",
        "measured, decode",
        "random, decode",
        "random, forward",
    ]
    curve, decode, *_ = named
    assert list(curve.x) == pytest.approx([30, 60])
    losses = [arms[name].paired for name in ("small, forward", f"{EVIL}, forward")]
    assert list(curve.y) == [each.difference for each in losses]
    assert list(curve.error_y.array) == pytest.approx([each.high - each.difference for each in losses])
    assert list(curve.error_y.arrayminus) == pytest.approx([each.difference - each.low for each in losses])
    assert (curve.mode, curve.line.dash, decode.line.dash) == ("lines+markers", "solid", "dot")
    assert curve.line.color != decode.line.color and {trace.mode for trace in named[2:]} == {"markers"}
    recall = next(trace for trace in figure.data if not trace.showlegend and trace.legendgroup == curve.legendgroup)
    kept = arms["small, forward"].recall[0].paired.retained
    assert kept is not None and recall.y[0] == kept.value and recall.xaxis == "x2"
    assert [shape.y0 for shape in figure.layout.shapes] == [-MARGIN, MIN_RETAINED]
    assert EVIL not in figure.to_json()


def test_plans_by_layer_are_a_line_and_rows_of_their_own(evaluate: Evaluate) -> None:
    arms: dict[str, Any] = {"baseline": ARMS["baseline"]}
    for unit, loss in (("", 3), (" by layer", 9)):
        arms[f"plan measured{unit} 50%"] = arm("plan", "forward", "measured", 0.6, loss)
    arms["plan measured by layer 50%"][3]["config"]["granularity"] = "layer"
    store, run_id = evaluate(TASKS, arms)
    html = section_of(store, run_id)
    assert html is not None
    rows = html.split("<table>")[1].split("<tr>")[2:]
    assert len(rows) == 2 and all("61 %" in row for row in rows) and "measured by layer 50%" in rows[1]
    assert '"name":"measured, forward"' in html and '"name":"measured by layer, forward"' in html


def test_a_family_that_the_baseline_guesses_is_not_drawn(evaluate: Evaluate) -> None:
    tasks = np.repeat(["sums", "copying@512", "needle@512"], [400, 200, 200])
    baseline = np.concatenate([np.tile([1, 1, 1, 0], 150), np.tile([1, 0, 0, 0], 50)])
    kind, _, share, fields = arm("plan", "forward", "measured", 0.6, 0)
    store, run_id = evaluate(
        tasks, {"baseline": ("baseline", baseline, 0.0, {}), "half": (kind, baseline, share, fields)}
    )
    verdict = judge(store, run_id)
    (half,) = verdict.arms
    assert [recall.informative for recall in half.recall] == [True, False]
    figure = cache_figure([ArmPoint(half, "measured", 0.6)], 4096)
    assert [axis.title.text for axis in figure.select_yaxes()] == [
        "accuracy, points to the baseline",
        "copying left, %",
    ]
    benchmark = recall_figure(verdict)
    assert benchmark is not None
    assert [axis.title.text for axis in benchmark.select_yaxes()] == ["copying, points"]


UNKNOWN = ("plan", losing(3), 0.0, {"share": 0.5, "selection": "decode", "config": {"mode": "decode"}})


@pytest.mark.parametrize("others", [{"mask": ARMS["mask"]}, {"plan": UNKNOWN}], ids=["masks alone", "unknown bytes"])
def test_evaluations_without_plans_of_known_bytes_have_no_section(evaluate: Evaluate, others: dict[str, Any]) -> None:
    store, run_id = evaluate(TASKS, {"baseline": ARMS["baseline"], **others})
    assert section_of(store, run_id) is None


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> HeadPlan:
    path = tmp_path_factory.mktemp("plan") / "s.duckdb"
    grid = [site(0, 4, 4), site(2, 4, 2)]
    store, run_id = write_scan(path, grid, everything(3, 4, [40, 100]), [40, 100])
    return make_plan(store, run_id, window_share=0.5, sink=SINK, recent=RECENT)


def with_damages(plan: HeadPlan, damages: dict[tuple[int, int], HeadDamage]) -> HeadPlan:
    heads = (replace(head, damage=damages.get((head.layer, head.kv_head))) for head in plan.heads)
    return replace(plan, heads=tuple(heads))


def test_damages_are_measures_of_the_map(plan: HeadPlan) -> None:
    layer, head = np.array([0, 0, 0, 0, 2, 2, 2, 2]), np.tile(range(4), 2)
    heads = SiteHeads("r", "self", layer, head, np.array([0, 1, 2, 3, 0, 0, 1, 1]), 2)
    measured = with_damages(plan, {(0, 3): HeadDamage(0.25, None), (2, 1): HeadDamage(-0.5, None)})
    found = {measure.name: measure for measure in plan_measures(measured, heads)}
    assert set(found) == {"plan", "keep_score", "damage_text"}
    # Query heads that share a KV head have its numbers.
    np.testing.assert_array_equal(found["damage_text"].values, [np.nan] * 3 + [0.25] + [np.nan] * 2 + [-0.5] * 2)
    kinds = {(entry.layer, entry.kv_head): entry.head_class for entry in measured.heads}
    names = [found["plan"].classes[int(value)] for value in found["plan"].values]
    assert names == [kinds[place] for place in zip(layer, heads.kv_head, strict=True)]
    assert "damage" not in str([measure.name for measure in plan_measures(plan, heads)])
