"""Options: what the command line shows of a settings class, and its limits.

    @dataclass(frozen=True)
    class TokenConfig:
        min_tokens: Annotated[int, Option("minimum sequence length in tokens", least=1)] = 2

        def __post_init__(self) -> None:
            check_limits(self, CorpusError)

Type and default follow from the field. `headscan.settings.option_values` makes settings of values, and
`headscan.cli.option_parser` the parser. This module imports no library.
"""

from __future__ import annotations

import dataclasses
import reprlib
import sys
from abc import ABC
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from math import isfinite
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from headscan.errors import HeadscanError, unknown_name

#: Tokens of one forward pass, with padding, unless the user sets another number.
BATCH_TOKENS = 8192
#: About four months in seconds. Longer waits overflow in threads and locks.
LONGEST_WAIT = 1e7
#: Seconds to wait by default while another process has the store open.
LOCK_TIMEOUT = 30.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a number, or of each number of a tuple. A float must also be finite.

    Attributes:
        least, most: Limits, included.
        above, below: Limits, excluded.
        multiple: The number is a multiple of this one.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    multiple: int | None = None

    def broken_by(self, value: float) -> str | None:
        """Return the limit that a number breaks, with the verb that corrects it; None if it keeps all."""
        multiple = "" if self.multiple is None else f"a multiple of {self.multiple}"
        if not isinstance(value, Integral) and not isfinite(value):
            return "(limit finite numbers). Change"
        if self.least is not None and value < self.least:
            return f"(limit {_short(self.least)}{', ' * bool(multiple)}{multiple}). Raise"
        if self.above is not None and value <= self.above:
            return f"(limit above {_short(self.above)}). Raise"
        if self.most is not None and value > self.most:
            return f"(limit {_short(self.most)}). Lower"
        if self.below is not None and value >= self.below:
            return f"(limit below {_short(self.below)}). Lower"
        if self.multiple is not None and value % self.multiple:
            return f"(limit {multiple}). Change"
        return None


def _short(number: float) -> str:
    return str(number) if isinstance(number, Integral) else f"{number:g}"


#: Numbers of settings that are no options.
Count = Annotated[int, Limits(least=1)]
#: Seeds of settings are below this one: recall prompts that rank heads are made with those from there on, so that no
#: setting asks the questions that ranked the heads.
SEEDS = 2**32
Seed = Annotated[int, Limits(least=0, below=SEEDS)]


class Field(NamedTuple):
    """A field of a settings class.

    Attributes:
        kind: Type of one value: int, float, bool, or str for all others; ``many`` are a tuple.
        choices: Values of a `Literal`.
        classes: Classes of a value, if the first is a dataclass or an abstract class.
        default: MISSING if the field is required.
        marks: Its other annotations, such as `Limits`, `Option` and `Group`.
    """

    name: str
    kind: type = str
    many: bool = False
    optional: bool = False
    choices: tuple[str, ...] = ()
    classes: tuple[Any, ...] = ()
    default: Any = None
    marks: tuple[Any, ...] = ()


_NO_FIELD = Field("")


