"""Rankings of heads by scores, importance, gates and behaviours; selections, random heads and rule thresholds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from headscan.catalog import BEHAVIOURS, IMPORTANCES, PROMPT_IMPORTANCE, SCORES, head_count, statistics_for
from headscan.errors import SelectionError, unknown_name
from headscan.store.store import Store
from headscan.store.views import PLAIN_STATISTICS, importance_sql, pool_quantile


@dataclass(frozen=True)
class RankedHead:
    """One head of a ranking.

    Attributes:
        value: Mean of the score over the run's sequences; NaN if not measured.
        std: Standard deviation; NaN also for a single sequence.
        inactive_share: Share of sequences, 0 to 1, in which the head is beyond the pooled 10 % quantile; None for a
            statistic without inactive direction.
    """

    layer: int
    head: int
    kv_head: int
    value: float
    std: float
    inactive_share: float | None


def rank_heads(
    store: Store, run_id: str, score: str, *, site: str = "self", descending: bool | None = None
) -> list[RankedHead]:
    """Return all heads of a site by a score or statistic; layer and head break ties, and unmeasured heads are last.
    ``descending`` puts the highest first; None puts the most inactive first, and the lowest for a statistic.
    """
    if score not in (known := (*SCORES, *PLAIN_STATISTICS)):
        raise unknown_name("score or statistic", score, known)
    declared = SCORES.get(score)
    if descending is None:
        descending = declared is not None and declared.inactive == "high"
    inactive = f"{score}_inactive" if declared is not None else "NULL::DOUBLE"
    columns = f"kv_head, {_or_nan(score)} AS value, {_or_nan(f'{score}_std')} AS std, {inactive} AS inactive_share"
    heads = _ranked(store, RankedHead, columns, "all_head_summary", score, descending, run_id=run_id, site=site)
    if all(math.isnan(head.value) for head in heads):
        raise _not_measured(store, run_id, score, site)
    return heads


_Head = TypeVar("_Head")


def _ranked(
    store: Store, kind: Callable[..., _Head], columns: str, table: str, by: str, descending: bool | None, **where: Any
) -> list[_Head]:
    """Return the heads of a table as objects of a kind, whose further fields ``columns`` selects; layer and head break
    ties, and heads that are not measured are last.
    """
    rows = store.query(
        f"SELECT layer, head, {columns} FROM {table} AS ranked WHERE {' AND '.join(f'{name} = ?' for name in where)}"
        f" ORDER BY ranked.{by} {'DESC' if descending else 'ASC'} NULLS LAST, layer, head",
        list(where.values()),
    )
    return [kind(**row) for row in rows.to_pylist()]


def _or_nan(column: str) -> str:
    return f"coalesce({column}, 'nan'::DOUBLE)"


class OrderedHead(Protocol):
    """A head of any ranking, a dataclass with further numbers; a value of NaN is not measured."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def layer(self) -> int: ...
    @property
    def head(self) -> int: ...
    @property
    def value(self) -> float: ...


def select_heads(
    ranked: Sequence[OrderedHead], *, share: float | None = None, count: int | None = None
) -> list[tuple[int, int]]:
    """Return the first heads of a ranking as (layer, head): ``count`` heads, or ``max(1, floor(share * heads + 0.5))``
    for a share above 0, at most 1. Give exactly one of ``share`` and ``count``.
    """
    if (share is None) == (count is None):
        raise SelectionError("share and count: both or neither given. Give exactly one")
    if share is not None:
        if not 0 < share <= 1:
            raise SelectionError(f"share out of range: {share:g} (limit above 0, at most 1). Change share")
        count = head_count(share, len(ranked))
    assert count is not None
    measured = sum(not math.isnan(head.value) for head in ranked)
    if not 1 <= count <= measured:
        raise SelectionError(f"cannot select {count} heads (limit 1 to {measured} measured). Change share or count")
    return [(head.layer, head.head) for head in ranked[:count]]


def random_heads(all_heads: Iterable[tuple[int, int]], count: int, seed: int) -> list[tuple[int, int]]:
    """Return ``count`` different random heads, sorted. Equal heads and seed give equal results."""
    heads = sorted(set(all_heads))
    if not 1 <= count <= len(heads):
        raise SelectionError(f"cannot draw {count} random heads (limit 1 to {len(heads)}). Change count")
    drawn = np.random.default_rng(seed).choice(len(heads), size=count, replace=False)
    return [heads[i] for i in sorted(drawn)]


