"""The curves of a sweep, from the store to the figures and the section of a report."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np
import pytest

from headscan.catalog import SCORES
from headscan.ranking.comparisons import score_overlap
from headscan.report.ablation_costs import arms_section, sweep_parts
from headscan.report.arm_chart import FRAME, recall_figure, safe_text, shares_figure, within_point_text
from headscan.report.profile_charts import overlap_figure
from headscan.report.share_chart import BEST_COLOURS, curves_figure, point_text
from headscan.report.write_report import write_report
from headscan.store.store import Store
from headscan.text_tables import percent
from headscan.verdicts.confirmation import judge_sweep, record_confirmation
from headscan.verdicts.curves import Curve, is_sweep, read_curves
from headscan.verdicts.judge import Verdict, judge
from headscan.verdicts.verdict_rows import record_verdicts
from tests.numbers.plan_fixtures import everything, site, write_scan
from tests.numbers.sweep_fixtures import BASELINE, realised, write_sweep
from tests.stores import begin_arm

NAMES = tuple(SCORES)[:6]
SHARES = (0.05, 0.1, 0.2)
SEEDS = 2
TOKENS = [40, 100, 200]

#: Wider than this, a figure does not fit the page of a screen of 1,280 pixels.
PAGE = 1020


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, str, str]]:
    """A scan and a sweep of rules and masks with their random controls and recall tasks."""
    path = tmp_path_factory.mktemp("sweep") / "s.duckdb"
    store, run_id = write_scan(path, [site(i, 8, 4) for i in range(3)], everything(3, 8, TOKENS), TOKENS)
    evaluation = write_sweep(store, scores=NAMES, shares=SHARES, seeds=SEEDS)
    with store.reading():
        yield store, run_id, evaluation


@pytest.fixture(scope="module")
def verdict(sweep: tuple[Store, str, str]) -> Verdict:
    return judge(sweep[0], sweep[2])


@pytest.fixture(scope="module")
def curves(sweep: tuple[Store, str, str], verdict: Verdict) -> list[Curve]:
    return read_curves(sweep[0], verdict.run_id)


@pytest.fixture(scope="module")
def rules(curves: list[Curve]) -> list[Curve]:
    return [curve for curve in curves if curve.kind.endswith("rule")]


def test_curves_are_read_best_first(curves: list[Curve], rules: list[Curve]) -> None:
    assert {(curve.kind, curve.criterion) for curve in curves} == {
        *((kind, score) for kind in ("rule", "mask") for score in NAMES),
        ("random_rule", None),
        ("random_mask", None),
    }
    assert [curve.name for curve in rules] == [*NAMES, "random"]
    shares = [curve.share_within_point for curve in rules]
    assert shares == sorted(shares, reverse=True)
    for curve in rules:
        assert curve.safe_share is not None
        safe = [point.ablated_share for point in curve.points if point.safe]
        assert curve.safe_share == max(safe) < curve.share_within_point
    assert rules[0].safe_share >= realised(NAMES[0], 0.05)
    for curve in rules:
        assert [point.share for point in curve.points] == [0, *SHARES]
        assert [point.ablated_share for point in curve.points] == pytest.approx(
            [0, *(realised(curve.criterion, share) for share in SHARES)]
        )
        assert [point.arms for point in curve.points] == [0] + [SEEDS if curve.is_random else 1] * len(SHARES)
        assert curve.points[0].accuracy == pytest.approx(BASELINE, abs=0.03)
    assert is_sweep(curves)


def test_one_share_is_no_sweep(tmp_path: Path) -> None:
    store, _ = write_scan(tmp_path / "s.duckdb", [site(0, 4, 2)], everything(1, 4, TOKENS), TOKENS)
    run_id = write_sweep(store, scores=NAMES[:1], shares=[0.1], kinds=["mask"], questions=400, recall=False)
    html = arms_section(store, store.resolve_run(run_id, "evaluate"), judge(store, run_id))
    curves = read_curves(store, run_id)
    assert curves and not is_sweep(curves)
    assert 'id="arms"' in html and "curves-mask" not in html
    assert "Recall was not tested" in html and "recall task" not in html


def test_the_best_scores_have_colours_and_bands(rules: list[Curve]) -> None:
    figure = curves_figure(rules)
    named = [trace for trace in figure.data if trace.showlegend is not False]
    assert [trace.name for trace in named] == ["other scores", *NAMES[:4], "random"]
    assert [trace.line.color for trace in named[1:5]] == list(BEST_COLOURS)
    assert named[0].legendrank > 1000  # plotly's own: those drawn first stand last
    bands = [trace for trace in figure.data if trace.fill == "toself"]
    assert len(bands) == 5 and all(band.mode == "lines" for band in bands)
    first = rules[0].points
    size = len(first)
    assert list(bands[0].x[:size]) == pytest.approx([100 * point.ablated_share for point in first])
    assert list(bands[0].y[:size]) == pytest.approx([100 * (point.baseline + point.high) for point in first])
    assert list(bands[0].y[size:]) == pytest.approx([100 * (p.baseline + p.low) for p in reversed(first)])
    lines = [trace for trace in figure.data if trace.mode == "lines+markers"]
    assert len(lines) == len(rules)
    assert list(named[1].x) == list(bands[0].x[:size])
    assert list(named[1].y) == pytest.approx([100 * point.accuracy for point in first])
    margin = [shape.y0 for shape in figure.layout.shapes if shape.line.dash == "dash"]
    assert margin == [pytest.approx(100 * first[0].baseline - 1)]
    assert figure.layout.width <= PAGE


def test_hover_text_describes_a_point(rules: list[Curve]) -> None:
    point = rules[1].points[2]
    text = point_text(rules[1], point)
    assert text.startswith("first_token_weight_ln, rule of 0.1<br>7.9 % of heads ablated")
    assert f"{100 * point.difference:+.2f} points [{100 * point.low:+.2f}, {100 * point.high:+.2f}]" in text
    assert "seeds" not in text
    chance = rules[-1].points[2]
    assert point_text(rules[-1], chance).endswith(
        f"mean of 2 seeds, {100 * chance.lowest:+.2f} to {100 * chance.highest:+.2f}<br>loses recall"
    )
    assert chance.lowest < chance.highest
    assert point_text(rules[1], rules[1].points[0]).startswith("baseline<br>")


def test_the_two_shares_are_grouped_bars(rules: list[Curve]) -> None:
    figure = shares_figure(rules)
    within_point, safe = figure.data
    assert list(within_point.y) == list(safe.y) == [*NAMES, "random"]
    assert list(within_point.x) == pytest.approx([100 * curve.share_within_point for curve in rules])
    assert list(safe.x) == pytest.approx([100 * (curve.safe_share or 0) for curve in rules])
    assert figure.layout.yaxis.autorange == "reversed"
    assert figure.layout.width <= PAGE
    # A curve that never falls only says what it reaches; one that falls at once lets nothing go.
    for share, text in ((rules[0].reach, "≥ 15 %"), (0.149, "14.9 %"), (0.0, "0 %")):
        assert within_point_text(replace(rules[0], share_within_point=share)) == text


def test_a_missing_safe_share_has_a_reason(rules: list[Curve]) -> None:
    first = rules[0]
    kept = replace(first, points=tuple(point._replace(recall_lost=False) for point in first.points))
    assert safe_text(replace(kept, safe_share=0.0375)) == "3.75 %"
    unknown = replace(kept, safe_share=None)
    assert safe_text(unknown) == "too few questions or correct answers" and not unknown.stopped_by_recall
    points = (*kept.points[:2], *(point._replace(recall_lost=True) for point in kept.points[2:]))
    stopped = replace(kept, points=points, safe_share=points[1].ablated_share)
    assert stopped.recall_lost_at == points[2].ablated_share
    assert safe_text(stopped) == f"{percent(points[1].ablated_share)}, then recall is lost"
    # What the benchmark stops before is not blamed on recall.
    assert safe_text(replace(stopped, safe_share=0.01)) == "1 %"
    bars = shares_figure([unknown, stopped]).data[1]
    assert list(bars.x) == [0.0, pytest.approx(100 * points[1].ablated_share)]
    assert list(bars.text) == ["too few questions or correct answers", safe_text(stopped)]
    lines = [trace for trace in curves_figure([stopped]).data if trace.mode == "lines+markers"]
    assert list(lines[0].marker.symbol) == ["circle", "circle", "x", "x"]
    html = "".join(sweep_parts([unknown, stopped]))
    assert html.count("too few questions") >= 2 and "recall lost from" in html


def test_names_include_the_selection_if_there_are_several(evaluate: Callable[..., tuple[Store, str]]) -> None:
    tasks, right = np.array(["a"] * 8), np.ones(8)
    arms = {"baseline": ("baseline", right, 0.0, {})}
    fields = {"criterion": "entropy", "share": 0.1}
    for kind, selection in (("rule", "scan a"), ("mask", "scan a"), ("mask", "scan a by inactivity")):
        arms[f"{kind} {selection}"] = (kind, right, 0.1, {**fields, "selection": selection})
    store, run_id = evaluate(tasks, arms)
    judge(store, run_id)
    names = {(curve.kind, curve.selection): curve.name for curve in read_curves(store, run_id)}
    assert names == {
        ("rule", "scan a"): "entropy",
        ("mask", "scan a"): "entropy, scan a",
        ("mask", "scan a by inactivity"): "entropy, scan a by inactivity",
    }


def test_recall_is_drawn_over_the_benchmark(verdict: Verdict) -> None:
    figure = recall_figure(verdict)
    assert figure is not None
    assert [axis.title.text for axis in figure.select_yaxes()] == ["copying, points", "needle, points"]
    shown = {(trace.name, trace.xaxis) for trace in figure.data}
    assert shown == {(k, x) for k in ("rule", "mask", "random rule", "random mask") for x in ("x", "x2")}
    rule_points = next(trace for trace in figure.data if (trace.name, trace.xaxis) == ("rule", "x2"))
    arms = [arm for arm in verdict.arms if arm.kind == "rule"]
    assert sum(trace.showlegend for trace in figure.data) == 4
    near = [arm for arm in verdict.arms if arm.paired.difference >= -FRAME]
    assert 0 < len(near) < len(verdict.arms)
    left, right = figure.layout.xaxis2.range
    bottom, top = figure.layout.yaxis2.range
    for place, arm in enumerate(arms):
        (loss,) = (recall.paired.difference for recall in arm.recall if recall.family == "needle")
        # No arm is hidden: those outside the frame are at its edge, with their true numbers.
        assert rule_points.x[place] == pytest.approx(max(left, arm.paired.difference)) and rule_points.x[place] < right
        assert rule_points.y[place] == pytest.approx(max(bottom, loss)) and rule_points.y[place] < top
        assert list(rule_points.customdata[place]) == pytest.approx([arm.paired.difference, loss])
    symbols = {symbol for trace in figure.data for symbol in trace.marker.symbol}
    assert {"circle", "triangle-left"} <= symbols
    assert figure.layout.width <= PAGE


def test_the_overlap_is_a_map_of_all_pairs(sweep: tuple[Store, str, str]) -> None:
    store, run_id, _ = sweep
    pairs = score_overlap(store, run_id).to_pylist()
    figure = overlap_figure(pairs)
    (heatmap,) = figure.data
    values = np.array(heatmap.z, dtype=float)
    names = [label.split()[0] for label in heatmap.y]
    assert [label.split()[1] for label in heatmap.y] == list(heatmap.x)
    for row in pairs:
        a, b = names.index(row["score_a"]), names.index(row["score_b"])
        assert values[a, b] == values[b, a] == pytest.approx(100 * row["overlap"])
        assert f"both {row['both']:,}" in heatmap.hovertext[a][b]
    assert np.isnan(np.diag(values)).all() and np.isnan(values).sum() == len(names)
    assert figure.layout.width <= PAGE


def test_the_report_of_a_sweep(sweep: tuple[Store, str, str], tmp_path: Path) -> None:
    store, run_id, evaluation = sweep
    path = write_report(store, tmp_path / "r.html", scan_run=run_id, evaluate_run=evaluation, scores=())
    html = path.read_text("utf-8")
    for identity in ("curves-rule", "shares-rule", "curves-mask", "shares-mask", "recall", "overlap"):
        assert html.count(f'id="{identity}"') == 1
    assert 'id="arms"' not in html  # the curves have them all
    order = [
        html.index(text)
        for text in ('id="answers"', 'id="curves-rule"', 'id="curves-mask"', "Recall and benchmark", "<details>")
    ]
    assert order == sorted(order)
    folded = html[html.index("<details>") : html.index("</details>")]
    assert f"All {2 * len(SHARES) * (len(NAMES) + SEEDS)} arms" in folded
    assert "rule first_token_weight 5%" in folded and "Verdicts" in folded
    assert re.search(r"removes most heads: .{4,60}, with every smaller tested share safe, too; random heads", html)
    assert "are not corrected for comparing 14 of them" in html


@pytest.mark.slow
def test_a_report_writes_nothing_and_missing_verdicts_change_nothing(tmp_path: Path) -> None:
    """A read-only store is reported: verdicts that it lacks are computed in memory, and read the same when stored."""
    path = tmp_path / "s.duckdb"
    store, run_id = write_scan(path, [site(i, 8, 4) for i in range(3)], everything(3, 8, TOKENS), TOKENS)
    evaluation = write_sweep(store, scores=NAMES[:2], shares=SHARES[:2], seeds=1, questions=800)
    pages = []
    for _ in range(2):
        path.chmod(0o444)
        before = path.read_bytes(), path.stat().st_mtime_ns
        page = write_report(store, tmp_path / "r.html", scan_run=run_id, evaluate_run=evaluation, scores=())
        pages.append(page.read_text("utf-8"))
        assert (path.read_bytes(), path.stat().st_mtime_ns) == before
        path.chmod(0o644)
        record_verdicts(store, evaluation)
        record_confirmation(store, evaluation)
    assert 'id="curves-rule"' in pages[0] and pages[0] == pages[1]


def test_the_report_names_the_selecting_and_judging_questions(sweep: tuple[Store, str, str], verdict: Verdict) -> None:
    store, _, evaluation = sweep
    run = store.resolve_run(evaluation, "evaluate")
    for confirm in (True, False):
        judged = judge(store, run["run_id"])
        html = arms_section(store, run, judged, judge_sweep(store, judged, confirm=confirm))
        for choice in judge_sweep(store, verdict, confirm=confirm):
            assert escape(choice.sentence()) in html
        assert ("The best arms, judged on other questions" in html) is confirm
        assert html.count("selected on 1,000 questions and judged on 1,000 others") == 2 * confirm
        assert html.count("selected and judged on the same 2,000 questions") == 2 * (not confirm)
        assert html.index("The best arms") < html.index('id="curves-rule"') < html.index("too optimistic")


def test_scores_that_were_not_swept_leave_no_figures(curves: list[Curve]) -> None:
    """Rules alone, and random arms alone."""
    html = "".join(sweep_parts([curve for curve in curves if curve.kind == "rule"]))
    assert "curves-rule" in html and "curves-mask" not in html and "random heads" not in html
    assert "curves-" not in "".join(sweep_parts([curve for curve in curves if curve.is_random]))


def test_an_evaluation_without_right_answers_is_reported_in_words(evaluate: Callable[..., tuple[Store, str]]) -> None:
    tasks, nothing = np.array(["text"] * 5), np.full(5, np.nan)
    store, run_id = evaluate(tasks, {"baseline": ("baseline", nothing, 0.0, {}), "ten": ("mask", nothing, 0.1, {})})
    html = arms_section(store, store.resolve_run(run_id, "evaluate"), judge(store, run_id))
    assert "no accuracy to compare" in html and "ten (10 % of heads ablated)" in html
    assert "plotly" not in html.lower()


def test_a_report_mentions_missing_arms(evaluate: Callable[..., tuple[Store, str]]) -> None:
    tasks, right = np.array(["a"] * 8), np.ones(8)
    store, run_id = evaluate(tasks, {"baseline": ("baseline", right, 0.0, {}), "ten": ("mask", right, 0.1, {})})
    run = store.resolve_run(run_id, "evaluate")
    assert "arms finished" not in arms_section(store, run, judge(store, run["run_id"]))
    begin_arm(store, run_id, "twenty", "mask")
    html = arms_section(store, run, judge(store, run["run_id"]))
    assert "2 of 3 arms finished: the curves" in html and "in points; 2 of 3 arms finished." in html
