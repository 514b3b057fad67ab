"""Recall tasks of any length and for any tokenizer, find needles and copy text: their questions, and their grades.

A benchmark with one-letter answers does not notice the loss of retrieval heads (arXiv 2404.15574). These generated
tasks do; log-likelihoods answer them, so any causal decoder can take them. A baseline at chance (a quarter of
the needles, nothing copied) shows that the model cannot do the task. An arm below a baseline that is above chance shows
that the ablated heads were needed.

A haystack hides four names. A needle question gives a first name and asks for the last name. All needles have the same
wording, and their values are the choices of every question, so only attention to the right key helps. A model that
cannot see the keys prefers the same value for every question: chance is 25 % in every haystack.

Only the first tokens of the values are scored, as many as distinguish them. If that is one token, the four choices of a
question are one input, which is read once and not four times. The value directly follows its key. With words between
them ("The word of the baker is ...") the demo model, which finds six of ten names in 256 tokens, is near chance.

Copying questions show random tokens, then a part of them again; the model continues the part. Only attention to the
first occurrence shows the continuation (induction, arXiv 2209.11895), so the grade depends neither on knowledge nor on
language.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice
from math import ceil, isnan
from random import Random
from typing import Any, NamedTuple, cast

from transformers import PreTrainedTokenizerBase

from headscan.catalog import RECALL_FAMILIES
from headscan.errors import NotFiniteError
from headscan.options import SEEDS
from headscan.settings.corpus_settings import BosPolicy, TokenConfig
from headscan.settings.evaluation_settings import RecallError, RecallQuestions
from headscan.store.verdict_limits import QUESTIONS_PER_TEXT
from headscan.texts.sequences import special_tokens
from headscan.texts.token_requests import LogLikelihood, Request


def questions_per_length(recall: RecallQuestions, lengths: int) -> dict[str, int]:
    """Return the number of questions per length, by family, for ``lengths`` lengths."""
    if recall.questions is not None:
        return dict.fromkeys(RECALL_FAMILIES, recall.questions)
    return {
        family: QUESTIONS_PER_TEXT * ceil(number / (QUESTIONS_PER_TEXT * lengths))
        for family, number in recall.by_family().items()
    }


@dataclass(frozen=True)
class RecallQuestion:
    """A question as the requests whose likelihoods answer it.

    Attributes:
        task: Family and length in tokens, such as ``needle@512``.
        question: Its number in the task, from 0.
        requests: One per choice; a single one for a continuation.
        answer: Index of the right choice; None for a continuation, graded by its greedy tokens.
    """

    task: str
    question: int
    requests: tuple[Request, ...]
    answer: int | None
    target: str


def grade(question: RecallQuestion, likelihoods: Sequence[LogLikelihood]) -> dict[str, Any]:
    """Return a question's row of the table ``answers``. ``correct`` is (answer in M) / |M| for the set M of the
    likeliest choices, so that guessing stays at chance, or for a continuation the share of its tokens that are greedy.
    """
    values = [likelihood.log_likelihood for likelihood in likelihoods]
    if any(map(isnan, values)):
        raise NotFiniteError(
            f"log-likelihoods of question {question.question} of {question.task} are NaN, because the model's "
            "activations are NaN or infinite. Load it in another `dtype`"
        )
    if question.answer is None:
        (request,), (likelihood,) = question.requests, likelihoods
        correct = likelihood.greedy_tokens / request.scored_tokens
        response = str(likelihood.greedy_tokens)
    else:
        likeliest = [choice for choice, value in enumerate(values) if value == max(values)]
        correct = (question.answer in likeliest) / len(likeliest)
        response = str(likeliest[0])
    return {
        "task": question.task,
        "question": question.question,
        "correct": correct,
        "target": question.target,
        "response": response,
        "log_likelihoods": values,
        "recall": True,
    }


class RecallSeries(NamedTuple):
    """A text, then questions about it with their right answers; ``answers`` are the places of the scored tokens.

    A question of its own has one scored token after hundreds of others. A series shows for the same work how well a
    model recalls in several places of the text. It has no grade: its first answers help with the later ones.
    """

    ids: tuple[int, ...]
    answers: tuple[int, ...]


#: Most needles of a series.
_SERIES = 8


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
        return self._after("a", ".")

    def of_one_length(self, words: Sequence[str]) -> list[Ids]:
        """Return ids of words with equal numbers of tokens, the smallest number that enough words have."""
        by_size: dict[int, set[Ids]] = {}
        for word in words:
            ids = self.words(word)
            if self._tokenizer.unk_token_id not in ids:
                by_size.setdefault(len(ids), set()).add(ids)
        enough = [size for size, tokens in by_size.items() if len(tokens) >= _ENOUGH]
        size = min(enough) if enough else max(by_size, key=lambda size: len(by_size[size]), default=0)
        tokens = sorted(by_size.get(size, ()))
        if len(tokens) < QUESTIONS_PER_TEXT:
            raise RecallError(
                f"the tokenizer does not fit recall tasks: words with different tokens among {', '.join(words[:3])}, "
                f"...: {len(tokens)} (at least {QUESTIONS_PER_TEXT})"
            )
        return tokens

    def distinguished(self, values: Sequence[Ids]) -> tuple[list[Ids], int]:
        """Return values that begin differently, and the smallest number of first tokens in which enough of them differ:
        mostly one token, with which one input covers all choices of a question.
        """
        for size in range(1, len(values[0])):
            by_beginning = {value[:size]: value for value in reversed(values)}
            if len(by_beginning) >= min(_ENOUGH, len(values)):
                return sorted(by_beginning.values()), size
        return list(values), len(values[0])

    def _after(self, before: str, text: str) -> Ids:
        """Return ids of ``text`` after ``before``. If a token spans both, the ids are those of ``text`` alone."""
        context, whole = self._encode(before), self._encode(before + text)
        return whole[len(context) :] if whole[: len(context)] == context else self._encode(text)

    def _encode(self, text: str) -> Ids:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))


class _NeedleWords:
    """A tokenizer's keys and values of needles. The ``scored`` first tokens of a value distinguish it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokens = TextTokens(tokenizer)
        self._keys = self._tokens.of_one_length(KEYS)
        self._values, self.scored = self._tokens.distinguished(self._tokens.of_one_length(VALUES))
        self._wordings = [self._tokens.words(wording) for wording in WORDINGS]
        self._full_stop = self._tokens.full_stop()
        self._longest_cue = max(map(len, self._wordings)) + len(self._keys[0])
        self._longest = self._longest_cue + len(self._values[0]) + len(self._full_stop)

    def check_room(self, length: int, beginning: Ids) -> None:
        """Raise unless ``length`` tokens hold the needles, a question and as much filler as one needle."""
        asked = self._longest_cue + self.scored
        least = len(beginning) + (QUESTIONS_PER_TEXT + 1) * self._longest + asked - 1
        if length < least:
            raise RecallError(
                f"recall length of {length} tokens (at least {least} for {QUESTIONS_PER_TEXT} needles of"
                f" {self._longest} tokens)"
            )

    def series(self, length: int, beginning: Ids) -> int:
        """Return the number of needles of which ``length`` tokens hold the sentences, the questions and the answers."""
        fit = (length - len(beginning) - self._longest) // (2 * self._longest)
        return min(_SERIES, len(self._keys), len(self._values), fit)

    def draw(self, count: int, rng: Random) -> tuple[list[Ids], list[Ids]]:
        """Return the cues of needles, each a wording with a key, and their values."""
        wording = rng.choice(self._wordings)
        cues = [wording + key for key in rng.sample(self._keys, count)]
        return cues, rng.sample(self._values, count)

    def needles(self, cues: Sequence[Ids], values: Sequence[Ids]) -> list[Ids]:
        return [cue + value + self._full_stop for cue, value in zip(cues, values, strict=True)]

    def haystack(self, needles: Sequence[Ids], room: int, rng: Random) -> Ids:
        """Return needles, in their order, among filler of ``room`` tokens."""
        return _hide(needles, _filler(self._tokens, room, rng), rng)