def thresholds(store: Store, run_id: str, score: str, quantiles: Sequence[float], *, site: str = "self") -> list[float]:
    """Return a rule's threshold for each quantile of a scan: the quantile of the pool of scores if low is inactive,
    that of 1 - quantile if high is (arXiv 2504.03889), by linear interpolation. On other inputs a rule ablates another
    share than its quantile.
    """
    if score not in SCORES:
        raise unknown_name("score", score, SCORES)
    if not quantiles:
        raise SelectionError("0 quantiles given (limit 1). Give at least one, from 0 to 1")
    for quantile in quantiles:
        if not 0 <= quantile <= 1:
            raise SelectionError(f"quantile out of range: {quantile:g} (limit 0 to 1). Change the quantile")
    stored = store.query(
        "SELECT thresholds FROM measure_pools WHERE run_id = ? AND site = ? AND measure = ?", [run_id, site, score]
    ).to_pylist()
    known = dict(stored[0]["thresholds"] or ()) if stored else {}
    if all(quantile in known for quantile in quantiles):
        return [known[quantile] for quantile in quantiles]
    levels = [float(pool_quantile(SCORES[score], quantile)) for quantile in quantiles]
    pool_quantiles = store.pool_quantiles(run_id, site, score, levels)
    if pool_quantiles is None:
        raise _not_measured(store, run_id, score, site)
    return pool_quantiles


def _not_measured(store: Store, run_id: str, score: str, site: str) -> SelectionError:
    sites = store.query("SELECT DISTINCT site FROM head_statistics WHERE run_id = ? ORDER BY site", [run_id])[
        "site"
    ].to_pylist()
    if sites and site not in sites:
        return SelectionError(f"run {run_id} has no site {site!r}. Choose from {', '.join(sites)}")
    needed = ", ".join(sorted(statistics_for([score]))) if score in SCORES else score
    return SelectionError(
        f"run {run_id} has no {score} at site {site}. Choose a measured score, or scan with the statistics {needed}"
    )


@dataclass(frozen=True)
class GatedHead:
    """A head and its gate, as in the table ``head_gates``."""

    layer: int
    head: int
    kv_head: int
    gate: float
    p_open: float
    closed: bool
    gate_up: float | None
    head_class: str | None

    @property
    def value(self) -> float:
        """The number that orders the heads: many gates are 0 or 1, their probabilities differ."""
        return self.p_open


def rank_gates(store: Store, run_id: str, *, site: str = "self", descending: bool | None = None) -> list[GatedHead]:
    """Return all heads of a site, the most closed first; layer and head break ties."""
    columns = "kv_head, gate, p_open, closed, gate_up, class AS head_class"
    # p_open orders like the location of the gate.
    heads = _ranked(store, GatedHead, columns, "head_gates", "p_open", descending, run_id=run_id, site=site)
    if not heads:
        raise SelectionError(f"run {run_id} has no gates at site {site}. Choose another run, or another site")
    return heads


@dataclass(frozen=True)
class ImportantHead:
    """One head of a ranking: its score (NaN if undefined, as in a layer without any importance), and the mean over the
    sequences of the derivative of the loss by its gate, in nats.
    """

    layer: int
    head: int
    kv_head: int
    value: float
    mean_gate_gradient: float


def rank_importance(
    store: Store, run_id: str, name: str = "importance", *, site: str = "self", descending: bool | None = None
) -> list[ImportantHead]:
    """Return all heads of a site by a name of `IMPORTANCES`, least important first; layer and head break ties."""
    if name not in IMPORTANCES:
        raise unknown_name("importance", name, IMPORTANCES)
    columns = f"kv_head, {_or_nan(name)} AS value, {_or_nan('mean_gate_gradient')} AS mean_gate_gradient"
    heads = _ranked(store, ImportantHead, columns, "all_importance_summary", name, descending, run_id=run_id, site=site)
    if not heads:
        raise SelectionError(f"run {run_id} has no importance at site {site}. Choose another run, or another site")
    if all(math.isnan(head.value) for head in heads):
        raise _no_importance(store, run_id, name, site)
    return heads


def _no_importance(store: Store, run_id: str, name: str, site: str) -> SelectionError:
    """Return the error for an importance that is NULL for all heads of a site."""
    means = list(dict.fromkeys(term.mean for term in IMPORTANCES[name].terms))
    values = store.query(
        f"SELECT {', '.join(means)} FROM all_importance_summary WHERE run_id = ? AND site = ?", [run_id, site]
    ).to_pydict()
    missing = next((mean for mean in means if all(value is None for value in values[mean])), None)
    if missing == PROMPT_IMPORTANCE:
        why = "it measured no recall prompts. Measure importance with recall prompts, or rank by importance"
    elif missing == "relative_entropy":
        why = "no sequence has 2 tokens and a finite entropy. Measure other texts, or rank by importance"
    elif missing is not None:
        why = "its gradients are not finite. Measure again in another dtype"
    else:
        why = f"no head at site {site} has all of {', '.join(means)}. Measure again in another dtype"
    return SelectionError(f"run {run_id} has no {name}: {why}")


#: Least share of the sequences in the smaller half.
_LEAST_HALF = 0.25


