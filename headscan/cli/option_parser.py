"""Command lines from settings: values read from text, options, defaults, help and the settings object.

A verb is a frozen dataclass with a docstring, which is its help page, and a method `run`. Fields with an `Option` are
options, fields with a `Group` are settings classes whose options are shown together:

    @dataclass(frozen=True, kw_only=True)
    class Count(StoreVerb):
        \"\"\"count the tokens of a corpus

            headscan count texts/ --limit 500
        \"\"\"

        limit: Annotated[int, Option("number of texts", least=1)] = 500
        tokens: Annotated[TokenConfig, Group("sequences")]

        def run(self) -> Result: ...

A class attribute `common` names the options of the short help page; `--help all` shows all of them. Each option can
stand in a file, too (`--config-file`).

`headscan.cli.main` lists the verbs. `int`, `float`, `str`, `bool`, a `Literal`, a tuple of these and each of
them `| None` are read from text; an `Option` narrows the values or has a function of its own. `__post_init__` raises if
options do not go together. `read_settings` refuses a given option that has no effect with the method of the verb
(``only``), whose key and words before it are in `by_method`, or with or without another option (``needs``).
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_origin

from headscan.errors import HeadscanError, unknown_name
from headscan.options import Group, Needs, Option, field_hint, field_type, without_none
from headscan.settings.settings_file import settings_file

S = TypeVar("S")


class UsageError(HeadscanError):
    """A command line that cannot be parsed, or options that do not go together."""


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError`, so that each error is one line, and reads no shortened option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        unknown = re.match("unrecognized arguments: (--[a-z-]+)", message)
        if unknown and unknown[1] in _RENAMED:
            message = f"{unknown[1]} is now {_RENAMED[unknown[1]]}"
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Propose near choices; argparse lists all of them."""
        if action.choices is not None and value not in action.choices:
            near = get_close_matches(str(value), list(map(str, action.choices)), n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"choose one of {', '.join(action.choices)}"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {hint}")


#: Option of every verb with a file of options.
_CONFIG_FILE = "--config-file"
#: Options by their earlier names.
_RENAMED = {
    "--config": "--config-file for a file of options, and --corpus-config for a hub data set",
    "--safe-loss": "--max-loss",
    "--step-tokens": "--batch-tokens",
}
#: Larger counts are typing errors, and they overflow in libraries.
_MOST = 2**31 - 1


class _Help(argparse.Action):
    """The option --help: the common options of a verb, or all of them."""

    def __init__(self, *, common: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(nargs="?", const="", choices=["", "all"], metavar="all", default=argparse.SUPPRESS, **settings)
        self.common = common

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> NoReturn:
        if self.common and values != "all":
            shown = {"--help", *self.common}
            hidden = [
                action for action in parser._actions if shown.isdisjoint(action.option_strings or [action.metavar])
            ]
            for action in hidden:
                action.help = argparse.SUPPRESS
            parser.epilog = f"`{parser.prog} --help all` shows {len(hidden)} more options."
        parser.print_help()
        parser.exit()


class ValueProblemError(HeadscanError):
    """A text that is no value of an option."""


def operations(text: str) -> float:
    """Return operations per second, such as 400T or 4e14."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE]\+?\d{1,2})?)([GTP]?)(?:FLOP/?[sS]|FLOPS)?", text.strip())
    value = float(match[1]) * {"": 1, "G": 1e9, "T": 1e12, "P": 1e15}[match[2]] if match else 0.0
    if not 1e6 <= value <= 1e21:
        raise ValueProblemError(f"{text!r} is no speed from 1e6 to 1e21 operations per second: write 400T or 4e14")
    return value


@dataclass(frozen=True)
class BoundOption:
    """An option of a settings class.

    Attributes:
        path: Names of the fields that lead to it.
        kind: Type of one value: int, float, str or bool; ``many`` are a tuple.
        choices: Permitted values; None permits all.
        default: Value without the option; MISSING if it is required.
        only: Methods or formats of the verb that use it; empty: all of them.
        needs: Other options that decide whether it has an effect, each with the path of the class that declares that.
    """

    path: tuple[str, ...]
    option: Option
    kind: type
    many: bool
    choices: tuple[str, ...] | None
    default: Any
    group: str
    only: tuple[str, ...] = ()
    needs: tuple[tuple[tuple[str, ...], Needs], ...] = ()

    @property
    def flag(self) -> str:
        """Name on the command line; the first one of several."""
        return self.flags[0]

    @property
    def flags(self) -> list[str]:
        """All names on the command line."""
        return (self.option.flag or f"--{self.path[-1].replace('_', '-')}").split()

    @property
    def key(self) -> str:
        """Names of the fields that lead to it, with dots."""
        return ".".join(self.path)

    def read(self, text: str) -> Any:
        """Return the value of a text: one, or several that are separated by commas, names once each. A word of the
        option's sets stands for several values.
        """
        option = self.option
        if not self.many or option.repeated:
            return self._read_one(text)
        if option.sets is not None and text in option.sets:
            return option.sets[text]
        parts = [part.strip() for part in text.split(",")]
        if self.kind is str and option.names is None and option.parse is None:
            # Only a library can check these names.
            parts = [part for part in parts if part]
            if not parts:
                raise ValueProblemError(f"{text!r} names nothing: give at least one name")
        return self._read_several(parts)

    def _read_several(self, texts: Sequence[str]) -> tuple[Any, ...]:
        values = tuple(map(self._read_one, texts))
        return values if self.option.names is None else tuple(dict.fromkeys(values))

    def _read_one(self, text: str) -> Any:
        option = self.option
        if option.parse is not None:
            return option.parse(text)
        if self.kind in (int, float):
            return self._number(text)
        if option.names is not None and text not in (known := tuple(option.names)):
            raise unknown_name(option.kind, text, known)
        return text

    def _number(self, text: str) -> int | float:
        try:
            value: int | float = self.kind(text)
        except ValueError:
            raise ValueProblemError(f"{text!r} is not a {'whole ' * (self.kind is int)}number") from None
        without_most = self.kind is int and self.option.most is None
        if broken := (replace(self.option, most=_MOST) if without_most else self.option).problem(value):
            raise ValueProblemError(f"{text} (limit {broken[0]}). {broken[1]} it")
        return value

    def plain(self, value: Any) -> Any:
        """Return the value of the option from one in a file: a number, a text, a list, or true or false."""
        if self.kind is bool:
            if not isinstance(value, bool):
                raise ValueProblemError(f"{value!r} is neither true nor false")
            return value is not self.option.negated
        if isinstance(value, dict) and is_dataclass(self.option.parse):
            return self.option.parse(**value)
        if value == [] and () in (self.option.sets or {}).values():
            return ()
        is_list = isinstance(value, list)
        texts = list(map(str, value)) if is_list else [str(value)]
        if len(texts) != 1 and not self.many:
            raise ValueProblemError(f"{value!r} is a list; give one value")
        if is_list and not (texts and all(texts)):
            raise ValueProblemError(f"{value!r} is empty or has an empty member: give at least one value")
        named = texts if is_list or not self.many else texts[0].split(",")
        if self.choices is not None and not set(named) <= set(self.choices):
            raise ValueProblemError(f"{','.join(texts)!r} is none of {', '.join(self.choices)}")
        is_set = len(texts) == 1 and texts[0] in (self.option.sets or ())
        if self.option.repeated or (is_list and self.many and not is_set):
            return self._read_several(texts)  # a member, such as the name of a file, may contain commas
        return self.read(texts[0])

    def add_to(self, container: argparse._ActionsContainer, *, required: bool) -> None:
        """Add the option to a parser; one that is not ``required`` has a value in a file of options, or a default."""
        shown: dict[str, Any] = {"help": self._help()}
        if self.kind is bool:
            container.add_argument(self.flag, dest=self.key, default=argparse.SUPPRESS, **shown, **self._switch())
            return
        if self.flag.startswith("--"):
            metavar = self.flag.strip("-").replace("-", "_").upper()
            names, shown["dest"] = self.flags, self.key
            shown |= {"required": required, "default": argparse.SUPPRESS}
        else:
            metavar, names = self.flag, [self.key]
            shown |= {"nargs": None} if required else {"nargs": "?", "default": argparse.SUPPRESS}
        if self.choices is not None:
            shown["choices"] = self.choices
        else:
            shown["type"] = self._argument
        shown["metavar"] = self.option.metavar or (None if self.choices else metavar)
        if self.option.spaces:
            shown |= {"nargs": "+", "action": _Joined}
        elif self.option.repeated:
            shown["action"] = _Joined
        container.add_argument(*names, **shown)

    def _switch(self) -> dict[str, Any]:
        if self.option.negated:
            return {"action": "store_false"}
        if self.default is False:
            return {"action": "store_true"}
        return {"action": argparse.BooleanOptionalAction}

    def _argument(self, text: str) -> Any:
        try:
            return self.read(text)
        except HeadscanError as problem:
            raise argparse.ArgumentTypeError(str(problem)) from None

    def _help(self) -> str:
        shown = self.default
        nothing = shown is MISSING or shown is None or shown is False or shown == ()  # 0 is a default to show
        if "(default" in self.option.help or nothing or self.option.negated:
            return self.option.help.replace("%", "%%")
        if shown is True:
            shown = "yes"
        elif isinstance(shown, tuple):
            shown = ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in shown)
        elif isinstance(shown, float):
            shown = f"{shown:g}"
        return f"{self.option.help} (default: {shown})".replace("%", "%%")


class _Joined(argparse.Action):
    """An action that joins values: ``1,2 3`` gives 1, 2 and 3, a repeated option all its values."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        if isinstance(values, list):
            several = (some if isinstance(some, tuple) else (some,) for some in values)
            setattr(namespace, self.dest, tuple(value for some in several for value in some))
        else:
            setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), values))


