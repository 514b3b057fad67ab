"""The pool task of an ablation on labelled examples: one arm answers a group of them.

Shapes: B examples, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from headscan.analysis.schema.effect_tables import ACCURACY, BLEU, LOSS
from headscan.errors import NotFiniteError
from headscan.models.forward_inputs import batch_kwargs
from headscan.models.loaded_model import LoadedModel
from headscan.models.rope import UNVARYING, RopeLengths
from headscan.models.token_batches import run_halving
from headscan.pipelines.ablate_labelled.site_arms import SiteArm, ablated
from headscan.pipelines.labelled.labelled_loss import labelled_loss
from headscan.pipelines.labelled.labelled_texts import Answers, LabelledText
from headscan.pipelines.scoring.batching import pad, whole_batches

#: Metrics by kind of targets; the first is the default.
METRICS = {Answers.CLASS: (ACCURACY, LOSS), Answers.TEXT: (BLEU, LOSS, ACCURACY)}


@dataclass(frozen=True)
class AnswerItem:
    """An arm and a group of examples for one replica.

    Attributes:
        group: Number of the group.
        classes: Names of the classes; none for target texts.
        metric: Accuracy, loss or BLEU.
        new_tokens: Longest generated text, in tokens.
        batch_tokens: Tokens of one pass, padding included.
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
    """Pool task: answer examples with heads ablated.

    Raises:
        NotFiniteError: A loss or a logit is NaN or infinite.
    """
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
    """Return the greedy outputs."""
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
    """Raise NotFiniteError if a value is NaN or infinite."""
    if wrong := int((~values.isfinite()).sum()):
        raise NotFiniteError(
            f"NaN or infinite outputs: {wrong} of {values.numel()} (limit 0). Load the model in another `dtype`"
        )
