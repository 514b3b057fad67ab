"""What messages quote from other errors, and the names that they list."""

from __future__ import annotations

import pytest

from headscan.errors import HeadscanError, ModelLoadError, check_type, first_line, one_line, unknown_name
from headscan.models.model_facts import typed_line

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
