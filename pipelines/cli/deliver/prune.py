"""remove attention heads for good: a smaller model, repaired, saved and judged

    headscan prune demo --share 0.4 --out smaller/
    headscan prune MODEL --share 0.4 --corpus texts/ --tasks mmlu --out smaller/
    headscan prune MODEL --shares 0.1,0.2,0.4 --method damage,output_norm_ln --corpus texts/ --out curve/
    headscan prune MODEL --kv-bytes 1GiB --at 32768 --corpus texts/ --out smaller/

Heads are chosen by the loss that repair cannot undo, or by another method. The projections that remain are solved again
in closed form. The saved model loads in headscan and in transformers. It answers the same questions as the original,
next to controls of about the same size with the same repair: random heads, and whole attention layers dropped.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headscan.catalog import SCORES
from headscan.pipelines.cli.shared import arguments, device_options, task_options, text_options
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared.json_output import Result, add_json
from headscan.pipelines.cli.shared.whole_model import WholeModel

if TYPE_CHECKING:
    from headscan.pipelines.pruning.calibration_texts import RecallConfig
    from headscan.pipelines.pruning.pruning_units import Budget
    from headscan.pipelines.pruning.run_prune import PruneConfig, PruneResult
    from headscan.pruning.selection.head_selection import SelectionConfig

#: Methods that need no scan. An imported list is the option --import-heads.
_OWN_METHODS = ("damage", "random", "layer-drop")
METHODS = (*_OWN_METHODS, *SCORES)
_UNITS = ("head", "group", "layer")
#: Questions, recall questions of each kind and texts of the demo: four models answer in half a minute on two cores.
_DEMO_QUESTIONS, _DEMO_RECALL, _DEMO_SEQUENCES = 80, 40, 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    shared.add_store(parser)
    add_json(parser)
    device_options.add_devices(parser)
    shared.add_resume(parser)
    task_options.add_tasks(parser, required=False)
    _add_sizes(parser)
    _add_choice(parser)
    text_options.add_texts(parser, demo_sequences=_DEMO_SEQUENCES)
    parser.add_argument(
        "--controls",
        type=arguments.whole(0),
        metavar="N",
        help="number of models with as many random heads removed and the same repair; unless 0, whole attention layers "
        "are dropped for comparison, too (default: 1)",
    )
    parser.add_argument(
        "--skip-verdict", action="store_true", help="no evaluation, no controls: choose, repair and save only"
    )
    parser.add_argument(
        "--remote-code",
        action="store_true",
        help="copy the code of pruned models into the folder, for machines without headscan",
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="new folder of the model; with several sizes, of their folders"
    )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("size").add_mutually_exclusive_group(required=True)
    sizes.add_argument("--share", type=arguments.share, help="share of the heads to remove, for example 0.4")
    sizes.add_argument(
        "--shares",
        type=arguments.listed(arguments.share),
        help="comma-separated shares; each gives a model, and common moments are measured once",
    )
    sizes.add_argument(
        "--kv-bytes",
        type=arguments.byte_size,
        metavar="BYTES",
        help="most bytes of one sequence's KV cache, as in 2GiB; needs --at, and removes whole KV groups",
    )
    sizes.add_argument(
        "--max-loss",
        type=arguments.number(0, 1e3, above=True),
        metavar="NATS",
        help="largest divergence of the predictions from the original's on the calibration texts, in nats per token",
    )
    sizes.add_argument(
        "--heads",
        type=arguments.listed(arguments.head),
        nargs="+",
        action=arguments.Flat,
        metavar="LAYER:HEAD",
        help="comma-separated heads to remove",
    )
    sizes.add_argument("--mask", metavar="NAME", help="name or id of a mask in the store whose heads are removed")
    sizes.add_argument("--import-heads", metavar="FILE", help="JSON list of [layer, head] whose heads are removed")
    parser.add_argument("--at", type=arguments.count, metavar="TOKENS", help="sequence length of --kv-bytes, in tokens")


def _add_choice(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("choice and repair")
    group.add_argument(
        "--method",
        type=arguments.names("method", METHODS),
        default=("damage",),
        help="comma-separated methods: damage (loss that repair cannot undo), a score of a scan in the store, random, "
        "layer-drop (default: damage)",
    )
    group.add_argument("--run", help="first characters of the scan's id for scores (default: the newest of this model)")
    group.add_argument(
        "--unit",
        choices=_UNITS,
        help="head: single query heads; group: KV heads with their query heads, which frees KV cache; layer: whole "
        "attentions (default: head; group with --kv-bytes)",
    )
    group.add_argument(
        "--tries",
        type=arguments.whole(0),
        metavar="N",
        help="choices near the best one that are repaired and compared with it, for damage and layer-drop (default: "
        "12; of the demo 0)",
    )
    group.add_argument(
        "--repair",
        choices=text_options.REPAIRS,
        default="o+down",
        help="projections that are solved again: o output, v value, down the second of the MLP; mean adds the mean "
        "outputs of removed heads instead (default: o+down)",
    )
    group.add_argument(
        "--recall-weight",
        type=arguments.number(0, 1e3),
        metavar="W",
        help="weight of needle and copying prompts in choice and repair, next to 1 for the texts; 0 or --no-recall: "
        "texts alone (default: 0.3)",
    )
    group.add_argument(
        "--distill",
        type=arguments.whole(0),
        default=0,
        metavar="STEPS",
        help="steps of distillation of the repaired projections after the repair (default: 0)",
    )


def run(options: argparse.Namespace) -> Result:
    from headscan.pipelines.pruning.run_prune import prune
    from headscan.pipelines.pruning.work_folder import check_place

    _check(options)
    check_place(Path(options.out))
    model = WholeModel.of(options)
    with _config(options, model) as config, model.opened(config.texts) as (context, batch_tokens):
        result = prune(
            replace(config, evaluation=replace(config.evaluation, batch_tokens=batch_tokens)),
            model.store,
            context,
            lambda other: model.open_other(other, config.texts),
            resume_anyway=options.resume_anyway,
            say=shared.say,
        )
    return _result(options, result)


def _check(options: argparse.Namespace) -> None:
    """Raise UsageError if options do not go together."""
    if (options.kv_bytes is None) != (options.at is None):
        raise arguments.UsageError("--kv-bytes and --at go together: give bytes and the length at which they count")
    if options.kv_bytes is not None and options.unit == "head":
        raise arguments.UsageError("--kv-bytes needs --unit group or layer: single query heads free no KV cache")
    named = options.heads or options.mask or options.import_heads
    if named and (options.unit is not None or tuple(options.method) != ("damage",)):
        raise arguments.UsageError("--method and --unit have no effect on named heads: leave them out")
    if options.tries is not None and not named and not {"damage", "layer-drop"} & set(options.method):
        raise arguments.UsageError("--tries has no effect without --method damage or layer-drop: leave it out")
    if options.skip_verdict and (unused := _of_verdict(options)):
        raise arguments.UsageError(f"{unused[0]} has no effect with --skip-verdict: leave one of them out")
    if options.run is not None and not set(options.method) & set(SCORES):
        raise arguments.UsageError("--run has no effect without a score as --method: leave it out, or name a score")
    text_options.check_texts(options)


def _of_verdict(options: argparse.Namespace) -> list[str]:
    """Return the given options of the evaluation."""
    given = {
        "--tasks": options.tasks is not None,
        "--controls": options.controls is not None,
        "--recall-lengths": options.recall_lengths is not None,
        "--recall-questions": options.recall_questions is not None,
    }
    return [option for option, is_given in given.items() if is_given]


@contextmanager
def _config(options: argparse.Namespace, model: WholeModel) -> Iterator[PruneConfig]:
    """Yield the settings; the demo's task exists inside the context."""
    from headscan.checkpoints.sources import load_config
    from headscan.models.model_class import check_bounds
    from headscan.pipelines.pruning.head_orders import imported_heads, mask_heads, score_orders
    from headscan.pipelines.pruning.repairs import Repair
    from headscan.pipelines.pruning.run_prune import PruneConfig

    spec, identity = model.spec, model.identity
    store = shared.open_store(options)
    named: dict[str, tuple[tuple[int, int], ...]] = {}
    if options.heads:
        named["heads"] = tuple(options.heads)
    elif options.mask:
        named["mask"] = mask_heads(store, options.mask, identity)
    elif options.import_heads:
        named["imported"] = tuple(imported_heads(options.import_heads))
    for heads in named.values():
        check_bounds(load_config(spec.source, spec.revision, spec.trust_remote_code), heads)
    with tempfile.TemporaryDirectory() as scratch:
        text_options.ask_the_demo(options, Path(scratch), questions=_DEMO_QUESTIONS, recall=_DEMO_RECALL)
        yield PruneConfig(
            evaluation=task_options.evaluate_config(options, spec),
            out=Path(options.out),
            budgets=() if named else _budgets(options),
            methods=tuple(options.method),
            heads=named,
            orders=score_orders(store, identity, options.method, options.run),
            texts=text_options.text_config(options),
            recall=_recall(options),
            unit=options.unit or ("group" if options.kv_bytes is not None else "head"),
            selection=_selection(options),
            repair=Repair(options.repair, options.distill),
            **({} if options.controls is None else {"controls": options.controls}),
            remote_code=options.remote_code,
            skip_verdict=options.skip_verdict,
        )


