"""HTML report of a scan, optionally with an evaluation and plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from headscan.analysis.atomic_files import write_text
from headscan.analysis.errors import AnalysisError
from headscan.analysis.plans import HeadPlan, check_model
from headscan.analysis.provenance import provenance_changes, provenance_history
from headscan.analysis.report.sections import page as pages
from headscan.analysis.report.sections.ablation_cost import arms_section
from headscan.analysis.report.sections.agreement import agreement_section
from headscan.analysis.report.sections.cache_cost import cache_section
from headscan.analysis.report.sections.head_maps import (
    COMPARED,
    RANKED_BY,
    heatmaps_section,
    inactive_heads_section,
    profiles_section,
)
from headscan.analysis.report.sections.plan_summary import plan_section
from headscan.analysis.report.sections.pruning_cost import pruning_section
from headscan.analysis.report.sections.score_definitions import definitions_section
from headscan.analysis.schema.views import SUMMARISED
from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.judge import judge

DEFAULT_SCORES = ("output_norm_ln", "first_token_weight", "entropy", "distant_mass")


class ReportError(AnalysisError):
    """A report cannot be written with these arguments."""


def write_report(
    store: Store,
    path: str | Path,
    *,
    scan_run: str | None,
    evaluate_run: str | None = None,
    plan: HeadPlan | None = None,
    scores: Sequence[str] = DEFAULT_SCORES,
    confirm: bool = True,
) -> Path:
    """Write a report atomically, without changing the store.

    The page loads nothing from the network.

    Args:
        scan_run: First characters of a scan's id; None uses the newest finished scan.
        evaluate_run: First characters of the id of an evaluation of the same model; None leaves arms out.
        plan: A plan for the same model; None leaves it out.
        scores: Scores and statistics to draw; the page names those that the scan did not measure.
        confirm: Judge the best arms of a sweep on the questions that did not select them.

    Raises:
        ReportError: An unknown score, or an evaluation of another model.
        PlanError: A plan for another model.
        AnalysisError: No such run, arms that cannot be compared, or a path that cannot be written.
    """
    for name in scores:
        if name not in SUMMARISED:
            raise ReportError(f"unknown score or statistic {name!r}. Choose from {', '.join(SUMMARISED)}")
    run = store.resolve_run(scan_run, "scan")
    evaluation = None if evaluate_run is None else store.resolve_run(evaluate_run, "evaluate")
    if evaluation is not None:
        _check_same_model(run, evaluation)
    if plan is not None:
        check_model(plan, config_hash=run["model_config_hash"], weights_hash=run["weights_hash"], grid=run["grid"])
    heads = _heads(store, run["run_id"], scores)
    if not heads:
        raise ReportError(f"run {run['run_id']} has no measured heads. Wait for its first shard, or scan again")
    parts = [*_title(store, run), heatmaps_section(store, run["run_id"], heads, scores)]
    if (profiles := profiles_section(store, run["run_id"], heads)) is not None:
        parts.append(profiles)
    parts.append(inactive_heads_section(heads))
    if (agreement := agreement_section(store, run["run_id"], heads[0]["site"])) is not None:
        parts.append(agreement)
    if evaluation is not None:
        verdict = judge(store, evaluation["run_id"])
        parts.append(arms_section(store, evaluation, verdict, confirm=confirm))
        if (cache := cache_section(store, verdict)) is not None:
            parts.append(cache)
        if (pruning := pruning_section(store, evaluation, verdict)) is not None:
            parts.append(pruning)
    if plan is not None:
        parts.append(plan_section(plan))
    parts += [definitions_section(scores), _provenance(run, evaluation)]
    return write_text(path, pages.page(f"Attention heads of {run['model']}", parts))


def _check_same_model(run: Mapping[str, Any], evaluation: Mapping[str, Any]) -> None:
    for column in ("model_config_hash", "weights_hash"):
        ours, theirs = run[column], evaluation[column]
        if ours is not None and theirs is not None and ours != theirs:
            raise ReportError(
                f"run {evaluation['run_id']} evaluated another model ({evaluation['model']}) than run {run['run_id']}"
                f" scanned ({run['model']}). Choose runs of one model"
            )


def _heads(store: Store, run_id: str, scores: Sequence[str]) -> list[dict[str, Any]]:
    """Return rows of ``head_summary`` with the columns of the report, self-attention first."""
    names = dict.fromkeys((RANKED_BY, *COMPARED, *scores))
    return store.query(
        f"SELECT site, layer, head, kv_head, sequences, {', '.join(names)}, {RANKED_BY}_std, {RANKED_BY}_inactive"
        " FROM all_head_summary WHERE run_id = ? ORDER BY site <> 'self', site, layer, head",
        [run_id],
    ).to_pylist()


def _title(store: Store, run: Mapping[str, Any]) -> list[str]:
    row = store.query(
        "SELECT count(*) AS sequences, coalesce(sum(tokens), 0)::BIGINT AS tokens, min(tokens) AS shortest,"
        " max(tokens) AS longest FROM sequences WHERE run_id = ?",
        [run["run_id"]],
    ).to_pylist()[0]
    packages = run["packages"] or {}
    versions = [f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages]
    if run["code_version"]:
        versions.insert(0, f"headscan {run['code_version']}")
    parts = [
        f"<h1>{escape('Attention heads of ' + run['model'])}</h1>",
        pages.paragraph(f"Statistics of every head on {run['corpus'] or 'a corpus'}, measured with headscan.", "lead"),
    ]
    if run["status"] != "finished":
        parts.append(
            pages.paragraph(
                f"This scan is {run['status']}: the numbers cover the {row['sequences']:,} stored sequences.",
                "warning",
            )
        )
    measured = pages.facts(
        [
            ("Model", run["model"] + (f" at {run['model_revision']}" if run["model_revision"] else "")),
            ("Heads", _grid_text(run)),
            ("Corpus", run["corpus"]),
            ("Sequences", f"{row['sequences']:,} of {row['shortest'] or 0:,} to {row['longest'] or 0:,} tokens"),
            ("Tokens", f"{row['tokens']:,}"),
            ("Data type", run["dtype"]),
            ("Attention path", run["attention_path"]),
            ("Sequence start", run["bos_policy"]),
            ("Date", _date(run["started_at"])),
            ("Versions", ", ".join(versions) or None),
        ]
    )
    return [*parts, pages.section("What was measured", [measured])]


def _grid_text(run: Mapping[str, Any]) -> str:
    grid = [site for site in run["grid"] or () if site["site"] == "self"]
    text = f"{_counted(run['num_layers'], 'layer')}, {_counted(run['num_heads'], 'query head')}"
    kv_heads = sorted({site["num_key_value_heads"] for site in grid})
    if kv_heads:
        text += f", {' or '.join(map(str, kv_heads))} KV heads"
    if bounded := sum(site["sliding_window"] is not None for site in grid):
        text += f"; {_counted(bounded, 'layer')} with a sliding window"
    if 0 < len(grid) < run["num_layers"]:
        text += f"; {_counted(len(grid), 'layer')} with attention"
    if others := dict.fromkeys(site["site"] for site in run["grid"] or () if site["site"] != "self"):
        text += f"; also {' and '.join(others)} attention"
    return text


def _provenance(run: Mapping[str, Any], evaluation: Mapping[str, Any] | None) -> str:
    parts = [pages.heading("Scan"), _run_facts(run)]
    if evaluation is not None:
        parts += [pages.heading("Evaluation"), _run_facts(evaluation)]
    return pages.section("Provenance", parts)


def _run_facts(run: Mapping[str, Any]) -> str:
    history = provenance_history(run)
    resumed = [
        f"{new['since']}: {', '.join(changes)}"
        for old, new in pairwise(history)
        if (changes := provenance_changes(old, new))
    ]
    packages = ", ".join(f"{name} {version}" for name, version in (run["packages"] or {}).items())
    return pages.facts(
        [
            ("Run", run["run_id"]),
            ("Status", run["status"]),
            ("Fingerprint", run["fingerprint"]),
            ("Model", run["model"]),
            ("Revision", run["model_revision"]),
            ("Configuration hash", run["model_config_hash"]),
            ("Weights hash", run["weights_hash"]),
            ("Tokenizer hash", run["tokenizer_hash"]),
            ("Corpus hash", run["corpus_hash"]),
            ("Started", _date(run["started_at"])),
            ("Ended", _date(run["finished_at"])),
            ("Options", pages.one_line(run["config"]) if run["config"] else None),
            ("Corpus report", pages.one_line(run["report"]) if run["report"] else None),
            ("headscan", run["code_version"]),
            ("Packages", packages or None),
            ("Device", history[0].get("device")),
            ("Resumed with changes", "; ".join(resumed) or None),
        ]
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _date(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
