"""The step ablate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from headscan.errors import InterventionError
from headscan.grid import check_pairs, parse_head
from headscan.options import Group, Option, short
from headscan.settings.corpus_settings import LONGEST_TEXT, SHORTEST, CorpusSpec, ExamplesSpec, Metric, longest_text
from headscan.settings.evaluation_settings import TASK_TOKENS, RecallQuestions, ReplacementConfig, TaskConfig
from headscan.steps.question_step import QuestionStep, demo_task
from headscan.steps.results import Result
from headscan.store.tables import ALL_BUT_ONE, EACH

if TYPE_CHECKING:
    from headscan.runs.model_identity import ModelIdentity
    from headscan.runs.run_context import Run
    from headscan.steps.run_ablate import AblateResult
    from headscan.store.store import Store
    from headscan.verdicts.head_effects import HeadEffect

#: Heads shown at either end of the table.
_SHOWN = 10


@short
@dataclass(frozen=True)
class Ablate(QuestionStep["AblateResult"]):
    """measure the effect of every attention head, ablated alone

        headscan ablate MODEL --each --corpus texts/ --store s.duckdb
        headscan ablate MODEL --heads 18:6,18:7,17:4 --corpus texts/ --store s.duckdb
        headscan ablate MODEL --each --all-but-one --tasks arc_easy --limit 500
        headscan ablate MODEL --each --tasks arc_easy --replace mean --corpus texts/
        headscan ablate CLASSIFIER --each --data dev.tsv
        headscan rank --by effect --store s.duckdb

    Effects are differences to the model without ablation, on the accuracy of tasks or the loss of texts, with paired
    95 % intervals and Benjamini-Hochberg over the table. Classifiers and encoder-decoders have --data, with effects at
    every site. Layers below an ablated head run once for all heads. The same command again resumes.

    Attributes:
        tasks: Tasks of which the accuracy is measured; without names, the loss of ``corpus`` is.
        recall: Effects are not measured on recall questions.
        corpus: Texts whose loss is measured if there are no tasks, and texts of ``replacement``.
        each: Ablate one head at a time; so does a step without ``all_but_one``.
        heads: Heads that are measured, in an encoder-decoder at every site; empty measures all.
        all_but_one: Ablate all other heads of a head's layer.
        data: Labelled examples instead of tasks and texts.
        metric: Accuracy, loss or BLEU of ``data``; None uses accuracy for classes and BLEU for target texts.
        max_tokens: Longest text, or text and target text; None uses the model's context, at most 2,048 tokens.
    """

    common: ClassVar = (
        "MODEL --corpus --tasks --data --heads --each --all-but-one --replace --sequences --max-tokens --store"
    )
    error: ClassVar = InterventionError

    tasks: Annotated[TaskConfig, Group("tasks", needs="no --data")] = field(default_factory=TaskConfig)
    recall: RecallQuestions | None = None
    each: Annotated[bool, Option("effect of each single head (default without --all-but-one)")] = False
    heads: Annotated[
        tuple[tuple[int, int], ...],
        Option(
            "comma-separated heads to measure, each alone (default: all)",
            metavar="LAYER:HEAD",
            parse=parse_head,
            spaces=True,
        ),
    ] = ()
    all_but_one: Annotated[
        bool,
        Option(
            "effect of reducing each layer to its best head, chosen on one half of the questions or documents and "
            "judged on the other"
        ),
    ] = False
    replacement: Annotated[ReplacementConfig, Group("texts", needs="no --data")] = field(
        default_factory=ReplacementConfig
    )
    #: With tasks, texts replace outputs; without, their loss is measured.
    corpus: Annotated[CorpusSpec | None, Group("texts", needs="no --data; --replace mean,resample or no --tasks")] = (
        None
    )
    sequences: Annotated[
        int, Option("number of texts whose loss is measured", least=1, needs="no --data; no --tasks")
    ] = 128
    max_tokens: Annotated[
        int | None,
        Option(
            f"longest of these texts in tokens (default: the model's context, at most {LONGEST_TEXT})",
            least=SHORTEST,
            needs="no --tasks",
        ),
    ] = None
    data: Annotated[ExamplesSpec | None, Group("labelled examples")] = None
    metric: Metric = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "model", self.model.in_full_precision())
        self.refuse(("recall", "max_loss"), "on single heads")
        check_pairs(self.heads)
        if self.heads and self.all_but_one:
            raise InterventionError("`all_but_one` compares all heads of a layer: leave out `heads`, or `all_but_one`")
        if self.text is not None:
            raise InterventionError("`text` has no effect on single heads: leave it out, or set `corpus`")
        if self.data is not None:
            if self.tasks.names or self.corpus is not None:
                raise InterventionError("effects have one metric: leave out `data`, or `tasks` and `corpus`")
            self.refuse(("tasks", "share_prefixes", "replacement", "sequences"), "with `data`")
            return
        self.refuse(("metric",), "without `data`")
        self.tasks.check_effect()
        if not self.tasks.names:
            self.require_corpus("`tasks` or `corpus` is required, or `data` of labelled examples: name one of them")
        if self.tasks.names and self.corpus is not None and self.replacement.kind == "zero":
            raise InterventionError("tasks and texts, but effects have one metric. Set either `tasks` or `corpus`")
        if self.tasks.names:
            self.refuse(("sequences", "max_tokens"), "with `tasks`")
        object.__setattr__(self, "replacement", self.replacement.with_corpus(self.corpus, self.model))

    @property
    def modes(self) -> tuple[str, ...]:
        if not self.all_but_one:
            return (EACH,)
        return (EACH, ALL_BUT_ONE) if self.each else (ALL_BUT_ONE,)

    def longest(self, identity: ModelIdentity) -> int:
        on_tasks = self.data is None and self.tasks.names
        return TASK_TOKENS if on_tasks else longest_text(identity, self.max_tokens)

    def for_demo(self, scratch: Path) -> Self:
        """Return the step with the folder of the demo's own task, if it is named without its folder."""
        from headscan.texts.continuation_task import DEMO_TASK

        if DEMO_TASK not in self.tasks.names or self.tasks.include_path is not None:
            return self
        return replace(self, tasks=replace(self.tasks, include_path=demo_task(scratch)["include_path"]))

    def execute(self, run: Run) -> AblateResult:
        from headscan.steps.run_ablate import run_ablate

        return run_ablate(self, run)

    def shown(self, result: AblateResult, store: Store) -> Result:
        """Return the effects; the text shows both ends of the table."""
        effects = result.effects
        rows = [{**asdict(effect), "harm": effect.harm, "significant": effect.significant} for effect in effects]
        facts = {"run_id": result.run_id, "store": str(store.path)}
        return Result(rows, lambda: f"run {result.run_id} in {store.path}\n\n{effects_text(effects)}", facts)


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
            f"{_title(first)}\nheads with a significant effect (q at most {FALSE_DISCOVERY_RATE:g}):"
            f" {facts['significant']} of {facts['heads']}; needed: {facts['harmful']}, harmful: {facts['helpful']},"
            f" confirmed on halves: {facts['confirmed']}"
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
