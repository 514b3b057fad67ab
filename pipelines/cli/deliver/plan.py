"""write head_plan.json: which KV heads keep the whole cache, and which only a window

    headscan plan --store s.duckdb --window-share 0.5
    headscan plan --method retrieval_score --kv-bytes 2GiB --at 32768
    headscan plan --method imported --pattern pattern/

`headscan export` writes the plan for KV-cache tools.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from headscan.pipelines.cli.shared import arguments
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.runs.terminal import show

if TYPE_CHECKING:
    from headscan.analysis.plans import BudgetRequest, HeadPlan

#: Methods whose scores follow from the store. The scores of another method come from a function of its own, and
#: `_budget`, `_window` and `allocate` turn them into a plan.
_STORE_METHODS = ("distant_mass", "retrieval_score", "imported", "random")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_store(parser)
    parser.add_argument(
        "--run",
        help="first characters of the id of a scan, or of a probe for retrieval_score (default: the newest one)",
    )
    parser.add_argument(
        "--method",
        choices=_STORE_METHODS,
        default="distant_mass",
        help="method that orders the KV heads (default: distant_mass)",
    )
    budget = parser.add_argument_group("budget").add_mutually_exclusive_group()
    budget.add_argument(
        "--window-share",
        type=arguments.number(0, 1, above=True),
        help="share of KV heads that keep only a window (default: 0.5, or the pattern's own number)",
    )
    budget.add_argument(
        "--kv-bytes",
        type=arguments.byte_size,
        metavar="BYTES",
        help="most bytes of one sequence's KV cache, as in 2GiB",
    )
    parser.add_argument("--at", type=arguments.count, metavar="TOKENS", help="sequence length of --kv-bytes, in tokens")
    parser.add_argument(
        "--sink",
        type=arguments.count,
        help="number of first tokens that a window head keeps (default: 4, or the pattern's)",
    )
    parser.add_argument(
        "--recent",
        type=arguments.count,
        help="number of last tokens that a window head keeps (default: 256, or the pattern's)",
    )
    parser.add_argument(
        "--pattern",
        metavar="PATH",
        help="pattern of method imported: folder or file of DuoAttention, RLKV, PruLong or HeadKV",
    )
    parser.add_argument(
        "--inverted",
        action=argparse.BooleanOptionalAction,
        help="low numbers of the pattern keep the full cache (default: checked against its stated sparsity)",
    )
    parser.add_argument("--seed", type=arguments.whole(0), default=0, help="seed of method random (default: 0)")
    parser.add_argument("--out", default="head_plan.json", help="output file (default: head_plan.json)")


def run(options: argparse.Namespace) -> None:
    _check(options)
    plan = _from_store(options)
    plan.save(options.out)
    for line in plan.summary():
        show(line)
    print(f"written to {options.out}")


def _check(options: argparse.Namespace) -> None:
    """Raise UsageError if options do not go together."""
    if (options.kv_bytes is None) != (options.at is None):
        raise arguments.UsageError("--kv-bytes and --at go together: give bytes and the length at which they count")
    if (options.method == "imported") != (options.pattern is not None):
        raise arguments.UsageError("--method imported and --pattern go together: give both or neither")
    if options.inverted is not None and options.pattern is None:
        raise arguments.UsageError("--inverted describes a pattern: give --pattern, or leave it out")


def _from_store(options: argparse.Namespace) -> HeadPlan:
    """Return the plan of a method that reads the store."""
    from headscan.analysis.plans import make_plan, read_pattern

    pattern = None if options.pattern is None else read_pattern(options.pattern, inverted=options.inverted)
    return make_plan(
        shared.open_store(options),
        options.run,
        method=options.method,
        budget=_budget(options),
        sink=options.sink,
        recent=options.recent,
        pattern=pattern,
        seed=options.seed,
    )


def _budget(options: argparse.Namespace) -> BudgetRequest | None:
    """Return the budget of a command line; None for the pattern's own."""
    from headscan.analysis.plans import KVBytes, WindowShare

    if options.kv_bytes is not None:
        return KVBytes(options.kv_bytes, options.at)
    if options.window_share is None and options.pattern is not None:
        return None
    return WindowShare(0.5 if options.window_share is None else options.window_share)
