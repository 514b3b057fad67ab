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
from headscan.analysis.store.records import ArmRecord, ArmState
from headscan.analysis.store.run_writer import run_identity
from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.verdict_rows import record_verdicts
from headscan.cluster.tasks.pool import Pool
from headscan.cluster.tasks.staged_task import StagingError
from headscan.errors import NotFiniteError, UnsupportedModelError
from headscan.model_spec import ModelSpec
from headscan.pipelines.evaluate.answering import AnsweringPlan, ArmAnswers, answer
from headscan.pipelines.evaluate.evaluation_requests import Questions
from headscan.pipelines.evaluate.harness import HarnessError
from headscan.pipelines.evaluate.tasks import TaskConfig
from headscan.pipelines.evaluate.workload import work_items
from headscan.pipelines.kv.plan_arms import window_notes
from headscan.pipelines.recall import RecallPlan
from headscan.pipelines.runs.identity import ModelFacts, fingerprint, identify
from headscan.pipelines.runs.run_context import RunContext
from headscan.pipelines.runs.run_records import begin_run, run_record
from headscan.pipelines.scoring.arms import BASELINE, Arm, check_arms
from headscan.pipelines.scoring.bundles import resumable_layers
from headscan.pipelines.scoring.scoring_mode import HALF, can_share_prefixes, choose_reading, computed_as_rules
from headscan.pipelines.scoring.token_requests import GenerationRequest, Likelihood, Request


@dataclass(frozen=True)
class EvaluateConfig:
    """Everything that an arm's answers depend on, apart from the arm.

    Attributes:
        model: The model to load.
        tasks: Tasks and prompts.
        recall: Recall questions; None omits them.
        batch_tokens: Tokens of one forward pass, padding included; the same for all arms.
        share_prefixes: Read common prefixes once. None shares them unless arms would use different kernels in half
            precision, whose rounding differs.

    Raises:
        HarnessError: ``batch_tokens`` is out of range.
    """

    model: ModelSpec
    tasks: TaskConfig
    recall: RecallPlan | None = field(default_factory=RecallPlan)
    batch_tokens: int = 8192
    share_prefixes: bool | None = None

    def __post_init__(self) -> None:
        if self.batch_tokens < 1:
            raise HarnessError(f"batch_tokens={self.batch_tokens} is too small (limit 1). Set it to 1 or more")


