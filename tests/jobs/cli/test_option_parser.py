"""Parsers from settings classes: defaults, nesting, functions, errors that name options."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from headscan.cli.main import VERBS, verb_class
from headscan.cli.option_parser import UsageError, VerbParser, options_of, read_settings, with_flags
from headscan.cluster.placement_base import PLACEMENTS, PlacementRequest
from headscan.errors import HeadscanError
from headscan.options import Group, Option


@dataclass(frozen=True)
class Tokens:
    most: Annotated[int, Option("most tokens", flag="--max-tokens")] = 9
    least: Annotated[int, Option("fewest tokens", flag="--min-tokens", least=1)] = 2
    mode: Annotated[Literal["chunk", "pack"], Option("cut")] = "chunk"

    def __post_init__(self) -> None:
        if self.most < self.least:
            raise HeadscanError(f"`least={self.least}` is above {self.most}. Lower `least`")


@dataclass(frozen=True)
class Data:
    path: Annotated[str, Option("file", flag="--data")]
    limit: Annotated[int | None, Option("most examples (default: all)", flag="--limit-examples", least=1)] = None


@dataclass(frozen=True)
class Questions:
    count: Annotated[int, Option("number of questions", flag="--questions", least=1)] = 4


@dataclass(frozen=True)
class Retries:
    times: Annotated[int, Option("number of retries", least=0, most=9)] = 3

    def __post_init__(self) -> None:
        if self.times == 7:
            raise HeadscanError("`times=7` is unlucky. Change `times`")


@dataclass(frozen=True, kw_only=True)
class Verb:
    """do something

    headscan verb MODEL
    """

    model: Annotated[str, Option("model", flag="MODEL")]
    share: Annotated[float, Option("share of heads", above=0, below=1)] = 0.5
    scores: Annotated[
        tuple[str, ...], Option("scores", kind="score", names=("one", "two"), sets={"all": ("one", "two")})
    ] = ()
    sizes: Annotated[tuple[int, ...], Option("sizes", least=1, spaces=True)] = (1, 2)
    fast: Annotated[bool, Option("fast")] = False
    skipped: Annotated[int, Option("skipped heads", least=0)] = 0
    confirm: Annotated[bool, Option("confirm")] = True
    safe: Annotated[bool, Option("unsafe", flag="--unsafe")] = True
    tokens: Annotated[Tokens, Group("tokens")]
    ask: Annotated[Questions | None, Group("questions", switch=Option("also ask"))] = field(default_factory=Questions)
    data: Annotated[Data | None, Group("data")] = None
    retries: Annotated[Retries, Group("retries")] = field(default_factory=lambda: Retries(5))


def read(*words: str) -> Verb:
    return read_settings("verb", Verb, words)


def test_defaults_stand_in_the_settings_alone() -> None:
    verb = read("m")
    assert (verb.model, verb.share, verb.sizes, verb.data) == ("m", 0.5, (1, 2), None) and verb.confirm and verb.safe
    assert (verb.retries, verb.tokens, verb.ask) == (Retries(5), Tokens(9), Questions(4))
    text = " ".join(VerbParser(Verb).format_help().split())
    assert "(default: 0.5)" in text and "(default: 1,2)" in text and "(default: yes)" in text
    assert "skipped heads (default: 0)" in text and "fast (default" not in text
    assert text.count("(default: all)") == 1 and "number of retries (default: 5)" in text


def test_a_command_line_becomes_settings() -> None:
    words = ["--scores", "two,one,two", "--sizes", "3,4", "5", "--fast", "--no-confirm", "--unsafe", "--mode", "pack"]
    verb = read("m", *words, "--data", "x.tsv", "--limit-examples", "3", "--times", "0")
    assert (verb.scores, verb.sizes) == (("two", "one"), (3, 4, 5))
    assert (verb.fast, verb.confirm, verb.safe) == (True, False, False)
    assert (verb.tokens, verb.data, verb.retries.times) == (Tokens(9, 2, "pack"), Data("x.tsv", 3), 0)
    assert read("m", "--no-ask").ask is None and read("m", "--ask", "--questions", "2").ask == Questions(2)
    assert read("m", "--scores", "all").scores == ("one", "two")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: MODEL"),
        (["m", "--share", "1"], "--share: 1 (limit below 1). Lower it"),
        (["m", "--times", "10"], "--times: 10 (limit 9). Lower it"),
        (["m", "--times", "7"], "--times 7 is unlucky. Change --times"),
        (["m", "--scores", "twi"], "unknown score 'twi'; did you mean two?"),
        (["m", "--mode", "pick"], "--mode: 'pick' is unknown; did you mean pack?"),
        (["m", "--limit-examples", "3"], "--limit-examples has no effect without --data: add --data, or leave it out"),
        (["m", "--no-ask", "--questions", "4"], "--questions has no effect with --no-ask: leave one of them out"),
        (["m", "--min-tokens", "10"], "--min-tokens 10 is above 9. Lower --min-tokens"),
    ],
)
def test_errors_name_options(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as found:
        read(*words)
    assert message in str(found.value)


def test_messages_of_a_run_have_the_flags_of_the_verb() -> None:
    assert with_flags("`least=9` is above 4", Verb) == "--min-tokens 9 is above 4"
    assert with_flags("(`safe=False`), `confirm=False`", Verb) == "(--unsafe), --no-confirm"


def test_placements_are_those_that_can_be_chosen() -> None:
    assert options_of(PlacementRequest)["placement"].names == ("auto", *PLACEMENTS)


@dataclass(frozen=True, kw_only=True)
class Both:
    own: Annotated[int, Option("of method b", needs="--method b")] = 0
    free: Annotated[int, Option("of all methods")] = 0
    freed: Annotated[int, Option("of any method")] = 0


@dataclass(frozen=True, kw_only=True)
class Methods:
    """use a method"""

    way: Annotated[Literal["a", "b", "c"], Option("method", flag="--method")] = "a"
    seed: Annotated[int | None, Option("seed", needs="--method a,c")] = None
    fast: Annotated[bool, Option("fast", needs="no --seed; --method c or --free")] = False
    retries: Annotated[Retries, Group(needs="--method c")]
    both: Annotated[Both, Group("both", needs="--method a,b", free="freed")]


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("--method b --seed 0", "--seed has no effect on --method b (only on a, c): leave it out"),
        ("--times 4", "--times has no effect on --method a (only on c): leave it out"),
        ("--times 3", "--times has no effect on --method a (only on c): leave it out"),
        ("--method c --free 0", "--free has no effect on --method c (only on a, b): leave it out"),
        ("--own 0", "--own has no effect on --method a (only on b): leave it out"),
        ("--method c --seed 0 --fast", "--fast has no effect with --seed: leave one of them out"),
        ("--fast", "--fast has no effect on --method a (only on c): leave it out"),
    ],
)
def test_an_option_that_the_others_leave_without_effect_is_refused(words: str, refusal: str) -> None:
    """Options of a group have its conditions, too."""
    with pytest.raises(UsageError, match=f"^{re.escape(refusal)}$"):
        read_settings("methods", Methods, words.split())


def test_options_with_an_effect_are_taken() -> None:
    assert read_settings("methods", Methods, "--method b --own 1 --free 2 --fast".split()).both == Both(own=1, free=2)
    assert read_settings("methods", Methods, "--method c --times 4 --seed 1 --freed 0".split()).retries.times == 4
    assert read_settings("methods", Methods, "--method c --fast".split()).fast


def test_conditions_name_options_of_the_verb_and_values_that_it_takes() -> None:
    checked = 0
    for verb in VERBS:
        options = options_of(verb_class(verb)).values()
        for option in options:
            for condition in filter(None, re.split("; | or ", option.needs)):
                flag, _, values = condition.removeprefix("no ").partition(" ")
                [other] = [each for each in options if flag in each.flags]
                known = other.names or other.field.choices
                assert not values or other.parse or set(values.split(",")) <= set(known), (verb, condition)
                checked += 1
    assert checked > 50
