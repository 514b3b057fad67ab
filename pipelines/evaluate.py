"""Evaluation: the same questions for a baseline and for arms with heads silenced, every answer into the store.

The same command again resumes: finished arms are skipped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from analysis.records import ArmRecord, RunRecord
from analysis.store import Store
from cluster.pool import ModelSpec, Pool
from headscan.errors import UnsupportedModelError
from headscan.interventions import HeadMask, HeadRule
from pipelines.arms import Arm
from pipelines.harness import HarnessError, HeadscanLM, quiet_harness
from pipelines.identity import ModelIdentity, code_version, fingerprint, identify, model_facts, package_versions

#: What of a task's description decides its prompts.
_PROMPT = (
    "doc_to_text doc_to_choice doc_to_target description target_delimiter fewshot_delimiter fewshot_split output_type"
).split()
#: lm-eval's own default.
_FEWSHOT_SEED = 1234
#: Which metric tells whether an answer is right, the first that a task has.
_CORRECT = ("acc", "exact_match", "acc_norm", "acc_mutual_info", "em")


@dataclass(frozen=True)
class EvaluateConfig:
    """Everything an evaluation's answers depend on, the arms aside.

    Attributes:
        model: What to load.
        tasks: Names of lm-eval tasks, groups or tags.
        include_path: Folder with more tasks.
        num_fewshot: Examples in the prompt; None: as the task says.
        limit: Questions a task; None: all.
        apply_chat_template: Put prompts into the tokenizer's chat template.
        bos: ``auto`` (as the tokenizer does), ``always`` or ``never``.
        batch_tokens: Tokens of one forward pass, padding included; the same for all arms.

    Raises:
        HarnessError: No tasks, or a number out of range.
    """

    model: ModelSpec
    tasks: tuple[str, ...]
    include_path: str | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    apply_chat_template: bool = False
    bos: str = "auto"
    batch_tokens: int = 8192

    def __post_init__(self) -> None:
        if not self.tasks:
            raise HarnessError("no tasks: name at least one with --tasks")
        for name, least in (("num_fewshot", 0), ("limit", 1), ("batch_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise HarnessError(f"--{name.replace('_', '-')} {value} is too small: give at least {least}")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise HarnessError(f"--include-path {self.include_path} is no folder: give one with task files")


@dataclass(frozen=True)
class ArmResult:
    """One arm's outcome.

    Attributes:
        questions: Questions answered; 0 when the arm had been finished before.
        accuracy: Share answered rightly.
        truncated: Prompts longer than the context.
        zeroed_share: Share of heads really silenced.
    """

    name: str
    resumed: bool
    questions: int
    accuracy: float
    truncated: int
    zeroed_share: float


def evaluate(
    config: EvaluateConfig,
    store: Store,
    pool: Pool,
    arms: Sequence[Arm],
    *,
    say: Callable[[str], None] = lambda line: None,
) -> str:
    """Run every arm over every task; returns the run's id.

    Raises:
        HeadscanError, AnalysisError: What a user can mend; arms finished until then stay.
    """
    identity = identify(config.model)
    tasks = _Tasks(config)
    mark = fingerprint(
        {
            "model": identity.fingerprint(),
            "dtype": config.model.dtype,
            "tasks": tasks.fingerprint(),
            "num_fewshot": config.num_fewshot,
            "limit": config.limit,
            "apply_chat_template": config.apply_chat_template,
            "bos": config.bos,
            "batch_tokens": config.batch_tokens,
        }
    )
    facts = pool.one(model_facts, None)
    if not facts.grid.predicts_next_token:
        raise UnsupportedModelError(
            f"{identity.name} does not predict the next token of a text: tasks are answered by decoders alone"
        )
    for arm in arms:
        if isinstance(arm.silenced, HeadMask):
            facts.grid.check(arm.silenced.heads)
    state = store.begin_run(
        RunRecord(
            kind="evaluate",
            fingerprint=mark,
            **identity.columns(),
            bos_policy=config.bos,
            corpus=",".join(config.tasks),
            num_layers=facts.grid.num_layers,
            num_heads=facts.grid.num_heads,
            dtype=facts.dtype,
            attention_path=facts.attention_path,
            grid=facts.sites,
            config={
                "tasks": config.tasks,
                "num_fewshot": config.num_fewshot,
                "limit": config.limit,
                "apply_chat_template": config.apply_chat_template,
                "batch_tokens": config.batch_tokens,
            },
            packages=package_versions(),
            code_version=code_version(),
        )
    )
    for arm in arms:
        result = _run_arm(config, identity, store, pool, state.run_id, arm, tasks)
        say(_line(result))
    store.finish_run(state.run_id)
    return state.run_id


class _Tasks:
    """lm-eval's tasks of one evaluation, loaded once for all arms.

    Raises:
        HarnessError: A task is not known, or it or its data cannot be loaded.
    """

    def __init__(self, config: EvaluateConfig) -> None:
        from lm_eval.tasks import TaskManager

        self._config = config
        with quiet_harness():
            manager = TaskManager(include_path=config.include_path)
            known = set(manager.all_tasks)
            for name in config.tasks:
                if name not in known and not Path(name).is_file():
                    near = get_close_matches(name, known, n=3)
                    hint = f"did you mean {', '.join(near)}?" if near else "is --include-path the folder it lies in?"
                    raise HarnessError(f"unknown task {name!r}: {hint}")
            try:
                self._loaded: Any = manager.load(list(config.tasks))
            except Exception as problem:  # whatever lm-eval, datasets or a task's own code raise
                lines = str(problem).strip().splitlines() or [type(problem).__name__]
                raise HarnessError(f"{', '.join(config.tasks)} cannot be loaded: {lines[0]}") from problem
        for task in self._loaded["tasks"].values():
            # As lm-eval has it: a task that says 0 keeps 0.
            if task.get_config("num_fewshot") != 0:
                own = task.get_config("num_fewshot") or 0
                task.set_config("num_fewshot", own if config.num_fewshot is None else config.num_fewshot)

    def fingerprint(self) -> str:
        """Hash of the questions and of how prompts are made of them."""
        digest = hashlib.sha256()
        for name, task in sorted(self._loaded["tasks"].items()):
            prompt = {key: str(getattr(task.config, key, None)) for key in _PROMPT}
            digest.update(json.dumps([name, prompt]).encode())
            for question in islice(task.eval_docs, self._config.limit):
                digest.update(json.dumps(question, sort_keys=True, default=str).encode())
        return digest.hexdigest()

    def run(self, lm: HeadscanLM) -> dict[str, list[dict[str, Any]]]:
        """Samples by task."""
        from lm_eval.evaluator import evaluate as run_tasks

        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=_FEWSHOT_SEED)  # the same examples for every arm
        with quiet_harness():
            results = run_tasks(
                lm=lm,
                task_dict=self._loaded,
                limit=self._config.limit,
                bootstrap_iters=0,
                log_samples=True,
                apply_chat_template=self._config.apply_chat_template,
                fewshot_as_multiturn=self._config.apply_chat_template,
            )
        samples: dict[str, list[dict[str, Any]]] = results["samples"]
        return samples


def _run_arm(
    config: EvaluateConfig, identity: ModelIdentity, store: Store, pool: Pool, run_id: str, arm: Arm, tasks: _Tasks
) -> ArmResult:
    mask_id = None
    if isinstance(arm.silenced, HeadMask):
        origin = {"heads": [list(head) for head in arm.silenced.heads]}
        mask_id = store.add_mask(
            f"{run_id}: {arm.name}",
            arm.silenced.heads,
            run_id=arm.scan_run,
            score=arm.score,
            share=arm.share,
            config=origin,
        )
    state = store.begin_arm(
        ArmRecord(
            run_id=run_id,
            name=arm.name,
            kind=arm.kind,
            mask_id=mask_id,
            score=arm.score,
            threshold=arm.silenced.threshold if isinstance(arm.silenced, HeadRule) else None,
            config={"share": arm.share, "scan_run": arm.scan_run},
        )
    )
    if state.finished:
        return ArmResult(arm.name, True, 0, float("nan"), 0, float("nan"))
    lm = HeadscanLM(pool, identity, arm.silenced, batch_tokens=config.batch_tokens, bos=config.bos, title=arm.name)
    answers = answer_table(tasks.run(lm))
    store.add_answers(state.arm_id, answers)
    store.finish_arm(state.arm_id, zeroed_share=lm.zeroed_share)
    correct = answers["correct"].to_numpy()
    return ArmResult(arm.name, False, len(correct), float(correct.mean()), lm.truncated, lm.zeroed_share)


def answer_table(samples: dict[str, list[dict[str, Any]]]) -> pa.Table:
    """One row per task and question from lm-eval's samples.

    Raises:
        HarnessError: A task has no metric that tells right from wrong.
    """
    rows = []
    for task, questions in samples.items():
        first_filter = questions[0]["filter"] if questions else None
        for sample in questions:
            if sample["filter"] != first_filter:
                continue  # the same answers, extracted in another way
            metric = next((name for name in _CORRECT if name in sample["metrics"]), None)
            if metric is None:
                raise HarnessError(
                    f"task {task} reports {', '.join(sample['metrics'])}: arms need one of {', '.join(_CORRECT)}"
                )
            values = [answer[0] for answer in sample["filtered_resps"] if isinstance(answer, (tuple, list))]
            if metric == "acc_mutual_info":
                # The second half are the same choices without their context.
                half = len(values) // 2
                values = [given - alone for given, alone in zip(values[:half], values[half:], strict=True)]
            rows.append(
                {
                    "task": task,
                    "question": int(sample["doc_id"]),
                    "doc_hash": sample["doc_hash"],
                    "target": str(sample["target"]),
                    "response": str(values.index(max(values))) if values else str(sample["filtered_resps"][0]),
                    "correct": float(sample[metric]),
                    "log_likelihoods": [float(value) for value in values],
                    "metrics": json.dumps({name: sample[name] for name in sample["metrics"]}, default=str),
                }
            )
    return pa.Table.from_pylist(rows)


def _line(result: ArmResult) -> str:
    if result.resumed:
        return f"{result.name}: finished before"
    line = f"{result.name}: accuracy {result.accuracy:.2%} on {result.questions} questions"
    if result.zeroed_share:
        line += f", {result.zeroed_share:.1%} of heads silenced"
    if result.truncated:
        line += f"; {result.truncated} prompts were longer than the context and lost their beginning"
    return line
