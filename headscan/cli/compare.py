"""The verb compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from headscan.catalog import SCORES
from headscan.cli.option_parser import UsageError
from headscan.cli.verb_base import StoreVerb, say_run
from headscan.errors import SelectionError
from headscan.options import Group, Option, Site
from headscan.steps.results import Json, Result
from headscan.text_tables import say

if TYPE_CHECKING:
    from headscan.store.store import Store


@dataclass(frozen=True, kw_only=True)
class _OneScan:
    quantile: Annotated[
        float | None,
        Option(
            "share of (sequence, layer, head) that a rule ablates, with --fixed heads (default: 0.1)", above=0, below=1
        ),
    ] = None
    fixed: Annotated[bool, Option("heads picked once by their mean score, instead of per sequence")] = False


@dataclass(frozen=True, kw_only=True)
class _TwoScans:
    by_layer: Annotated[bool, Option("one row per layer")] = False
    scores: Annotated[tuple[str, ...], Option("comma-separated scores (default: all)", kind="score", names=SCORES)] = ()


@dataclass(frozen=True, kw_only=True)
class Compare(StoreVerb):
    """compare the scores of one scan (which heads they pick), or of two scans (how far each head moved)

        headscan compare
        headscan compare 3f9a --quantile 0.1
        headscan compare 3f9a 77c0 --by-layer

    Without ids, the two newest finished scans with the same heads are compared, or the scores of the newest scan if it
    is the only one. An id may be shortened to its first characters.
    """

    json: Json = False
    run_a: Annotated[
        str | None, Option("first characters of a scan's id (default: the newest finished scan)", flag="RUN_A")
    ] = None
    run_b: Annotated[
        str | None,
        Option(
            "first characters of a second scan's id: another model, checkpoint or corpus (default without RUN_A: the "
            "scan before it with the same heads, unless an option is for one scan)",
            flag="RUN_B",
        ),
    ] = None
    site: Site = "self"
    one: Annotated[_OneScan, Group("one scan")]
    two: Annotated[_TwoScans, Group("two scans")]

    def __post_init__(self) -> None:
        if self.run_a is not None and self.run_b is None and self.two != _TwoScans():
            raise UsageError("--by-layer and --scores compare two scans. Name a second scan, or leave them out")
        if self.run_b is not None and self.one != _OneScan():
            raise UsageError("--quantile and --fixed compare scores of one scan. Name one scan, or leave them out")

    def run(self) -> Result:
        from headscan.ranking.comparisons import comparable_scan

        store = self.store.open()
        scan = store.resolve_run(self.run_a, "scan")
        run_a, run_b = str(scan["run_id"]), self.run_b
        if self.run_a is None and self.one == _OneScan():
            run_b = comparable_scan(store, scan)
            if run_b is None and self.two != _TwoScans():
                raise SelectionError(f"{store.path} has 1 scan of these heads (limit 2). Scan another model or corpus")
        if self.run_a is None:
            for run in (scan, *([store.resolve_run(run_b)] if run_b else [])):
                say_run(run)
        return self._overlaps(store, run_a) if run_b is None else self._distances(store, run_a, run_b)

    def _overlaps(self, store: Store, run_a: str) -> Result:
        from headscan.ranking.comparisons import mask_overlap, score_overlap
        from headscan.text_tables import text_table

        overlap, quantile = mask_overlap if self.one.fixed else score_overlap, self.one.quantile or 0.1
        pairs = overlap(store, run_a, quantile, site=self.site).to_pylist()
        say("intersection over union of what the scores pick, in percent")
        return Result(pairs, lambda: text_table(_matrix(pairs)), {"run_a": run_a, "quantile": quantile})

    def _distances(self, store: Store, run_a: str, run_b: str) -> Result:
        from headscan.ranking.comparisons import score_distance
        from headscan.text_tables import table_cells, text_table

        by_layer, scores = self.two.by_layer, self.two.scores or SCORES
        rows = score_distance(store, run_a, run_b, scores=scores, by_layer=by_layer, site=self.site).to_pylist()
        say("Wasserstein-1 distance of the scores' distributions; relative: divided by their pooled deviation")
        layer = {"layer": "layer"} if by_layer else {}
        columns = {"score": "score", **layer, "relative": "relative_distance", "distance": "distance"}
        columns |= {"mean a": "mean_a", "mean b": "mean_b"}
        return Result(rows, lambda: text_table(table_cells(rows, columns)), {"run_a": run_a, "run_b": run_b})


def _matrix(pairs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the overlap table, with the scores' numbers as columns, which are narrower than names."""
    picked = {pair[f"score_{side}"]: pair[f"picked_{side}"] for pair in pairs for side in ("a", "b")}
    overlaps = {frozenset((pair["score_a"], pair["score_b"])): pair["overlap"] for pair in pairs}
    return [
        {"": number, "score": score, "picked": count}
        | {str(i): round(100 * overlaps.get(frozenset((score, other)), 1.0)) for i, other in enumerate(picked, 1)}
        for number, (score, count) in enumerate(picked.items(), 1)
    ]
