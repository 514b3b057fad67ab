"""Reader of ``head_plan.json``; errors name the wrong field by its place in the file."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from headscan.analysis.plans.format.head_plan import FORMAT, VERSION, HeadPlan
from headscan.analysis.plans.format.plan_records import Evidence, PlanError


def load_plan(path: str | Path) -> HeadPlan:
    """Read a plan that ``HeadPlan.save`` wrote; versions 2 and 3 are upgraded.

    Raises:
        PlanError: Missing, not a head plan, of another version, or damaged.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"cannot read {path} ({error.strerror}). Name a plan that `headscan plan` wrote") from error
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
            f"{path} has version {data.get('version')!r} of the head plan format (limit {VERSION})."
            " Use the headscan version that wrote it, or make the plan again"
        )
    try:
        plan = _build(HeadPlan, {k: v for k, v in data.items() if k not in ("format", "version")}, "plan")
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    assert isinstance(plan, HeadPlan)
    return plan


def _build(kind: Any, value: Any, place: str) -> Any:
    """Convert decoded JSON to ``kind``: a dataclass, tuple, literal, optional or plain type.

    Raises:
        PlanError: The value has another type; the message names its ``place``.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _build(_member([a for a in arguments if a is not type(None)], value), value, place)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_build(arguments[0], item, f"{place}[{i}]") for i, item in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
        return value
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        names = [field.name for field in fields(kind)]
        if set(names) == set(value):
            hints = get_type_hints(kind)
            return kind(**{name: _build(hints[name], value[name], f"{place}.{name}") for name in names})
        odd = sorted(set(names) ^ set(value))
        raise PlanError(f"{place} lacks or should not have {', '.join(odd)}. Make the plan again with `headscan plan`")
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise PlanError(f"{place} is {str(value)[:40]!r}, which is not valid. Make the plan again with `headscan plan`")


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