def options_of(cls: Any) -> tuple[BoundOption, ...]:
    """Return the options of a settings class, with those of the settings classes in it."""
    return _cached_options(cls)  # type checkers refuse a class as the argument of a cached function, unless it is Any


@cache
def _cached_options(cls: Any) -> tuple[BoundOption, ...]:
    return tuple(_options_below(cls, MISSING, (), Group()))


def _options_below(cls: type, default: Any, path: tuple[str, ...], group: Group) -> list[BoundOption]:
    """Return the options of a settings class that fields at ``path`` hold. ``default`` holds settings whose values are
    the defaults; MISSING uses those of the fields.
    """
    options = []
    for name, hint, declared, own in _declared_fields(cls):
        value = own if default is MISSING or default is None else getattr(default, name)
        if isinstance(declared, Group):
            inner, optional = _settings_class(hint)
            within = Group(declared.title or group.title, declared.only or group.only)
            if declared.switch is not None:
                needs = [(path, each) for each in declared.needs if not each.of]
                switch, title = declared.switch, within.title
                options.append(BoundOption((*path, name), switch, bool, False, None, True, title, needs=tuple(needs)))
            for option in _options_below(inner, value, (*path, name), within):
                needs = [(path, each) for each in declared.needs if not each.of or {*each.of} & {*option.path}]
                default_value = None if optional and option.default is MISSING else option.default
                options.append(replace(option, default=default_value, needs=(*needs, *option.needs)))
            continue
        value_type = field_type(hint)
        if declared.one_of is not None and value is MISSING:
            raise TypeError(f"{cls.__name__}.{name} excludes others and has no default")
        permitted = None if declared.names is not None else declared.choices or value_type.choices
        kind, many, only = value_type.kind, value_type.many, declared.only or group.only
        needs = [(path, each) for each in declared.needs]
        options.append(
            BoundOption((*path, name), declared, kind, many, permitted, value, group.title, only, tuple(needs))
        )
    return options


