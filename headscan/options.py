"""Options: what the command line shows of a settings class.

    @dataclass(frozen=True)
    class TokenPlan:
        min_tokens: Annotated[int, Option("minimum sequence length in tokens", least=1)] = 2

Type and default follow from the field. `headscan.pipelines.cli.option_parser` makes the parser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: About four months in seconds. Longer waits overflow in threads and locks.
LONGEST_WAIT = 1e7


@dataclass(frozen=True)
class Option:
    """The command-line option of a field.

    Attributes:
        help: Noun phrase with unit; the default is added unless the text names it.
        flag: Name of the option, or several with spaces between them; None makes it from the field's name. A name
            without dashes is a positional argument.
        metavar: Name of the value in help; None uses that of the option.
        choices: Permitted values; None reads them from a `Literal`.
        parse: Returns one value of a text; None follows the type.
        least, most: Limits of a number, included.
        above, below: Limits of a number, excluded.
        kind: Noun for one of ``names``.
        names: Values of a text; errors propose the nearest.
        sets: Words that stand for several names.
        spaces: Values may also be separated by spaces.
        negated: The option sets False.
        repeated: The option may be repeated; each adds a value.
        one_of: Name of a group of options that exclude each other.
        required: The option, or one of its group, is required.
    """

    help: str
    flag: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    parse: Callable[[str], Any] | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    kind: str = "name"
    names: Iterable[str] | None = None
    sets: Mapping[str, tuple[str, ...]] | None = None
    spaces: bool = False
    negated: bool = False
    repeated: bool = False
    one_of: str | None = None
    required: bool = False


@dataclass(frozen=True)
class Group:
    """A settings class inside another one, whose options form a group of the help page.

    Attributes:
        title: Title of the group; empty adds the options to the group around.
    """

    title: str = ""
