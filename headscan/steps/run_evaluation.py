"""Evaluation: a baseline and arms answer the same questions.

The same command again resumes: finished arms and stored answers of unfinished arms are skipped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import isnan
from typing import Any

import numpy as np
import torch

from headscan.ablation.intervention import Intervention
from headscan.cluster.pool import refuse_staged
from headscan.engine.answer import HALF, AnsweringSettings, need_headscan_kernels, need_whole_inputs, settings_for
from headscan.engine.answering import ArmResponses, answer_arms, request_chunks
from headscan.engine.arms import BASELINE, Arm, check_arms, distinct_arms
from headscan.engine.bundles import bundle_size
from headscan.engine.likelihood import joint_prefix_tokens
from headscan.errors import NotFiniteError
from headscan.model_spec import ModelSpec
from headscan.runs.model_identity import ModelFacts, ModelIdentity, fingerprint
from headscan.runs.progress import at_work
from headscan.runs.run_context import Run
from headscan.steps.checks import check_eviction, check_generates, check_models, check_next_token_head, check_resampled
from headscan.steps.plan_arms import window_notes
from headscan.steps.question_step import QuestionStep
from headscan.store.records import ArmRecord, RunKind, RunRecord
from headscan.store.store import Store, run_identity
from headscan.text_tables import counted, percent
from headscan.texts.tasks import Questions, TaskResults
from headscan.texts.token_requests import LogLikelihood
from headscan.verdicts.verdict_rows import record_verdicts


@dataclass(frozen=True)
class Purpose:
    """The kind of run that an evaluation makes. A user's evaluation is an `EVALUATE`. The answers of single heads are
    a run of the kind ``ablate`` that judges no arm, because the table of heads compares them.

    Attributes:
        settings: Further JSON settings that identify the run in the store.
        judges_arms: Report each finished arm, and store its verdict.
        look: Number of the planned look, from 1, that asks these questions; `Questions` has the earlier ones. None
            without looks.
    """

    kind: RunKind = "evaluate"
    settings: Mapping[str, Any] = field(default_factory=dict)
    judges_arms: bool = True
    look: int | None = None


EVALUATE = Purpose()


def run_evaluation(
    config: QuestionStep[Any],
    run: Run,
    arms: Sequence[Arm],
    *,
    questions: Questions | None = None,
    purpose: Purpose = EVALUATE,
) -> str:
    """Run every arm over every question; return the run's id. Arms with a model of their own are answered one model
    after the other, and the pool of ``run`` is closed before. ``questions`` None makes those of ``config``.
    """
    if questions is None:
        questions = Questions(config.tasks, config.recall, run.identity, config.text)
    arms = distinct_arms(arms)
    models = _checked(run, arms, questions)
    interventions = [arm.intervention for arm in arms]
    rounding = _rounding(run.facts, interventions, in_ranges=run.pool.staged)
    record = _record(run, questions, rounding, purpose, config.share_prefixes)
    chunks = request_chunks(questions.requests, run.batch_tokens)
    failed = list[str]()
    extends = purpose.look is not None or _lacks_arms(run.store, record, arms)
    with run.ledger(record, extends=extends) as ledger:
        if purpose.judges_arms and purpose.look is None:
            ledger.closing["report"] = {"judging": {"max_loss": config.max_loss}}
        unfinished = _begin(run, ledger.run_id, arms, purpose)
        specs = dict.fromkeys(arm.model for arm in unfinished.values())
        for spec in sorted(specs, key=lambda spec: spec is not None):  # the model of the baseline is open
            model_arms = {arm_id: arm for arm_id, arm in unfinished.items() if arm.model == spec}
            title = f"answers of {counted(len(model_arms), 'arm')}"
            with nullcontext(run) if spec is None else run.on(spec, models[spec]) as of_model:
                settings = _answering_settings(of_model, config.share_prefixes, questions, interventions)
                answered = answer_arms(ledger, of_model.pool, model_arms, chunks, settings, title=title, say=run.say)
                for arm_id, responses in answered:
                    arm = model_arms[arm_id]
                    try:
                        figures = _finish_arm(run.store, questions, of_model.facts, arm, arm_id, responses)
                        if purpose.judges_arms and purpose.look is None:  # those of a look are of a part
                            run.say(f"{arm.name}: {', '.join(figures)}")
                    except NotFiniteError as problem:
                        failed.append(arm.name)
                        run.say(f"{arm.name}: {problem}")
        if purpose.judges_arms and BASELINE.name not in failed:  # every verdict is a comparison with the baseline
            with at_work("verdicts"):
                record_verdicts(run.store, ledger.run_id)
        if failed:
            raise NotFiniteError(
                f"NaN log-likelihoods, and so no result, in {len(failed)} of {counted(len(arms), 'arm')}:"
                f" {', '.join(failed)}. Load the model in another `dtype`"
            )
    return ledger.run_id


def _begin(run: Run, run_id: str, arms: Sequence[Arm], purpose: Purpose) -> dict[str, Arm]:
    """Store the arms, and return those that are not finished by their ids in the store."""
    unfinished, finished = dict[str, Arm](), list[Arm]()
    with run.store.one_transaction():
        for arm in arms:
            record = replace(_arm_record(run.store, run_id, arm), look=purpose.look)
            if run.store.begin_arm(record):
                finished.append(arm)
            else:
                unfinished[record.arm_id] = arm
    for arm in finished if purpose.judges_arms and purpose.look is None else ():
        run.say(f"{arm.name}: finished before")
    return unfinished


def _lacks_arms(store: Store, record: RunRecord, arms: Sequence[Arm]) -> bool:
    """Return True if arms will answer that the run, if there is one, has not finished."""
    if not store.path.exists():
        return True
    known = [run_identity(record.kind, record.fingerprint)]
    finished = store.query("SELECT name FROM arms WHERE run_id = ? AND status = 'finished'", known)
    return not {*finished["name"].to_pylist()}.issuperset(arm.name for arm in arms)


def _checked(run: Run, arms: Sequence[Arm], questions: Questions) -> dict[ModelSpec, ModelIdentity]:
    """Return the identities of the arms' other models; raise unless all models and arms can answer the questions."""
    if questions.examples is not None:
        refuse_staged(run.pool, "an answer to a labelled example")
        return {}
    check_next_token_head(run)  # before the run begins; `_answering_settings` checks other models when they are open
    models = check_models(arms, run.identity, questions)
    for note in (*questions.notes, *check_arms(run.facts.grid, arms), *window_notes(arms, questions.requests.values())):
        run.say(note)
    check_resampled(arms, questions.requests)
    check_generates(run.pool, questions.requests)
    check_eviction(run, arms, questions.requests)
    return models


