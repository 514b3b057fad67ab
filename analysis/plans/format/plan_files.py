"""Reader of ``head_plan.json``; errors name the wrong field by its place in the file."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from headscan.analysis.plans.format.head_plan import FORMAT, VERSION, HeadPlan
from headscan.analysis.plans.format.plan_records import Evidence, PlanError

#: Largest file, in bytes: about 100 times the plan of 128 layers with 128 KV heads each.
_MOST_BYTES = 1 << 30
#: Largest integer, which JSON numbers of all programs hold exactly.
_MOST_INTEGER = 1 << 53
#: Most levels of nested values in a field of any type.
_MOST_LEVELS = 32

_AGAIN = "Make the plan again with `headscan plan`"


def load_plan(path: str | Path) -> HeadPlan:
    """Read a plan that ``HeadPlan.save`` wrote; versions 2 and 3 are upgraded.

    Every field is checked before it is used, so a damaged or hostile file costs no more time than reading it.

    Raises:
        PlanError: Missing, not a regular file, not a head plan, of another version, or damaged.
    """
    try:
        data = json.loads(_text(Path(path)))
    except OSError as error:
        raise PlanError(f"cannot read {path} ({error.strerror}). Name a plan that `headscan plan` wrote") from error
    except RecursionError as error:
        raise PlanError(f"{path} nests its values too deeply. Name a plan that `headscan plan` wrote") from error
    except ValueError as error:
        raise PlanError(f"{path} is not JSON ({error}). Name a plan that `headscan plan` wrote") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError(f"{path} is not a head plan (no format {FORMAT!r}). Name a plan that `headscan plan` wrote")
    if data.get("version") == 2:
        data = _from_version_2(data)
    if data.get("version") == 3:
        data = _from_version_3(data)
    if data.get("version") != VERSION:
        raise PlanError(
            f"{path} has version {_shown(data.get('version'))} of the head plan format (limit {VERSION})."
            " Use the headscan version that wrote it, or make the plan again"
        )
    try:
        plan = _build(HeadPlan, {k: v for k, v in data.items() if k not in ("format", "version")}, "plan")
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    assert isinstance(plan, HeadPlan)
    return plan


def _text(path: Path) -> str:
    """Return the text of a regular file.

    Raises:
        PlanError: Another kind of file, which might never end, or a larger one than any plan.
        OSError: It cannot be read.
        UnicodeDecodeError: It is not UTF-8.
    """
    facts = path.stat()
    if not S_ISREG(facts.st_mode) and not path.is_dir():  # reading a folder gives the system's own words
        raise PlanError(f"{path} is not a regular file. Name a plan that `headscan plan` wrote")
    if facts.st_size > _MOST_BYTES:
        raise PlanError(
            f"{path} has {facts.st_size} bytes (limit {_MOST_BYTES}). Name a plan that `headscan plan` wrote"
        )
    return path.read_text(encoding="utf-8")


def _build(kind: Any, value: Any, place: str) -> Any:
    """Convert decoded JSON to ``kind``: a dataclass, tuple, literal, optional or plain type.

    Raises:
        PlanError: The value has another type; the message names its ``place``.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return _plain(value, place)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _build(_member([a for a in arguments if a is not type(None)], value), value, place)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_build(arguments[0], item, f"{place}[{i}]") for i, item in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
        return _plain(value, place)
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        names = [field.name for field in fields(kind)]
        if set(names) == set(value):
            hints = get_type_hints(kind)
            return kind(**{name: _build(hints[name], value[name], f"{place}.{name}") for name in names})
        odd = ", ".join(repr(name)[1:41] for name in sorted(set(names) ^ set(value)))
        raise PlanError(f"{place} lacks or should not have {odd}. {_AGAIN}")
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(_plain(value, place))
    if kind in (int, str, bool) and type(value) is kind:
        return _plain(value, place)
    raise PlanError(f"{place} is {_shown(value)}, which is not valid. {_AGAIN}")


def _plain(value: Any, place: str, levels: int = _MOST_LEVELS) -> Any:
    """Return decoded JSON unchanged.

    Raises:
        PlanError: A number that is infinite, NaN or too large, or values that are nested too deeply.
    """
    if isinstance(value, int) and abs(value) > _MOST_INTEGER:
        raise PlanError(f"{place} is an integer of {value.bit_length()} bits (limit {_MOST_INTEGER}). {_AGAIN}")
    if isinstance(value, float) and not math.isfinite(value):
        raise PlanError(f"{place} is {value} (limit finite numbers). {_AGAIN}")
    if isinstance(value, list | dict):
        if not levels:
            raise PlanError(f"{place} nests its values too deeply (limit {_MOST_LEVELS} levels). {_AGAIN}")
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            _plain(part, f"{place}[{name!r}]", levels - 1)
    return value


def _shown(value: Any) -> str:
    """Return the beginning of a value; long integers, lists and objects are named only."""
    if isinstance(value, int) and abs(value) > _MOST_INTEGER:
        return "a larger integer"
    if isinstance(value, list | dict):
        return f"a {type(value).__name__}"
    return repr(str(value)[:40])


def _member(kinds: list[Any], value: Any) -> Any:
    """Return the member of a union that a value names by its ``kind``; the first if it names none."""
    named = value.get("kind") if isinstance(value, dict) else None
    return next(
        (kind for kind in kinds if len(kinds) > 1 and named in get_args(get_type_hints(kind)["kind"])), kinds[0]
    )


def _from_version_2(data: dict[str, Any]) -> dict[str, Any]:
    """Return a version 2 plan, which always rests on a scan, in the form of version 3.

    Values of other types stay as they are, so that the reader names them.
    """

    def extended(value: Any, more: dict[str, Any]) -> Any:
        return more | value if isinstance(value, dict) else value

    def each(value: Any, more: dict[str, Any]) -> Any:
        return [extended(item, more) for item in value] if isinstance(value, list) else value

    heads, budget = data.get("heads"), data.get("budget")
    windows = budget.get("window_heads") if isinstance(budget, dict) else None
    if isinstance(heads, list):
        evidence = asdict(Evidence())
        heads = [
            head | {"evidence": extended(head.get("evidence"), evidence)} if isinstance(head, dict) else head
            for head in heads
        ]
    return data | {
        "version": 3,
        "method": "distant_mass",
        "calibration": extended(data.get("calibration"), {"kind": "scan"}),
        "heads": heads,
        "query_heads": each(data.get("query_heads"), {"retrieval_score": None, "induction_score": None}),
        "budget": extended(budget, {"request": {"window_heads": windows, "kind": "window_heads"}, "dropped_heads": 0}),
    }


def _from_version_3(data: dict[str, Any]) -> dict[str, Any]:
    """Return a version 3 plan, which does not know the model's positions, in the form of version 4."""
    model = data.get("model")
    return data | {"version": 4, "model": {"max_tokens": None} | model if isinstance(model, dict) else model}