@dataclass(frozen=True)
class HalvesAgreement:
    """Agreement of two halves of a run's sequences on the order of the heads: Spearman's rank correlation and Kendall's
    tau-b, -1 to 1. Halves that ``share_documents`` say nothing about other texts.
    """

    sequences: tuple[int, int]
    spearman: float
    kendall: float
    share_documents: bool = False

    def line(self) -> str:
        first, second = self.sequences
        shared = " of the same documents" if self.share_documents else ""
        return (
            f"orders of the heads by {first} and by {second} other sequences{shared} agree with Spearman"
            f" {self.spearman:.2f}, Kendall {self.kendall:.2f}"
        )


def halves_agreement(
    store: Store, run_id: str, name: str = "importance", *, site: str = "self"
) -> HalvesAgreement | None:
    """Return the agreement of two halves of the sequences on the order of a site's heads by a name of `IMPORTANCES`;
    None for fewer than two sequences, fewer than three heads, or all heads equal.

    The halves are every other document, so that they share no text; if one would hold less than a quarter of the
    sequences, they are every other sequence.
    """
    if name not in IMPORTANCES:
        raise unknown_name("importance", name, IMPORTANCES)
    texts = "" if IMPORTANCES[name].on_recall else " AND recall_task IS NULL"

    def divided_by(number: str) -> tuple[str, tuple[int, int]]:
        """Return the sequences, with the half of each by a number, as SQL, and the sizes of both halves."""
        divided = f"(SELECT *, {number} % 2 AS half FROM sequences WHERE run_id = ?{texts})"
        (counts,) = store.query(
            f"SELECT count(*) FILTER (half = 1) AS first, count(*) FILTER (half = 0) AS second FROM {divided}", [run_id]
        ).to_pylist()
        return divided, (counts["first"], counts["second"])

    divided, sizes = divided_by("dense_rank() OVER (ORDER BY document)")
    share_documents = min(sizes) < _LEAST_HALF * sum(sizes)
    if share_documents:
        divided, sizes = divided_by("row_number() OVER (ORDER BY sequence)")
    values = store.query(
        f"SELECT max({name}) FILTER (half = 1) AS first, max({name}) FILTER (half = 0) AS second"
        f" FROM ({importance_sql(divided, 'half')}) WHERE site = ? GROUP BY layer, head"
        " HAVING first IS NOT NULL AND second IS NOT NULL",
        [run_id, site],
    ).to_pydict()
    if min(sizes) < 1 or len(values["first"]) < 3:
        return None
    if any(len(set(of_half)) == 1 for of_half in values.values()):
        return None
    from scipy.stats import kendalltau, spearmanr  # slow to import, and most rankings do without it

    both = values["first"], values["second"]
    agreement = float(spearmanr(*both).statistic), float(kendalltau(*both).statistic)
    return HalvesAgreement(sizes, *agreement, share_documents=share_documents)


@dataclass(frozen=True)
class BehavingHead:
    """A head and its strength of a behaviour, 0 to 1."""

    layer: int
    head: int
    value: float


def measured_behaviours(store: Store, run_id: str) -> tuple[str, ...]:
    """Return the behaviours that a run probed, in catalogue order."""
    behaviours = store.query("SELECT DISTINCT behaviour FROM head_behaviours WHERE run_id = ?", [run_id])
    names = set(behaviours["behaviour"].to_pylist())
    return tuple(name for name in BEHAVIOURS if name in names)


def rank_behaviours(
    store: Store, run_id: str, behaviour: str, *, site: str = "self", descending: bool | None = None
) -> list[BehavingHead]:
    """Return all heads of a site, strongest behaviour first, or weakest if ``descending`` is False; layer and head
    break ties.
    """
    of_site = {"run_id": run_id, "behaviour": behaviour, "site": site}
    heads = _ranked(store, BehavingHead, "value", "head_behaviours", "value", descending is not False, **of_site)
    if not heads:
        raise SelectionError(
            f"run {run_id} has no {behaviour} at site {site}. Choose another probe run, or probe"
            f" {behaviour} with `headscan probe`"
        )
    return heads


def covering_window(store: Store, scan: Mapping[str, Any]) -> str:
    """Return why no head of a scan has distant mass, if no text is longer than the window; empty otherwise."""
    config = scan["config"] or {}
    sink, recent = (int(config.get(name) or 0) for name in ("sink", "recent"))
    row = store.query("SELECT max(tokens) AS longest FROM sequences WHERE run_id = ?", [scan["run_id"]]).to_pylist()[0]
    longest = int(row["longest"] or 0)
    if "recent" not in config or longest > sink + recent:
        return ""
    return (
        f"distant_mass is 0 for every head: the longest text has {longest:,} tokens, and the window of {sink} first and"
        f" {recent} last tokens covers it"
    )
