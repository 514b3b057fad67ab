"""Roles of heads, read from a store, and the roles that remain when heads are removed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headscan.errors import SelectionError
from headscan.store.provenance import same_model
from headscan.store.records import Mask
from headscan.store.scan_tables import literal
from headscan.store.store import Store
from headscan.store.views import ROLES

#: Kinds of runs that can measure a role.
_KINDS = ("scan", "recording", "probe", "ablate")


class RoleHead(NamedTuple):
    """A head with a role and its number. ``key_offset`` is key minus query position; None unless positional."""

    layer: int
    head: int
    value: float
    key_offset: int | None


@dataclass(frozen=True)
class RoleVerdicts:
    """The heads of one role of `ROLES`, by layer and head, out of ``measured`` heads with a number."""

    role: str
    run_id: str
    measured: int
    heads: tuple[RoleHead, ...]

    def strongest(self) -> str:
        """Return `strongest_words` of the heads."""
        return strongest_words(self.heads, lowest=ROLES[self.role].comparison == "<")


@dataclass(frozen=True)
class HeadRoles:
    """The roles of one model's heads at one site: ``found`` in the order of `ROLES`, and ``missing``, which no run
    measured. ``model`` is the row in ``runs`` of the model's newest run; ``runs`` are the rows that measured a role.
    """

    site: str
    model: Mapping[str, Any]
    runs: tuple[Mapping[str, Any], ...]
    found: tuple[RoleVerdicts, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Survival:
    """A role after heads are removed: the heads with the role that remain and those that are lost, of ``had`` before.
    ``at_random`` is the expected number that remains if as many heads are removed at random.
    """

    role: str
    had: int
    left: tuple[RoleHead, ...]
    lost: tuple[RoleHead, ...]
    at_random: float


#: Heads of a role that tables list.
_LISTED = 8


def strongest_words(heads: Sequence[RoleHead], *, lowest: bool = False) -> str:
    """Return the strongest heads as LAYER:HEAD, positional ones with their offset, and the number of the others. With
    ``lowest``, a low number gives the role.
    """
    strongest = sorted(heads, key=lambda head: head.value if lowest else -head.value)
    listed = [
        f"{head.layer}:{head.head}" + ("" if head.key_offset is None else f"({head.key_offset:+d})")
        for head in strongest[:_LISTED]
    ]
    return " ".join([*listed, *[f"and {len(heads) - _LISTED} more"] * (len(heads) > _LISTED)])


def read_roles(store: Store, runs: Sequence[str] = (), *, site: str = "self") -> HeadRoles:
    """Return the roles of a model's heads, each from the model's newest finished run that measured it. ``runs``, the
    first characters of run ids, are read first and choose the model; without any, the newest run chooses it.
    """
    known = [run for run in store.runs() if run["kind"] in _KINDS]
    named = [_named(known, prefix) for prefix in runs]
    finished = [run for run in known if run["status"] == "finished"]
    if not named and not finished:
        raise SelectionError("the store has 0 finished runs that measure roles (limit 1). Run `headscan scan` first")
    model = (named or finished)[0]
    for run in named:
        if not same_model(run, model):
            raise SelectionError(
                f"run {run['run_id']} is of {run['model']}, another model than {model['model']} of run"
                f" {model['run_id']}. Name runs of one model"
            )
    roles = _roles_from(store, named + [run for run in finished if run not in named and same_model(run, model)], site)
    if not roles.found:
        raise SelectionError(
            f"no run of {model['model']} measured a role at site {site}. Choose another site, or run `headscan scan`"
        )
    return roles


def roles_of(store: Store, scan: Mapping[str, Any], site: str) -> HeadRoles:
    """Return the roles of a scanned model's heads: from the scan, and from the newest finished runs of the model."""
    others = (run for run in store.runs() if run["kind"] in _KINDS and run["status"] == "finished")
    same = [run for run in others if run["run_id"] != scan["run_id"] and same_model(run, scan)]
    return _roles_from(store, [scan, *same], site)


