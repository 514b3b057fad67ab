"""Make all recall questions of a plan; copying questions show random tokens, then a part of them again.

The model continues the part. Only attention to the first occurrence shows the continuation (induction, arXiv
2209.11895). The tokens have no meaning, so the grade depends neither on knowledge nor on language.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, cast

from headscan.pipelines.corpora.sequences import special_tokens
from headscan.pipelines.recall.needle import needle_questions
from headscan.pipelines.recall.recall_plan import COPYING, NEEDLE, RecallQuestion, questions_per_length, recall_lengths
from headscan.pipelines.scoring.token_requests import Request
from headscan.pipelines.settings.corpus_settings import BosPolicy, TokenPlan
from headscan.pipelines.settings.evaluation_settings import SHARING, RecallError, RecallPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Repeated tokens that mark a place in the passage, and tokens to copy from there.
_CUE, _COPIED = 8, 16
_SPAN = _CUE + _COPIED


def copying_questions(
    tokenizer: PreTrainedTokenizerBase, beginning: tuple[int, ...], length: int, questions: int, seed: int
) -> Iterator[RecallQuestion]:
    """Yield the questions of one length. Four share a passage, and each copies from another quarter of it.

    Args:
        beginning: Tokens before the passage (BOS).
        length: Tokens that the model reads, including the beginning.
        questions: Number of questions, a multiple of 4.
    """
    # The last token is predicted, not read.
    size = length + 1 - len(beginning) - _SPAN
    if size < _SPAN:
        raise RecallError(
            f"recall length of {length} tokens (at least {length + _SPAN - size} to copy {_COPIED} tokens). Raise the "
            "recall lengths, or disable recall"
        )
    common = _common_tokens(tokenizer, least=size)
    if len(common) < _SPAN:
        raise RecallError(
            f"printable tokens of the tokenizer: {len(common)} (at least {_SPAN} for copying). Disable recall"
        )
    task = f"copying@{length}"
    for text in range(questions // SHARING):
        rng = Random(f"{seed} {task} {text}")
        passage = _passage(common, size, rng)
        for quarter in range(SHARING):
            start = int((quarter + rng.random()) / SHARING * (size - _SPAN + 1))
            ids = (*beginning, *passage, *passage[start : start + _SPAN])
            yield RecallQuestion(task, text * SHARING + quarter, (Request(ids, _COPIED),), None, str(_COPIED))


def _passage(tokens: list[int], size: int, rng: Random) -> tuple[int, ...]:
    """Draw random tokens without repetition. When all are used, all are drawn again in another order."""
    drawn: list[int] = []
    while len(drawn) < size:
        drawn += rng.sample(tokens, min(len(tokens), size - len(drawn)))
    return tuple(drawn)


def _common_tokens(tokenizer: PreTrainedTokenizerBase, least: int) -> list[int]:
    """Return ids of common text tokens. They are ``least`` or an eighth of the vocabulary, the larger of both.

    Heads do not copy tokens that are rare in training. Vocabularies have no frequencies, but most are learnt from
    frequent to rare pieces, so the first ids are the most common. Special and added tokens, parts of a character and
    control characters are left out.
    """
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    ordinary = sorted(set(tokenizer.get_vocab().values()) - special)
    text = (token for token in ordinary if _is_text(tokenizer, token))
    return list(islice(text, max(least, len(ordinary) // 8)))


def _is_text(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    text = str(tokenizer.decode([token]))
    return text != "" and text.isprintable() and "\N{REPLACEMENT CHARACTER}" not in text


def recall_questions(
    tokenizer: PreTrainedTokenizerBase, plan: RecallPlan, max_tokens: int | None, *, bos: str
) -> list[RecallQuestion]:
    """Return the questions, by length and then by task. The first questions of a length do not depend on other lengths.

    In every request the model reads exactly the length in the task's name.

    Args:
        max_tokens: Positions of the model; None means no limit.
        bos: ``auto`` (as the tokenizer does), ``always`` or ``never``.
    """
    beginning = _beginning(tokenizer, bos)
    lengths = recall_lengths(plan, max_tokens)
    count = questions_per_length(plan, len(lengths))
    return [
        question
        for length in lengths
        for kind, make in ((NEEDLE, needle_questions), (COPYING, copying_questions))
        for question in make(tokenizer, beginning, length, count[kind], plan.seed)
    ]


def _beginning(tokenizer: PreTrainedTokenizerBase, bos: str) -> tuple[int, ...]:
    """Return the tokens before a question, as in a benchmark."""
    if bos != "always":
        return special_tokens(tokenizer, TokenPlan(2, bos=cast(BosPolicy, bos))).prefix
    for first in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if first is not None:
            return (int(first),)
    raise RecallError("bos=always: the tokenizer has neither BOS nor EOS. Use bos=auto or bos=never")
