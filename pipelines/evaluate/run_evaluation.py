"""Evaluation: a baseline and arms answer the same questions.

The same command again resumes: finished arms and stored answers of unfinished arms are skipped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from math import isnan
from typing import Any, Protocol

import numpy as np
import torch

from headscan.ablation.intervention import Intervention
from headscan.analysis.store.records import ArmState, RunKind, RunRecord
from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.verdict_rows import record_verdicts
from headscan.errors import NotFiniteError
from headscan.model_spec import ModelSpec
from headscan.pipelines.evaluate.answering import (
    AnsweringSettings,
    ArmResponses,
    RequestChunk,
    answer_arms,
    request_chunks,
)
from headscan.pipelines.evaluate.checks import (
    check_continues,
    check_generates,
    check_models,
    check_predicts,
    check_resampled,
)
from headscan.pipelines.evaluate.tasks import Questions, TaskResults
from headscan.pipelines.kv.plan_arms import window_notes
from headscan.pipelines.runs.model_identity import ModelFacts, ModelIdentity, fingerprint
from headscan.pipelines.runs.progress import at_work
from headscan.pipelines.runs.run_context import Run
from headscan.pipelines.scoring.arms import BASELINE, Arm, check_arms, distinct_arms
from headscan.pipelines.scoring.bundles import bundle_size, possible_starts
from headscan.pipelines.scoring.likelihood import grouped_tokens
from headscan.pipelines.scoring.reading import HALF, choose_reading, computed_as_rules, reads_whole
from headscan.pipelines.scoring.token_requests import LogLikelihood
from headscan.pipelines.settings.evaluation_settings import EvaluateConfig


@dataclass(frozen=True)
class Purpose:
    """What an evaluation is for: ``settings`` are further JSON settings that identify its run in the store, and
    ``judges_arms`` reports each finished arm and stores its verdict.
    """

    kind: RunKind = "evaluate"
    settings: Mapping[str, Any] = field(default_factory=dict)
    judges_arms: bool = True


EVALUATE = Purpose()


def run_evaluation(
    config: EvaluateConfig,
    run: Run,
    arms: Sequence[Arm],
    *,
    questions: Questions | None = None,
    purpose: Purpose = EVALUATE,
) -> str:
    """Run every arm over every question; return the run's id. Arms with a model of their own are answered one model
    after the other, and the pool of ``run`` is closed before. ``questions`` None makes those of the configuration.
    """
    if questions is None:
        questions = Questions(config.tasks, config.recall, run.identity, config.text)
    check_predicts(run)  # before the run begins; `answering` checks the models of other arms when they are open
    arms = distinct_arms(arms)
    models = check_models(arms, run.identity, questions)
    for note in (*questions.notes, *check_arms(run.facts.grid, arms), *window_notes(arms, questions.requests.values())):
        run.say(note)
    check_resampled(arms, questions.requests)
    check_generates(run.pool, questions.requests)
    check_continues(run, arms, questions.requests)
    interventions = [arm.intervention for arm in arms]
    rounding = _rounding(run.facts, interventions, in_ranges=run.pool.staged)
    record = _record(config, rounding, run, questions, purpose)
    chunks = request_chunks(questions.requests, config.batch_tokens)
    answering = partial(_answering, config, questions, interventions)
    with run.recording(record, arms=[arm.name for arm in arms]) as state:
        run_arms(run, state.run_id, arms, questions, chunks, answering, models=models, judges_arms=purpose.judges_arms)
    return state.run_id


class ArmQuestions(Protocol):
    """Questions that all arms of a run answer; methods take responses and ablated shares by the request's hash."""

    def grade(self, responses: Mapping[str, LogLikelihood | str]) -> TaskResults:
        """Return the answers of one arm, and its results."""

    def ablated_share(self, shares: Mapping[str, float]) -> float:
        """Return the share of heads that one arm ablated, 0 to 1."""


def _answering(
    config: EvaluateConfig, questions: Questions, interventions: Sequence[Intervention | None], run: Run, open_arms: int
) -> AnsweringSettings:
    """Return how the model of ``run`` answers its unfinished arms; all ``interventions`` of the evaluation count."""
    pool, facts = run.pool, run.facts
    check_predicts(run)
    check_generates(pool, questions.requests)
    shares = False if pool.staged else config.share_prefixes
    reading = choose_reading(pool.one, facts.dtype, run.identity.rope_lengths, interventions, shares, run.say)
    # Arms that use the kernels of rules always start from token ids, never from a cached layer.
    bundled = open_arms > 1 and not (pool.staged or reading.rule_kernels)
    starts = pool.one(possible_starts, interventions) if bundled else frozenset()
    cached = max(questions.longest_input(), grouped_tokens(facts.device.split(":")[0]))
    size = bundle_size(facts.caches if reading.share_prefixes else {}, cached)
    return AnsweringSettings(config.batch_tokens, reading, starts, size)


