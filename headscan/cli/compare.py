"""The verb compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from headscan.catalog import SCORES
from headscan.cli.option_parser import UsageError
from headscan.cli.verb_base import StoreVerb
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

        headscan compare 3f9a --quantile 0.1
        headscan compare 3f9a 77c0 --by-layer

    An id may be shortened to its first characters.
    """

    json: Json = False
    run_a: Annotated[str, Option("first characters of a scan's id", flag="RUN_A")]
    run_b: Annotated[
        str | None, Option("first characters of a second scan's id: another model, checkpoint or corpus", flag="RUN_B")
    ] = None
    site: Site = "self"
    one: Annotated[_OneScan, Group("one scan")]
    two: Annotated[_TwoScans, Group("two scans")]

    def __post_init__(self) -> None:
        if self.run_b is None and self.two != _TwoScans():
            raise UsageError("--by-layer and --scores compare two scans. Name a second scan, or leave them out")
        if self.run_b is not None and self.one != _OneScan():
            raise UsageError("--quantile and --fixed compare scores of one scan. Name one scan, or leave them out")

    def run(self) -> Result:
        store = self.store.open()
        return self._overlaps(store) if self.run_b is None else self._distances(store, self.run_b)

    def _overlaps(self, store: Store) -> Result:
        from headscan.ranking.comparisons import mask_overlap, score_overlap
        from headscan.text_tables import text_table

        overlap, quantile = mask_overlap if self.one.fixed else score_overlap, self.one.quantile or 0.1
        pairs = overlap(store, self.run_a, quantile, site=self.site).to_pylist()
        say("intersection over union of what the scores pick, in percent")
        return Result(pairs, lambda: text_table(_matrix(pairs)), {"run_a": self.run_a, "quantile": quantile})

    def _distances(self, store: Store, run_b: str) -> Result:
        from headscan.ranking.comparisons import score_distance
        from headscan.text_tables import table_cells, text_table

        by_layer, scores = self.two.by_layer, self.two.scores or SCORES
        rows = score_distance(store, self.run_a, run_b, scores=scores, by_layer=by_layer, site=self.site).to_pylist()
        say("Wasserstein-1 distance of the scores' distributions; relative: divided by their pooled deviation")
        layer = {"layer": "layer"} if by_layer else {}
        columns = {"score": "score", **layer, "relative": "relative_distance", "distance": "distance"}
        columns |= {"mean a": "mean_a", "mean b": "mean_b"}
        return Result(rows, lambda: text_table(table_cells(rows, columns)), {"run_a": self.run_a, "run_b": run_b})


def _matrix(pairs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the overlap table, with the scores' numbers as columns, which are narrower than names."""
    picked = {pair[f"score_{side}"]: pair[f"picked_{side}"] for pair in pairs for side in ("a", "b")}
    overlaps = {frozenset((pair["score_a"], pair["score_b"])): pair["overlap"] for pair in pairs}
    return [
        {"": number, "score": score, "picked": count}
        | {str(i): round(100 * overlaps.get(frozenset((score, other)), 1.0)) for i, other in enumerate(picked, 1)}
        for number, (score, count) in enumerate(picked.items(), 1)
    ]
