"""Limits of settings, and what messages quote from other errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from headscan.errors import (
    GateError,
    HeadscanError,
    ModelLoadError,
    UnknownNameError,
    check_type,
    first_line,
    one_line,
    unknown_name,
)
from headscan.models.model_facts import typed_line
from headscan.options import Count, Limits, Option, Seed, check_limits


@dataclass(frozen=True)
class Settings:
    count: Count = 1
    seed: Seed = 0
    share: Annotated[float | None, Option("share", above=0, below=1)] = None
    rate: Annotated[float, Limits()] = 0.1
    sizes: Annotated[tuple[int, ...], Option("sizes", least=8, multiple=4)] = (8,)
    mode: Annotated[Literal["one", "two"], Option("mode")] = "one"
    names: Annotated[tuple[str, ...], Option("names", kind="score", names=("left", "right"))] = ()
    side: Literal["left", "right"] | None = None
    sides: tuple[Literal["left", "right"], ...] = ()
    words: tuple[str, ...] = ()
    free: int = -1
    inner: Limits | None = None
    inners: tuple[Limits, ...] = ()
    flag: bool | None = None

    def __post_init__(self) -> None:
        check_limits(self, GateError)


def test_values_within_their_limits() -> None:
    Settings()
    Settings(
        count=np.int64(2),
        share=np.float32(0.5),
        rate=0,
        sizes=(8, 12),
        mode="two",
        names=("right",),
        side="left",
        words=("",),
    )
    Settings(side="left", sides=("left", "right"), words=("any",))
    Settings(inner=Option("help"), inners=(Limits(),))
    listed = Settings(share=None, sizes=[16], count=10**400, flag=True)  # type: ignore[arg-type]
    assert listed.sizes == (16,) and hash(listed) == hash(Settings(sizes=(16,), count=10**400, flag=True))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 0}, "`count=0` (limit 1). Raise `count`"),
        ({"seed": -1}, "`seed=-1` (limit 0). Raise `seed`"),
        ({"share": 0}, "`share=0` (limit above 0). Raise `share`"),
        ({"share": 1.5}, "`share=1.5` (limit below 1). Lower `share`"),
        ({"share": float("nan")}, "`share=nan` (limit finite numbers). Change `share`"),
        ({"rate": float("inf")}, "`rate=inf` (limit finite numbers). Change `rate`"),
        ({"rate": None}, "`rate=None` is not a number. Change `rate`"),
        ({"count": "8"}, "`count='8'` is not a whole number. Change `count`"),
        ({"count": 8.5}, "`count=8.5` is not a whole number. Change `count`"),
        ({"count": True}, "`count=True` is not a whole number. Change `count`"),
        ({"sizes": (8, 4)}, "`sizes=4` (limit 8, a multiple of 4). Raise `sizes`"),
        ({"sizes": (8, 9)}, "`sizes=9` (limit a multiple of 4). Change `sizes`"),
        ({"sizes": 8}, "`sizes=8` is no tuple. Change `sizes`"),
        ({"mode": "three"}, "`mode='three'` is unknown. Choose one or two"),
        ({"side": "up"}, "`side='up'` is unknown. Choose left or right"),
        ({"sides": ("left", "up")}, "`sides='up'` is unknown. Choose left or right"),
        ({"sides": "left"}, "`sides='left'` is no tuple. Change `sides`"),
        ({"words": "left"}, "`words='left'` is no tuple. Change `words`"),
        ({"inner": 512}, "`inner=512` is no Limits. Pass a Limits"),
        ({"inners": (Limits(), None)}, "`inners=None` is no Limits. Pass a Limits"),
        ({"flag": "no"}, "`flag='no'` is not True or False. Change `flag`"),
        ({"names": "left"}, "`names='left'` is no tuple. Change `names`"),
    ],
)
def test_errors_name_field_value_limit_and_fix(given: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadscanError) as found:
        Settings(**given)
    assert type(found.value) is GateError and str(found.value) == message


def test_names_propose_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown score 'rigt'; did you mean right\?"):
        Settings(names=("rigt",))


#: A message as torch writes it: one line that is as long as a page.
PAGE = RuntimeError("flex_attention got " + "Tensor(shape=[1, 2, 3]) " * 80 + "\nand a second line")


def test_a_quoted_error_has_one_line_of_300_characters_at_most() -> None:
    for quote in (first_line, one_line, typed_line):
        line = quote(PAGE)
        assert "\n" not in line and line.endswith("...") and len(line) <= 300 + len("RuntimeError: ")
        assert "flex_attention got Tensor(shape=[1, 2, 3])" in line
    assert first_line(ValueError("short\nmore")) == "short" and one_line(ValueError("short\n more")) == "short more"
    assert first_line(ValueError()) == one_line(ValueError()) == typed_line(ValueError()) == "ValueError"
    assert first_line(RuntimeError("\x1b[36mray::Worker\x1b[39m died")) == "ray::Worker died"


def test_an_own_error_keeps_its_fix() -> None:
    own = HeadscanError(f"{'a long path/' * 40} is no model. Give another")
    assert first_line(own).endswith("Give another")


def test_a_type_is_named_with_what_to_pass() -> None:
    check_type("lm", 3, int, "a number", ModelLoadError)
    with pytest.raises(ModelLoadError, match=r"^`lm` is of type str 'gpt2'\. Pass a model$"):
        check_type("lm", "gpt2", int, "a model", ModelLoadError)


def test_a_name_of_another_type_is_unknown() -> None:
    assert str(unknown_name("score", {"a": 1}, ["entropy"])) == "unknown score {'a': 1}. Choose one of entropy"  # type: ignore[arg-type]
