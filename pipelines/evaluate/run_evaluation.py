"""Evaluation: a baseline and arms answer the same questions.

The same command again resumes: finished arms and stored answers of unfinished arms are skipped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import isnan
from typing import Any

import numpy as np
import torch

from headscan.ablation.ablation import Ablation
from headscan.analysis.errors import StoreError
from headscan.analysis.store.records import ArmState, RunKind
from headscan.analysis.store.store import Store, run_identity
from headscan.analysis.verdicts.verdict_rows import record_verdicts
from headscan.cluster.tasks.pool import Pool
from headscan.errors import NotFiniteError
from headscan.model_spec import ModelSpec
from headscan.pipelines.evaluate.answering import AnsweringPlan, ArmAnswers, WorkItem, answer, work_items
from headscan.pipelines.evaluate.evaluation_checks import (
    check_continues,
    check_models,
    check_not_evicting,
    check_predicts,
    check_resampled,
    check_scored,
)
from headscan.pipelines.evaluate.evaluation_requests import Questions
from headscan.pipelines.kv.plan_arms import window_notes
from headscan.pipelines.runs.identity import ModelFacts, fingerprint, identify
from headscan.pipelines.runs.run_records import RunContext, begin_run, run_record
from headscan.pipelines.scoring.arms import BASELINE, Arm, check_arms
from headscan.pipelines.scoring.bundles import bundle_size, possible_starts
from headscan.pipelines.scoring.prefix_walk import grouped_tokens
from headscan.pipelines.scoring.scoring_mode import HALF, choose_reading, computed_as_rules, reads_whole
from headscan.pipelines.scoring.token_requests import Likelihood
from headscan.pipelines.settings.evaluation_settings import EvaluateConfig

#: Opens the pool of a model.
OpenModel = Callable[[ModelSpec], Pool]


@dataclass(frozen=True)
class Purpose:
    """Why arms are evaluated.

    Attributes:
        kind: Kind of the run.
        settings: Further settings that identify the run; JSON can hold them.
        judges_arms: Each arm gets a line and a verdict.
    """

    kind: RunKind = "evaluate"
    settings: Mapping[str, Any] = field(default_factory=dict)
    judges_arms: bool = True


EVALUATE = Purpose()


def evaluate(
    config: EvaluateConfig,
    store: Store,
    pool: Pool,
    arms: Sequence[Arm],
    *,
    questions: Questions | None = None,
    context: RunContext | None = None,
    open_model: OpenModel | None = None,
    resume_anyway: bool = False,
    say: Callable[[str], None] = lambda line: None,
    purpose: Purpose = EVALUATE,
) -> str:
    """Run every arm over every question; returns the run's id.

    Args:
        questions: The questions of the configuration; None makes them.
        context: Identity and facts of the model; None computes them.
        open_model: Opens the pool of an arm's own model. ``pool`` is closed before, and each of these pools before the
            next one, so that two models are never loaded together. None allows no such arms.
        resume_anyway: Add answers to a run even if the software or the device changed; both are recorded.
        purpose: Kind of the run, and further settings that identify it.
    """
    context = RunContext(identify(config.model), pool) if context is None else context
    identity = context.identity
    if questions is None:
        questions = Questions(config.tasks, config.recall, identity, config.text)
    check_predicts(context)
    facts = context.facts
    # Arms with the same name are the same, such as the random controls of two plans with the same windows.
    arms = list({arm.name: arm for arm in arms}.values())
    models = check_models(arms, identity, questions.requests, can_open=open_model is not None)
    for note in (*questions.notes, *check_arms(facts.grid, arms), *window_notes(arms, questions.requests.values())):
        say(note)
    check_resampled(arms, questions.requests)
    if pool.staged:
        check_scored(questions.requests)
        check_not_evicting(arms)
    else:
        check_continues(context, arms, questions.requests)
    rounding = _rounding(facts, [arm.ablated for arm in arms], in_ranges=pool.staged)
    run_id = _begin(config, rounding, context, questions, arms, store, resume_anyway, say, purpose)
    with store.one_transaction():
        states = {arm.name: _begin_arm(store, run_id, arm) for arm in arms}
    answering: dict[ModelSpec | None, list[tuple[Arm, str]]] = defaultdict(list)
    for arm in arms:
        if states[arm.name].finished:
            if purpose.judges_arms:
                say(f"{arm.name}: finished before")
        else:
            answering[arm.model].append((arm, states[arm.name].arm_id))
    items = work_items(questions.requests, config.batch_tokens)
    session = _Session(config, store, questions, tuple(arms), items, say, purpose)
    try:
        if of_baseline := answering.pop(None, []):
            session.answer(context, of_baseline)
        for spec, members in answering.items():
            assert spec is not None and open_model is not None
            pool.close()
            with open_model(spec) as other:
                session.answer(RunContext(models[spec], other), members)
    except Exception:
        with suppress(StoreError):  # a full disk may also prevent this write
            store.finish_run(run_id, status="failed")
        raise
    failed = session.failed
    if purpose.judges_arms and BASELINE.name not in failed:  # every verdict is a comparison with the baseline
        record_verdicts(store, run_id)
    store.finish_run(run_id, status="failed" if failed else "finished")
    if failed:
        raise NotFiniteError(
            f"{len(failed)} of {len(arms)} arms have NaN log-likelihoods and no result: {', '.join(failed)}; load the "
            "model in another `dtype`"
        )
    return run_id


@dataclass
class _Session:
    """An evaluation in progress.

    Attributes:
        arms: All arms, of every model: they read prompts in the same way.
        failed: Names of the arms without a result.
    """

    config: EvaluateConfig
    store: Store
    questions: Questions
    arms: tuple[Arm, ...]
    items: Sequence[WorkItem]
    say: Callable[[str], None]
    purpose: Purpose
    failed: list[str] = field(default_factory=list)

    def answer(self, context: RunContext, open_arms: Sequence[tuple[Arm, str]]) -> None:
        """Answer every question with arms of one model, and store each arm when it is finished."""
        pool, config = context.pool, self.config
        check_predicts(context)
        if pool.staged:
            check_scored(self.questions.requests)
        share = False if pool.staged else config.share_prefixes
        ablated = [arm.ablated for arm in self.arms]
        reading = choose_reading(pool.one, context.facts.dtype, ablated, share, self.say)
        reading = reading._replace(rope=context.identity.rope_lengths)
        # Arms that use the kernels of rules always start from token ids, never from a cached layer.
        bundled = len(open_arms) > 1 and not (pool.staged or reading.as_rules)
        starts = pool.one(possible_starts, ablated) if bundled else frozenset()
        longest = max((len(request.ids) for request in self.questions.requests.values()), default=0)
        cached = max(longest, grouped_tokens(context.facts.device.split(":")[0]))
        size = bundle_size(context.facts.caches if reading.share_prefixes else {}, cached)
        plan = AnsweringPlan(config.batch_tokens, reading, starts, size)
        title = f"{len(open_arms)} arm{'s' * (len(open_arms) > 1)}"
        for done in answer(self.store, pool, open_arms, self.items, plan, title=title):
            try:
                line = _finish_arm(self.store, self.questions, context.facts, done)
                if self.purpose.judges_arms:
                    self.say(line)
            except NotFiniteError as problem:
                self.failed.append(done.arm.name)
                self.say(f"{done.arm.name}: {problem}")


def _rounding(facts: ModelFacts, ablated: Sequence[Ablation | None], *, in_ranges: bool) -> str:
    """Return a description of the rounding of answers. Only arms with the same rounding are compared.

    In half precision rounding depends on the device's kernels and on whether the model runs in ranges of layers, which
    read every prompt whole.
    """
    if facts.dtype not in HALF:
        return "plain"
    how = ["of rules" if computed_as_rules(facts.dtype, ablated) else "plain", torch.device(facts.device).type]
    how += ["whole inputs"] * reads_whole(facts.dtype, ablated)
    return ", ".join([*how, "in ranges"] if in_ranges else how)


def _begin(
    config: EvaluateConfig,
    rounding: str,
    context: RunContext,
    questions: Questions,
    arms: Sequence[Arm],
    store: Store,
    resume_anyway: bool,
    say: Callable[[str], None],
    purpose: Purpose,
) -> str:
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
    mark = {
        "model": context.identity.fingerprint(),
        "dtype": config.model.dtype,
        "questions": questions.fingerprint(),
        **settings,
    }
    record = run_record(
        purpose.kind,
        fingerprint(mark),
        context,
        config=settings
        | {"dtype": config.model.dtype, "groups": questions.groups, "requests": len(questions.requests)},
        bos_policy=config.tasks.bos,
        corpus=",".join(config.tasks.names) or (None if config.text is None else config.text.corpus),
        corpus_hash=fingerprint(questions.fingerprint()),
    )
    extends = not {arm.name for arm in arms} <= _finished_arms(store, run_identity(purpose.kind, record.fingerprint))
    return begin_run(store, record, resume_anyway=resume_anyway, extends=extends, say=say).run_id


def _finished_arms(store: Store, run_id: str) -> set[str]:
    """Names of the run's finished arms; none without the run."""
    if not store.path.exists():
        return set()
    found = store.query("SELECT name FROM arms WHERE run_id = ? AND status = 'finished'", [run_id])
    return set(found["name"].to_pylist())


