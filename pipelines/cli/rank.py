"""order heads by a score, the most inactive first"""

from __future__ import annotations

import argparse

from headscan.catalog import SCORES, STATISTICS
from pipelines.cli import options as shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_store(parser)
    names = list(dict.fromkeys([*SCORES, *STATISTICS]))
    parser.add_argument(
        "--by", default="output_norm_ln", metavar="NAME", help=f"one of {', '.join(names)} (default: output_norm_ln)"
    )
    parser.add_argument("--run", help="beginning of a scan's id (default: the newest finished scan)")
    parser.add_argument("--limit", type=int, default=20, help="heads to show (default: 20; 0: all)")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--highest", action="store_true", help="the highest first, whatever end is inactive")
    order.add_argument("--lowest", action="store_true", help="the lowest first")


def run(options: argparse.Namespace) -> None:
    from analysis.selection import rank_heads
    from pipelines.cli.tables import text_table

    store = shared.open_store(options)
    run_id = store.resolve_run(options.run, "scan")["run_id"]
    descending = True if options.highest else False if options.lowest else None
    ranked = rank_heads(store, run_id, options.by, descending=descending)
    rows = [
        {
            "rank": place,
            "layer": head.layer,
            "head": head.head,
            "kv_head": head.kv_head,
            options.by: head.value,
            "std": head.std,
            **({} if head.inactive_share is None else {"inactive in": f"{head.inactive_share:.0%}"}),
        }
        for place, head in enumerate(ranked, 1)
    ]
    print(text_table(rows[: options.limit or None]))
