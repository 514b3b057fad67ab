"""Options: what the command line shows of a settings class, and its limits.

    @dataclass(frozen=True)
    class TokenConfig:
        min_tokens: Annotated[int, Option("minimum sequence length in tokens", least=1)] = 2

        def __post_init__(self) -> None:
            check_limits(self, CorpusError)

Type and default follow from the field. `headscan.cli.option_parser` makes the parser. This module imports no
library.
"""

from __future__ import annotations

import reprlib
import sys
from abc import ABC
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from math import isfinite
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

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

    def problem(self, value: float) -> tuple[str, str] | None:
        """Return the limit that a number breaks, and the verb that corrects it; None if it keeps all."""
        if not isinstance(value, Integral) and not isfinite(value):
            return "finite numbers", "Change"
        if self.least is not None and value < self.least:
            multiple = f", a multiple of {self.multiple}" if self.multiple else ""
            return f"{_short(self.least)}{multiple}", "Raise"
        if self.above is not None and value <= self.above:
            return f"above {_short(self.above)}", "Raise"
        if self.most is not None and value > self.most:
            return _short(self.most), "Lower"
        if self.below is not None and value >= self.below:
            return f"below {_short(self.below)}", "Lower"
        if self.multiple is not None and value % self.multiple:
            return f"a multiple of {self.multiple}", "Change"
        return None


def _short(number: float) -> str:
    return str(number) if isinstance(number, Integral) else f"{number:g}"


#: Numbers of settings that are no options.
Count = Annotated[int, Limits(least=1)]
#: Seeds of settings are below this one: recall prompts that rank heads are made with those from there on, so that no
#: setting asks the questions that ranked the heads.
SEEDS = 2**32
Seed = Annotated[int, Limits(least=0, below=SEEDS)]


@dataclass(frozen=True, kw_only=True)
class Needs:
    """A condition under which an option has an effect: another option of the verb is given, or has some value.

    For example, a corpus of replacements has ``Needs(key="heads.kind", values=("mean", "resample"))``: it has no effect
    if heads are replaced by zero.

    Attributes:
        key: The other option: the names of the fields that lead to it, with dots, from the class that declares the
            condition or from a class around it.
        values: Values of the other option under which this one has an effect; empty: any value that is given.
        named: Noun for ``values`` in the error; None lists them.
        absent: This option has an effect only if the other one is not given.
        unless: Another condition that is enough.
        of: Fields of the group whose options need this; empty: all of them.
    """

    key: str
    values: tuple[Any, ...] = ()
    named: str | None = None
    absent: bool = False
    unless: Needs | None = None
    of: tuple[str, ...] = ()


#: Condition of options of tasks and texts, which labelled examples replace.
NO_DATA = Needs(key="data.path", absent=True)


@dataclass(frozen=True)
class Option(Limits):
    """The command-line option of a field.

    Attributes:
        help: Noun phrase with unit; the default is added unless the text names it.
        flag: Name of the option, or several with spaces between them; None makes it from the field's name. A name
            without dashes is a positional argument.
        metavar: Name of the value in help; None uses that of the option.
        choices: Permitted values; None reads them from a `Literal`.
        parse: Reads a value from its word; None follows the field's type.
        kind: Noun for one of ``names``.
        names: Values of a text; errors propose the nearest.
        sets: Words that stand for several values, or for none.
        spaces: Values may also be separated by spaces.
        negated: The option sets False.
        repeated: Values are given one by one, as in ``--run A --run B``, and may contain commas.
        one_of: Name of a group of options that exclude each other.
        required: The option, or one of its group, is required on the command line.
        only: Methods or formats of the verb that use the option; empty: all of them.
        needs: Other options that decide whether this one has an effect; all must agree.
    """

    help: str
    flag: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    parse: Callable[[str], Any] | None = None
    kind: str = "name"
    names: Iterable[str] | None = None
    sets: Mapping[str, tuple[Any, ...]] | None = None
    spaces: bool = False
    negated: bool = False
    repeated: bool = False
    one_of: str | None = None
    required: bool = False
    only: tuple[str, ...] = ()
    needs: tuple[Needs, ...] = ()


#: Attention that is named on the command line.
Site = Annotated[Literal["self", "encoder", "cross", "merged"], Option("attention of the layer")]


@dataclass(frozen=True)
class Group:
    """A settings class inside another one, as a titled group of the help page; without a title, part of the group
    around. Its options without an ``only`` of their own have that of the group, and all have its ``needs``.

    Attributes:
        switch: Option of a group whose settings may be None: ``--no-NAME`` gives None.
    """

    title: str = ""
    only: tuple[str, ...] = ()
    needs: tuple[Needs, ...] = ()
    switch: Option | None = None


@dataclass(frozen=True)
class FieldType:
    """The type of a field: that of one value (int, float, str or bool), whether they form a tuple, whether None is
    permitted, the values of a `Literal`, and the class of each value if that is a dataclass or an abstract class.
    """

    kind: Any
    many: bool
    optional: bool
    choices: tuple[str, ...] | None
    cls: type | None = None


