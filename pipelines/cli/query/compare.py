"""compare the scores of one scan (which heads they pick), or of two scans (how far each head moved)

    headscan compare 3f9a --quantile 0.1
    headscan compare 3f9a 77c0 --by-layer

An id may be shortened to its first characters.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headscan.catalog import SCORES
from headscan.pipelines.cli.shared import arguments
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared.json_output import Result, add_json

if TYPE_CHECKING:
    from headscan.analysis.store.store import Store

_QUANTILE = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_store(parser)
    add_json(parser)
    parser.add_argument("run_a", metavar="RUN_A", help="first characters of a scan's id")
    parser.add_argument(
        "run_b",
        metavar="RUN_B",
        nargs="?",
        help="first characters of a second scan's id: another model, checkpoint or corpus",
    )
    parser.add_argument("--site", default="self", help="attention of the layer: self, encoder or cross (default: self)")
    one = parser.add_argument_group("one scan")
    one.add_argument(
        "--quantile",
        type=arguments.share,
        help=f"share of (sequence, layer, head) that a rule ablates, or with --masks of heads (default: {_QUANTILE})",
    )
    one.add_argument(
        "--masks", action="store_true", help="heads picked once by their mean score, instead of per sequence"
    )
    two = parser.add_argument_group("two scans")
    two.add_argument("--by-layer", action="store_true", help="one row per layer")
    two.add_argument("--scores", type=arguments.names("score", SCORES), help="comma-separated scores (default: all)")


def run(options: argparse.Namespace) -> Result:
    _check(options)
    store = shared.open_store(options)
    return _overlaps(store, options) if options.run_b is None else _distances(store, options)


def _check(options: argparse.Namespace) -> None:
    """Raise on options that this comparison would ignore."""
    from headscan.analysis.heads.comparisons import ComparisonError

    if options.run_b is None and (options.by_layer or options.scores):
        raise ComparisonError("--by-layer and --scores compare two scans. Name a second scan, or leave them out")
    if options.run_b is not None and (options.masks or options.quantile is not None):
        raise ComparisonError("--quantile and --masks compare scores of one scan. Name one scan, or leave them out")


def _overlaps(store: Store, options: argparse.Namespace) -> Result:
    from headscan.analysis.heads.comparisons import mask_overlap, score_overlap
    from headscan.pipelines.runs.text_tables import text_table

    overlap = mask_overlap if options.masks else score_overlap
    quantile = _QUANTILE if options.quantile is None else options.quantile
    pairs = overlap(store, options.run_a, quantile, site=options.site).to_pylist()
    shared.say("intersection over union of what the scores pick, in percent")
    return Result(pairs, lambda: text_table(_matrix(pairs)), {"run_a": options.run_a, "quantile": quantile})


def _matrix(pairs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the overlap table.

    Columns have the numbers of the scores, which are narrower than names.
    """
    picked = {pair[f"score_{side}"]: pair[f"picked_{side}"] for pair in pairs for side in ("a", "b")}
    overlaps = {frozenset((pair["score_a"], pair["score_b"])): pair["overlap"] for pair in pairs}
    return [
        {"": number, "score": score, "picked": count}
        | {str(i): round(100 * overlaps.get(frozenset((score, other)), 1.0)) for i, other in enumerate(picked, 1)}
        for number, (score, count) in enumerate(picked.items(), 1)
    ]


def _distances(store: Store, options: argparse.Namespace) -> Result:
    from headscan.analysis.heads.comparisons import score_distance
    from headscan.pipelines.runs.text_tables import table_cells, text_table

    rows = score_distance(
        store,
        options.run_a,
        options.run_b,
        scores=options.scores or SCORES,
        by_layer=options.by_layer,
        site=options.site,
    ).to_pylist()
    shared.say("Wasserstein-1 distance of the scores' distributions; relative: divided by their pooled deviation")
    layer = {"layer": "layer"} if options.by_layer else {}
    columns = {"score": "score", **layer, "relative": "relative_distance", "distance": "distance"}
    columns |= {"mean a": "mean_a", "mean b": "mean_b"}
    facts = {"run_a": options.run_a, "run_b": options.run_b}
    return Result(rows, lambda: text_table(table_cells(rows, columns)), facts)
