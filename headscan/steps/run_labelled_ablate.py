"""Arms of ablated heads at the sites of a model answer labelled examples, into the store.

Arms ablate single heads, all but one of a layer, or any set. The same command again resumes.

Shapes: B examples, C classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from headscan.ablation.intervention import Intervention
from headscan.ablation.masks import SiteMask
from headscan.cluster.pool import refuse_staged
from headscan.engine.answering import AnsweringSettings, RequestChunk
from headscan.engine.arms import Arm
from headscan.engine.likelihood import intervening
from headscan.engine.reading import PromptReading
from headscan.errors import InterventionError, NotFiniteError
from headscan.grid import Head, HeadGrid
from headscan.model_spec import ModelSpec
from headscan.models.forward_inputs import batch_kwargs
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import pad, run_halving, whole_batches
from headscan.options import BATCH_TOKENS, Count, Limits, check_limits
from headscan.runs.model_identity import ModelIdentity, fingerprint
from headscan.runs.progress import at_work
from headscan.runs.run_context import Run
from headscan.settings.corpus_settings import ExampleError, ExamplesSpec, LabelledMetric
from headscan.settings.evaluation_settings import AblationMode
from headscan.steps.run_ablate import AblateResult, ablated_sets
from headscan.steps.run_evaluation import ArmRun
from headscan.store.records import ArmKind, RunRecord
from headscan.store.tables import ACCURACY, BLEU, EACH, LOSS
from headscan.texts.labelled_texts import Answers, LabelledText, LabelledTexts, labelled_loss
from headscan.texts.tasks import ANSWERS, RESULTS, TaskResults
from headscan.texts.token_requests import ArmItem, LogLikelihood, Responses, ScoringItem
from headscan.verdicts.head_effects import bleu, record_effects


@dataclass(frozen=True)
class SiteArm(Arm):
    """An arm on labelled examples, which may ablate heads of several sites; the baseline has no ablation."""

    intervention: SiteMask | None = None

    @property
    def stored_mask(self) -> tuple[str, tuple[Head, ...]]:
        """The site and the heads of its mask in the store; heads of several sites are in the settings alone."""
        sites = () if self.intervention is None else self.intervention.sites
        return sites[0] if len(sites) == 1 else ("", ())

    @property
    def settings(self) -> dict[str, object]:
        sites = () if self.intervention is None else self.intervention.sites
        return {**dict(self.details), "sites": {site: [list(head) for head in heads] for site, heads in sites}}


WITHOUT_ABLATION = SiteArm("baseline", ArmKind.BASELINE)


def single_arms(grid: HeadGrid, mode: str) -> list[SiteArm]:
    """Return an arm for each head of every site, see `ablated_sets`."""
    return [
        SiteArm(f"{kind} {place}", ArmKind.MASK, SiteMask({kind: heads}), details=tuple(settings.items()))
        for kind in grid.kinds
        for place, heads, settings in ablated_sets(grid.at(kind), mode)
    ]


#: Metrics by kind of targets; the first is the default.
METRICS = {Answers.CLASS: (ACCURACY, LOSS), Answers.TEXT: (BLEU, LOSS, ACCURACY)}


@dataclass(frozen=True, kw_only=True)
class LabelledReading(PromptReading):
    """How labelled examples are read, and answered in up to ``new_tokens``; ``classes`` are empty for target texts."""

    answers: Answers
    classes: tuple[str, ...]
    metric: str
    new_tokens: int

    def item(
        self, name: str, requests: tuple[Any, ...], interventions: Sequence[Intervention | None], batch_tokens: int
    ) -> ScoringItem[Any]:
        [intervention] = interventions
        return LabelledArmItem(name, requests, intervention, batch_tokens, self)


@dataclass(frozen=True)
class LabelledArmItem(ArmItem[LabelledText]):
    """Examples for one replica."""

    reading: LabelledReading

    @torch.no_grad()
    def run(self, lm: LoadedModel) -> list[Responses[LogLikelihood | str]]:
        """Answer examples: with log-likelihoods of targets for a loss, otherwise with classes or generated texts."""
        lengths, reading = [text.longest for text in self.requests], self.reading
        ask = _losses if reading.metric == LOSS else _classes if reading.answers is Answers.CLASS else _generate
        answer_of: dict[int, LogLikelihood | str] = {}
        with intervening(lm, self.intervention, headscan_kernels=False):
            for batch in whole_batches(lengths, self.batch_tokens, reading.rope.group):
                halves = run_halving(
                    list(batch.sequence_indices),
                    lambda rows: ask(lm, reading, [self.requests[row] for row in rows]),
                    lengths,
                    lm.limits["labelled"],
                )
                for rows, answers in halves:
                    answer_of.update(zip(rows, answers, strict=True))
        heads = 0 if self.intervention is None else len(self.intervention.fixed_heads or ())
        share = heads / sum(lm.grid.at(kind).total_heads for kind in lm.grid.kinds)
        return [Responses(tuple(answer_of[row] for row in range(len(self.requests))), (share,) * len(self.requests))]


def _losses(lm: LoadedModel, reading: LabelledReading, texts: list[LabelledText]) -> list[LogLikelihood]:
    losses_B = labelled_loss(lm, reading.answers, texts, summed=True).losses(lm).double().cpu()
    _check_finite(losses_B)
    # A loss does not show which tokens greedy decoding would choose; the store has NULL.
    return [LogLikelihood(-loss, None) for loss in losses_B.tolist()]  # type: ignore[arg-type]


def _classes(lm: LoadedModel, reading: LabelledReading, texts: list[LabelledText]) -> list[str]:
    logits_BC = lm.model(**labelled_loss(lm, reading.answers, texts).inputs).logits.float().cpu()
    _check_finite(logits_BC)
    return [reading.classes[number] for number in logits_BC.argmax(-1).tolist()]


class _FiniteLogits(LogitsProcessor):
    """A check of the logits of every generated token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # Processors of the model set tokens that it may not write to minus infinity.
        _check_finite(scores.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=0.0))
        return scores


