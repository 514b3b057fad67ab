"""Flags instead of parameter names in the messages of the library."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Names in parsed options that are no flags.
_NO_FLAGS = {"build_parser", "command", "model", "verb", "version"}
#: Parameter values whose flag has another name.
_OTHER_NAMES = {"safetensors=False": "--pickled-weights"}


def with_flags(text: str, names: Iterable[str]) -> str:
    """Return a library's message with the flags of a command line.

    ``replicas=3`` becomes ``--replicas 3``, ``confirm=True`` and ``confirm=False`` become ``--confirm`` and
    ``--no-confirm``, and a name in backticks becomes its flag.

    Args:
        names: Names of the parsed options; other parameters stay as they are.
    """
    for pair, other in _OTHER_NAMES.items():
        text = text.replace(pair, other)
    known = "|".join(sorted(set(names) - _NO_FLAGS, key=len, reverse=True))
    if not known:
        return text

    def flag(found: re.Match[str]) -> str:
        name = (found["bare"] or found["name"]).replace("_", "-")
        if found["bare"] or found["value"] == "True":
            return f"--{name}"
        return f"--no-{name}" if found["value"] == "False" else f"--{name} "

    return re.sub(rf"`(?P<bare>{known})`|(?<![\w./-])(?P<name>{known})=(?P<value>(?:True|False)\b)?", flag, text)