def _answering_settings(
    run: Run, share_prefixes: bool | None, questions: Questions, interventions: Sequence[Intervention | None]
) -> AnsweringSettings:
    """Return how the model of ``run`` answers its arms. ``interventions`` are those of all arms of the evaluation,
    which must round alike.
    """
    if questions.examples is not None:
        return AnsweringSettings(run.batch_tokens, share_prefixes=False, bundle_size=1)
    pool, facts = run.pool, run.facts
    check_next_token_head(run)
    check_generates(pool, questions.requests)
    share_prefixes = False if pool.staged else share_prefixes
    settings = settings_for(
        interventions, run.batch_tokens, share_prefixes, dtype=facts.dtype, rope=run.identity.rope_lengths, say=run.say
    )
    if pool.staged or settings.headscan_kernels:
        return replace(settings, bundle_size=1)
    prefix_tokens = max(questions.longest_input(), joint_prefix_tokens(facts.device.split(":")[0]))
    size = bundle_size({} if settings.share_prefixes is False else facts.caches, prefix_tokens)
    return replace(settings, bundle_size=size)


def _rounding(facts: ModelFacts, interventions: Sequence[Intervention | None], *, in_ranges: bool) -> str:
    """Return a description of the rounding of answers; only arms with the same rounding are compared. In half precision
    it depends on the device's kernels and on whether the model runs in ranges of layers, which read every prompt whole.
    """
    if facts.dtype not in HALF:
        return "plain"
    kernels = "of rules" if need_headscan_kernels(facts.dtype, interventions) else "plain"
    rounding = [kernels, torch.device(facts.device).type]
    if need_whole_inputs(facts.dtype, interventions):
        rounding.append("whole inputs")
    if in_ranges:
        rounding.append("in ranges")
    return ", ".join(rounding)