def _begin_arm(store: Store, run_id: str, arm: Arm) -> ArmState:
    mask_id = None
    heads = arm.fixed_heads or arm.removed
    if heads:
        mask_id = store.add_mask(
            f"{run_id}: {arm.name}",
            heads,
            run_id=arm.scan_run,
            score=arm.score,
            share=arm.share,
            config={"heads": [list(head) for head in heads]},
        )
    return store.begin_arm(arm.record(run_id, mask_id))


def _finish_arm(store: Store, questions: Questions, facts: ModelFacts, done: ArmAnswers) -> str:
    """Grade and store an arm; returns a line about it."""
    wrong = sum(isinstance(answer, Likelihood) and isnan(answer.log_likelihood) for answer in done.answers.values())
    if wrong:
        raise NotFiniteError(f"{wrong} of {len(done.answers)} log-likelihoods are NaN, so the arm has no result")
    graded = questions.grade(done.answers)
    share = _zeroed_share(questions, facts, done)
    store.finish_arm(done.arm_id, graded.answers, results=graded.results, zeroed_share=share)
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


def _zeroed_share(questions: Questions, facts: ModelFacts, done: ArmAnswers) -> float:
    """Return the share of heads, 0 to 1, that an arm ablated or that its model lacks."""
    if done.arm.removed:
        return len(done.arm.removed) / (len(list(facts.grid.heads())) + len(done.arm.removed))
    return questions.zeroed_share(done.zeroed)
