"""HTML report of a scan, optionally with an evaluation and plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from headscan.catalog import ORDERS
from headscan.errors import HeadscanError, unknown_name
from headscan.plans import HeadPlan, check_model
from headscan.report.ablation_costs import arms_section, criteria_section, site_section
from headscan.report.answers import Commands, ReportAnswer, answers_of, missing_tables
from headscan.report.head_data import HeadData, page_data, read_head_data
from headscan.report.page_parts import (
    contents,
    html_page,
    measured_section,
    provenance_section,
    rendered,
    stored_sequences,
)
from headscan.report.saving_costs import cache_left, cache_section, pruning_section
from headscan.report.sections import (
    RANKED_BY,
    agreement_parts,
    behaving_heads_section,
    comparison_section,
    definitions_section,
    inactive_heads_section,
    looking_section,
    plan_section,
)
from headscan.store.output_files import write_text
from headscan.store.provenance import same_model
from headscan.store.store import Store
from headscan.text_tables import counted
from headscan.verdicts.arm_verdict import loss_words
from headscan.verdicts.confirmation import SweepChoice, judge_sweep
from headscan.verdicts.curves import is_sweep, read_curves
from headscan.verdicts.judge import Verdict, judge
from headscan.verdicts.metrics import exceeds


class ReportError(HeadscanError):
    """A report cannot be written with these arguments."""


@dataclass(frozen=True)
class _Shown:
    """Contents of a report; ``verdict`` and ``choices`` are of the evaluation."""

    store: Store
    scan: Mapping[str, Any]
    data: HeadData
    evaluation: Mapping[str, Any] | None
    verdict: Verdict | None
    choices: Sequence[SweepChoice]
    plan: HeadPlan | None
    plan_file: str | Path | None
    answers: Sequence[ReportAnswer]
    cache: tuple[int | None, Mapping[str, float]]
    lost: Mapping[str, str]


def write_report(
    store: Store,
    path: str | Path,
    *,
    scan_run: str | None,
    evaluate_run: str | None = None,
    compare_run: str | None = None,
    plan: HeadPlan | None = None,
    plan_file: str | Path | None = None,
    scores: Sequence[str] = (),
    confirm: bool = True,
    max_loss: float | None = None,
    max_points: float | None = None,
    answers: Sequence[ReportAnswer] = (),
    cache: tuple[int, Mapping[str, float]] | None = None,
    lost: Mapping[str, str] | None = None,
) -> Path:
    """Write a report atomically, without changing the store; the page loads nothing from the network.

    Runs are given by the first characters of their ids: None uses the newest finished scan, and leaves out the
    evaluation and the comparison. The evaluation and ``plan`` are of the scan's model; None leaves out the plan.
    Commands in the report name ``plan_file``; None leaves a placeholder. The map shows the first measured one of
    ``scores``, names of `ORDERS`, first; all measured ones can be selected. ``confirm`` judges the best arms of a
    sweep on the questions that did not select them. `judge` explains ``max_loss`` and ``max_points``. ``answers``,
    those of a study, stand instead of what the page itself makes of the evaluation. ``cache`` is a length in tokens
    with the share of the KV cache that each plan leaves at it, by arm; None takes the length of the plans that is
    nearest to 32,768 tokens. ``lost`` has, by arm, what arms lose in words that were asked nothing.
    """
    for name in scores:
        if name not in ORDERS:
            raise unknown_name("score", name, ORDERS)
    with store.reading():
        run = store.resolve_run(scan_run, "scan")
        evaluation = None if evaluate_run is None else store.resolve_run(evaluate_run, "evaluate")
        compared = None if compare_run is None else store.resolve_run(compare_run, "scan")
    if evaluation is not None and not same_model(run, evaluation):
        raise ReportError(
            f"run {evaluation['run_id']} evaluated another model ({evaluation['model']}) than run {run['run_id']}"
            f" scanned ({run['model']}). Choose runs of one model"
        )
    if plan is not None:
        check_model(plan, config_hash=run["model_config_hash"], weights_hash=run["weights_hash"], grid=run["grid"])
    verdict = (
        None if evaluation is None else judge(store, evaluation["run_id"], max_loss=max_loss, max_points=max_points)
    )
    data = read_head_data(
        store, run, evaluation_id=None if evaluation is None else evaluation["run_id"], plan=plan, compared=compared
    )
    if not data.sites:
        raise ReportError(f"run {run['run_id']} has no measured heads. Wait for its first shard, or scan again")
    choices = _choices(store, verdict, confirm)
    lost = dict(lost or {})
    if verdict is not None:
        limit = verdict.max_loss
        lost |= {name: loss_words(loss, limit) for name, loss in verdict.losses.items() if exceeds(loss, limit)}
    shown = _Shown(
        store, run, data, evaluation, verdict, choices, plan, plan_file, answers, cache or cache_left(verdict), lost
    )
    title = f"Attention heads of {run['model']}"
    with store.reading():
        first_site = data.sites[0]
        agreement = Markup("\n".join(agreement_parts(first_site)))
        sequences = f"{first_site.heads.sequences:,}"
        evidence = [rendered("head_map.html.j2", sequences=sequences, agreement=agreement), *_evidence(shown)]
        parts = [_opening(shown, title, contents(evidence)), *evidence]
    first = (*scores, RANKED_BY)
    return write_text(path, html_page(title, parts, page_data(data, first)))


def _choices(store: Store, verdict: Verdict | None, confirm: bool) -> Sequence[SweepChoice]:
    if verdict is None or verdict.looks or not is_sweep(read_curves(store, verdict.run_id, verdict.unrecorded)):
        return ()
    return judge_sweep(store, verdict, confirm=confirm)


def _opening(shown: _Shown, title: str, sections: Sequence[tuple[str, str]]) -> str:
    run = shown.scan
    row = stored_sequences(shown.store, run["run_id"])
    warnings = []
    if run["status"] != "finished":
        warnings.append(
            f"This scan is {run['status']}: the numbers cover {counted(row['sequences'], 'stored sequence')}."
        )
    if shown.verdict is not None and shown.verdict.progress:
        warnings.append(f"{shown.verdict.progress}: the answers cover only these.")
    evaluated = (shown.verdict, shown.choices, shown.cache, shown.plan, shown.plan_file)
    answers = answers_of(shown.store, run, shown.data, *evaluated, shown.answers)
    return rendered(
        "answers.html.j2",
        title=title,
        lead=f"Statistics of every head on {run['corpus'] or 'a corpus'}, measured with headscan.",
        warnings=warnings,
        answers=answers,
        shown=list(_shown_runs(shown)),
        contents=sections,
    )


def _shown_runs(shown: _Shown) -> Iterator[str]:
    run = shown.scan
    scans = counted(len(shown.store.runs("scan")), "scan")
    yield (
        f"Scan {run['run_id']} of {run['model']} on {run['corpus'] or 'a corpus'}"
        f" ({scans} in the store; choose with --run)."
    )
    if shown.evaluation is None:
        yield "No evaluation (choose one with --evaluation)."
    else:
        total = counted(len(shown.store.runs("evaluate")), "evaluation")
        yield (
            f"Evaluation {shown.evaluation['run_id']} on {shown.evaluation['corpus'] or 'its tasks'}"
            f" ({total} in the store; choose with --evaluation)."
        )
    for group, of_group in shown.data.runs.items():
        yield f"{group}: run {of_group['run_id']}, the newest of this model."
    if missing := missing_tables(shown.data, Commands.of(run, shown.store.path)):
        yield f"Not on the map: {', '.join(f'{group.lower()} ({command})' for group, command in missing)}."
    yield "No plan (choose one with --plan)." if shown.plan is None else f"Plan by method {shown.plan.method}."
    if shown.data.compared is not None:
        yield f"Compared with scan {shown.data.compared['run_id']} (choose with --compare)."


def _evidence(shown: _Shown) -> list[str]:
    """Return the sections after the map, provenance last."""
    store, run, data = shown.store, shown.scan, shown.data
    sites = [site.heads.site for site in data.sites]
    evidence = [
        inactive_heads_section(data),
        looking_section(store, run["run_id"], sites),
        behaving_heads_section(data.sites, data.runs),
    ]
    if shown.evaluation is not None and shown.verdict is not None:
        evidence += [
            arms_section(store, shown.evaluation, shown.verdict, shown.choices),
            criteria_section(store, shown.verdict),
            pruning_section(store, shown.evaluation, shown.verdict),
            cache_section(shown.verdict, *shown.cache),
        ]
    runs = {"Scan": run, "Evaluation": shown.evaluation, "Compared scan": data.compared, **data.runs}
    evidence += [
        site_section(store, run),
        None if shown.plan is None else plan_section(shown.plan, shown.verdict, shown.cache[0], shown.lost),
        comparison_section(run, data),
        definitions_section(list(data.sites[0].spreads)),
        measured_section(run, stored_sequences(store, run["run_id"])),
        provenance_section((name, each) for name, each in runs.items() if each is not None),
    ]
    return [part for part in evidence if part is not None]
