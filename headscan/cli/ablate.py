"""The verb ablate."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from headscan.cli.option_parser import Given, UsageError, changed
from headscan.cli.results import Json, Result
from headscan.cli.task_options import (
    NO_DATA,
    Metric,
    OptionalTaskOptions,
    demo_task,
    labelled_evaluation,
    replacement_of,
)
from headscan.cli.verb_base import CORPORA, CorpusOptions, RunVerb, quiet_libraries
from headscan.options import Group, Needs, Option
from headscan.settings.corpus_settings import ExamplesSpec
from headscan.settings.evaluation_settings import AblationMode, LossTexts, ReplacementOption
from headscan.store.tables import ALL_BUT_ONE, EACH

if TYPE_CHECKING:
    from headscan.verdicts.head_effects import HeadEffect

_NO_TASKS = Needs(key="tasks.names", absent=True)
#: With tasks, texts replace outputs; without, their loss is measured.
_REPLACED = Needs(key="heads.kind", values=("mean", "resample"), unless=_NO_TASKS)
#: Heads shown at either end of the table.
_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class _Heads:
    each: Annotated[bool, Option("effect of each single head (default without --all-but-one)")] = False
    all_but_one: Annotated[
        bool,
        Option(
            "effect of reducing each layer to its best head, chosen on one half of the questions or documents and "
            "judged on the other"
        ),
    ] = False
    kind: ReplacementOption = "zero"

    @property
    def modes(self) -> tuple[AblationMode, ...]:
        if not self.all_but_one:
            return (EACH,)
        return (EACH, ALL_BUT_ONE) if self.each else (ALL_BUT_ONE,)


@dataclass(frozen=True, kw_only=True)
class _Texts(CorpusOptions):
    name: Annotated[
        str | None,
        Option(
            f"texts whose loss is measured if there are no tasks, and texts of --replace: {CORPORA} (default: required "
            "without tasks, except for `demo`)",
            flag="--corpus",
            needs=(_REPLACED,),
        ),
    ] = None
    loss: Annotated[Given[LossTexts], Group(needs=(_NO_TASKS,))]


@dataclass(frozen=True, kw_only=True)
class Ablate(RunVerb):
    """measure the effect of every attention head, ablated alone

        headscan ablate MODEL --each --corpus texts/ --store s.duckdb
        headscan ablate MODEL --each --all-but-one --tasks arc_easy --limit 500
        headscan ablate MODEL --each --tasks arc_easy --replace mean --corpus texts/
        headscan ablate CLASSIFIER --each --data dev.tsv
        headscan rank --by effect --store s.duckdb

    Effects are differences to the model without ablation, on the accuracy of tasks or the loss of texts, with paired
    95 % intervals and Benjamini-Hochberg over the table. Classifiers and encoder-decoders have --data, with effects at
    every site. Layers below an ablated head run once for all heads. The same command again resumes.
    """

    common: ClassVar = "MODEL --corpus --tasks --data --each --all-but-one --replace --sequences --max-tokens --store"

    json: Json = False
    heads: Annotated[_Heads, Group("heads", needs=(replace(NO_DATA, of=("kind",)),))]
    data: Annotated[ExamplesSpec | None, Group("labelled examples")]
    metric: Metric = None
    tasks: Annotated[OptionalTaskOptions, Group("tasks", needs=(NO_DATA, Needs(key="tasks.names", of=("prompts",))))]
    texts: Annotated[_Texts, Group("texts", needs=(replace(NO_DATA, of=("name", "data_set", "sequences")),))]

    def __post_init__(self) -> None:
        if not (self.data or self.tasks.names or self.texts.name or self.is_demo):
            raise UsageError("--tasks or --corpus is required, or --data of labelled examples: name one of them")

    def run(self) -> Result:
        if self.data is not None:
            return self._on_examples(self.data)
        from headscan.jobs import job_functions
        from headscan.settings.evaluation_settings import AblateConfig

        texts = None if self.tasks.names else self.texts.loss.build(corpus=self.texts.required(self))
        quiet_libraries()
        spec = self.full_precision()
        with tempfile.TemporaryDirectory() as scratch:
            evaluation = self.tasks.config(spec, **self._demo_task(Path(scratch)))
            replacement = replacement_of(self.heads.kind, self.texts, self)
            config = AblateConfig(evaluation, texts, self.heads.modes, replacement)
            result = job_functions.ablate(config, self.store.path, **self.job_options())
        return effects_result(result.run_id, self.store.path, result.effects)

    def _demo_task(self, scratch: Path) -> dict[str, Any]:
        """Return the folder of the demo's own task, if it is named without its folder."""
        if not self.is_demo or "tasks.prompts.include_path" in changed(self):
            return {}
        from headscan.texts.continuation_task import DEMO_TASK

        if DEMO_TASK not in self.tasks.names:
            return {}
        return {"include_path": demo_task(scratch)["include_path"]}

    def _on_examples(self, data: ExamplesSpec) -> Result:
        from headscan.jobs import job_functions
        from headscan.steps.run_labelled_ablate import LabelledAblateConfig

        judging = labelled_evaluation(self, data, self.metric, self.texts.loss.values.get("max_tokens"))
        config = LabelledAblateConfig(judging, self.heads.modes)
        result = job_functions.labelled_ablate(config, self.store.path, **self.job_options())
        return effects_result(result.run_id, self.store.path, result.effects)


