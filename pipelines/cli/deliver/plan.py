"""write head_plan.json: which KV heads keep the whole cache, and which only a window

    headscan plan --store s.duckdb --window-share 0.5
    headscan plan MODEL --method measured --corpus texts/ --max-loss 0.01
    headscan plan --method retrieval_score --kv-bytes 2GiB --at 32768
    headscan plan --method imported --pattern pattern/

Method measured needs the model and no store: it measures how much loss a window on each KV head adds. `headscan export`
writes the plan for KV-cache tools.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from headscan.pipelines.cli.shared import arguments, device_options
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared.json_output import Result, add_json

if TYPE_CHECKING:
    from headscan.analysis.plans import BudgetRequest, HeadPlan

#: Methods that read the store, and all methods.
_OF_STORE = ("distant_mass", "retrieval_score", "imported", "random")
_METHODS = ("measured", *_OF_STORE)

#: Options of the model and its devices, of the corpus, and of the measurement.
_LOADING = (
    *("revision", "dtype", "trust_remote_code", "pickled_weights", "device", "placement", "replicas"),
    *("gpus_per_replica", "stages", "memory", "offload", "ray_address", "silence_limit", "start_timeout"),
    "batch_tokens",
)
_CORPUS = ("config", "split", "column", "corpus_revision")
_MEASURING = ("max_tokens", "sequences", "recall_prompts", "confirm", "seed")

#: By option, the methods that use it. All methods use the other options.
_USED_BY = {
    **dict.fromkeys((*_LOADING, *_CORPUS, *_MEASURING, "max_loss"), ("measured",)),
    "run": _OF_STORE,
    "inverted": ("imported",),
    "seed": ("measured", "random"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser, optional=True)
    shared.add_store(parser)
    add_json(parser)
    device_options.add_devices(parser)
    parser.add_argument(
        "--run",
        help="first characters of the id of a scan, or of a probe for retrieval_score (default: the newest one)",
    )
    parser.add_argument(
        "--method",
        choices=_METHODS,
        default="distant_mass",
        help="method that orders the KV heads (default: distant_mass)",
    )
    budget = parser.add_argument_group("budget").add_mutually_exclusive_group()
    budget.add_argument(
        "--window-share",
        type=arguments.number(0, 1, above=True),
        help="share of the candidates (KV heads that may get a window) that keep only a window (default: 0.5, or the "
        "pattern's own number)",
    )
    budget.add_argument(
        "--kv-bytes",
        type=arguments.byte_size,
        metavar="BYTES",
        help="most bytes of one sequence's KV cache, as in 2GiB",
    )
    budget.add_argument(
        "--max-loss",
        type=arguments.number(0, 1e3, above=True),
        metavar="NATS",
        help="largest loss increase of method measured on the prompts that rank the heads, in nats per token, for text "
        "and for each recall task",
    )
    parser.add_argument("--at", type=arguments.count, metavar="TOKENS", help="sequence length of --kv-bytes, in tokens")
    parser.add_argument(
        "--sink",
        type=arguments.count,
        help="number of first tokens that a window head keeps (default: 4, or the pattern's)",
    )
    parser.add_argument(
        "--recent",
        type=arguments.listed(arguments.count),
        help="number of last tokens that a window head keeps; of comma-separated widths, method measured chooses one "
        "for each head (default: 256, or the pattern's)",
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
    parser.add_argument(
        "--seed",
        type=arguments.whole(0),
        help="seed of method random, and of the recall prompts of method measured (default: 0)",
    )
    measured = parser.add_argument_group("method measured")
    measured.add_argument(
        "--corpus",
        help="file, folder, data set on the hub, or a built-in corpus: python-stdlib, python-stdlib-modules, "
        "python-stdlib-heldout",
    )
    shared.add_corpus(measured)
    measured.add_argument(
        "--max-tokens",
        type=arguments.count,
        help="length of texts and recall prompts in tokens (default: the model's context, at most 2048)",
    )
    measured.add_argument(
        "--sequences",
        type=arguments.count,
        help="number of texts; one half is held out to measure the plan (default: 64)",
    )
    measured.add_argument(
        "--recall-prompts",
        type=arguments.whole(0),
        metavar="N",
        help="number of needle and of copying prompts, a multiple of 8; 0 measures text only (default: 32)",
    )
    measured.add_argument(
        "--confirm",
        action=argparse.BooleanOptionalAction,
        help="choose the KV heads near the budget's edge by their loss with real window masks (default: --confirm)",
    )
    parser.add_argument("--out", default="head_plan.json", help="output file (default: head_plan.json)")


def run(options: argparse.Namespace) -> Result:
    _check(options)
    plan = _measured(options) if options.method == "measured" else _from_store(options)
    plan.save(options.out)
    facts = {"file": options.out, "model": plan.model.name, "budget": plan.budget, "notes": plan.notes}
    return Result(plan.heads, lambda: "\n".join([*plan.summary(), f"written to {options.out}"]), facts)


def _check(options: argparse.Namespace) -> None:
    """Raise UsageError if options do not go together."""
    measured = options.method == "measured"
    if measured and options.model == shared.DEMO_MODEL:
        shared.require_corpus(options)
    if measured != (options.model is not None):
        raise arguments.UsageError("--method measured and MODEL go together: give both or neither")
    if measured != (options.corpus is not None):
        raise arguments.UsageError("--method measured and --corpus go together: give both or neither")
    if not measured and options.recent is not None and len(options.recent) > 1:
        raise arguments.UsageError("--recent with several widths needs --method measured: give one width")
    if (options.kv_bytes is None) != (options.at is None):
        raise arguments.UsageError("--kv-bytes and --at go together: give bytes and the length at which they count")
    if (options.method == "imported") != (options.pattern is not None):
        raise arguments.UsageError("--method imported and --pattern go together: give both or neither")
    # Options that differ from their defaults were given.
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name, methods in _USED_BY.items():
        if options.method not in methods and getattr(options, name) != parser.get_default(name):
            raise arguments.UsageError(
                f"--{name.replace('_', '-')} has no effect on --method {options.method} (only on"
                f" {', '.join(methods)}): leave it out"
            )


def _from_store(options: argparse.Namespace) -> HeadPlan:
    """Return the plan of a method that reads the store."""
    from headscan.analysis.plans import make_plan, read_pattern

    pattern = None if options.pattern is None else read_pattern(options.pattern, inverted=options.inverted)
    store = shared.open_store(options)
    run = store.resolve_run(options.run, "probe" if options.method == "retrieval_score" else "scan")
    plan = make_plan(
        store,
        run["run_id"],
        method=options.method,
        budget=_budget(options),
        sink=options.sink,
        recent=None if options.recent is None else options.recent[0],
        pattern=pattern,
        seed=options.seed or 0,
    )
    shared.say_run(run)
    return plan


def _measured(options: argparse.Namespace) -> HeadPlan:
    """Return the plan of method measured."""
    from headscan.analysis.plans import DEFAULT_RECENT, DEFAULT_SINK
    from headscan.pipelines.kv.damage_measurement import MeasureConfig
    from headscan.pipelines.kv.measured_plan import LossLimit, measured_plan
    from headscan.pipelines.runs.identity import identify
    from headscan.pipelines.runs.run_records import RunContext

    shared.quiet_libraries()
    spec = shared.model_spec(options)
    identity = identify(spec)
    config = MeasureConfig(
        corpus=shared.corpus_spec(options),
        sink=DEFAULT_SINK if options.sink is None else options.sink,
        recents=options.recent or (DEFAULT_RECENT,),
        **{name: value for name in _MEASURING if (value := getattr(options, name)) is not None},
    )
    budget: BudgetRequest | LossLimit | None = (
        _budget(options) if options.max_loss is None else LossLimit(options.max_loss)
    )
    assert budget is not None
    place = device_options.placement(options, spec, tokens=config.tokens(identity), evaluates=True)
    config = replace(config, batch_tokens=place.batch_tokens)
    with device_options.open_replicas(options, spec, place.placement) as pool:
        return measured_plan(RunContext(identity, pool), config, budget, say=shared.say)


def _budget(options: argparse.Namespace) -> BudgetRequest | None:
    """Return the budget of a command line; None for the pattern's own."""
    from headscan.analysis.plans import KVBytes, WindowShare

    if options.kv_bytes is not None:
        return KVBytes(options.kv_bytes, options.at)
    if options.window_share is None and options.pattern is not None:
        return None
    return WindowShare(0.5 if options.window_share is None else options.window_share)
