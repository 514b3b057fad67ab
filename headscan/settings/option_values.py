"""Settings from the values of their options: words of a command line, or what a YAML or JSON file holds.

An option is known by its key: the names of the fields that lead to it, with dots, such as ``tokens.max_tokens``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from headscan.errors import HeadscanError, one_line, unknown_name
from headscan.options import Field, Group, Option, declared_fields, value_problem

S = TypeVar("S")
#: Larger counts are typing errors, and they overflow in libraries.
_MOST = 2**31 - 1
#: Most values that a refusal lists.
_SHOWN_VALUES = 8


class UsageError(HeadscanError):
    """A command line or a file of options that cannot be read, or options that do not go together."""


def options_of(cls: Any) -> Mapping[str, Option]:
    """Return the options of a settings class by their keys, with those of the settings classes in it."""
    return _cached_options(cls)  # type checkers refuse a class as the argument of a cached function, unless it is Any


@cache
def _cached_options(cls: Any) -> Mapping[str, Option]:
    return {option.key: option for option in _options_below(cls, MISSING, (), "")}


def _options_below(cls: Any, defaults: Any, path: tuple[str, ...], title: str) -> Iterator[Option]:
    """Yield the options of a settings class at ``path``. ``defaults`` are settings with the default values; MISSING or
    None uses those of the fields.
    """
    for field, declared in _options_and_groups(cls):
        here = (*path, field.name)
        default = field.default if defaults in (MISSING, None) else getattr(defaults, field.name)
        if isinstance(declared, Option):
            yield replace(declared, path=here, field=field, default=default, group=title)
            continue
        group = declared.title or title
        inside = list(_options_below(field.classes[0], default, here, group))
        opens = [option.flags[0] for option in inside if field.optional and option.default is MISSING]
        if declared.switch is not None:
            switch = replace(declared.switch, path=here, field=Field(field.name, bool), default=True, group=group)
            inside, opens = [switch, *inside], switch.flags
        for option in inside:
            needs = [declared.needs] if option.path[-1] not in declared.free.split() else []
            # Without the option that makes the settings they are None, and the others have no effect.
            needs += [flag for flag in opens if flag not in option.flags]
            needed = None if field.optional and option.default is MISSING else option.default
            yield replace(option, default=needed, needs="; ".join(filter(None, [*needs, option.needs])))


def _options_and_groups(cls: Any) -> Iterator[tuple[Field, Option | Group]]:
    for field in declared_fields(cls):
        yield from ((field, mark) for mark in field.marks if isinstance(mark, Option | Group))


def option_value(option: Option, given: Any) -> Any:
    """Return the value of an option from its word, or from a value in a file; raise HeadscanError if there is none."""
    field, sets = option.field, option.sets or {}
    if isinstance(given, dict) and is_dataclass(option.parse):
        return make_settings(option.parse, _field_values(options_of(option.parse), given))
    if isinstance(given, list) and len(given) == 1 and not field.many:
        [given] = given
    if isinstance(given, dict) or (isinstance(given, list) and not field.many):
        raise UsageError(f"{given!r} is a {type(given).__name__}; give one value")
    if field.kind is bool:
        values: tuple[Any, ...] = (given,)
    elif field.many:
        members = list(map(str, given)) if isinstance(given, list) else [str(given)]
        if sets.get(" ".join(members)) is not None or (not members and () in sets.values()):
            return sets.get(" ".join(members), ())
        if not isinstance(given, list) and not option.repeated:
            members = list(filter(None, map(str.strip, members[0].split(","))))
        if not members or not all(members):
            raise UsageError(f"{given!r} is empty or has an empty member: give at least one value")
        values = tuple(_read(option, member) for member in members)
    else:
        values = (_read(option, str(given)),)
    limits = replace(option, most=_MOST) if field.kind is int and not (option.most or option.parse) else option
    for value in values:
        if problem := value_problem(value, field, limits, UsageError):
            raise problem
    return (values if option.names is None else tuple(dict.fromkeys(values))) if field.many else values[0]


def _read(option: Option, word: str) -> Any:
    try:
        return (option.parse or option.field.kind)(word)
    except ValueError:
        raise UsageError(f"{word!r} is not a {'whole ' * (option.field.kind is int)}number") from None


def file_values(cls: Any, path: str | Path) -> dict[str, Any]:
    """Return the values in a YAML or JSON file by the keys of their options. The file has the names of the options, or
    those of a class's fields below the name of its group.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_bytes())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as problem:
        what = problem.strerror if isinstance(problem, OSError) else one_line(problem)
        raise UsageError(f"{path} cannot be read: {what}. Give a YAML or JSON file") from problem
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds no settings. Write lines such as `model: demo`")
    fields = {key.removeprefix("step."): option for key, option in options_of(cls).items()}
    flags = {flag.lstrip("-").lower(): option for option in fields.values() for flag in option.flags}
    values: dict[str, Any] = {}
    for name, value in content.items():
        plain = str(name).replace("_", "-")
        group = {f"{name}.{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {}
        in_group = not fields.keys().isdisjoint(group)
        if not in_group and plain not in flags:
            raise UsageError(f"{path}: {unknown_name('option', plain, flags)}")
        try:
            if in_group:
                values |= _field_values(fields, group)
            elif value is not None:
                found = option_value(flags[plain], value)
                values[flags[plain].key] = not found if flags[plain].negated else found
        except HeadscanError as problem:
            raise UsageError(f"{path}: {plain}: {problem}") from None
    return values


def _field_values(options: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options by their keys; null and [] keep a default without a value."""
    if unknown := given.keys() - options.keys():
        raise unknown_name("option", min(unknown), options)
    kept = {key: each for key, each in given.items() if each is not None and (each != [] or options[key].default != ())}
    return {options[key].key: option_value(options[key], each) for key, each in kept.items()}


def make_settings(cls: type[S], values: Mapping[str, Any]) -> S:
    """Return the settings of a class with the values of some options, by key. Raise UsageError if a required one is
    missing, two exclude each other, or one has no effect.
    """
    options = options_of(cls)
    _check_given(options, values)
    made: S = cls(**_arguments(cls, values, ""))
    return made


def _arguments(cls: Any, values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the arguments of a settings class, by field; fields that keep their defaults are left out."""
    arguments: dict[str, Any] = {}
    for field, declared in _options_and_groups(cls):
        name, default, key = field.name, field.default, f"{path}{field.name}"
        if isinstance(declared, Option):
            arguments |= {name: values[key]} if key in values else {}
        elif values.get(key) is False:
            arguments[name] = None
        else:
            inside = _arguments(field.classes[0], values, f"{key}.")
            if default in (MISSING, None) and (inside or not field.optional):
                arguments[name] = field.classes[0](**inside)
            elif inside:
                arguments[name] = replace(default, **inside)
    return arguments


def _check_given(options: Mapping[str, Option], values: Mapping[str, Any]) -> None:
    if missing := [option.flags[0] for key, option in options.items() if option.is_required and key not in values]:
        raise UsageError(f"the following arguments are required: {', '.join(missing)}")
    for name in {option.one_of: None for option in options.values() if option.one_of is not None}:
        group = [option for option in options.values() if option.one_of == name]
        flags, given = ([each.flags[0] for each in some] for some in (group, [o for o in group if o.key in values]))
        if not given and any(option.required for option in group):
            raise UsageError(f"one of the arguments {' '.join(flags)} is required")
        if len(given) > 1:
            raise UsageError(f"argument {given[1]}: not allowed with argument {given[0]}")
    for key in values:
        for condition in filter(None, options[key].needs.split("; ")):
            reasons = [_unmet(each, options, values) for each in condition.split(" or ")]
            if None not in reasons:
                raise UsageError(f"{_written(options[key], values)} has no effect {reasons[0]}")


def _unmet(condition: str, options: Mapping[str, Option], values: Mapping[str, Any]) -> str | None:
    """Return why a condition does not hold, and what to do; None if it holds."""
    flag, _, names = condition.removeprefix("no ").partition(" ")
    other = next(option for option in options.values() if flag in option.flags)
    value = values.get(other.key, other.default)
    if names:
        held = value if isinstance(value, tuple) else (value,)
        if not set(held).isdisjoint(names.split(",")):
            return None
        found, others = ",".join(map(str, held)), names.split(",")
        only = ", ".join(others if len(others) <= _SHOWN_VALUES else [*others[:_SHOWN_VALUES], "..."])
        return f"on {f'{flag} ' * flag.startswith('--')}{found} (only on {only}): leave it out"
    is_given = value is True if other.field.kind is bool else other.key in values
    if condition.startswith("no "):
        return f"with {flag}: leave one of them out" if is_given else None
    if is_given:
        return None
    if other.default is True:
        return f"with {_written(other, values)}: leave one of them out"
    return f"without {flag}: add {flag}, or leave it out"


def _written(option: Option, values: Mapping[str, Any]) -> str:
    """Return an option as the command line has it, such as ``--no-confirm``."""
    is_off = option.field.kind is bool and not option.negated and values.get(option.key) is False
    return f"--no-{option.flags[0][2:]}" if is_off else option.flags[0]
