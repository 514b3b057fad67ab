"""Needles: four names lie in a haystack, and of each the first half is given and the second is asked for.

All needles have one wording and their values are the choices of every question, so that nothing helps but attention to
the right key. An answerer that cannot see the keys prefers the same value whichever is asked for, and is right once in
four: chance is 25 % in every single haystack, whatever values a model finds likely by themselves.

The value stands right behind its key. With words between them ("The word of the baker is ...") the demo model, which
finds six names of ten in 256 tokens, is near chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING

from pipelines.recall.plan import SHARING, RecallError, RecallPlan
from pipelines.recall.prose import KEYS, VALUES, WORDINGS, sentences
from pipelines.recall.question import RecallQuestion
from pipelines.recall.text_tokens import Ids, TextTokens
from pipelines.requests import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def needle_questions(
    tokenizer: PreTrainedTokenizerBase, beginning: tuple[int, ...], length: int, plan: RecallPlan
) -> Iterator[RecallQuestion]:
    """The questions of one length; four share a haystack and ask for one needle each.

    The choices of a question are equally long in tokens and stand in the order of the haystack: the answer's index is
    also the quarter of the haystack in which it lies.

    Args:
        beginning: What stands before the haystack (BOS).
        length: Tokens that the model reads, the beginning included.

    Raises:
        RecallError: Too short for a haystack, or a tokenizer that cannot write four keys and values.
    """
    tokens = TextTokens(tokenizer)
    keys, values = tokens.alike(KEYS, SHARING), tokens.alike(VALUES, SHARING)
    wordings = [tokens.words(wording) for wording in WORDINGS]
    full_stop = tokens.full_stop()
    _check_room(length, beginning, max(map(len, wordings)) + len(keys[0]) + len(values[0]), len(full_stop))
    task = f"needle@{length}"
    for text in range(plan.questions // SHARING):
        rng = Random(f"{plan.seed} {task} {text}")
        wording = rng.choice(wordings)
        cues = [wording + key for key in rng.sample(keys, SHARING)]
        choices = rng.sample(values, SHARING)
        needles = [cue + value + full_stop for cue, value in zip(cues, choices, strict=True)]
        # The last token is predicted, never read.
        room = length + 1 - len(beginning) - sum(map(len, (*needles, cues[0], choices[0])))
        haystack = beginning + _hide(needles, _filler(tokens, room, rng), rng)
        for answer, cue in enumerate(cues):
            requests = tuple(Request(haystack + cue + value, len(value)) for value in choices)
            yield RecallQuestion(task, text * SHARING + answer, requests, answer, str(answer))


def _check_room(length: int, beginning: Ids, asked: int, full_stop: int) -> None:
    """Raise unless ``length`` holds the needles, a question of ``asked`` tokens and as much filler as one needle."""
    least = len(beginning) + SHARING * (asked + full_stop) + asked - 1 + asked
    if length < least:
        raise RecallError(
            f"{length} tokens leave no haystack around {SHARING} needles of {asked + full_stop} tokens: give recall "
            f"lengths of at least {least}, or leave recall out"
        )


def _filler(tokens: TextTokens, room: int, rng: Random) -> list[Ids]:
    """Sentences of ``room`` tokens in all; the first lacks its beginning where whole ones do not fit."""
    drawn = sentences(rng)
    filler: list[Ids] = []
    while True:
        ids = tokens.words(next(drawn))
        if len(ids) >= room:
            return [ids[-room:], *filler]
        filler.append(ids)
        room -= len(ids)


def _hide(needles: Sequence[Ids], filler: Sequence[Ids], rng: Random) -> Ids:
    """The filler with the needles between its sentences, in their order, one at a random place of each quarter."""
    ends = list(accumulate(map(len, filler)))
    depths = [(quarter + rng.random()) / len(needles) * ends[-1] for quarter in range(len(needles))]
    hidden: list[int] = []
    waiting = 0
    for sentence, end in zip(filler, ends, strict=True):
        hidden += sentence
        while waiting < len(needles) and depths[waiting] <= end:
            hidden += needles[waiting]
            waiting += 1
    return tuple(hidden)
