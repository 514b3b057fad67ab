"""JSON schema of ``head_plan.json``, generated from the dataclasses."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from headscan.analysis.plans.format.head_plan import FORMAT, VERSION, HeadPlan

#: Bounds that the types do not state, by class and field.
_BOUNDS: dict[tuple[str, str], dict[str, Any]] = {
    ("PlannedHead", "score"): {"minimum": 0, "maximum": 1},
    ("PlannedHead", "layer"): {"minimum": 0},
    ("PlannedHead", "kv_head"): {"minimum": 0},
    ("WindowShare", "window_share"): {"exclusiveMinimum": 0, "maximum": 1},
    ("WindowHeads", "window_heads"): {"minimum": 0},
    ("KVBytes", "kv_bytes"): {"minimum": 1},
    ("KVBytes", "tokens"): {"minimum": 1},
}

_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean"}


def plan_schema() -> dict[str, Any]:
    """Return the schema (JSON Schema, draft 2020-12) of plan files of this version.

    The committed copy is ``docs/head_plan.schema.json``.
    """
    definitions: dict[str, Any] = {}
    plan = _record(HeadPlan, definitions)
    plan["properties"] = {"format": {"const": FORMAT}, "version": {"const": VERSION}} | plan["properties"]
    plan["required"] = ["format", "version", *plan["required"]]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "headscan head plan",
        **plan,
        "$defs": dict(sorted(definitions.items())),
    }


def _record(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a dataclass."""
    assert is_dataclass(kind)
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    properties = {name: _schema(hints[name], definitions) | _BOUNDS.get((kind.__name__, name), {}) for name in names}
    return {
        "description": " ".join((kind.__doc__ or "").split("\n\n")[0].split()),
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type; dataclasses go to ``definitions``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return {}
    if kind is type(None):
        return {"type": "null"}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(member, definitions) for member in arguments]}
    if origin is Literal:
        return {"const": arguments[0]} if len(arguments) == 1 else {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object"}
    if is_dataclass(kind) and isinstance(kind, type):
        if kind.__name__ not in definitions:
            definitions[kind.__name__] = {}
            definitions[kind.__name__] = _record(kind, definitions)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    return {"type": _PLAIN[kind]}