def _selection(options: argparse.Namespace) -> SelectionConfig:
    from headscan.pruning.selection.head_selection import QUICK, SelectionConfig

    effort = QUICK if options.model == shared.DEMO_MODEL else SelectionConfig()
    return effort if options.tries is None else replace(effort, tries=options.tries)


def _recall(options: argparse.Namespace) -> RecallConfig:
    from headscan.pipelines.pruning.calibration_texts import RecallConfig

    if not options.recall or options.recall_weight == 0:
        return RecallConfig(prompts=0)
    return RecallConfig() if options.recall_weight is None else RecallConfig(weight=options.recall_weight)


def _budgets(options: argparse.Namespace) -> tuple[Budget, ...]:
    from headscan.pipelines.pruning.pruning_units import BytesBudget, LossBudget, ShareBudget

    if options.kv_bytes is not None:
        return (BytesBudget(options.kv_bytes, options.at),)
    if options.max_loss is not None:
        return (LossBudget(options.max_loss),)
    shares = options.shares or (options.share,)
    return tuple(ShareBudget(share) for share in dict.fromkeys(shares))


def _result(options: argparse.Namespace, result: PruneResult) -> Result:
    """Return a row for each pruned model, controls included, with its verdict."""
    from headscan.pipelines.cli.shared.arm_rows import arm_row

    names = result.names or ("",) * len(result.models)
    verdict = result.verdict
    arms = {} if verdict is None else {arm.name: arm for arm in (*verdict.arms, *verdict.unjudged)}
    rows = [
        {
            **asdict(built),
            "folder": None if built.is_control else built.folder,
            "arm": name or None,
            "verdict": arm_row(arms[name]) if name in arms else None,
        }
        for built, name in zip(result.models, names, strict=True)
    ]
    facts = {"run_id": None if verdict is None else verdict.run_id, "store": options.store}
    return Result(rows, lambda: _text(options, result, names), facts)


