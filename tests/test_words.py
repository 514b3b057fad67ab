"""Printed words have one style: percent signs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest

from headscan.text_tables import percent
from tests.sources import ROOT, modules

#: Names of arms, which stores hold: the sign follows the number at once.
_NAMES = {
    "engine/arms.py",
    "steps/plan_arms.py",
    "steps/prune/pruned_arms.py",
    "steps/referee/run_labelled_referee.py",
    "steps/referee/run_referee.py",
    "study/study_candidates.py",
}


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.25, "25 %"),
        (0.125, "12.5 %"),
        (1 / 3, "33.3 %"),
        (1 / 12, "8.33 %"),
        (1, "100 %"),
        (0.9996, "100 %"),
        (0.0003, "0.03 %"),
        (-1e-9, "0 %"),
        (12.34, "1,234 %"),
        (float("nan"), "nan %"),
        (None, "–"),
    ],
)
def test_a_share_in_percent_is_short(share: float | None, text: str) -> None:
    assert percent(share) == text


def signs(source: str) -> Iterator[str]:
    """Texts and formats in which a percent sign follows a number or a value at once."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            for before, part in pairwise(node.values):
                follows = isinstance(before, ast.FormattedValue) and isinstance(part, ast.Constant)
                if follows and str(part.value).startswith("%"):
                    yield str(part.value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"\d%(?!\w)", node.value):
            yield node.value


def test_percent_signs_follow_a_space() -> None:
    """``percent`` writes shares, and a space is before the sign of any other number; arms have it in their names."""
    assert list(signs('f"{a:.1%} {b:%Y} {c}% {d} %"; "5% x"; "5 %"; "%d"')) == ["% ", "5% x", ".1%"]
    found = {}
    for path in modules().values():
        name = path.relative_to(ROOT / "headscan").as_posix()
        at = list(signs(path.read_text("utf-8")))
        if name in _NAMES:
            assert at and not any(re.search(r"\d%", text) for text in at), f"{name} names no arm: {at}"
        elif at:
            found[name] = at
    # An example of a name in the help of a verb.
    assert {name: [re.findall(r"\w+ \d+%", text) for text in at] for name, at in found.items()} == {
        "steps/evaluate.py": [["gate 20%"]],
        "cli/roles.py": [["output_norm_ln 25%"]],
    }