def needle_questions(
    task: str, tokenizer: PreTrainedTokenizerBase, beginning: tuple[int, ...], length: int, questions: int, seed: int
) -> Iterator[RecallQuestion]:
    """Yield the questions of one length; four, of a multiple of 4, share a haystack and ask for one needle each. The
    choices have the same number of scored tokens and the order of the haystack, so the answer's index is also its
    quarter of the haystack. The model reads ``length`` tokens, including those of the ``beginning`` (BOS).
    """
    words = _NeedleWords(tokenizer)
    words.check_room(length, beginning)
    scored = words.scored
    for text in range(questions // QUESTIONS_PER_TEXT):
        rng = Random(f"{seed} {task} {text}")
        cues, choices = words.draw(QUESTIONS_PER_TEXT, rng)
        needles = words.needles(cues, choices)
        # The last token is predicted, not read.
        room = length + 1 - len(beginning) - sum(map(len, (*needles, cues[0]))) - scored
        haystack = beginning + words.haystack(needles, room, rng)
        for answer, cue in enumerate(cues):
            requests = tuple(Request(haystack + cue + value[:scored], scored) for value in choices)
            yield RecallQuestion(task, text * QUESTIONS_PER_TEXT + answer, requests, answer, str(answer))


def needle_series(
    tokenizer: PreTrainedTokenizerBase, beginning: tuple[int, ...], length: int, count: int, seed: int
) -> Iterator[RecallSeries]:
    """Yield ``count`` prompts of ``length`` tokens that ask for each needle of their haystack, in random order."""
    words = _NeedleWords(tokenizer)
    asked = words.series(length, beginning)
    for text in range(count):
        rng = Random(f"{seed} needles {length} {text}")
        cues, values = words.draw(asked, rng)
        needles = words.needles(cues, values)
        ids = beginning + words.haystack(needles, length - len(beginning) - 2 * sum(map(len, needles)), rng)
        answers: list[int] = []
        for needle in rng.sample(needles, asked):
            start = len(ids) + len(cues[0])
            answers += range(start, start + words.scored)
            ids += needle
        yield RecallSeries(ids, tuple(answers))


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
    """Insert the needles between the filler's sentences, in order, one at a random place of each quarter."""
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


#: Repeated tokens that mark a place in the passage, and tokens to copy from there.
_CUE, _COPIED = 8, 16
_SPAN = _CUE + _COPIED


def copying_questions(
    task: str, tokenizer: PreTrainedTokenizerBase, beginning: tuple[int, ...], length: int, questions: int, seed: int
) -> Iterator[RecallQuestion]:
    """Yield the questions of one length; four share a passage, and each copies from another quarter of it. The
    arguments are those of `needle_questions`.
    """
    # The last token is predicted, not read.
    size = length + 1 - len(beginning) - _SPAN
    if size < _SPAN:
        raise RecallError(
            f"recall length of {length} tokens (at least {length + _SPAN - size} to copy {_COPIED} tokens)"
        )
    common = _common_tokens(tokenizer, least=size)
    if len(common) < _SPAN:
        raise RecallError(
            f"the tokenizer does not fit recall tasks: {len(common)} printable tokens (at least {_SPAN} for copying)"
        )
    for text in range(questions // QUESTIONS_PER_TEXT):
        rng = Random(f"{seed} {task} {text}")
        passage = _passage(common, size, rng)
        for quarter in range(QUESTIONS_PER_TEXT):
            ids = (*beginning, *passage, *_part(passage, quarter, QUESTIONS_PER_TEXT, rng))
            yield RecallQuestion(
                task, text * QUESTIONS_PER_TEXT + quarter, (Request(ids, _COPIED),), None, str(_COPIED)
            )


def copying_series(
    tokenizer: PreTrainedTokenizerBase, beginning: tuple[int, ...], length: int, count: int, seed: int
) -> Iterator[RecallSeries]:
    """Yield ``count`` prompts of ``length`` tokens that copy from all quarters of their passage, in random order."""
    asked = min(QUESTIONS_PER_TEXT, (length - len(beginning)) // (2 * _SPAN))
    size = length - len(beginning) - asked * _SPAN
    common = _common_tokens(tokenizer, least=size)
    for text in range(count):
        rng = Random(f"{seed} copies {length} {text}")
        passage = _passage(common, size, rng)
        ids = (*beginning, *passage)
        answers: list[int] = []
        for quarter in rng.sample(range(asked), asked):
            answers += range(len(ids) + _CUE, len(ids) + _SPAN)
            ids += _part(passage, quarter, asked, rng)
        yield RecallSeries(ids, tuple(answers))


def _part(passage: Ids, number: int, parts: int, rng: Random) -> Ids:
    """Return tokens to repeat, from a random place in one of the equal parts of a passage."""
    start = int((number + rng.random()) / parts * (len(passage) - _SPAN + 1))
    return passage[start : start + _SPAN]


def _passage(tokens: list[int], size: int, rng: Random) -> tuple[int, ...]:
    """Draw random tokens without repetition. When all are used, all are drawn again in another order."""
    drawn: list[int] = []
    while len(drawn) < size:
        drawn += rng.sample(tokens, min(len(tokens), size - len(drawn)))
    return tuple(drawn)


def _common_tokens(tokenizer: PreTrainedTokenizerBase, least: int) -> list[int]:
    """Return ids of common text tokens: ``least`` or an eighth of the vocabulary, the larger of both.

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


#: Makes the questions of a task, from its name, the tokenizer, the tokens before a text, the length, the number of
#: questions and a seed; see `needle_questions`.
Generator = Callable[[str, PreTrainedTokenizerBase, Ids, int, int, int], Iterator[RecallQuestion]]
#: The generators of the families in `RECALL_FAMILIES`.
GENERATORS: dict[str, Generator] = {"needle": needle_questions, "copying": copying_questions}
#: Makes the series of a family from the same, without a name; the number is that of prompts.
SeriesGenerator = Callable[[PreTrainedTokenizerBase, Ids, int, int, int], Iterator[RecallSeries]]
SERIES: dict[str, SeriesGenerator] = {"needle": needle_series, "copying": copying_series}


def recall_series(
    tokenizer: PreTrainedTokenizerBase, length: int, count: int, seed: int
) -> dict[str, tuple[RecallSeries, ...]]:
    """Return ``count`` prompts of ``length`` tokens by family, for calibration; a family without series has questions.
    `recall_questions` has checked that the tokenizer and the length hold them.
    """
    beginning = _beginning(tokenizer, "auto")
    return {
        family: tuple(SERIES.get(family, _alone(family))(tokenizer, beginning, length, count, seed))
        for family in RECALL_FAMILIES
    }


#: Evaluations draw questions with seeds below `SEEDS`, prompts of plans and of held-out losses with as many from there
#: on.
_SERIES_SEED = 2 * SEEDS


def _alone(family: str) -> SeriesGenerator:
    """Return a generator of series of one question, none of which an evaluation or another prompt asks."""
    generator = GENERATORS[family]

    def series(
        tokenizer: PreTrainedTokenizerBase, beginning: Ids, length: int, count: int, seed: int
    ) -> Iterator[RecallSeries]:
        task = f"{family}@{length - 1}"
        for question in generator(task, tokenizer, beginning, length - 1, count, seed + _SERIES_SEED):
            ids, scored = question.requests[question.answer or 0]
            yield RecallSeries(ids, tuple(range(len(ids) - scored, len(ids))))

    return series


def recall_questions(
    tokenizer: PreTrainedTokenizerBase,
    recall: RecallQuestions,
    max_tokens: int | None,
    *,
    bos: str,
    first_seed: int = 0,
) -> list[RecallQuestion]:
    """Return the questions, by length and then by task, whose requests make the model read exactly the length in the
    task's name. The first questions of a length do not depend on other lengths. ``max_tokens`` None means no limit;
    ``bos`` is ``auto`` (as the tokenizer does), ``always`` or ``never``. The seed of the settings counts from
    ``first_seed``.
    """
    beginning = _beginning(tokenizer, bos)
    lengths = recall.lengths_within(max_tokens)
    count, seed = questions_per_length(recall, len(lengths)), first_seed + recall.seed
    return [
        question
        for length in lengths
        for family in RECALL_FAMILIES
        for question in GENERATORS[family](f"{family}@{length}", tokenizer, beginning, length, count[family], seed)
    ]


@contextmanager
def fixed_by(fix: str) -> Iterator[None]:
    """Add the fix, which depends on the caller's settings, to the error of questions that a tokenizer or a length
    cannot hold.
    """
    try:
        yield
    except RecallError as problem:
        raise RecallError(f"{problem}. {fix}") from problem


def _beginning(tokenizer: PreTrainedTokenizerBase, bos: str) -> tuple[int, ...]:
    """Return the tokens before a question, as in a benchmark."""
    if bos != "always":
        return special_tokens(tokenizer, TokenConfig(2, bos=cast(BosPolicy, bos))).prefix
    for first in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if first is not None:
            return (int(first),)
    raise RecallError("`bos=always`: the tokenizer has neither BOS nor EOS. Use `bos=auto` or `bos=never`")
