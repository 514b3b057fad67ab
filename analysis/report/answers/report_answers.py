"""All answers at the top of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headscan.analysis.arm_kinds import ArmKind
from headscan.analysis.plans import HeadPlan
from headscan.analysis.report.answers.answer import Answer, Commands
from headscan.analysis.report.answers.cache_answer import cache_answer
from headscan.analysis.report.answers.inactive_answer import inactive_answer
from headscan.analysis.report.answers.removal_answers import ablation_answer, pruning_answer
from headscan.analysis.report.costs import ablation_cost, cache_cost, pruning_cost
from headscan.analysis.report.numbers.head_data import HeadData
from headscan.analysis.report.numbers.head_tables import HEAD_TABLES
from headscan.analysis.report.sections import inactive_heads, plan_summary
from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.confirmation import Choice
from headscan.analysis.verdicts.judge import Verdict


def answers_of(
    store: Store,
    scan: Mapping[str, Any],
    data: HeadData,
    verdict: Verdict | None,
    choices: Sequence[Choice],
    plan: HeadPlan | None,
    plan_file: str | Path | None,
) -> list[Answer]:
    """Return the answers in the order of the page, missing ones included."""
    commands = Commands.of(scan, store.path, plan_file)
    site = data.sites[0]
    tried = 0 if verdict is None else sum(arm.kind in (ArmKind.MASK, ArmKind.RULE) for arm in verdict.arms)
    tokens, left = (None, {}) if verdict is None else cache_cost.cache_left(store, verdict)
    links = (cache_cost.IDENTITY, plan_summary.IDENTITY)
    answers = [
        inactive_answer(site.spreads, len(site.heads), (inactive_heads.RANKED_BY,), inactive_heads.IDENTITY, commands),
        ablation_answer(verdict, choices, tried, ablation_cost.IDENTITY, commands),
        pruning_answer(verdict, pruning_cost.IDENTITY, commands),
        cache_answer(verdict, left, tokens, plan, links, commands),
    ]
    return [*answers, *_missing_tables(data, commands)]


def _missing_tables(data: HeadData, commands: Commands) -> list[Answer]:
    """Return one answer on the tables of heads that the store lacks; empty without any."""
    missing = [table for table in HEAD_TABLES if table.known and table.group not in data.runs]
    if not missing:
        return []
    *others, last = [table.group.lower() for table in missing]
    names = f"{', '.join(others)} or {last}" if others else last
    verbs = " ; ".join(
        commands.on_model(table.verb, *table.options, *(commands.own_texts if table.reads_texts else ()))
        for table in missing
    )
    detail = f"The store has no {names} of this model's heads, so the map lacks them."
    return [Answer("What do the heads do?", "Not measured", detail, "missing", None, verbs)]
