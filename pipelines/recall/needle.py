"""Needle questions: a haystack hides four names.

A question gives a first name and asks for the last name.

All needles have the same wording, and their values are the choices of every question, so only attention to the right
key helps. A model that cannot see the keys prefers the same value for every question and is right once in four:
chance is 25 % in every haystack, however likely the values are by themselves.

Only the first tokens of the values are scored, as many as distinguish them. If that is one token, the four choices of
a question are one input, which is read once and not four times.

The value directly follows its key. With words between them ("The word of the baker is ...") the demo model, which
finds six of ten names in 256 tokens, is near chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING

from headscan.pipelines.recall.recall_plan import RecallQuestion
from headscan.pipelines.scoring.token_requests import Request
from headscan.pipelines.settings.evaluation_settings import SHARING, RecallError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Words before a key, the same in every needle of a haystack.
WORDINGS = ("A letter came for", "Remember the name", "The guest was", "They spoke of")

KEYS = tuple(
    "Adam Alice Andrew Anna Arthur Charles Clara David Edward Elena Emma Eric Frank Fred George Grace Helen Henry Hugo "
    "Ivan Jack James Jane Julia Karl Kate Laura Leo Lisa Louis Lucy Maria Martin Max Nina Oliver Oscar Paul Peter "
    "Robert Rosa Ruth Sam Sarah Simon Thomas Victor Walter".split()
)

VALUES = tuple(
    "Archer Banks Baxter Berry Bishop Black Brooks Brown Carter Castle Chase Church Cook Cooper Cross Dean Field "
    "Fisher Ford Fox Green Hall Hill Hood House Hunt Hunter Judge King Knight Lake Lane Law Lynch Long Major Marsh "
    "Moon Page Park Pierce Pool Power Price Reed Rice Rivers Rock Rose Sharp Singer Small Star Stone Street Summer "
    "Swift Taylor Temple Wall Waters West White Winter Wolf Wood Woods Young".split()
)

_PEOPLE = (
    "baker barber beekeeper boatman bricklayer butcher carpenter clerk dancer dentist driver farmer gardener glazier "
    "janitor librarian mechanic messenger miller musician nurse painter pilot plumber poet porter potter sailor "
    "sculptor shepherd tailor teacher watchmaker weaver"
).split()
_THINGS = (
    "apron basket bell bicycle blanket bottle broom bucket button candle carpet chair clock coat compass cup drum "
    "envelope fiddle flag funnel hammer hat jar kettle ladder lamp map mirror needle notebook oar pillow pipe plate "
    "ribbon rope saddle scarf shovel spoon suitcase ticket towel trumpet umbrella vase wheel"
).split()
_PLACES = (
    "attic bakery balcony barn bridge canal cellar courtyard dairy factory fountain garage gate greenhouse harbour inn "
    "kitchen laundry library lighthouse market meadow mill museum orchard pharmacy pier quarry school shed stable "
    "station terrace theatre tower tunnel vineyard windmill workshop"
).split()

_TEMPLATES = (
    "The {person} carried the {thing} to the {place} before noon.",
    "Nobody at the {place} knew why the {person} wanted another {thing}.",
    "In the evening the {person} left a {thing} near the {place}.",
    "A {thing} had been lying in the {place} since the {person} moved away.",
    "When the rain stopped, the {person} mended the {thing} behind the {place}.",
    "The {thing} from the {place} was heavier than the {person} had thought.",
    "Every Monday the {person} walks past the {place} with a {thing}.",
    "It took the {person} an hour to find the {thing} in the {place}.",
    "Somebody painted the {thing} blue and showed it to the {person} at the {place}.",
    "The {person} promised to bring the {thing} back to the {place}.",
    "Beside the {place} the {person} sold a {thing} for very little money.",
    "The {person} never trusted the old {thing} that hung in the {place}.",
    "There was room for one more {thing} in the {place}, said the {person}.",
    "At dawn the {place} was empty, and the {person} had forgotten the {thing}.",
    "The {person} swapped a {thing} for a ride to the {place}.",
    "Children from the {place} borrowed the {thing} that belonged to the {person}.",
    "The {person} slept badly because the {thing} in the {place} rattled.",
    "Two days later the {thing} turned up under the {place}, to the joy of the {person}.",
    "The {person} wrote a short note about the {thing} and pinned it to the {place}.",
    "With a sigh the {person} put the {thing} down and looked at the {place}.",
    "The {place} smelled of soap after the {person} had washed the {thing}.",
    "A cousin of the {person} keeps a {thing} like this in the {place}.",
    "The {thing} broke, so the {person} went home by way of the {place}.",
    "On the road to the {place} the {person} dropped the {thing} twice.",
    "The {person} would rather lose the {thing} than sell the {place}.",
    "From the {place} one could hear the {person} beating on a {thing}.",
    "Last year the {person} built a {place} and had no {thing} left.",
    "The {person} laughed when the {thing} rolled out of the {place}.",
    "The door of the {place} was shut, so the {person} sat on the {thing}.",
    "Without the {thing} the {person} did not dare to enter the {place}.",
    "The {person} counted the steps to the {place} and tapped the {thing} at each.",
    "The wind blew the {thing} off the {place} while the {person} was eating.",
    "Neither the {person} nor the neighbours had seen a {thing} at the {place}.",
    "For the {person}, the {place} without a {thing} was only half a home.",
    "The {person} hid behind the {place} and held the {thing} very still.",
    "After lunch the {thing} was taken from the {person} and locked in the {place}.",
    "An advertisement for the {thing} made the {person} travel to the {place}.",
    "The {person} tied the {thing} to the roof of the {place} with a piece of string.",
    "The {person} learned at the {place} how to clean a {thing} with sand.",
    "It was the {person} who opened the {place} and lent everybody a {thing}.",
)


def sentences(rng: Random) -> Iterator[str]:
    """Yield random sentences forever, each of 2.5 million at most once."""
    seen: set[str] = set()
    while True:
        sentence = rng.choice(_TEMPLATES).format(
            person=rng.choice(_PEOPLE), thing=rng.choice(_THINGS), place=rng.choice(_PLACES)
        )
        if sentence not in seen:
            seen.add(sentence)
            yield sentence


Ids = tuple[int, ...]

#: Number of keys or values with enough variety; if fewer have the same short length, longer ones are used.
_ENOUGH = 16


class TextTokens:
    """A tokenizer's ids for pieces of running text, without special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def words(self, text: str) -> Ids:
        """Return ids of words inside a text, with the space before them."""
        return self._after(".", f" {text}")

    def full_stop(self) -> Ids:
        """Return ids of a full stop after a word."""
        return self._after("a", ".")

    def of_one_length(self, words: Sequence[str], least: int) -> list[Ids]:
        """Return ids of words with equal numbers of tokens. It is the smallest number that enough words have."""
        by_size: dict[int, set[Ids]] = {}
        for word in words:
            ids = self.words(word)
            if self._tokenizer.unk_token_id not in ids:
                by_size.setdefault(len(ids), set()).add(ids)
        enough = [size for size, found in by_size.items() if len(found) >= _ENOUGH]
        size = min(enough) if enough else max(by_size, key=lambda size: len(by_size[size]), default=0)
        found = sorted(by_size.get(size, ()))
        if len(found) < least:
            raise RecallError(
                f"words with different tokens among {', '.join(words[:3])}, ...: {len(found)} (at least {least}). "
                "Disable recall"
            )
        return found

    def distinguished(self, values: Sequence[Ids]) -> tuple[list[Ids], int]:
        """Return values that begin differently, and the distinguishing token count. All of them differ in that many
        first tokens.

        It is the smallest number that leaves enough values. It is mostly one token; then one input covers all choices
        of a question.
        """
        for size in range(1, len(values[0])):
            found = {value[:size]: value for value in reversed(values)}
            if len(found) >= min(_ENOUGH, len(values)):
                return sorted(found.values()), size
        return list(values), len(values[0])

    def _after(self, before: str, text: str) -> Ids:
        """Return ids of ``text`` after ``before``. If the two merge, they are those of ``text`` alone."""
        context, whole = self._encode(before), self._encode(before + text)
        return whole[len(context) :] if whole[: len(context)] == context else self._encode(text)

    def _encode(self, text: str) -> Ids:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))


def needle_questions(
    tokenizer: PreTrainedTokenizerBase, beginning: tuple[int, ...], length: int, questions: int, seed: int
) -> Iterator[RecallQuestion]:
    """Yield the questions of one length. Four share a haystack and ask for one needle each.

    The choices of a question have the same number of scored tokens and the order of the haystack, so the answer's index
    is also its quarter of the haystack.

    Args:
        beginning: Tokens before the haystack (BOS).
        length: Tokens that the model reads, including the beginning.
        questions: Number of questions, a multiple of 4.
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
    """Raise unless ``length`` tokens suffice for a question. They hold the needles, a question and as much filler as
    one needle.

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
    """Return sentences of ``room`` tokens in total. The first may lack its beginning."""
    drawn = sentences(rng)
    filler: list[Ids] = []
    while True:
        ids = tokens.words(next(drawn))
        if len(ids) >= room:
            return [ids[-room:], *filler]
        filler.append(ids)
        room -= len(ids)


def _hide(needles: Sequence[Ids], filler: Sequence[Ids], rng: Random) -> Ids:
    """Insert the needles between the filler's sentences, in order. Each quarter gets one, at a random place."""
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