def run_arms(
    run: Run,
    run_id: str,
    arms: Sequence[Arm],
    questions: ArmQuestions,
    chunks: Sequence[RequestChunk],
    answering: Callable[[Run, int], AnsweringSettings],
    *,
    judges_arms: bool,
    models: Mapping[ModelSpec, ModelIdentity] | None = None,
) -> None:
    """Answer all questions, whose requests are ``chunks``, with every arm of a run that has begun, and finish the run.

    Args:
        answering: Returns how the model of a run answers so many unfinished arms.
        judges_arms: Gives each arm a line and a verdict.
        models: The models of arms that have their own.
    """
    store = run.store
    with store.one_transaction():
        states = {arm.name: _begin_arm(store, run_id, arm) for arm in arms}
    unfinished: dict[ModelSpec | None, list[tuple[Arm, str]]] = defaultdict(list)
    for arm in arms:
        if not states[arm.name].finished:
            unfinished[arm.model].append((arm, states[arm.name].arm_id))
        elif judges_arms:
            run.say(f"{arm.name}: finished before")
    failed: list[str] = []
    for spec in sorted(unfinished, key=lambda spec: spec is not None):  # the model of the baseline is open
        open_arms = unfinished[spec]
        with ExitStack() as opened:
            own = run if spec is None else opened.enter_context(run.on(spec, (models or {})[spec]))
            title = f"{len(open_arms)} arm{'s' * (len(open_arms) > 1)}"
            settings = answering(own, len(open_arms))
            for done in answer_arms(store, own.pool, open_arms, chunks, settings, title=title):
                try:
                    line = _finish_arm(store, questions, own.facts, done)
                    if judges_arms:
                        run.say(line)
                except NotFiniteError as problem:
                    failed.append(done.arm.name)
                    run.say(f"{done.arm.name}: {problem}")
    if judges_arms and BASELINE.name not in failed:  # every verdict is a comparison with the baseline
        with at_work("verdicts"):
            record_verdicts(store, run_id)
    store.finish_run(run_id, status="failed" if failed else "finished")
    if failed:
        raise NotFiniteError(
            f"{len(failed)} of {len(arms)} arms have NaN log-likelihoods and no result: {', '.join(failed)}. Load the "
            "model in another `dtype`"
        )


def _rounding(facts: ModelFacts, interventions: Sequence[Intervention | None], *, in_ranges: bool) -> str:
    """Return a description of the rounding of answers; only arms with the same rounding are compared. In half precision
    it depends on the device's kernels and on whether the model runs in ranges of layers, which read every prompt whole.
    """
    if facts.dtype not in HALF:
        return "plain"
    how = ["of rules" if computed_as_rules(facts.dtype, interventions) else "plain", torch.device(facts.device).type]
    if reads_whole(facts.dtype, interventions):
        how.append("whole inputs")
    if in_ranges:
        how.append("in ranges")
    return ", ".join(how)


def _record(config: EvaluateConfig, rounding: str, run: Run, questions: Questions, purpose: Purpose) -> RunRecord:
    settings: dict[str, Any] = {
        **{name: value for name, value in asdict(config.tasks).items() if name not in ("names", "include_path")},
        "fewshot_as_multiturn": config.tasks.multiturn,
        "tasks": config.tasks.names,
        "recall": None if config.recall is None else config.recall.settings(),
        "batch_tokens": config.batch_tokens,
        "share_prefixes": config.share_prefixes,
        "rounding": rounding,
        **purpose.settings,
    }
    if config.text is not None:
        settings["text"] = config.text.settings()
    deciding = {
        "model": run.identity.fingerprint(),
        "dtype": config.model.dtype,
        "questions": questions.fingerprint(),
        **settings,
    }
    return run.record(
        purpose.kind,
        fingerprint(deciding),
        config=settings
        | {"dtype": config.model.dtype, "groups": questions.tasks.groups, "requests": len(questions.requests)},
        bos_policy=config.tasks.bos,
        corpus=",".join(config.tasks.names) or (None if config.text is None else config.text.corpus),
        corpus_hash=fingerprint(questions.fingerprint()),
    )


def _begin_arm(store: Store, run_id: str, arm: Arm) -> ArmState:
    mask_id = None
    site, heads = arm.site_and_heads
    if heads:
        mask_id = store.add_mask(
            f"{run_id}: {arm.name}",
            heads,
            site=site,
            run_id=arm.ranking_run,
            criterion=arm.criterion,
            share=arm.share,
            config={"heads": [list(head) for head in heads]},
        )
    return store.begin_arm(arm.record(run_id, mask_id))


def _finish_arm(store: Store, questions: ArmQuestions, facts: ModelFacts, done: ArmResponses) -> str:
    """Grade and store an arm, and return a line about it; raise NotFiniteError if a log-likelihood is NaN."""
    wrong = sum(
        isinstance(answer, LogLikelihood) and isnan(answer.log_likelihood) for answer in done.responses.values()
    )
    if wrong:
        raise NotFiniteError(f"{wrong} of {len(done.responses)} log-likelihoods are NaN, so the arm has no result")
    graded = questions.grade(done.responses)
    removed = len(done.arm.removed)
    share = removed / (facts.grid.total_heads + removed) if removed else questions.ablated_share(done.ablated_shares)
    store.finish_arm(done.arm_id, graded.answers, results=graded.results, ablated_share=share)
    families: dict[str, list[float]] = defaultdict(list)
    answers = graded.answers.select(["task", "recall", "correct"]).to_pydict()
    for task, recall, correct in zip(*answers.values(), strict=True):
        if correct is not None:
            families[task.partition("@")[0] if recall else ""].append(correct)
    parts = []
    for family, correct in sorted(families.items()):
        name = family or f"accuracy on {len(correct)} questions"
        parts.append(f"{name} {np.mean(correct):.2%}")
    graded_tasks = {name for name, right in zip(answers["task"], answers["correct"], strict=True) if right is not None}
    results = [row for row in graded.results.to_pylist() if row["task"] not in graded_tasks and not row["is_group"]]
    parts += [f"{row['task']} {row['metric']} {row['value']:.4g}" for row in results if row["value"] is not None]
    if done.arm.kind.ablates:
        parts.append(f"{share:.1%} of heads ablated")
    elif done.arm.removed:
        parts.append(f"{share:.1%} of heads removed")
    return f"{done.arm.name}: {', '.join(parts)}"
