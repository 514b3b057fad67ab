"""The report's section on pruned models: curves, maps, sizes, and escaped names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headscan.report.profile_charts import removed_map
from headscan.report.saving_costs import pruning_section
from headscan.report.share_chart import ArmPoint, pruning_figure
from headscan.store.records import RunRecord
from headscan.store.store import Store
from headscan.verdicts.judge import Verdict, judge
from tests.numbers.conftest import HEADS, LAYERS, answer_table
from tests.stores import begin_arm, copy_store

EVIL = "<script>alert('1')</script>"
TASKS = np.repeat(["sums", "needle@512"], [400, 200])
RIGHT = np.tile([1, 1, 1, 0], 150)
PASSAGES = 6


def cost(heads: int, seconds: float) -> dict[str, Any]:
    return {"query_heads": heads, "kv_heads": heads // 2, "parameters": 1000 * heads, "weight_bytes": 4000 * heads,
            "cache_bytes": 256 * heads, "measured_cache_bytes": 256 * heads, "prefill_seconds": seconds,
            "token_seconds": seconds / 8}  # fmt: skip


ARMS: dict[str, tuple[str, int, float, tuple[tuple[int, int], ...]]] = {
    "baseline": ("baseline", 0, 0.0, ()),
    f"pruned {EVIL} 20%": ("pruned", 4, 0.02, ((0, 1), (2, 3))),
    f"pruned {EVIL} 40%": ("pruned", 9, 0.05, ((0, 1), (0, 2), (1, 0), (2, 3), (2, 0))),
    "random pruned": ("random_pruned", 60, 0.5, ((1, 1), (1, 2))),
    "1 attention layer dropped": ("layers_dropped", 20, 0.15, ((1, 0), (1, 1), (1, 2), (1, 3))),
}


@pytest.fixture
def evaluation(tmp_path: Path, empty_store: Path) -> tuple[Store, dict[str, Any], Verdict]:
    store = Store(copy_store(empty_store, tmp_path / "s.duckdb"))
    sites = [{"site": "self", "layer": layer, "num_attention_heads": HEADS} for layer in range(LAYERS)]
    with store.one_transaction():
        record = RunRecord("evaluate", "e", "tiny", LAYERS, HEADS, grid=sites)
        run_id = store.begin_run(record).run_id
        for name, (kind, lost, increase, removed) in ARMS.items():
            mask = None
            if removed:
                mask = store.add_mask(name, removed)
            config = {"method": EVIL, "skipped_layers": [1] if kind == "layers_dropped" else []}
            measured = {"before": cost(12, 0.08), "after": cost(12 - len(removed), 0.05)}
            settings = {"share": 0.2, "selection": "head, o", "config": config | measured}
            arm_id = begin_arm(store, run_id, name, kind, mask_id=mask, **settings)
            right = RIGHT.copy()
            right[np.flatnonzero(RIGHT)[::3][:lost]] = 0
            text = answer_table(np.array(["text"] * PASSAGES), np.full(PASSAGES, np.nan))
            sums = [f'{{"loss": [{-(2 + increase + 0.001 * i) * 100}, 100]}}' for i in range(PASSAGES)]
            text = text.set_column(text.column_names.index("metrics"), "metrics", pa.array(sums))
            text = text.set_column(
                text.column_names.index("doc_hash"), "doc_hash", pa.array([f"d{i}" for i in range(PASSAGES)])
            )
            answers = pa.concat_tables([answer_table(TASKS, right), text], promote_options="permissive")
            results = pa.Table.from_pylist(
                [{"task": "text", "is_group": False, "metric": "loss", "filter": "none", "value": 2 + increase,
                  "standard_error": None, "questions": PASSAGES}]
            )  # fmt: skip
            store.finish_arm(arm_id, answers, results=results, ablated_share=len(removed) / 12)
        store.finish_run(run_id)
    return store, store.resolve_run(run_id, "evaluate"), judge(store, run_id)


def points(verdict: Verdict) -> list[ArmPoint]:
    return [ArmPoint(each, EVIL, each.arm.ablated_share or 0.0, ARMS[each.name][3]) for each in verdict.arms]


def test_the_section_has_curves_map_losses_and_sizes(evaluation: tuple[Store, dict[str, Any], Verdict]) -> None:
    html = pruning_section(*evaluation)
    assert html is not None and EVIL not in html
    for words in ('id="pruning"', 'id="removed-0"', "+0.0500", "nats per token", "(1.60x)", "1.75 KiB", "Losses"):
        assert words in html, words
    assert 'id="removed-1"' not in html
    assert "original" in html and "random pruned" in html


def test_other_evaluations_have_no_section(evaluation: tuple[Store, dict[str, Any], Verdict]) -> None:
    store, run, verdict = evaluation
    alone = Verdict(verdict.run_id, verdict.model, ())
    assert pruning_section(store, run, alone) is None


def test_curves_hold_the_numbers_of_the_verdict(evaluation: tuple[Store, dict[str, Any], Verdict]) -> None:
    figure = pruning_figure(points(evaluation[2]))
    traces = [trace for trace in figure.data if trace.xaxis in (None, "x")]
    names = [trace.name for trace in traces]
    assert len(names) == 3 and names[1:] == ["random heads (control)", "whole attention layers dropped (control)"]
    chosen = traces[0]
    assert chosen.x == (0.0, pytest.approx(100 * 2 / 12), pytest.approx(100 * 5 / 12))
    assert chosen.y == (0.0, pytest.approx(0.02), pytest.approx(0.05))
    by_name = {arm.name: arm for arm in evaluation[2].arms}
    increase = by_name[f"pruned {EVIL} 40%"].metrics[0].increase
    assert increase is not None
    assert chosen.error_y.array[2] == pytest.approx(increase.high - increase.difference)
    accuracy = next(trace for trace in figure.data if trace.xaxis == "x2")
    assert accuracy.y[2] == by_name[f"pruned {EVIL} 40%"].paired.difference
    recall = next(trace for trace in figure.data if trace.xaxis == "x3")
    assert recall.y[0] == 100.0 and not recall.showlegend


def test_the_map_shows_from_which_share_a_head_goes(evaluation: tuple[Store, dict[str, Any], Verdict]) -> None:
    chosen = [point for point in points(evaluation[2]) if not point.verdict.kind.is_control]
    figure = removed_map(chosen, dict.fromkeys(range(LAYERS), HEADS), "map")
    (cells,) = [trace for trace in figure.data if trace.type == "heatmap"]
    assert cells.z.tolist() == [[2, 0, 1, 2], [1, 2, 2, 2], [1, 2, 2, 0]]
    assert cells.hovertext[0][2] == "layer 0, head 2<br>removed from 41.7 %"
    assert [trace.name for trace in figure.data[1:]] == ["removed from 16.7 %", "removed from 41.7 %", "stays"]


def test_models_of_another_repair_have_a_curve_of_their_own(evaluation: tuple[Store, dict[str, Any], Verdict]) -> None:
    first, second, *controls = (replace(point, selection="repair o") for point in points(evaluation[2]))
    figure = pruning_figure([first, replace(second, selection="repair none"), *controls])
    names = [trace.name for trace in figure.data if trace.xaxis in (None, "x")]
    assert [name.rpartition(", ")[2] for name in names] == ["repair o", "repair none", "repair o", "repair o"]
