"""Arms of ablated heads at the sites of a model answer labelled examples, into the store.

Arms ablate single heads, all but one of a layer, or any set. The same command again resumes.

Shapes: B examples, C classes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from headscan.ablation.ablation import intervene
from headscan.ablation.masks import HeadMask
from headscan.analysis.store.records import ArmKind, ArmRecord
from headscan.analysis.store.store import Store
from headscan.analysis.store.tables import ACCURACY, BLEU, EACH, LOSS
from headscan.analysis.verdicts.head_effects import HeadEffect, bleu, record_effects
from headscan.errors import InterventionError, NotFiniteError
from headscan.grid import Head, HeadGrid
from headscan.model_spec import ModelSpec
from headscan.models.forward_inputs import batch_kwargs
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import UNVARYING, RopeLengths
from headscan.models.token_batches import run_halving
from headscan.pipelines.runs.run_records import Run, fingerprint
from headscan.pipelines.runs.text_tables import Progress
from headscan.pipelines.scan.labelled_texts import Answers, LabelledText, LabelledTexts, labelled_loss, read_labelled
from headscan.pipelines.scoring.token_requests import pad, whole_batches
from headscan.pipelines.settings.corpus_settings import DataSpec, ExampleError

#: Ablated heads by kind of site.
SiteHeads = tuple[tuple[str, tuple[Head, ...]], ...]


@dataclass(frozen=True)
class SiteArm:
    """One way of running the model: the outputs of ``heads``, by kind of site, become zero; the baseline has none."""

    name: str
    heads: SiteHeads = ()
    details: tuple[tuple[str, object], ...] = ()

    @property
    def size(self) -> int:
        return sum(len(heads) for _, heads in self.heads)

    def begin(self, store: Store, run_id: str) -> tuple[str, bool]:
        """Store the arm; return its id, and True if it is finished. Heads of one site are stored as a mask, those of
        several sites in the settings of the arm.
        """
        mask_id = None
        if len(self.heads) == 1:
            ((site, heads),) = self.heads
            listed = {"heads": [list(head) for head in heads]}
            mask_id = store.add_mask(f"{run_id}: {self.name}", heads, site=site, config=listed)
        record = ArmRecord(
            run_id=run_id,
            name=self.name,
            kind=ArmKind.MASK if self.heads else ArmKind.BASELINE,
            mask_id=mask_id,
            replacement="zero" if self.heads else None,
            config={**dict(self.details), "sites": self.as_lists()},
        )
        state = store.begin_arm(record)
        return state.arm_id, state.finished

    def as_lists(self) -> dict[str, Any]:
        return {site: [list(head) for head in heads] for site, heads in self.heads}


WITHOUT_ABLATION = SiteArm("baseline")


@contextmanager
def ablated(lm: LoadedModel, heads: SiteHeads) -> Iterator[None]:
    """Ablate heads of several sites while the context is open."""
    with ExitStack() as masks:
        for site, of_site in heads:
            masks.enter_context(intervene(lm.at(site), HeadMask(of_site)))
        yield


def heads_of(lists: Mapping[str, Any]) -> SiteHeads:
    """Return ablated heads from plain data."""
    return tuple((site, tuple(Head(*head) for head in heads)) for site, heads in lists.items() if heads)


def single_arms(grid: HeadGrid, mode: str) -> list[SiteArm]:
    """Return an arm for each head: that head ablated, or all others of its layer (no arm in layers of one head)."""
    arms = []
    for kind in grid.kinds:
        for site in grid.at(kind).sites:
            every = [Head(site.layer, head) for head in range(site.num_attention_heads)]
            for head in every if mode == EACH or len(every) > 1 else ():
                removed = (head,) if mode == EACH else tuple(other for other in every if other != head)
                place = {"site": kind, "layer": site.layer, "head": head.head, "kv_head": site.kv_head_of[head.head]}
                words = "" if mode == EACH else "all but "
                name = f"{kind} {words}{site.layer}:{head.head}"
                arms.append(SiteArm(name, ((kind, removed),), (("mode", mode), *place.items())))
    return arms


#: Metrics by kind of targets; the first is the default.
METRICS = {Answers.CLASS: (ACCURACY, LOSS), Answers.TEXT: (BLEU, LOSS, ACCURACY)}


@dataclass(frozen=True)
class AnswerItem:
    """An arm and a group of examples for one replica. ``classes`` are empty for target texts; ``new_tokens`` is the
    length of the longest generated text.
    """

    arm: SiteArm
    group: int
    texts: tuple[LabelledText, ...]
    answers: Answers
    classes: tuple[str, ...]
    metric: str
    new_tokens: int
    batch_tokens: int
    rope: RopeLengths = UNVARYING

    @property
    def name(self) -> str:
        return f"{self.arm.name}, group {self.group}"


class TextAnswer(NamedTuple):
    """The answer to one example.

    Attributes:
        response: Class or generated text; None if the loss alone is measured.
        correct: 1 for a right answer, 0 for a wrong one; None if the metric is not accuracy.
        metrics: Log-likelihood and tokens for a loss, counts of a sentence for BLEU.
    """

    response: str | None
    correct: float | None
    metrics: Mapping[str, Sequence[float]]


@torch.no_grad()
def answer_examples(lm: LoadedModel, item: AnswerItem) -> list[TextAnswer]:
    """Pool task: answer examples with heads ablated."""
    lengths = [text.longest for text in item.texts]
    answer = _ANSWERING[item.answers, item.metric]
    found: dict[int, TextAnswer] = {}
    with ablated(lm, item.arm.heads):
        for batch in whole_batches(lengths, item.batch_tokens, item.rope):
            halves = run_halving(
                list(batch.rows),
                lambda rows: answer(lm, item, [item.texts[row] for row in rows]),
                lengths,
                lm.limits["labelled"],
            )
            for rows, answers in halves:
                found.update(zip(rows, answers, strict=True))
    return [found[row] for row in range(len(item.texts))]


def _losses(lm: LoadedModel, item: AnswerItem, texts: list[LabelledText]) -> list[TextAnswer]:
    losses_B = labelled_loss(lm, item.answers, texts, summed=True).losses(lm).double().cpu()
    _check_finite(losses_B)
    sizes = [len(text.target_ids) for text in texts]
    return [TextAnswer(None, None, {LOSS: (-loss, size)}) for loss, size in zip(losses_B.tolist(), sizes, strict=True)]


def _classes(lm: LoadedModel, item: AnswerItem, texts: list[LabelledText]) -> list[TextAnswer]:
    logits_BC = lm.model(**_inputs(lm, texts)).logits.float().cpu()
    _check_finite(logits_BC)
    chosen = [item.classes[number] for number in logits_BC.argmax(-1).tolist()]
    return [TextAnswer(name, float(name == text.target), {}) for name, text in zip(chosen, texts, strict=True)]


def _same_text(lm: LoadedModel, item: AnswerItem, texts: list[LabelledText]) -> list[TextAnswer]:
    written = _generate(lm, item, texts)
    return [TextAnswer(text, float(text == goal.target), {}) for text, goal in zip(written, texts, strict=True)]


def _sentence_counts(lm: LoadedModel, item: AnswerItem, texts: list[LabelledText]) -> list[TextAnswer]:
    from sacrebleu.metrics.bleu import BLEU as SentenceBleu

    scorer = SentenceBleu(effective_order=True)  # avoids a warning about single sentences; counts do not change
    found = []
    for text, goal in zip(_generate(lm, item, texts), texts, strict=True):
        score: Any = scorer.sentence_score(text, [goal.target])
        found.append(TextAnswer(text, None, {BLEU: (*score.counts, *score.totals, score.sys_len, score.ref_len)}))
    return found


_Answer = Callable[[LoadedModel, AnswerItem, list[LabelledText]], list[TextAnswer]]
_ANSWERING: Mapping[tuple[Answers, str], _Answer] = {
    (Answers.CLASS, LOSS): _losses,
    (Answers.TEXT, LOSS): _losses,
    (Answers.CLASS, ACCURACY): _classes,
    (Answers.TEXT, ACCURACY): _same_text,
    (Answers.TEXT, BLEU): _sentence_counts,
}


class _FiniteLogits(LogitsProcessor):
    """A check of the logits of every generated token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # Processors of the model set tokens that it may not write to minus infinity.
        _check_finite(scores.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=0.0))
        return scores