@dataclass(frozen=True)
class Option(Limits):
    """The command-line option of a field.

    Attributes:
        help: Noun phrase with unit; the default is added unless the text names it.
        flag: Name of the option, or several with spaces between them; None makes it from the field's name. A name
            without dashes is a positional argument. A flag of its own sets False where the default is True.
        metavar: Name of the value in help; None uses N for numbers, and the name of the option for others.
        parse: Reads a value from its word; None follows the field's type.
        names: Values of a text; None uses those of a `Literal`. Errors propose the nearest.
        kind: Noun for one of ``names`` in errors; None uses the name of the option.
        sets: Words that stand for several values, or for none.
        spaces: Values may also be separated by spaces.
        repeated: Values are given one by one, as in ``--run A --run B``, and may contain commas.
        one_of: Name of a group of options that exclude each other.
        required: The option, or one of its group, is required on the command line.
        needs: Conditions under which the option has an effect, as the command line writes them: ``--tasks`` is given,
            ``no --tasks`` is not, ``--method damage,random`` has one of these values. " or " joins alternatives, and
            "; " conditions of which all must hold.
        path, field, default, group: What `options_of` finds: names of the fields that lead to the option, its field,
            its value if it is not given (MISSING if it is required), and the title of its group.
    """

    help: str
    flag: str | None = None
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    names: Iterable[str] | None = None
    kind: str | None = None
    sets: Mapping[str, tuple[Any, ...]] | None = None
    spaces: bool = False
    repeated: bool = False
    one_of: str | None = None
    required: bool = False
    needs: str = ""
    path: tuple[str, ...] = ()
    field: Field = _NO_FIELD
    default: Any = None
    group: str = ""

    @property
    def flags(self) -> list[str]:
        """All names on the command line."""
        return (self.flag or f"--{self.path[-1].replace('_', '-')}").split()

    @property
    def key(self) -> str:
        """Names of the fields that lead to it, with dots."""
        return ".".join(self.path)

    @property
    def is_required(self) -> bool:
        """The command line needs it in any case."""
        return self.default is MISSING or (self.required and self.one_of is None)

    @property
    def negated(self) -> bool:
        """The option sets False."""
        return self.default is True and self.flag is not None


#: A class of settings.
Settings = TypeVar("Settings")


def short(cls: type[Settings]) -> type[Settings]:
    """Shorten what `repr` and `help` show of a dataclass of settings: fields that differ from their defaults, and types
    without the marks of the command line.
    """

    def shown(self: Any) -> str:
        given = [f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if _is_given(self, each)]
        return f"{type(self).__name__}({', '.join(given)})"

    marked = cls.__init__.__annotations__
    cls.__init__.__annotations__ = {name: _unmarked(hint) for name, hint in marked.items()}
    cls.__repr__ = shown  # type: ignore[method-assign]
    return cls


def _is_given(settings: Any, field: dataclasses.Field[Any]) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    value = getattr(settings, field.name)
    return field.repr and (default is MISSING or value != default)


def _unmarked(hint: Any) -> Any:
    """Return the type of an annotation; a text is cut at the first comma outside of brackets."""
    if not isinstance(hint, str) or not hint.startswith("Annotated["):
        return hint
    depth = 0
    for place, letter in enumerate(hint[len("Annotated[") :]):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            return hint[len("Annotated[") :][:place]
    return hint


#: Attention that is named on the command line.
Site = Annotated[Literal["self", "encoder", "cross", "merged"], Option("attention of the layer")]


@dataclass(frozen=True)
class Group:
    """A settings class inside another one, as a titled group of the help page; without a title, part of the group
    around.

    Attributes:
        needs: Conditions of its options, except for the fields that ``free`` names, with spaces between them.
        switch: Option of a group whose settings may be None: ``--no-NAME`` gives None.
    """

    title: str = ""
    needs: str = ""
    free: str = ""
    switch: Option | None = None


@cache
def declared_fields(cls: Any) -> tuple[Field, ...]:
    """Return the fields of a settings class. One whose type is imported for type checkers alone takes any value."""
    found = []
    for each in fields(cls):
        home = next(base for base in cls.__mro__ if each.name in vars(base).get("__annotations__", {}))
        hint = vars(home)["__annotations__"][each.name]
        try:
            hint = eval(hint, vars(sys.modules[home.__module__])) if isinstance(hint, str) else hint
        except NameError:
            hint = None
        hint, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        default = each.default if each.default_factory is MISSING else each.default_factory()
        is_union = get_origin(hint) in (Union, UnionType)
        kinds = [kind for kind in get_args(hint) if kind is not NoneType] if is_union else [hint]
        many, optional = get_origin(kinds[0]) is tuple, is_union and NoneType in get_args(hint)
        kind, choices, classes = get_args(kinds[0])[0] if many else kinds[0], (), ()
        if get_origin(kind) is Literal:
            choices = get_args(kind)
        elif isinstance(kind, type) and (is_dataclass(kind) or ABC in kind.__mro__):  # `issubclass` also finds int
            classes = (kind, *(get_origin(other) or other for other in kinds[1:]))
        kind = kind if kind in (int, float, bool) and len(kinds) == 1 else str
        found.append(Field(each.name, kind, many, optional, choices, classes, default, tuple(marks)))
    return tuple(found)