def _declared_fields(cls: type) -> Iterator[tuple[str, Any, Option | Group, Any]]:
    """Yield name, type, declaration and default of the fields that have options."""
    for field in fields(cls):
        hint = field_hint(cls, field.name)
        if get_origin(hint) is not Annotated:
            continue
        kind, *declarations = get_args(hint)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        for declared in declarations:
            if isinstance(declared, (Option, Group)):
                yield field.name, kind, declared, default


def _settings_class(hint: Any) -> tuple[Any, bool]:
    """Return the settings class of a group, and whether it may be None."""
    kind, optional = without_none(hint)
    assert is_dataclass(kind), hint
    return kind, optional


def add_options(parser: argparse.ArgumentParser, cls: type, preset: Collection[str] = ()) -> None:
    """Add the options of a verb to a parser; those with the names ``preset`` have values in a file of options."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    exclusive: dict[str, Any] = {}
    options = options_of(cls)
    what = "YAML or JSON file of options, as in `share: 0.1`; those of the command line replace them"
    parser.add_argument(_CONFIG_FILE, metavar="FILE", help=what, default=argparse.SUPPRESS)
    filled = {bound.option.one_of for bound in options if bound.key in preset}
    for bound in options:
        container: Any = parser
        if bound.group:
            container = groups.get(bound.group) or groups.setdefault(
                bound.group, parser.add_argument_group(bound.group)
            )
        if (one_of := bound.option.one_of) is not None:
            if one_of not in exclusive:
                required = bound.option.required and one_of not in filled
                exclusive[one_of] = container.add_mutually_exclusive_group(required=required)
            container = exclusive[one_of]
        is_required = bound.default is MISSING or (bound.option.required and bound.option.one_of is None)
        bound.add_to(container, required=is_required and bound.key not in preset)


def _help_text(cls: type) -> str:
    """Return the docstring of a verb without its sections for Python."""
    return re.split(r"\n\n(?=Attributes:|Raises:)", inspect.getdoc(cls) or "")[0]


def verb_parser(verb: str, cls: type, preset: Collection[str] = ()) -> Parser:
    """Return the parser of a verb; options with the names ``preset`` have values in a file of options."""
    parser = Parser(prog=f"headscan {verb}", description=_help_text(cls), add_help=False)
    common = getattr(cls, "common", "").split()
    which = "the usual options; `--help all`: all options" if common else "all options"
    parser.add_argument("-h", "--help", action=_Help, common=common, help=which)
    add_options(parser, cls, preset)
    needed = [
        " ".join([*action.option_strings[-1:], str(action.metavar or action.dest.upper())])
        for action in parser._actions
        if action.required
    ]
    parser.usage = " ".join([parser.prog, *needed, "[options]"])
    return parser


def read_settings(verb: str, cls: type[S], words: Sequence[str]) -> S:
    """Return the settings of a command line and of the file that it names with --config-file, or raise UsageError."""
    preset = _preset(verb, cls, words)
    given = vars(verb_parser(verb, cls, preset).parse_args(words))
    given.pop("config_file", None)  # `preset` has its values
    groups = {bound.key: bound.option.one_of for bound in options_of(cls)}
    chosen = {groups.get(key) for key in given} - {None}
    kept = {key: value for key, value in preset.items() if groups[key] not in chosen}
    try:
        values = kept | given
        _check_used(cls, values)
        _check_needs(cls, values)
        return cls(**_arguments(cls, values))
    except UsageError:
        raise
    except HeadscanError as problem:
        raise UsageError(with_flags(str(problem), cls)) from problem


def _preset(verb: str, cls: type, words: Sequence[str]) -> dict[str, Any]:
    """Return the values of the file of options by the names of their fields with dots; empty without a file."""
    reader = Parser(prog=f"headscan {verb}", add_help=False)
    reader.add_argument(_CONFIG_FILE)
    file = reader.parse_known_args(list(words))[0].config_file
    if file is None:
        return {}
    options = {flag.lstrip("-").lower(): bound for bound in options_of(cls) for flag in bound.flags}
    by_key = {bound.key.removeprefix("step."): bound for bound in options.values()}
    values = {}
    for name, value in settings_file(file, UsageError).items():
        plain = str(name).replace("_", "-")
        of_group = {f"{name}.{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {}
        if of_group and of_group.keys() <= by_key.keys():
            given = [(by_key[key], each) for key, each in of_group.items()]
        elif plain in options:
            given = [(options[plain], value)]
        else:
            raise UsageError(f"{file}: {unknown_name('option', plain, tuple(options))}")
        for bound, each in given:
            if each is None or (of_group and each == [] and bound.default == ()):
                continue
            try:
                # Options that set False have the name of the field in a group.
                values[bound.key] = each if of_group and isinstance(each, bool) else bound.plain(each)
            except HeadscanError as problem:
                raise UsageError(f"{file}: {plain}: {problem}") from None
    return values


def _arguments(cls: type, values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the arguments of a settings class, by field, from the given values by their fields' names with dots. A
    group is an object of its class.
    """
    given: dict[str, Any] = {}
    for name, hint, declared, default in _declared_fields(cls):
        key = f"{path}{name}"
        if isinstance(declared, Option):
            given |= {name: values[key]} if key in values else {}
            continue
        inner, optional = _settings_class(hint)
        if declared.switch is not None and not values.get(f"{path}{name}", True):
            for option in options_of(inner):
                if f"{key}.{option.key}" in values:
                    raise UsageError(f"{option.flag} has no effect with {_off(declared.switch)}: leave one of them out")
            given[name] = None
            continue
        if optional and declared.switch is None and _is_absent(options_of(inner), values, f"{key}."):
            given[name] = None
            continue
        own = _arguments(inner, values, f"{key}.")
        given[name] = inner(**own) if default is MISSING or default is None else replace(default, **own)
    return given