def _roles_from(store: Store, runs: Sequence[Mapping[str, Any]], site: str) -> HeadRoles:
    """Return the roles of a site, each from the first run, of at least one, that measured it."""
    with store.reading():
        of_site = _found(store, runs, site)
    used = {verdicts.run_id for verdicts in of_site}
    measured = {verdicts.role for verdicts in of_site}
    return HeadRoles(
        site,
        runs[0],
        tuple(run for run in runs if run["run_id"] in used),
        tuple(of_site),
        tuple(role for role in ROLES if role not in measured),
    )


def find_mask(store: Store, name: str, model: Mapping[str, Any]) -> Mask:
    """Return a mask of a model (a row of ``runs``) by name or id, or by the name of an arm: fixed heads, or a pruned
    model.
    """
    rows = store.query(
        "SELECT DISTINCT mask_id FROM arms WHERE name = ? AND mask_id IS NOT NULL ORDER BY mask_id", [name]
    )["mask_id"].to_pylist()
    if len(rows) > 1:
        raise SelectionError(f"{len(rows)} arms are named {name} (limit 1). Give one of the mask ids {', '.join(rows)}")
    mask = store.mask(rows[0] if rows else name)
    origins = store.query(
        "SELECT DISTINCT run_id FROM (SELECT run_id FROM arms WHERE mask_id = $1 UNION ALL"
        " SELECT run_id FROM masks WHERE mask_id = $1) WHERE run_id IS NOT NULL",
        [mask.mask_id],
    )["run_id"].to_pylist()
    for run in store.runs():
        if run["run_id"] in origins and not same_model(run, model):
            raise SelectionError(
                f"mask {name} is of {run['model']}, another model than {model['model']}. Choose a mask of it, or name"
                " runs of the other model"
            )
    return mask


def survival(roles: HeadRoles, removed: Collection[tuple[int, int]]) -> list[Survival]:
    """Return the remaining and the lost heads of each measured role without the ``removed`` (layer, head)."""
    gone = set(removed)

    def kept(heads: Iterable[RoleHead], wanted: bool) -> tuple[RoleHead, ...]:
        return tuple(head for head in heads if ((head.layer, head.head) not in gone) == wanted)

    return [
        Survival(
            verdicts.role,
            len(verdicts.heads),
            kept(verdicts.heads, True),
            kept(verdicts.heads, False),
            len(verdicts.heads) * (1 - len(gone) / verdicts.measured),
        )
        for verdicts in roles.found
    ]


def _named(known: Sequence[dict[str, Any]], prefix: str) -> dict[str, Any]:
    matching = [run for run in known if run["run_id"].startswith(prefix)]
    if len(matching) != 1:
        names = ", ".join(f"{run['run_id']} ({run['kind']})" for run in matching or known)
        raise SelectionError(
            f"{len(matching)} runs that measure roles begin with {prefix!r} (limit 1). Choose one of {names or 'none'}"
        )
    return matching[0]


def _found(store: Store, runs: Sequence[Mapping[str, Any]], site: str) -> list[RoleVerdicts]:
    """Return the roles of a site, each from the first run that measured it, in the order of `ROLES`."""
    verdicts: dict[str, RoleVerdicts] = {}
    for run in runs:
        kind = "scan" if run["kind"] == "recording" else run["kind"]
        wanted = [name for name, role in ROLES.items() if role.measured_by == kind and name not in verdicts]
        if not wanted:
            continue
        # The names are literals, because DuckDB leaves out the parts of the view for other roles only then.
        rows = store.query(
            "SELECT role, layer, head, value, key_offset, holds FROM all_head_roles"
            f" WHERE role IN ({', '.join(map(literal, wanted))}) AND run_id = ? AND site = ? ORDER BY layer, head",
            [run["run_id"], site],
        ).to_pylist()
        for name in {row["role"] for row in rows}:
            own = [row for row in rows if row["role"] == name]
            heads = (RoleHead(r["layer"], r["head"], r["value"], r["key_offset"]) for r in own if r["holds"])
            verdicts[name] = RoleVerdicts(name, run["run_id"], len(own), tuple(heads))
    return [verdicts[name] for name in ROLES if name in verdicts]