def _text(options: argparse.Namespace, result: PruneResult, names: Sequence[str]) -> str:
    from headscan.pipelines.pruning.held_out_losses import loss_rows
    from headscan.pipelines.pruning.pruning_table import cost_rows, model_rows
    from headscan.pipelines.runs.text_tables import text_table

    parts = [text_table(model_rows(result.models, names, result.verdict))]
    own = [built for built in result.models if not built.is_control]
    parts.append(
        text_table(
            [
                {"share": f"{100 * built.share:.3g}%", "method": built.method, **row}
                for built in own
                for row in loss_rows(built.losses)
            ]
        )
    )
    if len(own) == 1:
        rows = [dict(zip(("", "before", "after"), row, strict=True)) for row in cost_rows(own[0].costs)]
        parts.append(text_table(rows))
    if result.verdict is not None:
        parts.append(f"The verdict (run {result.verdict.run_id} in {options.store}):")
        of_run = {arm.name: arm for arm in (*result.verdict.arms, *result.verdict.unjudged)}
        judged = [
            f"  {of_run[name].sentence()}"
            for built, name in zip(result.models, names, strict=True)
            if not built.is_control and name in of_run
        ]
        parts.append("\n".join(judged))
    parts.append("\n".join(f"written to {built.folder}" for built in own))
    return "\n\n".join(parts)