def _generate(lm: LoadedModel, reading: LabelledReading, texts: list[LabelledText]) -> list[str]:
    model: Any = lm.model
    checks = LogitsProcessorList([_FiniteLogits()])
    ids, lengths = pad([text.ids for text in texts])
    inputs = batch_kwargs(ids.to(lm.device), lengths.to(lm.device), causal=False)
    written = model.generate(
        **inputs, do_sample=False, num_beams=1, max_new_tokens=reading.new_tokens, logits_processor=checks
    )
    decoded = lm.require_tokenizer().batch_decode(written, skip_special_tokens=True)
    return [text.strip() for text in decoded]


def _check_finite(values: torch.Tensor) -> None:
    if wrong := int((~values.isfinite()).sum()):
        raise NotFiniteError(
            f"NaN or infinite outputs: {wrong} of {values.numel()} (limit 0). Load the model in another `dtype`"
        )


#: Examples of one chunk.
_CHUNK_EXAMPLES = 512
#: Generated tokens beyond twice the longest target.
_SPARE_TOKENS = 8


@dataclass(frozen=True)
class LabelledEvaluateConfig:
    """Settings of labelled examples that judge ablated heads.

    Attributes:
        metric: Accuracy, loss or BLEU; None uses accuracy for classes and BLEU for target texts.
        max_tokens: Longest text and target text; None uses the model's context, at most 2,048 tokens.
    """

    model: ModelSpec
    data: ExamplesSpec
    metric: LabelledMetric | None = None
    max_tokens: Annotated[int | None, Limits(least=1)] = None
    batch_tokens: Count = BATCH_TOKENS

    def __post_init__(self) -> None:
        check_limits(self, ExampleError)

    def metric_of(self, texts: LabelledTexts) -> str:
        known = METRICS[texts.answers]
        if self.metric is not None and self.metric not in known:
            raise InterventionError(
                f"metric {self.metric!r} of {texts.answers.value} targets (limit {', '.join(known)}). Choose another"
            )
        return known[0] if self.metric is None else self.metric


@dataclass(frozen=True)
class LabelledAblateConfig:
    """Settings of a table of the effects of single heads on labelled examples.

    Attributes:
        modes: ``each`` ablates one head at a time, ``all_but_one`` all other heads of its layer.
    """

    judging: LabelledEvaluateConfig
    modes: tuple[AblationMode, ...] = (EACH,)

    def __post_init__(self) -> None:
        check_limits(self, InterventionError)
        if not self.modes:
            raise InterventionError("`modes` is empty (limit 1 mode). Set `modes`")


