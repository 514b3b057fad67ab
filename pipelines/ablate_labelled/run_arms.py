"""Arms answer labelled examples, into the store; the same command again resumes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from headscan.analysis.effects.bleu_outcomes import bleu
from headscan.analysis.errors import StoreError
from headscan.analysis.schema.effect_tables import ACCURACY, BLEU, LOSS
from headscan.analysis.store.run_writer import run_identity
from headscan.analysis.store.store import Store
from headscan.cluster.tasks.pool import Pool
from headscan.errors import InterventionError
from headscan.model_spec import ModelSpec
from headscan.pipelines.ablate_labelled.answer_task import METRICS, AnswerItem, TextAnswer, answer_examples
from headscan.pipelines.ablate_labelled.site_arms import SiteArm
from headscan.pipelines.labelled.example_file import DataSpec, ExampleError
from headscan.pipelines.labelled.labelled_texts import LabelledText, LabelledTexts
from headscan.pipelines.runs.identity import fingerprint
from headscan.pipelines.runs.progress import Progress
from headscan.pipelines.runs.run_context import RunContext
from headscan.pipelines.runs.run_records import begin_run, run_record

#: Examples of one item of a pool.
_GROUP = 512
#: Generated tokens beyond twice the longest target.
_SPARE_TOKENS = 8


@dataclass(frozen=True)
class LabelledConfig:
    """Settings of an ablation on labelled examples.

    Attributes:
        model: A classifier or an encoder-decoder.
        data: The examples that judge.
        metric: Accuracy, loss or BLEU; None uses accuracy for classes and BLEU for target texts.
        max_tokens: Longest text and target text; None uses the model's context, at most 2,048 tokens.
        batch_tokens: Tokens of one pass, padding included.

    Raises:
        ExampleError: ``batch_tokens`` is below 1.
    """

    model: ModelSpec
    data: DataSpec
    metric: str | None = None
    max_tokens: int | None = None
    batch_tokens: int = 8192

    def __post_init__(self) -> None:
        if self.batch_tokens < 1:
            raise ExampleError(f"batch_tokens={self.batch_tokens} (limit 1). Raise `batch_tokens`")

    def metric_of(self, texts: LabelledTexts) -> str:
        """Return the metric.

        Raises:
            InterventionError: The targets have no such metric.
        """
        known = METRICS[texts.answers]
        if self.metric is not None and self.metric not in known:
            raise InterventionError(
                f"metric {self.metric!r} of {texts.answers.value} targets (limit {', '.join(known)}). Choose another"
            )
        return known[0] if self.metric is None else self.metric


@dataclass
class LabelledRun:
    """A run in progress.

    Attributes:
        texts: All examples.
        judging: The examples that arms answer.
        settings: Further settings that identify the run; JSON can hold them.
        resume_anyway: Resume even if the software or the device changed.
    """

    config: LabelledConfig
    texts: LabelledTexts
    judging: Sequence[LabelledText]
    store: Store
    pool: Pool
    context: RunContext
    settings: Mapping[str, Any] = field(default_factory=dict)
    resume_anyway: bool = False
    say: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        self.metric = self.config.metric_of(self.texts)

    @contextmanager
    def opened(self, names: Collection[str]) -> Iterator[str]:
        """Begin or resume the run, and finish it when the context exits; yield its id.

        Args:
            names: Names of all arms that will answer.

        Raises:
            ResumeError: Software or device changed, and ``resume_anyway`` is False.
        """
        settings = {
            "metric": self.metric,
            "answers": self.texts.answers.value,
            "examples": len(self.judging),
            "batch_tokens": self.config.batch_tokens,
            "replace": "zero",
            **self.settings,
        }
        identity, data_hash = self.context.identity, self.texts.fingerprint()
        model = {"model": identity.fingerprint(), "dtype": self.config.model.dtype}
        record = run_record(
            "ablate",
            fingerprint({**model, "examples_hash": data_hash, **settings}),
            self.context,
            config={"data": asdict(self.config.data), "dtype": self.config.model.dtype, **settings},
            bos_policy=None,
            corpus=self.config.data.name,
            corpus_hash=data_hash,
        )
        known = self.stored_arms(run_identity("ablate", record.fingerprint))
        extends = any(known.get(name, {}).get("status") != "finished" for name in names)
        state = begin_run(self.store, record, resume_anyway=self.resume_anyway, extends=extends, say=self.say)
        self.run_id = state.run_id
        try:
            yield self.run_id
        except Exception:
            with suppress(StoreError):  # a full disk may also prevent this write
                self.store.finish_run(self.run_id, status="failed")
            raise
        self.store.finish_run(self.run_id)

    def stored_arms(self, run_id: str) -> dict[str, dict[str, Any]]:
        """Return status and settings of the run's arms by name; none without the run."""
        if not self.store.path.exists():
            return {}
        rows = self.store.query("SELECT name, status, config FROM arms WHERE run_id = ?", [run_id]).to_pylist()
        return {row["name"]: {"status": row["status"], **json.loads(row["config"])} for row in rows}

    def answer(self, arms: Sequence[SiteArm]) -> None:
        """Answer every example with every unfinished arm.

        Raises:
            HeadscanError: An arm fails; finished arms stay in the store.
        """
        with self.store.one_transaction():
            states = {arm.name: arm.begin(self.store, self.run_id) for arm in arms}
        left = [arm for arm in arms if not states[arm.name][1]]
        groups = -(-len(self.judging) // _GROUP)
        if not left:
            return
        parts: dict[str, dict[int, list[TextAnswer]]] = defaultdict(dict)
        with Progress("ablate", len(left) * len(self.judging), "examples") as progress:
            for done in self.pool.map(answer_examples, self._items(left)):
                item = done.item
                parts[item.arm.name][item.group] = done.value
                progress.update(len(item.texts))
                if len(parts[item.arm.name]) == groups:
                    of_arm = parts.pop(item.arm.name)
                    answers = [answer for group in sorted(of_arm) for answer in of_arm[group]]
                    self._finish(states[item.arm.name][0], item.arm, answers)

    def _items(self, arms: Sequence[SiteArm]) -> Iterator[AnswerItem]:
        most = 2 * max(len(text.target_ids) for text in self.judging) + _SPARE_TOKENS
        if (limit := self.context.identity.max_tokens) is not None:
            most = min(most, limit - 1)
        for arm in arms:
            for start in range(0, len(self.judging), _GROUP):
                yield AnswerItem(
                    arm,
                    start // _GROUP,
                    tuple(self.judging[start : start + _GROUP]),
                    self.texts.answers,
                    self.texts.classes,
                    self.metric,
                    most,
                    self.config.batch_tokens,
                    self.context.identity.rope_lengths,
                )

    def _finish(self, arm_id: str, arm: SiteArm, answers: Sequence[TextAnswer]) -> None:
        rows = [
            {
                "task": self.config.data.name,
                "question": text.index,
                "doc_hash": text.document,
                "target": text.target,
                "response": answer.response,
                "correct": answer.correct,
                "metrics": json.dumps({name: list(values) for name, values in answer.metrics.items()}),
            }
            for text, answer in zip(self.judging, answers, strict=True)
        ]
        kinds = {"question": pa.int32(), "correct": pa.float64()}
        names = ("task", "question", "doc_hash", "target", "response", "correct", "metrics")
        table = pa.table({name: pa.array([row[name] for row in rows], kinds.get(name, pa.string())) for name in names})
        result = {
            "task": self.config.data.name,
            "is_group": False,
            "metric": self.metric,
            "filter": "none",
            "value": _level(self.metric, answers),
            "standard_error": None,
            "questions": len(rows),
        }
        grid = self.context.facts.grid
        share = arm.size / sum(grid.at(kind).total_heads for kind in grid.kinds)
        self.store.finish_arm(arm_id, table, results=pa.Table.from_pylist([result]), zeroed_share=share)


def _level(metric: str, answers: Sequence[TextAnswer]) -> float:
    """Return the metric of all answers."""
    if metric == ACCURACY:
        return float(np.mean([answer.correct for answer in answers]))
    counts = np.array([answer.metrics[metric] for answer in answers], dtype=float).sum(0)
    if metric == BLEU:
        return float(bleu(counts))
    assert metric == LOSS
    return float(-counts[0] / counts[1])
