"""The verb roles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from headscan.cli.verb_base import StoreVerb, say_run
from headscan.options import Option, Site
from headscan.steps.results import Json, Result
from headscan.text_tables import counted, say

if TYPE_CHECKING:
    from headscan.ranking.head_roles import HeadRoles, RoleHead


@dataclass(frozen=True, kw_only=True)
class Roles(StoreVerb):
    """show the role of each head, such as induction or sink, and which roles a mask or a pruned model keeps

        headscan roles --store s.duckdb
        headscan roles --mask "pruned output_norm_ln 25% 3f9a1c"
        headscan roles --run 3f9a --run 77c0 --all-heads

    Roles come from scans, probes and `headscan ablate --each`. Each is read from the newest finished run of the model
    that measured it. Roles that were not measured are listed with the command that measures them. The table lists the
    strongest heads of each role; --all-heads and --json list all.
    """

    json: Json = False
    runs: Annotated[
        tuple[str, ...],
        Option(
            "first characters of the id of a run that is read first; may be repeated (default: the newest runs)",
            flag="--run",
            repeated=True,
        ),
    ] = ()
    mask: Annotated[
        str | None,
        Option("name or id of a mask, or name of an arm with fixed heads or of a pruned model (default: none)"),
    ] = None
    site: Site = "self"
    all_heads: Annotated[bool, Option("one row per head and role, with its number", needs="no --mask")] = False

    def run(self) -> Result:
        from headscan.ranking.head_roles import read_roles
        from headscan.text_tables import table_cells, text_table

        store = self.store.open()
        roles = read_roles(store, self.runs, site=self.site)
        for origin in roles.runs:
            say_run(origin)
        facts = {"runs": [origin["run_id"] for origin in roles.runs], "site": roles.site, "missing": roles.missing}
        if self.mask is not None:
            rows, columns = _survival_rows(store, roles, self.mask), _SURVIVAL_COLUMNS
        elif self.all_heads:
            rows, columns = _head_rows(roles), _HEAD_COLUMNS
        else:
            rows, columns = _role_rows(roles), _ROLE_COLUMNS
        notes = [f"not measured: {role}. Run `{role_command(role)}`" for role in roles.missing]
        return Result(rows, lambda: text_table(table_cells(rows, columns) or [_NO_HEADS]), facts, notes)


def role_command(name: str) -> str:
    """Return the command that measures a role."""
    from headscan.store.views import ROLES

    role = ROLES[name]
    texts = ("--corpus", "TEXTS") if role.reads_texts else ()
    return " ".join(("headscan", role.measured_by, "MODEL", *role.options, *texts))


def _role_rows(roles: HeadRoles) -> list[dict[str, Any]]:
    from headscan.store.views import ROLES

    return [
        {
            "role": holders.role,
            "rule": ROLES[holders.role].rule,
            "threshold_source": ROLES[holders.role].threshold_source,
            "measured": holders.measured,
            "heads": holders.heads,
        }
        for holders in roles.found
    ]


def _head_rows(roles: HeadRoles) -> list[dict[str, Any]]:
    return [{"role": holders.role, **head._asdict()} for holders in roles.found for head in holders.heads]


def _survival_rows(store: Any, roles: HeadRoles, name: str) -> list[dict[str, Any]]:
    from headscan.errors import SelectionError
    from headscan.ranking.head_roles import find_mask, survival

    mask = find_mask(store, name, roles.model)
    if mask.site != roles.site:
        raise SelectionError(f"mask {mask.name} is of site {mask.site}, not {roles.site}. Set --site {mask.site}")
    say(f"without {counted(len(mask.heads), 'head')} of {mask.name}")
    return [
        {"role": left.role, "had": left.had, "left": left.left, "at_random": left.at_random, "lost": left.lost}
        for left in survival(roles, mask.heads)
    ]


def _strongest(heads: Sequence[RoleHead], rule: str = "") -> str:
    from headscan.ranking.head_roles import strongest_words

    return strongest_words(heads, lowest=rule.startswith("<"))


#: Columns of the tables, as for `table_cells`.
_Columns = dict[str, str | Callable[[Mapping[str, Any]], Any]]
_ROLE_COLUMNS: _Columns = {
    "role": "role",
    "number": "rule",
    "threshold of": "threshold_source",
    "heads": lambda row: len(row["heads"]),
    "of": "measured",
    "strongest": lambda row: _strongest(row["heads"], row["rule"]),
}
_HEAD_COLUMNS: _Columns = {"role": "role", "layer": "layer", "head": "head", "value": "value", "offset": "key_offset"}
_SURVIVAL_COLUMNS: _Columns = {
    "role": "role",
    "heads": "had",
    "remain": lambda row: len(row["left"]),
    "at random": "at_random",
    "lost": lambda row: _strongest(row["lost"]),
}
#: The only row of a table without heads.
_NO_HEADS = {"role": "none", "layer": None, "head": None, "value": None, "offset": None}
