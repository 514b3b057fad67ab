"""Copying: random tokens, and the beginning of a part of them once more, to be continued as before.

Nothing but attention to the first occurrence tells what follows (induction, arXiv 2209.11895), and the tokens mean
nothing, so that what is graded depends neither on knowledge nor on language.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

from headscan.pipelines.recall.question import RecallQuestion
from headscan.pipelines.recall.recall_plan import SHARING, RecallError
from headscan.pipelines.scoring.token_requests import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Tokens that say where in the passage to go on, and tokens to be copied from there.
_CUE, _COPIED = 8, 16
_SPAN = _CUE + _COPIED


def copying_questions(
    tokenizer: PreTrainedTokenizerBase, beginning: tuple[int, ...], length: int, questions: int, seed: int
) -> Iterator[RecallQuestion]:
    """The questions of one length; four share a passage and copy from one quarter of it each.

    Args:
        beginning: What stands before the passage (BOS).
        length: Tokens that the model reads, the beginning included.
        questions: How many, a multiple of 4.

    Raises:
        RecallError: Too short for a passage, or too few tokens to draw from.
    """
    # The last token is predicted, never read.
    size = length + 1 - len(beginning) - _SPAN
    if size < _SPAN:
        raise RecallError(
            f"{length} tokens leave no room to copy {_COPIED} tokens of a passage: give recall lengths of at least "
            f"{length + _SPAN - size}, or leave recall out"
        )
    common = _common_tokens(tokenizer, least=size)
    if len(common) < _SPAN:
        raise RecallError(
            f"the tokenizer has {len(common)} tokens of printable text, and copying draws {_SPAN} different ones: "
            "leave recall out"
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
    """Random tokens, all different as far as there are so many; then every token again in another order."""
    drawn: list[int] = []
    while len(drawn) < size:
        drawn += rng.sample(tokens, min(len(tokens), size - len(drawn)))
    return tuple(drawn)


def _common_tokens(tokenizer: PreTrainedTokenizerBase, least: int) -> list[int]:
    """Ids of common tokens of text: ``least``, or an eighth of the vocabulary where that is more; fewer if all are.

    A token that training hardly showed is copied by no head. Vocabularies do not say which those are, but nearly all
    are learnt from the most frequent pieces to the rarest, so that the first ids are the commonest. Left out are
    special and added tokens, and those that are no text by themselves: parts of a character, control characters.
    """
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    ordinary = sorted(set(tokenizer.get_vocab().values()) - special)
    text = (token for token in ordinary if _is_text(tokenizer, token))
    return list(islice(text, max(least, len(ordinary) // 8)))


def _is_text(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    text = str(tokenizer.decode([token]))
    return text != "" and text.isprintable() and "\N{REPLACEMENT CHARACTER}" not in text