def _generate(lm: LoadedModel, item: AnswerItem, texts: list[LabelledText]) -> list[str]:
    model: Any = lm.model
    checks = LogitsProcessorList([_FiniteLogits()])
    ids = model.generate(
        **_inputs(lm, texts), do_sample=False, num_beams=1, max_new_tokens=item.new_tokens, logits_processor=checks
    )
    decoded = lm.require_tokenizer().batch_decode(ids, skip_special_tokens=True)
    return [text.strip() for text in decoded]


def _inputs(lm: LoadedModel, texts: Sequence[LabelledText]) -> dict[str, torch.Tensor]:
    ids, lengths = pad([text.ids for text in texts])
    return batch_kwargs(ids.to(lm.device), lengths.to(lm.device), causal=False)


def _check_finite(values: torch.Tensor) -> None:
    if wrong := int((~values.isfinite()).sum()):
        raise NotFiniteError(
            f"NaN or infinite outputs: {wrong} of {values.numel()} (limit 0). Load the model in another `dtype`"
        )


#: Examples of one item of a pool.
_GROUP = 512
#: Generated tokens beyond twice the longest target.
_SPARE_TOKENS = 8


@dataclass(frozen=True)
class LabelledConfig:
    """Settings of an ablation on labelled examples.

    Attributes:
        metric: Accuracy, loss or BLEU; None uses accuracy for classes and BLEU for target texts.
        max_tokens: Longest text and target text; None uses the model's context, at most 2,048 tokens.
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
        known = METRICS[texts.answers]
        if self.metric is not None and self.metric not in known:
            raise InterventionError(
                f"metric {self.metric!r} of {texts.answers.value} targets (limit {', '.join(known)}). Choose another"
            )
        return known[0] if self.metric is None else self.metric


@dataclass
class LabelledRun:
    """A run whose arms answer the ``judging`` examples; the JSON data ``settings`` are a part of its identity."""

    config: LabelledConfig
    run: Run
    texts: LabelledTexts
    judging: Sequence[LabelledText]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metric = self.config.metric_of(self.texts)

    @contextmanager
    def opened(self, names: Collection[str]) -> Iterator[str]:
        """Begin or resume the run, and finish it when the context exits; yield its id."""
        settings = {
            "metric": self.metric,
            "answers": self.texts.answers.value,
            "examples": len(self.judging),
            "batch_tokens": self.config.batch_tokens,
            "replace": "zero",
            **self.settings,
        }
        identity, data_hash = self.run.identity, self.texts.fingerprint()
        model = {"model": identity.fingerprint(), "dtype": self.config.model.dtype}
        record = self.run.record(
            "ablate",
            fingerprint({**model, "examples_hash": data_hash, **settings}),
            config={"data": asdict(self.config.data), "dtype": self.config.model.dtype, **settings},
            bos_policy=None,
            corpus=self.config.data.name,
            corpus_hash=data_hash,
        )
        with self.run.recording(record, arms=names) as state:
            self.run_id = state.run_id
            yield self.run_id
        self.run.store.finish_run(self.run_id)

    def stored_arms(self) -> dict[str, dict[str, Any]]:
        """Return the settings of the run's arms by name."""
        rows = self.run.store.query("SELECT name, config FROM arms WHERE run_id = ?", [self.run_id]).to_pylist()
        return {row["name"]: json.loads(row["config"]) for row in rows}

    def answer(self, arms: Sequence[SiteArm]) -> None:
        with self.run.store.one_transaction():
            states = {arm.name: arm.begin(self.run.store, self.run_id) for arm in arms}
        left = [arm for arm in arms if not states[arm.name][1]]
        groups = -(-len(self.judging) // _GROUP)
        if not left:
            return
        parts: dict[str, dict[int, list[TextAnswer]]] = defaultdict(dict)
        with Progress("ablate", len(left) * len(self.judging), "examples") as progress:
            for done in self.run.pool.map(answer_examples, self._items(left)):
                item = done.item
                parts[item.arm.name][item.group] = done.value
                progress.update(len(item.texts))
                if len(parts[item.arm.name]) == groups:
                    of_arm = parts.pop(item.arm.name)
                    answers = [answer for group in sorted(of_arm) for answer in of_arm[group]]
                    self._finish(states[item.arm.name][0], item.arm, answers)

    def _items(self, arms: Sequence[SiteArm]) -> Iterator[AnswerItem]:
        most = 2 * max(len(text.target_ids) for text in self.judging) + _SPARE_TOKENS
        if (limit := self.run.identity.max_tokens) is not None:
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
                    self.run.identity.rope_lengths,
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
        grid = self.run.facts.grid
        share = arm.size / sum(grid.at(kind).total_heads for kind in grid.kinds)
        self.run.store.finish_arm(arm_id, table, results=pa.Table.from_pylist([result]), zeroed_share=share)


def _level(metric: str, answers: Sequence[TextAnswer]) -> float:
    if metric == ACCURACY:
        return float(np.mean([answer.correct for answer in answers]))
    counts = np.array([answer.metrics[metric] for answer in answers], dtype=float).sum(0)
    if metric == BLEU:
        return float(bleu(counts))
    assert metric == LOSS
    return float(-counts[0] / counts[1])


def labelled_effects(
    config: LabelledConfig, run: Run, modes: Sequence[str] = (EACH,), *, texts: LabelledTexts | None = None
) -> tuple[str, list[HeadEffect]]:
    """Measure the effect of every head of every site, and record the table in the store. Return the id of the run, and
    the effects by mode, site, layer and head.

    Args:
        modes: ``each``: one head is ablated; ``all_but_one``: all other heads of its layer.
        texts: The examples; None reads the file.
    """
    if texts is None:
        texts = read_labelled(config.data, config.model, run.identity, config.max_tokens)
    labelled = LabelledRun(config, run, texts, texts.texts)
    arms = [arm for mode in modes for arm in single_arms(run.facts.grid, mode)]
    run.say(f"{len(arms) + 1} arms: the baseline and {len(arms)} sets of heads, on {len(texts.texts)} examples")
    with labelled.opened([arm.name for arm in (WITHOUT_ABLATION, *arms)]) as run_id:
        labelled.answer([WITHOUT_ABLATION, *arms])
        found = record_effects(run.store, run_id)
    return run_id, found