def _is_absent(options: Sequence[BoundOption], values: Mapping[str, Any], path: str) -> bool:
    """Return True if settings that may be None lack what they require; raise if their other options are given."""
    needed = [option for option in options if option.default is MISSING]
    if any(path + option.key in values for option in needed):
        return False
    for option in options:
        if path + option.key in values:
            raise UsageError(f"{option.flag} has no effect without {needed[0].flag}: leave it out")
    return True


def _check_used(cls: type, values: Mapping[str, Any]) -> None:
    """Raise UsageError if an option is given that the method or format of a verb (`by_method`) does not use."""
    by_method: tuple[str, str] | None = getattr(cls, "by_method", None)
    if by_method is None:
        return
    options = {bound.key: bound for bound in options_of(cls)}
    key, name = by_method
    chosen = values.get(key, options[key].default)
    for given in values:
        if (bound := options[given]).only and chosen not in bound.only:
            flag, only = _written(bound, values), ", ".join(bound.only)
            raise UsageError(f"{flag} has no effect on {name}{chosen} (only on {only}): leave it out")


def needed_option(key: str, path: Sequence[str], options: Mapping[str, BoundOption]) -> BoundOption:
    """Return the option that a condition names, of the class at ``path`` or of the nearest one around it."""
    for length in range(len(path), -1, -1):
        if found := options.get(".".join((*path[:length], key))):
            return found
    raise KeyError(f"no option has the key {key!r}. Correct the condition")


