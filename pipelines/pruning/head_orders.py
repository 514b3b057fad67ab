"""Heads to remove from outside: scores of a scan, masks of a store, and lists in files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from headscan.analysis.heads.head_ranking import rank_heads
from headscan.analysis.store.provenance import same_model
from headscan.analysis.store.store import Store
from headscan.catalog import SCORES
from headscan.errors import PruningError
from headscan.pipelines.runs.identity import ModelIdentity
from headscan.pipelines.scoring.arms import find_scan


def score_orders(
    store: Store, identity: ModelIdentity, methods: Sequence[str], scan_run: str | None
) -> dict[str, list[tuple[int, int]]]:
    """Return the heads by score, the most inactive first, for the methods that are scores.

    Args:
        scan_run: First characters of a scan's id; None uses the newest scan of the model.
    """
    scores = [method for method in methods if method in SCORES]
    if not scores:
        return {}
    run_id = find_scan(store, identity, scan_run)
    return {score: [(head.layer, head.head) for head in rank_heads(store, run_id, score)] for score in scores}


def mask_heads(store: Store, name: str, identity: ModelIdentity) -> tuple[tuple[int, int], ...]:
    """Return the heads of a mask in the store.

    Args:
        name: Name or id of the mask, or the name of its arm if it is unique.
    """
    known = store.query("SELECT mask_id FROM masks WHERE name LIKE ? ESCAPE '!'", [f"%: {_escaped(name)}"])
    mask = store.mask(known["mask_id"][0].as_py() if known.num_rows == 1 else name)
    runs = store.query(
        "SELECT DISTINCT run_id FROM (SELECT run_id FROM arms WHERE mask_id = $1 UNION ALL"
        " SELECT run_id FROM masks WHERE mask_id = $1) WHERE run_id IS NOT NULL",
        [mask.mask_id],
    )["run_id"].to_pylist()
    for run in store.runs():
        if run["run_id"] in runs and not same_model(identity.columns(), run):
            raise PruningError(
                f"mask {name} belongs to {run['model']}, another model than {identity.name}. Choose a mask of it"
            )
    return mask.heads


def _escaped(name: str) -> str:
    return name.replace("!", "!!").replace("%", "!%").replace("_", "!_")


def imported_heads(path: str | Path) -> list[tuple[int, int]]:
    """Return the heads of a JSON file, in its order. It holds a list of ``[layer, head]`` pairs, or an object with such
    a list under ``heads``.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise PruningError(f"cannot read the heads of {path}: {problem}. Give a JSON list of [layer, head]") from None
    pairs = found.get("heads") if isinstance(found, dict) else found
    if not isinstance(pairs, list) or not pairs:
        raise PruningError(f"{path} names 0 heads (limit 1). Give a JSON list of [layer, head]")
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n >= 0 for n in pair)):
            raise PruningError(f"{path}: {json.dumps(pair)[:60]} is no head. Give a JSON list of [layer, head]")
    return [(layer, head) for layer, head in pairs]
