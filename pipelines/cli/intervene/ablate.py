"""measure the effect of every attention head, ablated alone

    headscan ablate MODEL --each --corpus texts/ --store s.duckdb
    headscan ablate MODEL --each --all-but-one --tasks arc_easy --limit 500
    headscan ablate MODEL --each --tasks arc_easy --replace mean --corpus texts/
    headscan ablate CLASSIFIER --each --data dev.tsv
    headscan rank --by effect --store s.duckdb

Effects are differences to the model without ablation, on the accuracy of tasks or the loss of texts, with paired 95 %
intervals and Benjamini-Hochberg over the table. Classifiers and encoder-decoders have --data, with effects at every
site. Layers below an ablated head run once for all heads. The same command again resumes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headscan.pipelines.cli.intervene import labelled_options, replace_options
from headscan.pipelines.cli.shared import arguments, device_options, task_options
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared.json_output import Result, add_json

if TYPE_CHECKING:
    from headscan.analysis.effects.head_effects import HeadEffect
    from headscan.pipelines.ablate.single_heads import LossTexts

#: Heads shown at either end of the table.
_SHOWN = 10
#: Factor and digits of a metric; others are shown as they are, with four digits.
_FORMATS = {"accuracy": (100, 2), "bleu": (1, 2)}


def effects_result(run_id: str, store: str, effects: Sequence[HeadEffect]) -> Result:
    """Return the effects of a run; the text shows both ends of the table."""
    rows = [{**asdict(effect), "harm": effect.harm, "significant": effect.significant} for effect in effects]
    facts = {"run_id": run_id, "store": store}
    return Result(rows, lambda: f"run {run_id} in {store}\n\n{effects_text(effects)}", facts)


def effects_text(effects: Sequence[HeadEffect]) -> str:
    """Return the tables of effects as text."""
    from headscan.analysis.effects.head_effects import effect_facts
    from headscan.analysis.schema.effect_tables import ALL_BUT_ONE, EACH, FALSE_DISCOVERY_RATE
    from headscan.pipelines.runs.text_tables import text_table

    parts = []
    sites = len({effect.site for effect in effects}) > 1
    single = sorted((e for e in effects if e.mode == EACH), key=lambda e: (-e.harm, e.site, e.layer, e.head))
    if single:
        first, found = single[0], effect_facts(single)
        parts.append(
            f"{_title(first)}\n{found['significant']} of {found['heads']} heads have a significant effect (q at most"
            f" {FALSE_DISCOVERY_RATE:g}): {found['harmful']} are needed, {found['helpful']} do harm;"
            f" {found['confirmed']} of them are confirmed on halves."
        )
        ends = single if len(single) <= 2 * _SHOWN else [*single[:_SHOWN], *single[-_SHOWN:]]
        parts.append(text_table([_cells(effect, sites) for effect in ends]))
        if len(ends) < len(single):
            parts.append(f"the {_SHOWN} most needed heads, then the {_SHOWN} least needed of {len(single)}")
    layers = [effect for effect in effects if effect.mode == ALL_BUT_ONE]
    if layers:
        judged = "chosen on one half, judged on the other" if layers[0].confirmed else "too few documents to split"
        parts.append(f"Each layer reduced to its best head ({judged}). {_title(layers[0])}")
        parts.append(text_table([_cells(effect, sites) for effect in layers]))
    return "\n\n".join(parts)


def _title(effect: HeadEffect) -> str:
    """Return metric, unit and replacement in words."""
    units = {"accuracy": "accuracy, in percentage points", "loss": "loss, in nats per token", "bleu": "BLEU"}
    metric = units.get(effect.metric, "bits per byte")
    baseline = f"{100 * effect.baseline:.2f} %" if effect.metric == "accuracy" else f"{effect.baseline:.4f}"
    replaced = {"zero": "zero", "mean": "their means", "resample": "their outputs on other texts"}[effect.replacement]
    unit = {"accuracy": "questions", "bleu": "sentences"}.get(effect.metric, "documents")
    return (
        f"Change of {metric}, with ablated heads at {replaced}; baseline {baseline} on {effect.n} {unit}, paired 95 %"
        " intervals."
    )


def _cells(effect: HeadEffect, sites: bool) -> dict[str, object]:
    """Return a row of a table; with the site if there are several.

    The number of digits depends on the metric.
    """

    scale, digits = _FORMATS.get(effect.metric, (1, 4))

    def number(value: float | None) -> str:
        return "" if value is None else f"{scale * value:+.{digits}f}"

    return {
        **({"site": effect.site} if sites else {}),
        "layer": effect.layer,
        "head": effect.head,
        "effect": number(effect.effect),
        "low": number(effect.low),
        "high": number(effect.high),
        "p": effect.p_value,
        "q": effect.q_value,
        "": ("*" if effect.significant else "") + ("+" if effect.mode == "each" and effect.confirmed else ""),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    shared.add_store(parser)
    add_json(parser)
    device_options.add_devices(parser)
    shared.add_resume(parser)
    heads = parser.add_argument_group("heads")
    heads.add_argument("--each", action="store_true", help="effect of each single head (default without --all-but-one)")
    heads.add_argument(
        "--all-but-one",
        action="store_true",
        help="effect of reducing each layer to its best head, chosen on one half of the questions or documents and "
        "judged on the other",
    )
    replace_options.add_replace(heads)
    labelled_options.add_labelled(parser)
    task_options.add_tasks(parser, required=False, recall=False)
    texts = parser.add_argument_group("texts")
    texts.add_argument(
        "--corpus",
        help="texts whose loss is measured if there are no tasks, and texts of --replace: file, folder, data set on "
        "the hub, or a built-in corpus (default: required without tasks, except for `demo`)",
    )
    shared.add_corpus(texts)
    texts.add_argument(
        "--sequences", type=arguments.count, help="number of texts whose loss is measured (default: 128)"
    )
    texts.add_argument(
        "--max-tokens",
        type=arguments.count,
        help="longest of these texts in tokens (default: the model's context, at most 2048)",
    )


def run(options: argparse.Namespace) -> Result:
    from headscan.analysis.schema.effect_tables import ALL_BUT_ONE, EACH
    from headscan.pipelines.ablate.single_heads import AblateConfig, single_head_effects

    modes = ((EACH,) if options.each or not options.all_but_one else ()) + (ALL_BUT_ONE,) * options.all_but_one
    labelled_options.check_labelled(options, {"replace": "zero"})
    if options.data is not None:
        return _on_examples(options, modes)
    _check(options)
    shared.quiet_libraries()
    if options.model == shared.DEMO_MODEL and options.dtype == "auto":
        options.dtype = "float32"  # half precision is slower on most CPUs
    spec = shared.model_spec(options)
    store = shared.open_store(options, writes=True)
    with tempfile.TemporaryDirectory() as scratch:
        _add_demo_task(options, Path(scratch))
        texts = _texts(options)
        value = replace_options.value_config(options)
        config = AblateConfig(task_options.evaluate_config(options, spec), texts, modes, value)
        plan = device_options.placement(options, spec, tokens=task_options.TASK_TOKENS, evaluates=True)
        config = replace(config, evaluation=replace(config.evaluation, batch_tokens=plan.batch_tokens))
        with device_options.open_replicas(options, spec, plan.placement) as pool:
            result = single_head_effects(config, store, pool, resume_anyway=options.resume_anyway, say=shared.say)
    return effects_result(result.run_id, options.store, result.effects)


def _on_examples(options: argparse.Namespace, modes: Sequence[str]) -> Result:
    from headscan.pipelines.ablate.labelled_arms import labelled_effects

    with labelled_options.opened(options) as (config, texts, store, context):
        run_id, effects = labelled_effects(
            config,
            store,
            context.pool,
            modes,
            context=context,
            texts=texts,
            resume_anyway=options.resume_anyway,
            say=shared.say,
        )
    return effects_result(run_id, options.store, effects)


def _check(options: argparse.Namespace) -> None:
    """Raise UsageError if options do not go together."""
    if options.tasks is None and options.corpus is None and options.model != shared.DEMO_MODEL:
        raise arguments.UsageError("--tasks or --corpus is required, or --data of labelled examples: name one of them")
    if options.tasks is None:
        options.tasks = ()
        shared.require_corpus(options)
        return
    if options.corpus is not None and options.replace == "zero":
        raise arguments.UsageError("--corpus has no effect with --tasks and --replace zero: leave one of them out")
    for name in ("sequences", "max_tokens"):
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise arguments.UsageError(f"{flag} has no effect with --tasks: leave one of them out")


def _add_demo_task(options: argparse.Namespace, scratch: Path) -> None:
    """Make the demo's own task, if it is named without its folder."""
    if options.model != shared.DEMO_MODEL or options.include_path is not None:
        return
    from headscan.pipelines.corpora.stdlib_files import held_out_files
    from headscan.pipelines.demo.demo_task import TASK_NAME, write_task
    from headscan.pipelines.demo.run_demo import DemoConfig

    if TASK_NAME in options.tasks:
        options.include_path = str(write_task(scratch / "task", held_out_files(), DemoConfig.questions))


def _texts(options: argparse.Namespace) -> LossTexts | None:
    from headscan.pipelines.ablate.single_heads import LossTexts

    if options.tasks:
        return None
    chosen = {} if options.sequences is None else {"sequences": options.sequences}
    return LossTexts(shared.corpus_spec(options), max_tokens=options.max_tokens, **chosen)