def _check_needs(cls: type, values: Mapping[str, Any]) -> None:
    """Raise UsageError if an option is given that has no effect with the other options, or without one of them."""
    options = {bound.key: bound for bound in options_of(cls)}
    for key in values:
        for path, needs in options[key].needs:
            if refused := _why_unused(values, needs, path, options):
                raise UsageError(f"{_written(options[key], values)} has no effect {refused}")


def _why_unused(
    values: Mapping[str, Any], needs: Needs, path: Sequence[str], options: Mapping[str, BoundOption]
) -> str | None:
    """Return why an option has no effect, and what to do; None if it has one."""
    if needs.unless is not None and _why_unused(values, needs.unless, path, options) is None:
        return None
    other = needed_option(needs.key, path, options)
    value = values.get(other.key, other.default)
    if needs.values:
        several = value if isinstance(value, tuple) else (value,)
        if not set(several).isdisjoint(needs.values):
            return None
        words = needs.named or " or ".join(needs.values)
        return f"with {other.flag} {','.join(map(str, several))}: leave it out, or use {words}"
    refused = value is False if other.default is True else needs.absent and other.key in values
    if refused:
        return f"with {_written(other, values)}: leave one of them out"
    if needs.absent or other.default is True or other.key in values:
        return None
    return f"without {other.flag}: add {other.flag}, or leave it out"


def _written(bound: BoundOption, values: Mapping[str, Any]) -> str:
    """Return the flag of a given option as the command line has it, such as ``--no-confirm``."""
    is_off = bound.kind is bool and not bound.option.negated and values.get(bound.key) is False
    return _off(bound.option, bound.flag) if is_off else bound.flag


def _off(option: Option, flag: str | None = None) -> str:
    return f"--no-{(flag or option.flag or '')[2:]}"


def with_flags(message: str, cls: type) -> str:
    """Return a message of the library with the options of a verb instead of the names of fields in backticks.

    ``replicas`` in backticks becomes ``--replicas``, ``replicas=3`` becomes ``--replicas 3``, and ``confirm=True`` and
    ``confirm=False`` become ``--confirm`` and ``--no-confirm``. A positional argument has its name of the usage line,
    such as ``MODEL``. All other words, such as paths, stay as they are.
    """
    bound = options_of(cls)
    flags = {option.path[-1]: option for option in bound}
    flags |= {option.flag.lstrip("-").replace("-", "_").lower(): option for option in bound}
    return re.sub(r"`([a-z_]+)(?:=([^`]*))?`", lambda found: _renamed(found, flags), message)


def _renamed(marked: re.Match[str], flags: Mapping[str, BoundOption]) -> str:
    """Return a name in backticks, which may have a value, as a flag; other names stay in backticks."""
    name, value = marked.groups()
    if name not in flags:
        return marked[0]
    flag = flags[name].flag
    if value is None or value == "True" or (value == "False" and flags[name].option.negated):
        return flag
    return f"--no-{flag[2:]}" if value == "False" else f"{flag} {value}"