def _record(run: Run, questions: Questions, rounding: str, purpose: Purpose, share_prefixes: bool | None) -> RunRecord:
    settings: dict[str, Any] = {
        **questions.settings(),
        "batch_tokens": run.batch_tokens,
        "share_prefixes": share_prefixes,
        "rounding": rounding,
        **purpose.settings,
    }
    identifying = {"questions": questions.fingerprint(), **settings}
    return run.record(
        purpose.kind,
        run.fingerprint(identifying),
        config=settings
        | {"dtype": run.model.dtype, "groups": questions.tasks.groups}
        | ({} if questions.of_look else {"requests": len(questions.requests)}),
        bos_policy=None if questions.examples is not None else questions.config.bos,
        corpus=questions.name,
        corpus_hash=fingerprint(questions.fingerprint()),
    )


def _arm_record(store: Store, run_id: str, arm: Arm) -> ArmRecord:
    """Return the arm's row in a run; the mask of its heads, if it has one, is stored."""
    mask_id = None
    site, heads = arm.stored_mask
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
    return arm.record(run_id, mask_id)


def _finish_arm(
    store: Store, questions: Questions, facts: ModelFacts, arm: Arm, arm_id: str, answers: ArmResponses
) -> list[str]:
    """Grade and store an arm, and return figures about it; raise NotFiniteError if a log-likelihood is NaN."""
    responses = {key: response for key, (response, _) in answers.items()}
    nan_responses = sum(
        isinstance(response, LogLikelihood) and isnan(response.log_likelihood) for response in responses.values()
    )
    if nan_responses:
        raise NotFiniteError(f"{nan_responses} of {len(responses)} log-likelihoods are NaN, so the arm has no result")
    graded = questions.grade(responses)
    if arm.removed:
        share = len(arm.removed) / (facts.grid.total_heads + len(arm.removed))
    else:
        share = questions.ablated_share({key: share for key, (_, share) in answers.items()})
    # The results of one look are of a part of the questions.
    results = None if questions.of_look else graded.results
    store.finish_arm(arm_id, graded.answers, results=results, ablated_share=share)
    return _figures(arm, graded, share)


def _figures(arm: Arm, graded: TaskResults, share: float) -> list[str]:
    """Return the figures of a finished arm: accuracies, results of tasks without right answers, and the ablated or
    removed ``share`` of heads.
    """
    correct_by_family: dict[str, list[float]] = defaultdict(list)
    graded_tasks: set[str] = set()
    answers = graded.answers.select(["task", "recall", "correct"]).to_pydict()
    for task, is_recall, correct in zip(*answers.values(), strict=True):
        if correct is not None:
            graded_tasks.add(task)
            correct_by_family[task.partition("@")[0] if is_recall else ""].append(correct)
    figures = []
    for family, values in sorted(correct_by_family.items()):
        name = family or f"accuracy on {counted(len(values), 'question')}"
        figures.append(f"{name} {percent(float(np.mean(values)))}")
    for row in graded.results.to_pylist():
        if row["task"] not in graded_tasks and not row["is_group"] and row["value"] is not None:
            figures.append(f"{row['task']} {row['metric']} {row['value']:.4g}")
    if arm.kind.ablates:
        figures.append(f"{percent(share)} of heads ablated")
    elif arm.removed:
        figures.append(f"{percent(share)} of heads removed")
    return figures