def effects_result(run_id: str, store: str, effects: Sequence[HeadEffect]) -> Result:
    """Return the effects of a run; the text shows both ends of the table."""
    rows = [{**asdict(effect), "harm": effect.harm, "significant": effect.significant} for effect in effects]
    facts = {"run_id": run_id, "store": store}
    return Result(rows, lambda: f"run {run_id} in {store}\n\n{effects_text(effects)}", facts)


def effects_text(effects: Sequence[HeadEffect]) -> str:
    from headscan.store.tables import ALL_BUT_ONE, EACH, FALSE_DISCOVERY_RATE
    from headscan.text_tables import text_table
    from headscan.verdicts.head_effects import effect_facts

    parts = []
    sites = len({effect.site for effect in effects}) > 1
    single = sorted((e for e in effects if e.mode == EACH), key=lambda e: (-e.harm, e.site, e.layer, e.head))
    if single:
        first, facts = single[0], effect_facts(single)
        parts.append(
            f"{_title(first)}\n{facts['significant']} of {facts['heads']} heads have a significant effect (q at most"
            f" {FALSE_DISCOVERY_RATE:g}): {facts['harmful']} are needed, {facts['helpful']} do harm;"
            f" {facts['confirmed']} of them are confirmed on halves."
        )
        ends = single if len(single) <= 2 * _SHOWN else [*single[:_SHOWN], *single[-_SHOWN:]]
        parts.append(text_table([_effect_cells(effect, sites) for effect in ends]))
        if len(ends) < len(single):
            parts.append(f"the {_SHOWN} most needed heads, then the {_SHOWN} least needed of {len(single)}")
    layers = [effect for effect in effects if effect.mode == ALL_BUT_ONE]
    if layers:
        judged = "chosen on one half, judged on the other" if layers[0].confirmed else "too few documents to split"
        parts.append(f"Each layer reduced to its best head ({judged}). {_title(layers[0])}")
        parts.append(text_table([_effect_cells(effect, sites) for effect in layers]))
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


def _effect_cells(effect: HeadEffect, sites: bool) -> dict[str, object]:
    """Return a row of a table, with the site if there are several; the number of digits depends on the metric."""
    from headscan.verdicts.metrics import METRICS

    metric = METRICS[effect.metric]

    def number(value: float | None) -> str:
        return "" if value is None else f"{metric.scale * value:+.{metric.digits + 1}f}"

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
