"""Make text from stores, corpora and models safe for a terminal."""

from __future__ import annotations

import re

#: Control characters (C0, DEL, C1), line separators, marks that change the direction of text, and lone surrogates:
#: they move the cursor, recolour or retitle a terminal, or make text read as something else.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return ``text`` with every unsafe character escaped.

    The escapes are like ``\x1b``; line ends are unsafe, too.
    """
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), text)


def printable_lines(text: str) -> str:
    """Return ``printable`` of each line and keep the line ends."""
    return "\n".join(map(printable, text.split("\n")))


def show(text: str) -> None:
    """Print lines to standard output, safe for a terminal."""
    print(printable_lines(text))