def field_hint(cls: type, name: str) -> Any:
    """Return the annotation of a field; None if its type is imported for type checkers alone: then it is no option."""
    home = next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))
    hint = vars(home)["__annotations__"][name]
    try:
        return eval(hint, vars(sys.modules[home.__module__])) if isinstance(hint, str) else hint
    except NameError:
        return None


def without_none(hint: Any) -> tuple[Any, bool]:
    """Return a type without ``| None``, and whether that was there; of several types, the first."""
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        return kinds[0], len(kinds) < len(get_args(hint))
    return hint, False


def field_type(hint: Any) -> FieldType:
    kind, optional = without_none(hint)
    many = get_origin(kind) is tuple
    if many:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return FieldType(str, many, optional, get_args(kind))
    if len(get_args(hint)) > 1 + optional and get_origin(hint) in (Union, UnionType):
        return FieldType(str, many, optional, None)  # one of several types
    # `issubclass` also finds classes such as int that an abstract class registers.
    cls = kind if isinstance(kind, type) and (is_dataclass(kind) or ABC in kind.__mro__) else None
    return FieldType(kind if kind in (int, float, str, bool) else str, many, optional, None, cls)


@cache
def _checked(cls: Any) -> tuple[tuple[str, FieldType, Limits | None], ...]:
    """Return name, type and limits of the fields that have limits, choices or a class, or hold a tuple or a bool."""
    checked: list[tuple[str, FieldType, Limits | None]] = []
    for each in fields(cls):
        hint = field_hint(cls, each.name)
        hint, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        kind, limits = field_type(hint), [mark for mark in marks if isinstance(mark, Limits)]
        if limits or kind.choices is not None or kind.many or kind.cls is not None or kind.kind is bool:
            checked += [(each.name, kind, limit) for limit in limits or (None,)]
    return tuple(checked)


def check_limits(settings: Any, error: type[HeadscanError]) -> None:
    """Check the fields of settings. Turn lists into tuples, because settings are compared and hashed, and a text or a
    path into the settings of its field: ``corpus="texts/"`` becomes ``CorpusSpec("texts/")``.

    Raise ``error`` if a number breaks its `Limits` or those of its `Option`, or is no number, if a bool is neither True
    nor False, if a value is none of the choices of its `Literal` or `Option`, if a tuple is something else, such as one
    text, and if a value, or one of a tuple, is no instance of the field's dataclass or abstract class. For a name that
    is none of an option's names, raise UnknownNameError.
    """
    cls: Any = type(settings)
    for name, kind, limits in _checked(cls):
        given = getattr(settings, name)
        if given is None and kind.optional:
            continue
        if isinstance(given, str | PathLike) and not kind.many and kind.cls is not None and is_dataclass(kind.cls):
            settings_class: Any = kind.cls
            given = settings_class(given)
            object.__setattr__(settings, name, given)
        if kind.many and not isinstance(given, (tuple, list)):
            raise error(f"`{name}={given!r}` is no tuple. Change `{name}`")
        if isinstance(given, list):
            object.__setattr__(settings, name, tuple(given))
        for value in given if kind.many else (given,):
            if kind.cls is not None and not isinstance(value, kind.cls):
                raise error(f"`{name}={reprlib.repr(value)}` is no {kind.cls.__name__}. Pass {_to_pass(kind.cls)}")
            if problem := _problem(name, value, kind, limits, error):
                raise problem


def _to_pass(cls: type) -> str:
    """Return a class with its article, or the classes that implement an abstract one."""
    classes: list[type] = cls.__subclasses__() if ABC in cls.__bases__ else [cls]
    names = [each.__name__ for each in classes]
    return " or ".join(f"{'an' if name[0] in 'AEIOU' else 'a'} {name}" for name in names)


def _problem(
    name: str, value: Any, kind: FieldType, limits: Limits | None, error: type[HeadscanError]
) -> HeadscanError | None:
    option = limits if isinstance(limits, Option) else None
    choices = (option and option.choices) or kind.choices
    if limits is not None and kind.kind in (int, float):
        numbers: Any
        noun, numbers = ("a whole number", Integral) if kind.kind is int else ("a number", Real)
        if isinstance(value, bool) or not isinstance(value, numbers):
            return error(f"`{name}={value!r}` is not {noun}. Change `{name}`")
        if broken := limits.problem(value):
            return error(f"`{name}={_short(value)}` (limit {broken[0]}). {broken[1]} `{name}`")
    elif kind.kind is bool and not isinstance(value, bool):
        return error(f"`{name}={value!r}` is not True or False. Change `{name}`")
    elif option is not None and option.names is not None and value not in option.names:
        return unknown_name(option.kind, value, option.names)
    elif choices is not None and value not in choices:
        return error(f"`{name}={value!r}` is unknown. Choose {' or '.join(choices)}")
    return None