def check_limits(settings: Any, error: type[HeadscanError]) -> None:
    """Check the fields of settings. Turn lists into tuples, because settings are compared and hashed, and a text or a
    path into the settings of its field: ``corpus="texts/"`` becomes ``CorpusSpec("texts/")``.

    Raise ``error`` if a number breaks its `Limits` or those of its `Option`, or is no number, if a bool is neither True
    nor False, if a value is none of the choices of its `Literal` or `Option`, if a tuple is something else, such as one
    text, and if a value, or one of a tuple, is no instance of the field's dataclass or abstract class. For a name that
    is none of an option's names, raise UnknownNameError.
    """
    cls: Any = type(settings)
    for field in declared_fields(cls):
        name, given = field.name, getattr(settings, field.name)
        if given is None and field.optional:
            continue
        is_settings = len(field.classes) == 1 and is_dataclass(field.classes[0]) and not field.many
        if is_settings and isinstance(given, str | PathLike):
            given = field.classes[0](given)
            object.__setattr__(settings, name, given)
        if field.many and not isinstance(given, tuple | list):
            raise error(f"`{name}={given!r}` is no tuple. Change `{name}`")
        if isinstance(given, list):
            object.__setattr__(settings, name, tuple(given))
        limits = [mark for mark in field.marks if isinstance(mark, Limits)]
        for value in given if field.many else (given,):
            if field.classes and not isinstance(value, field.classes):
                # An abstract class stands for those that implement it.
                made = [
                    each for cls in field.classes for each in (cls.__subclasses__() if ABC in cls.__bases__ else [cls])
                ]
                passed = [f"{'an' if each.__name__[0] in 'AEIOU' else 'a'} {each.__name__}" for each in made]
                kinds = " or ".join(cls.__name__ for cls in field.classes)
                raise error(f"`{name}={reprlib.repr(value)}` is no {kinds}. Pass {' or '.join(passed)}")
            for limit in limits or (None,):
                if problem := value_problem(value, field, limit, error, name):
                    raise problem


def value_problem(
    value: Any, field: Field, limits: Limits | None, error: type[HeadscanError], name: str = ""
) -> HeadscanError | None:
    """Return the error of one value that does not fit; None if it does. The message repeats the field's ``name``, if it
    is given.
    """

    def problem(shown: object, why: str) -> HeadscanError:
        return error(f"`{name}={shown}` {why} `{name}`" if name else f"{shown} {why} it")

    names = (isinstance(limits, Option) and limits.names) or field.choices
    if limits is not None and field.kind in (int, float):
        numbers: Any = Integral if field.kind is int else Real
        if isinstance(value, bool) or not isinstance(value, numbers):
            return problem(repr(value), f"is not a {'whole ' * (field.kind is int)}number. Change")
        if broken := limits.broken_by(value):
            return problem(_short(value), broken)
    elif field.kind is bool and not isinstance(value, bool):
        return problem(repr(value), "is not True or False. Change")
    elif names and value not in names:
        if isinstance(limits, Option) and limits.kind is not None:
            return unknown_name(limits.kind, value, names)
        near = get_close_matches(str(value), names, n=3)
        choose = f"; did you mean {', '.join(near)}?" if near else f". Choose {' or '.join(names)}"
        return error((f"`{name}={value!r}`" if name else repr(value)) + f" is unknown{choose}")
    return None
