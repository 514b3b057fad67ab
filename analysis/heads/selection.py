"""Rankings of heads, selections, random heads and rule thresholds."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from headscan.analysis.errors import SelectionError
from headscan.analysis.schema.views import PLAIN_STATISTICS, pool_quantile
from headscan.analysis.store.store import Store
from headscan.catalog import SCORES


@dataclass(frozen=True)
class RankedHead:
    """One head of a ranking.

    Attributes:
        value: Mean of the score over the run's sequences; NaN if not measured.
        std: Standard deviation over the sequences; NaN for a single sequence.
        inactive_share: Share of sequences (0 to 1) in which the head is beyond the pooled 10 % quantile; None for a
            statistic without inactive direction.
    """

    layer: int
    head: int
    kv_head: int
    value: float
    std: float
    inactive_share: float | None


def _check_name(name: str, known: Iterable[str], what: str) -> None:
    names = list(known)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(close)}?" if close else f"Choose from {', '.join(names)}"
        raise SelectionError(f"unknown {what} {name!r}. {hint}")


def rank_heads(
    store: Store, run_id: str, score: str, *, site: str = "self", descending: bool | None = None
) -> list[RankedHead]:
    """Return all heads of a site, most inactive first.

    Layer and head break ties; unmeasured heads are last.

    Args:
        score: Name of a score or statistic.
        descending: Highest first; None uses the direction of the score, and lowest first for a statistic.

    Raises:
        SelectionError: Unknown score, or nothing was measured for this run, site and score.
    """
    _check_name(score, (*SCORES, *PLAIN_STATISTICS), "score or statistic")
    declared = SCORES.get(score)
    if descending is None:
        descending = declared is not None and declared.inactive == "high"
    inactive = f"{score}_inactive" if declared is not None else "NULL::DOUBLE"
    rows = store.query(
        f"SELECT layer, head, kv_head, {score} AS mean, {score}_std AS std, {inactive} AS inactive"
        f" FROM all_head_summary WHERE run_id = ? AND site = ?"
        f" ORDER BY mean {'DESC' if descending else 'ASC'} NULLS LAST, layer, head",
        [run_id, site],
    ).to_pylist()
    if all(row["mean"] is None for row in rows):
        raise _not_measured(store, run_id, score, site)
    return [
        RankedHead(
            row["layer"],
            row["head"],
            row["kv_head"],
            math.nan if row["mean"] is None else row["mean"],
            math.nan if row["std"] is None else row["std"],
            row["inactive"],
        )
        for row in rows
    ]


def select_heads(
    ranked: Sequence[RankedHead], *, share: float | None = None, count: int | None = None
) -> list[tuple[int, int]]:
    """Return the first heads of a ranking as (layer, head).

    Args:
        share: Share of all heads, above 0, at most 1; rounded to the nearest count, at least one head.
        count: Number of heads. Give exactly one of ``share`` and ``count``.

    Raises:
        SelectionError: Both or neither given, out of range, or more heads than were measured.
    """
    if (share is None) == (count is None):
        raise SelectionError("share and count: both or neither given. Give exactly one")
    if share is not None:
        if not 0 < share <= 1:
            raise SelectionError(f"share out of range: {share:g} (limit above 0, at most 1). Change share")
        count = max(1, math.floor(share * len(ranked) + 0.5))
    assert count is not None
    measured = sum(not math.isnan(head.value) for head in ranked)
    if not 1 <= count <= measured:
        raise SelectionError(f"cannot select {count} heads (limit 1 to {measured} measured). Change share or count")
    return [(head.layer, head.head) for head in ranked[:count]]


def random_heads(all_heads: Iterable[tuple[int, int]], count: int, seed: int) -> list[tuple[int, int]]:
    """Return ``count`` different random heads, sorted.

    Equal heads and seed give equal results.

    Raises:
        SelectionError: ``count`` is not between 1 and the number of heads.
    """
    heads = sorted(set(all_heads))
    if not 1 <= count <= len(heads):
        raise SelectionError(f"cannot draw {count} random heads (limit 1 to {len(heads)}). Change count")
    drawn = np.random.default_rng(seed).choice(len(heads), size=count, replace=False)
    return [heads[i] for i in sorted(drawn)]


def thresholds(store: Store, run_id: str, score: str, quantiles: Sequence[float], *, site: str = "self") -> list[float]:
    """Return a rule's threshold for each quantile of a scan.

    Linear interpolation in the pool of scores, at the quantile if low is inactive and at 1 - quantile if high is (arXiv
    2504.03889). On other inputs a rule ablates another share than its quantile.

    Raises:
        SelectionError: Unknown score, no quantile or one outside 0 to 1, or nothing measured.
    """
    _check_name(score, SCORES, "score")
    if not quantiles:
        raise SelectionError("0 quantiles given (limit 1). Give at least one, from 0 to 1")
    for quantile in quantiles:
        if not 0 <= quantile <= 1:
            raise SelectionError(f"quantile out of range: {quantile:g} (limit 0 to 1). Change the quantile")
    levels = [float(pool_quantile(SCORES[score], quantile)) for quantile in quantiles]
    (row,) = store.query(
        f"SELECT quantile_cont({score}::DOUBLE, {levels!r}) AS found FROM head_scores WHERE run_id = ? AND site = ?",
        [run_id, site],
    ).to_pylist()
    if row["found"] is None:
        raise _not_measured(store, run_id, score, site)
    return [float(value) for value in row["found"]]


def _not_measured(store: Store, run_id: str, score: str, site: str) -> SelectionError:
    sites = store.query("SELECT DISTINCT site FROM head_statistics WHERE run_id = ? ORDER BY site", [run_id])[
        "site"
    ].to_pylist()
    if sites and site not in sites:
        return SelectionError(f"run {run_id} has no site {site!r}. Choose from {', '.join(sites)}")
    return SelectionError(f"run {run_id} has no {score} at site {site}. Choose a measured score, or scan again")
