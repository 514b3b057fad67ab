"""Needle questions: a haystack hides four names.

A question gives a first name and asks for the last name.

All needles have the same wording, and their values are the choices of every question, so only attention to the right
key helps. A model that cannot see the keys prefers the same value for every question and is right once in four: chance
is 25 % in every haystack, however likely the values are by themselves.

Only the first tokens of the values are scored, as many as distinguish them. If that is one token, the four choices of a
question are one input, which is read once and not four times.

The value directly follows its key. With words between them ("The word of the baker is ...") the demo model, which finds
six of ten names in 256 tokens, is near chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING

from headscan.pipelines.recall.prose import KEYS, VALUES, WORDINGS, sentences
from headscan.pipelines.recall.question import RecallQuestion
from headscan.pipelines.recall.recall_plan import SHARING, RecallError
from headscan.pipelines.recall.text_tokens import Ids, TextTokens
from headscan.pipelines.scoring.token_requests import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def needle_questions(
    tokenizer: PreTrainedTokenizerBase, beginning: tuple[int, ...], length: int, questions: int, seed: int
) -> Iterator[RecallQuestion]:
    """Yield the questions of one length.

    Four share a haystack and ask for one needle each.

    The choices of a question have the same number of scored tokens and the order of the haystack, so the answer's index
    is also its quarter of the haystack.

    Args:
        beginning: Tokens before the haystack (BOS).
        length: Tokens that the model reads, including the beginning.
        questions: Number of questions, a multiple of 4.

    Raises:
        RecallError: The length is too short for a haystack, or the tokenizer cannot write four keys and values.
    """
    tokens = TextTokens(tokenizer)
    keys = tokens.of_one_length(KEYS, SHARING)
    values, scored = tokens.distinguished(tokens.of_one_length(VALUES, SHARING))
    wordings = [tokens.words(wording) for wording in WORDINGS]
    full_stop = tokens.full_stop()
    asked = max(map(len, wordings)) + len(keys[0])
    _check_room(length, beginning, asked + len(values[0]) + len(full_stop), asked + scored)
    task = f"needle@{length}"
    for text in range(questions // SHARING):
        rng = Random(f"{seed} {task} {text}")
        wording = rng.choice(wordings)
        cues = [wording + key for key in rng.sample(keys, SHARING)]
        choices = rng.sample(values, SHARING)
        needles = [cue + value + full_stop for cue, value in zip(cues, choices, strict=True)]
        # The last token is predicted, not read.
        room = length + 1 - len(beginning) - sum(map(len, (*needles, cues[0]))) - scored
        haystack = beginning + _hide(needles, _filler(tokens, room, rng), rng)
        for answer, cue in enumerate(cues):
            requests = tuple(Request(haystack + cue + value[:scored], scored) for value in choices)
            yield RecallQuestion(task, text * SHARING + answer, requests, answer, str(answer))


def _check_room(length: int, beginning: Ids, needle: int, asked: int) -> None:
    """Raise unless ``length`` tokens suffice for a question.

    They hold the needles, a question and as much filler as one needle.

    Args:
        needle: Tokens of a needle.
        asked: Tokens of a question, its scored ones included.
    """
    least = len(beginning) + (SHARING + 1) * needle + asked - 1
    if length < least:
        raise RecallError(
            f"recall length of {length} tokens (at least {least} for {SHARING} needles of {needle} tokens). Raise the "
            "recall lengths, or disable recall"
        )


def _filler(tokens: TextTokens, room: int, rng: Random) -> list[Ids]:
    """Return sentences of ``room`` tokens in total.

    The first may lack its beginning.
    """
    drawn = sentences(rng)
    filler: list[Ids] = []
    while True:
        ids = tokens.words(next(drawn))
        if len(ids) >= room:
            return [ids[-room:], *filler]
        filler.append(ids)
        room -= len(ids)


def _hide(needles: Sequence[Ids], filler: Sequence[Ids], rng: Random) -> Ids:
    """Insert the needles between the filler's sentences, in order.

    Each quarter gets one, at a random place.
    """
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
