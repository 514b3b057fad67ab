"""show the role of each head, such as induction or sink, and which roles a mask or a pruned model keeps

    headscan roles --store s.duckdb
    headscan roles --mask "pruned output_norm_ln 25% 3f9a1c"
    headscan roles --run 3f9a --run 77c0 --heads

Roles come from scans, probes and `headscan ablate --each`. Each is read from the newest finished run of the model that
measured it. Roles that were not measured are listed with the command that measures them.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from headscan.pipelines.cli.shared import options as shared

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


def run(options: argparse.Namespace) -> None:
    from headscan.analysis.heads.head_roles import read_roles
    from headscan.pipelines.runs.text_tables import text_table

    store = shared.open_store(options)
    roles = read_roles(store, options.run, site=options.site)
    for origin in roles.runs:
        shared.say_run(origin)
    if options.mask is None:
        rows = _head_rows(roles) if options.heads else _role_rows(roles)
    else:
        rows = _survival_rows(store, roles, options)
    print(text_table(rows))
    for role in roles.missing:
        shared.say(f"not measured: {role}. Run `{COMMANDS[role]}`")


def _role_rows(roles: HeadRoles) -> list[dict[str, Any]]:
    from headscan.analysis.role_definitions import ROLES

    return [
        {
            "role": found.role,
            "number": ROLES[found.role].rule,
            "threshold of": ROLES[found.role].threshold_source,
            "heads": len(found.heads),
            "of": found.measured,
            "layer:head": _listed(found.heads),
        }
        for found in roles.found
    ]


def _head_rows(roles: HeadRoles) -> list[dict[str, Any]]:
    rows = [
        {"role": found.role, "layer": head.layer, "head": head.head, "value": head.value, "offset": head.key_offset}
        for found in roles.found
        for head in found.heads
    ]
    return rows or [{"role": "none", "layer": None, "head": None, "value": None, "offset": None}]


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
        {
            "role": left.role,
            "heads": left.had,
            "remain": len(left.left),
            "at random": left.at_random,
            "lost": _listed(left.lost),
        }
        for left in survival(roles, mask.heads)
    ]


def _listed(heads: tuple[RoleHead, ...]) -> str:
    """Return heads as LAYER:HEAD, positional ones with their offset."""
    return " ".join(
        f"{head.layer}:{head.head}" + ("" if head.key_offset is None else f"({head.key_offset:+d})") for head in heads
    )
