"""show the role of each head, such as induction or sink, and which roles a mask or a pruned model keeps

    headscan roles --store s.duckdb
    headscan roles --mask "pruned output_norm_ln 25% 3f9a1c"
    headscan roles --run 3f9a --run 77c0 --heads

Roles come from scans, probes and `headscan ablate --each`. Each is read from the newest finished run of the model that
measured it. Roles that were not measured are listed with the command that measures them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared.json_output import Result, add_json

if TYPE_CHECKING:
    from headscan.analysis.heads.head_roles import HeadRoles, RoleHead

#: The command that measures each role.
COMMANDS: dict[str, str] = {
    "positional": "headscan scan MODEL --corpus TEXTS --panel full",
    "confident": "headscan scan MODEL --corpus TEXTS --panel full",
    "previous_token": "headscan probe MODEL",
    "induction": "headscan probe MODEL",
    "retrieval": "headscan probe MODEL",
    "sink": "headscan scan MODEL --corpus TEXTS",
    "low_output": "headscan scan MODEL --corpus TEXTS",
    "inactive": "headscan ablate MODEL --each --corpus TEXTS",
    "constant": "headscan ablate MODEL --each --replace mean --corpus TEXTS",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_store(parser)
    add_json(parser)
    parser.add_argument(
        "--run",
        action="append",
        default=[],
        metavar="RUN",
        help="first characters of the id of a run that is read first; may be repeated (default: the newest runs)",
    )
    parser.add_argument(
        "--mask", help="name or id of a mask, or name of an arm with fixed heads or of a pruned model (default: none)"
    )
    parser.add_argument("--site", default="self", help="attention of the layer: self, encoder or cross (default: self)")
    parser.add_argument("--heads", action="store_true", help="one row per head and role, with its number")


def run(options: argparse.Namespace) -> Result:
    from headscan.analysis.heads.head_roles import read_roles
    from headscan.pipelines.runs.text_tables import table_cells, text_table

    store = shared.open_store(options)
    roles = read_roles(store, options.run, site=options.site)
    for origin in roles.runs:
        shared.say_run(origin)
    facts = {"runs": [origin["run_id"] for origin in roles.runs], "site": roles.site, "missing": roles.missing}
    if options.mask is not None:
        rows, columns = _survival_rows(store, roles, options), _SURVIVAL_COLUMNS
    elif options.heads:
        rows, columns = _head_rows(roles), _HEAD_COLUMNS
    else:
        rows, columns = _role_rows(roles), _ROLE_COLUMNS
    notes = [f"not measured: {role}. Run `{COMMANDS[role]}`" for role in roles.missing]
    return Result(rows, lambda: text_table(table_cells(rows, columns) or [_NO_HEADS]), facts, notes)


def _role_rows(roles: HeadRoles) -> list[dict[str, Any]]:
    from headscan.analysis.schema.views import ROLES

    return [
        {
            "role": found.role,
            "rule": ROLES[found.role].rule,
            "threshold_source": ROLES[found.role].threshold_source,
            "measured": found.measured,
            "heads": found.heads,
        }
        for found in roles.found
    ]


def _head_rows(roles: HeadRoles) -> list[dict[str, Any]]:
    return [{"role": found.role, **head._asdict()} for found in roles.found for head in found.heads]


def _survival_rows(store: Any, roles: HeadRoles, options: argparse.Namespace) -> list[dict[str, Any]]:
    from headscan.analysis.errors import SelectionError
    from headscan.analysis.heads.head_roles import find_mask, survival

    if options.heads:
        raise SelectionError("--heads lists heads without a mask. Leave out --heads or --mask")
    mask = find_mask(store, options.mask, roles.model)
    if mask.site != roles.site:
        raise SelectionError(f"mask {mask.name} is of site {mask.site}, not {roles.site}. Set --site {mask.site}")
    shared.say(f"without the {len(mask.heads)} heads of {mask.name}")
    return [
        {"role": left.role, "had": left.had, "left": left.left, "at_random": left.at_random, "lost": left.lost}
        for left in survival(roles, mask.heads)
    ]


def _listed(heads: tuple[RoleHead, ...]) -> str:
    """Return heads as LAYER:HEAD, positional ones with their offset."""
    return " ".join(
        f"{head.layer}:{head.head}" + ("" if head.key_offset is None else f"({head.key_offset:+d})") for head in heads
    )


#: Columns of the tables, as for `table_cells`.
_Columns = dict[str, str | Callable[[Mapping[str, Any]], Any]]
_ROLE_COLUMNS: _Columns = {
    "role": "role",
    "number": "rule",
    "threshold of": "threshold_source",
    "heads": lambda row: len(row["heads"]),
    "of": "measured",
    "layer:head": lambda row: _listed(row["heads"]),
}
_HEAD_COLUMNS: _Columns = {
    "role": "role",
    "layer": "layer",
    "head": "head",
    "value": "value",
    "offset": "key_offset",
}
_SURVIVAL_COLUMNS: _Columns = {
    "role": "role",
    "heads": "had",
    "remain": lambda row: len(row["left"]),
    "at random": "at_random",
    "lost": lambda row: _listed(row["lost"]),
}
#: The only row of a table without heads.
_NO_HEADS = {"role": "none", "layer": None, "head": None, "value": None, "offset": None}
