"""Files of settings, for the options of a verb or for a study: read, and made into objects of settings classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from headscan.errors import HeadscanError, one_line
from headscan.options import without_none


def settings_file(path: str | Path, error: type[HeadscanError]) -> dict[str, Any]:
    """Return the settings in a YAML or JSON file. Raise ``error`` if the file cannot be read or holds none."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_bytes())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as problem:
        what = problem.strerror if isinstance(problem, OSError) else one_line(problem)
        raise error(f"{path} cannot be read: {what}. Give a YAML or JSON file") from problem
    if not isinstance(content, dict):
        raise error(f"{path} holds no settings. Write lines such as `model: demo`")
    return content


def build_settings(kind: Any, settings: Mapping[str, Any], error: type[HeadscanError], place: str = "") -> Any:
    """Return an object of a settings class from the plain values of a file. Raise ``error`` for an unknown name, a
    missing setting, or a value of another type; ``place`` is the beginning of their names, with dots.
    """
    hints, names = get_type_hints(kind), [each.name for each in fields(kind)]
    if unknown := [name for name in settings if name not in names]:
        raise error(f"unknown setting {place}{unknown[0]}. Choose from {', '.join(names)}")
    missing = [
        each.name
        for each in fields(kind)
        if each.default is MISSING and each.default_factory is MISSING and each.name not in settings
    ]
    if missing:
        raise error(f"{place}{missing[0]} is missing. Set it")
    return kind(**{name: _value(hints[name], value, error, f"{place}{name}") for name, value in settings.items()})


def _value(hint: Any, value: Any, error: type[HeadscanError], place: str) -> Any:
    """Return a value as a field's type."""
    options = get_args(hint)
    if get_origin(hint) is Literal:
        if value not in options:
            raise error(f"{place}={value!r}. Choose from {', '.join(map(str, options))}")
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise error(f"{place}={value!r} is no list. Write [a, b]")
        return tuple(_value(options[0], each, error, place) for each in value)
    if get_origin(hint) in (Union, UnionType):
        inner, optional = without_none(hint)
        return None if value is None and optional else _value(inner, value, error, place)
    if is_dataclass(hint):
        # A single word names a model, a corpus or a task, and a list several tasks.
        first = fields(hint)[0].name
        named = [value] if first == "names" and isinstance(value, str) else value
        plain = value if isinstance(value, dict) else {first: named}
        return build_settings(hint, plain, error, f"{place}.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise error(f"{place}={value!r} is no {hint.__name__}. Change it")
    return value