@dataclass
class LabelledQuestions:
    """The examples ``judging`` as questions of an evaluation; the JSON data ``settings`` are a part of its identity."""

    config: LabelledEvaluateConfig
    texts: LabelledTexts
    judging: Sequence[LabelledText]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metric = self.config.metric_of(self.texts)
        self._hashes = [fingerprint({"example": (text.index, *text.tokens)}) for text in self.judging]

    def record(self, run: Run) -> RunRecord:
        settings = {
            "metric": self.metric,
            "answers": self.texts.answers.value,
            "examples": len(self.judging),
            "batch_tokens": self.config.batch_tokens,
            "replace": "zero",
            **self.settings,
        }
        data_hash = self.texts.fingerprint()
        model = {"model": run.identity.fingerprint(), "dtype": self.config.model.dtype}
        return run.record(
            "ablate",
            fingerprint({**model, "examples_hash": data_hash, **settings}),
            config={"data": asdict(self.config.data), "dtype": self.config.model.dtype, **settings},
            bos_policy=None,
            corpus=self.config.data.name,
            corpus_hash=data_hash,
        )

    def chunks(self) -> list[RequestChunk]:
        cuts = [slice(start, start + _CHUNK_EXAMPLES) for start in range(0, len(self.judging), _CHUNK_EXAMPLES)]
        return [
            RequestChunk(index, tuple(self._hashes[cut]), tuple(self.judging[cut])) for index, cut in enumerate(cuts)
        ]

    def answering_settings(self, identity: ModelIdentity) -> AnsweringSettings:
        most = 2 * max(len(text.target_ids) for text in self.judging) + _SPARE_TOKENS
        if (limit := identity.max_tokens) is not None:
            most = min(most, limit - 1)
        reading = LabelledReading(
            share_prefixes=False,
            rope=identity.rope_lengths,
            answers=self.texts.answers,
            classes=self.texts.classes,
            metric=self.metric,
            new_tokens=most,
        )
        return AnsweringSettings(self.config.batch_tokens, reading)

    def grade(self, responses: Mapping[str, LogLikelihood | str]) -> TaskResults:
        given = [responses[each] for each in self._hashes]
        numbers = self._numbers(given)
        graded = self.metric == ACCURACY
        rows = [
            {
                "task": self.config.data.name,
                "question": text.index,
                "doc_hash": text.document,
                "target": text.target,
                "response": answer if isinstance(answer, str) else None,
                "correct": own[0] if graded else None,
                "recall": False,
                "metrics": json.dumps({} if graded else {self.metric: own}),
            }
            for text, answer, own in zip(self.judging, given, numbers, strict=True)
        ]
        result = {
            "task": self.config.data.name,
            "is_group": False,
            "metric": self.metric,
            "filter": "none",
            "value": _level(self.metric, np.array(numbers, dtype=float)),
            "questions": len(rows),
        }
        return TaskResults(pa.Table.from_pylist(rows, schema=ANSWERS), pa.Table.from_pylist([result], schema=RESULTS))

    def _numbers(self, answers: Sequence[Any]) -> list[list[float]]:
        """Return the numbers of each answer: 1 or 0 for accuracy, log-likelihood and tokens for a loss, or the counts
        of a sentence for BLEU.
        """
        pairs = list(zip(answers, self.judging, strict=True))
        if self.metric == ACCURACY:
            return [[float(answer == text.target)] for answer, text in pairs]
        if self.metric == LOSS:
            return [[answer.log_likelihood, len(text.target_ids)] for answer, text in pairs]
        from sacrebleu.metrics.bleu import BLEU as SentenceBleu

        scorer: Any = SentenceBleu(effective_order=True)  # avoids a warning about single sentences
        scores = [scorer.sentence_score(answer, [text.target]) for answer, text in pairs]
        return [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores]

    def ablated_share(self, shares: Mapping[str, float]) -> float:
        return shares[self._hashes[0]]  # masks are the same for every example


def _level(metric: str, numbers: np.ndarray) -> float:
    """Return the metric of examples from their numbers (examples, ...)."""
    if metric == ACCURACY:
        return float(numbers.mean())
    total = numbers.sum(0)
    return float(bleu(total)) if metric == BLEU else float(-total[0] / total[1])


def answer_labelled(questions: LabelledQuestions, run: Run, run_id: str, arms: Sequence[SiteArm]) -> None:
    """Answer the examples with every arm of a run that has begun, and finish the run."""
    refuse_staged(run.pool, "an answer to a labelled example")
    arm_run = ArmRun(run, run_id, arms, judges_arms=False)
    if unfinished := arm_run.begin():
        arm_run.answer(run, unfinished, questions, questions.chunks(), questions.answering_settings(run.identity))
    arm_run.finish()


def run_labelled_ablate(config: LabelledAblateConfig, run: Run, *, texts: LabelledTexts) -> AblateResult:
    """Measure the effect of every head of every site, record the table in the store, and return it."""
    questions = LabelledQuestions(config.judging, texts, texts.texts)
    arms = [WITHOUT_ABLATION, *(arm for mode in config.modes for arm in single_arms(run.facts.grid, mode))]
    run.say(f"{len(arms)} arms: the baseline and {len(arms) - 1} sets of heads, on {len(texts.texts)} examples")
    with run.in_progress(questions.record(run), arms=[arm.name for arm in arms]) as state:
        answer_labelled(questions, run, state.run_id, arms)
    with at_work("effects and their intervals"):
        return AblateResult(state.run_id, tuple(record_effects(run.store, state.run_id)))