def evaluate(
    config: EvaluateConfig,
    store: Store,
    pool: Pool,
    arms: Sequence[Arm],
    *,
    questions: Questions | None = None,
    context: RunContext | None = None,
    resume_anyway: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> str:
    """Run every arm over every question; returns the run's id.

    Args:
        questions: The questions of the configuration; None makes them.
        context: Identity and facts of the model; None computes them.
        resume_anyway: Add answers to a run even if the software or the device changed; both are recorded.

    Raises:
        ResumeError: The run needs more answers, software or device changed, and ``resume_anyway`` is False.
        HeadscanError: The run fails; finished answers stay in the store.
    """
    context = RunContext(identify(config.model), pool) if context is None else context
    identity = context.identity
    if questions is None:
        questions = Questions(config.tasks, config.recall, identity)
    check_predicts(context)
    facts = context.facts
    # Arms with the same name are the same, such as the random controls of two plans with the same windows.
    arms = list({arm.name: arm for arm in arms}.values())
    for note in (*questions.notes, *check_arms(facts.grid, arms), *window_notes(arms, questions.requests.values())):
        say(note)
    if pool.staged:
        check_scored(questions.requests)
        check_not_evicting(arms)
    else:
        check_continues(context, arms, questions.requests)
    ablated = [arm.ablated for arm in arms]
    rounding = _rounding(facts, ablated, in_ranges=pool.staged)
    run_id = _begin(config, rounding, context, questions, arms, store, resume_anyway, say)
    states = {arm.name: _begin_arm(store, run_id, arm) for arm in arms}
    for arm in arms:
        if states[arm.name].finished:
            say(f"{arm.name}: finished before")
    open_arms = [(arm, states[arm.name].arm_id) for arm in arms if not states[arm.name].finished]
    failed = []
    if open_arms:
        share = False if pool.staged else config.share_prefixes
        reading = choose_reading(pool.one, facts.dtype, ablated, share, say)._replace(rope=identity.rope_lengths)
        # Arms that use the kernels of rules always start from token ids, never from a cached layer.
        bundled = len(open_arms) > 1 and not (pool.staged or reading.as_rules)
        resumable = pool.one(resumable_layers, None) if bundled else frozenset()
        plan = AnsweringPlan(config.batch_tokens, reading, resumable)
        items = work_items(questions.requests, config.batch_tokens)
        try:
            for done in answer(store, pool, open_arms, items, plan, title=f"{len(open_arms)} arms"):
                try:
                    say(_finish_arm(store, questions, done))
                except NotFiniteError as problem:
                    failed.append(done.arm.name)
                    say(f"{done.arm.name}: {problem}")
        except Exception:
            with suppress(StoreError):  # a full disk may also prevent this write
                store.finish_run(run_id, status="failed")
            raise
    if BASELINE.name not in failed:  # every verdict is a comparison with the baseline
        record_verdicts(store, run_id)
    store.finish_run(run_id, status="failed" if failed else "finished")
    if failed:
        raise NotFiniteError(
            f"{len(failed)} of {len(arms)} arms have NaN log-likelihoods and no result: {', '.join(failed)}; load the "
            "model in another `dtype`"
        )
    return run_id


def check_predicts(context: RunContext) -> None:
    """Raise UnsupportedModelError if the model is no decoder.

    Raises:
        UnsupportedModelError: The model does not predict the next token.
    """
    if not context.facts.grid.predicts_next_token:
        raise UnsupportedModelError(
            f"{context.identity.name} does not predict the next token, but tasks need a decoder. Use a decoder"
        )


def check_scored(requests: Mapping[str, Request | GenerationRequest]) -> None:
    """Raise StagingError if a request generates text.

    Generation needs all layers for every token.

    Raises:
        StagingError: A request generates text.
    """
    written = sum(isinstance(request, GenerationRequest) for request in requests.values())
    if written:
        raise StagingError(
            f"{written} texts are to be generated, which needs all layers of the model at once. Use tasks with "
            "log-likelihoods, or placement=whole or placement=sharded"
        )


def check_not_evicting(arms: Sequence[Arm]) -> None:
    """Raise StagingError if an arm evicts keys, which needs the KV cache of all layers at once.

    Raises:
        StagingError: An arm evicts keys.
    """
    evicting = [arm.name for arm in arms if arm.ablated is not None and arm.ablated.evicts]
    if evicting:
        raise StagingError(
            f"{evicting[0]} evicts keys, which needs all layers of the model at once. Use the mode forward, or"
            " placement=whole or placement=sharded"
        )


def check_continues(
    context: RunContext, arms: Sequence[Arm], requests: Mapping[str, Request | GenerationRequest]
) -> None:
    """Raise UnsupportedModelError if continuations of evicting arms cannot be scored.

    Raises:
        UnsupportedModelError: The model's layers continue a KV cache only token by token.
    """
    scored = any(isinstance(request, Request) for request in requests.values())
    evicting = [arm.name for arm in arms if arm.ablated is not None and arm.ablated.evicts]
    if scored and evicting and not context.pool.one(can_share_prefixes, None):
        raise UnsupportedModelError(
            f"{evicting[0]} evicts keys, but {context.identity.name} continues a KV cache only token by token. Use the"
            " mode forward, or tasks that generate text"
        )


def _rounding(facts: ModelFacts, ablated: Sequence[Ablation | None], *, in_ranges: bool) -> str:
    """Return a description of the rounding of answers.

    Only arms with the same rounding are compared.

    In half precision rounding depends on the device's kernels and on whether the model runs in ranges of layers, which
    read every prompt whole.
    """
    if facts.dtype not in HALF:
        return "plain"
    how = ["of rules" if computed_as_rules(facts.dtype, ablated) else "plain", torch.device(facts.device).type]
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
) -> str:
    settings: dict[str, Any] = {
        **{name: value for name, value in asdict(config.tasks).items() if name not in ("names", "include_path")},
        "fewshot_as_multiturn": config.tasks.multiturn,
        "tasks": config.tasks.names,
        "recall": None if config.recall is None else asdict(config.recall),
        "batch_tokens": config.batch_tokens,
        "share_prefixes": config.share_prefixes,
        "rounding": rounding,
    }
    mark = {
        "model": context.identity.fingerprint(),
        "dtype": config.model.dtype,
        "questions": questions.fingerprint(),
        **settings,
    }
    record = run_record(
        "evaluate",
        fingerprint(mark),
        context,
        config=settings | {"dtype": config.model.dtype, "groups": questions.groups},
        bos_policy=config.tasks.bos,
        corpus=",".join(config.tasks.names),
        corpus_hash=fingerprint(questions.fingerprint()),
    )
    extends = not {arm.name for arm in arms} <= _finished_arms(store, run_identity("evaluate", record.fingerprint))
    return begin_run(store, record, resume_anyway=resume_anyway, extends=extends, say=say).run_id


def _finished_arms(store: Store, run_id: str) -> set[str]:
    """Names of the run's finished arms; none without the run."""
    if not store.path.exists():
        return set()
    found = store.query("SELECT name FROM arms WHERE run_id = ? AND status = 'finished'", [run_id])
    return set(found["name"].to_pylist())


def _begin_arm(store: Store, run_id: str, arm: Arm) -> ArmState:
    mask_id = None
    if arm.fixed_heads is not None:
        mask_id = store.add_mask(
            f"{run_id}: {arm.name}",
            arm.fixed_heads,
            run_id=arm.scan_run,
            score=arm.score,
            share=arm.share,
            config={"heads": [list(head) for head in arm.fixed_heads]},
        )
    return store.begin_arm(
        ArmRecord(
            run_id=run_id,
            name=arm.name,
            kind=arm.kind,
            mask_id=mask_id,
            score=arm.score,
            threshold=None if arm.ablated is None else arm.ablated.score_threshold,
            share=arm.share,
            seed=arm.seed,
            selection=arm.selection,
            config={"scan_run": arm.scan_run, **dict(arm.details)},
        )
    )


def _finish_arm(store: Store, questions: Questions, done: ArmAnswers) -> str:
    """Grade and store an arm; returns a line about it.

    Raises:
        NotFiniteError: A log-likelihood is NaN; nothing is stored.
    """
    wrong = sum(isinstance(answer, Likelihood) and isnan(answer.log_likelihood) for answer in done.answers.values())
    if wrong:
        raise NotFiniteError(f"{wrong} of {len(done.answers)} log-likelihoods are NaN, so the arm has no result")
    graded = questions.grade(done.answers)
    share = questions.zeroed_share(done.zeroed)
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
    if "" not in families:
        results = graded.results.to_pylist()
        parts += [f"{row['task']} {row['metric']} {row['value']:.4g}" for row in results if row["value"] is not None]
    if done.arm.ablated is not None and not done.arm.kind.shrinks_cache:
        parts.append(f"{share:.1%} of heads ablated")
    return f"{done.arm.name}: {', '.join(parts)}"
