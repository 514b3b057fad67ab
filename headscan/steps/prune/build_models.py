"""Building of pruned models on one loaded model: choose the heads of all, then repair, slice and save each.

Moments, subsets and loss curves are computed once for all methods and shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from torch import Tensor

from headscan.catalog import LAYER_DROP, RANDOM
from headscan.engine.prompt_losses import Prompts
from headscan.errors import PruningError
from headscan.grid import Head, find_units
from headscan.long_work import KnownNumbers, LongWork, hash_of
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import pass_tokens
from headscan.options import BATCH_TOKENS
from headscan.pruning.calibration import Calibration
from headscan.pruning.edited_model import Divergence, Edits
from headscan.pruning.head_selection import HeadSelection, allocate_ranked
from headscan.pruning.repair import DistillConfig, RepairConfig, distill, mean_outputs, repair
from headscan.pruning.selection_settings import SelectionConfig
from headscan.pruning.slice_heads import slice_heads
from headscan.runs.progress import Progress, at_work, shown_steps
from headscan.runs.run_context import Run
from headscan.settings.saving_settings import RecallPrompts
from headscan.sizing.model_sizes import LayerCache
from headscan.steps.prune.calibration_texts import CalibrationPrompts, CalibrationTexts
from headscan.steps.prune.held_out_losses import HeldOutLosses
from headscan.steps.prune.model_costs import compare_costs, find_layer_caches, promised_cache
from headscan.steps.prune.prune_step import Prune, RepairChoice, WantedModel
from headscan.steps.prune.pruned_arms import BuiltModel, skipped_layers
from headscan.steps.prune.pruning_units import (
    BudgetSearch,
    all_units,
    allowed_groups,
    first_units,
    mean_ranks,
    rounding_note,
    skipped_by,
)
from headscan.steps.prune.work_folder import read_model, write_model
from headscan.text_tables import counted
from headscan.texts.held_out_text import HeldOutText

#: Calibration tokens on which the divergence of a `LossBudget` is measured; it has little noise.
_LOSS_TOKENS = 16384


@dataclass(frozen=True)
class BuildJob:
    """Models to build, and how; the methods of ``config`` choose the heads of those that name none.

    Attributes:
        texts: Texts that choose heads and repair.
        prompts: Recall prompts that choose heads and repair, next to the texts.
        held_out: Text on which the loss of models that are no controls is measured; None measures no loss.
        held_out_prompts: Recall prompts on which their loss is measured, next to ``held_out``.
        known: Damages that were measured before; new ones are added.
    """

    config: Prune
    texts: CalibrationTexts
    wanted: tuple[WantedModel, ...]
    batch_tokens: int = BATCH_TOKENS
    prompts: tuple[CalibrationPrompts, ...] = ()
    held_out: HeldOutText | None = None
    held_out_prompts: tuple[Prompts, ...] = ()
    known: KnownNumbers = field(default_factory=KnownNumbers)
    say: Callable[[str], None] = lambda line: None
    name: str = "pruning"


def build_models(lm: LoadedModel, job: BuildJob) -> list[BuiltModel]:
    """Pool task: build every wanted model and its controls, one after the other; those that are finished stay."""
    # Refuses models whose heads cannot be removed before anything is measured.
    with at_work("checking that heads can be removed"):
        slice_heads(lm, all_units(lm.grid, "head")[0])
    batch_tokens = pass_tokens(lm.device.type, job.batch_tokens)
    texts = calibration = job.texts.as_calibration(batch_tokens)
    if job.prompts:
        prompts = [each.as_calibration(batch_tokens) for each in job.prompts]
        calibration = texts.with_prompts(prompts, job.config.recall_prompts.weight)
    # The moments of the choice are as large as a repair needs, so all choices are made before the first repair.
    chosen = list(_Chooser(lm, job, texts, calibration).choose())
    builder = _Builder(lm, job, texts, calibration)
    return [builder.build(model) for model in chosen]


def kept_damages(
    run: Run,
    texts: CalibrationTexts,
    selection: SelectionConfig,
    batch_tokens: int,
    prompts: Sequence[CalibrationPrompts] = (),
    recall_weight: float = RecallPrompts.weight,
) -> AbstractContextManager[KnownNumbers]:
    """Return the damages of heads that the store has or gets. They depend on neither sizes nor methods."""
    tokens = {name: getattr(selection, name) for name in ("moment_tokens", "curve_tokens", "judged_tokens")}
    facts = {
        "texts": texts.content_hash,
        "prompts": [(each.name, hash_of(each.series)) for each in prompts],
        "recall_weight": recall_weight if prompts else None,
        "batch_tokens": batch_tokens,
        **tokens,
    }
    record = run.record(
        "prune",
        run.fingerprint(facts),
        config={"model": asdict(run.model), **facts},
        corpus=texts.corpus,
        corpus_hash=texts.content_hash,
    )
    return run.resumable_numbers(record)


@dataclass(frozen=True)
class _Chosen:
    """A model whose heads are chosen; ``finished`` if it was built before."""

    folder: Path
    method: str
    share: float
    removed: tuple[Head, ...]
    seed: int | None = None
    is_control: bool = False
    finished: BuiltModel | None = None


class _Chooser:
    """Chooses the heads of one model after the other on the loaded original; moments and curves are shared."""

    def __init__(self, lm: LoadedModel, job: BuildJob, texts: Calibration, calibration: Calibration) -> None:
        self._lm, self._job, self._config = lm, job, job.config
        self._texts, self._calibration = texts, calibration
        self._work = LongWork(job.known, shown_steps, job.say)
        self._units = all_units(lm.grid, self._config.removed_unit)
        self._allowed = allowed_groups(lm.grid, self._config.kv_counts)
        self._controls: set[tuple[str, float, tuple[Head, ...]]] = set()
        self._passed_over: list[Callable[[], tuple[Head, ...]]] = []

    @cached_property
    def _selection(self) -> HeadSelection:
        return HeadSelection(
            self._lm,
            self._calibration,
            unit=self._config.removed_unit,
            allowed=self._allowed,
            config=self._config.selection,
            work=self._work,
        )

    def choose(self) -> Iterator[_Chosen]:
        """Yield every wanted model, each before its controls."""
        for wanted in self._job.wanted:
            yield from self._with_controls(wanted)

    def _with_controls(self, wanted: WantedModel) -> Iterator[_Chosen]:
        finished = read_model(wanted.folder)
        removed = self._chosen(finished, lambda: self._removed(wanted))
        share, rounding = None, ""
        if wanted.budget is not None:
            share = wanted.budget.nominal_share
            rounding = rounding_note(
                wanted.budget, self._config.removed_unit, self._units, removed, self._config.kv_counts
            )
        if share is None:
            share = len(removed) / self._lm.grid.total_heads
        for note in (rounding, skipped_layers(skipped_by(self._lm.grid, removed))):
            if note:
                self._job.say(note)
        yield _Chosen(wanted.folder, wanted.method, share, removed, finished=finished)
        for seed, folder in enumerate(wanted.random_folders):
            heads = self._choose(RANDOM, self._count_of(removed), seed)
            if self._is_new((RANDOM, share, heads)):
                yield _Chosen(folder, RANDOM, share, heads, seed, is_control=True, finished=read_model(folder))
        if wanted.layers_folder is not None:
            finished = read_model(wanted.layers_folder)
            heads = self._chosen(finished, lambda: self._layers(len(removed)))
            if heads and self._is_new((LAYER_DROP, share, heads)):
                yield _Chosen(wanted.layers_folder, LAYER_DROP, share, heads, is_control=True, finished=finished)

    def _chosen(self, finished: BuiltModel | None, choose: Callable[[], tuple[Head, ...]]) -> tuple[Head, ...]:
        """Return the heads of a model; those of finished models are chosen again only before further choices. A choice
        can depend on what earlier choices measured, and a resumed run must choose the same heads.
        """
        if finished is not None:
            self._passed_over.append(choose)
            return finished.removed
        for earlier in self._passed_over:
            earlier()
        self._passed_over.clear()
        return choose()

    def _is_new(self, control: tuple[str, float, tuple[Head, ...]]) -> bool:
        if control in self._controls:
            return False
        self._controls.add(control)
        return True

    def _removed(self, wanted: WantedModel) -> tuple[Head, ...]:
        if wanted.budget is None:
            return self._lm.grid.check(wanted.heads)
        units = all_units(self._lm.grid, "layer") if wanted.method == LAYER_DROP else self._units
        search = BudgetSearch(
            lambda tokens: self._unit_bytes(units, tokens),
            lambda count, tokens: self._cache_bytes(self._choose(wanted.method, count), tokens),
            lambda count: self._loss(self._choose(wanted.method, count)),
            wanted.method,
        )
        removed = self._choose(wanted.method, wanted.budget.count(len(units), search))
        if not removed:
            least = min((step for numbers in (self._allowed or {}).values() for step in numbers if step), default=0)
            raise PruningError(
                f"{wanted.budget.label} with `kv_counts={self._config.kv_counts}` removes 0 KV groups (limit {least},"
                " the smallest step of a layer). Remove more, or allow any KV counts"
            )
        return removed

    def _count_of(self, removed: Sequence[Head]) -> int:
        """Return the number of units with as many heads as those removed."""
        if self._config.removed_unit == "head":
            return len(removed)
        gone = set(removed)
        return max(1, sum(gone.issuperset(heads) for heads in self._units))

    def _choose(self, method: str, count: int, seed: int = 0) -> tuple[Head, ...]:
        if method in self._config.orders:
            if self._allowed is not None:
                ranks = mean_ranks(self._units, self._config.orders[method])
                return allocate_ranked(
                    find_units(self._lm.grid, self._config.removed_unit), ranks, count, self._allowed
                )
            return tuple(Head(*head) for head in first_units(self._units, self._config.orders[method], count))
        return self._selection.choose(method=method, count=count, seed=seed)

    def _layers(self, heads: int) -> tuple[Head, ...]:
        """Return the heads of whole layers, about as many as ``heads``; none if these are all layers."""
        layers = all_units(self._lm.grid, "layer")
        count = max(1, round(heads * len(layers) / self._lm.grid.total_heads))
        if count >= len(layers):
            self._job.say(
                f"no control without whole attention layers: {counted(heads, 'head')} would take {count} of"
                f" {counted(len(layers), 'layer')} (limit {len(layers) - 1})"
            )
            return ()
        return self._selection.choose(method=LAYER_DROP, count=count, seed=0)

    @cached_property
    def _caches(self) -> Sequence[LayerCache]:
        caches = find_layer_caches(self._lm)
        if caches is None:
            raise PruningError("cannot apply `kv_bytes`: the KV cache of this model cannot be sized. Set `share`")
        return caches

    def _unit_bytes(self, units: Sequence[tuple[Head, ...]], tokens: int) -> list[int]:
        whole = self._cache_bytes((), tokens)
        return [whole - self._cache_bytes(heads, tokens) for heads in units]

    def _cache_bytes(self, removed: Sequence[Head], tokens: int) -> int:
        return promised_cache(self._caches, self._lm.grid, removed, tokens)

    def _loss(self, removed: Sequence[Head]) -> float:
        heads = self._lm.grid.check(removed)
        if not heads:
            return 0.0

        def measure() -> float:
            weights = repaired_weights(self._config.repair, self._lm, self._calibration, removed)
            divergence = Divergence(self._lm, self._texts.first(_LOSS_TOKENS), self._work)
            with at_work("divergence of the smaller model"):
                return divergence.of(Edits(heads, weights))

        key = ("divergence of a model within a loss limit", self._config.repair.words, heads)
        return float(self._work.known.measured(key, measure)[0])


class _Builder:
    """Repairs, slices and writes one chosen model after the other on the loaded original."""

    def __init__(self, lm: LoadedModel, job: BuildJob, texts: Calibration, calibration: Calibration) -> None:
        self._lm, self._job, self._texts, self._calibration = lm, job, texts, calibration

    @cached_property
    def _held_out(self) -> HeldOutLosses | None:
        job = self._job
        if job.held_out is None:
            return None
        return HeldOutLosses(self._lm, job.held_out, job.held_out_prompts, self._texts.batch_tokens)

    def build(self, model: _Chosen) -> BuiltModel:
        """Return a model with its costs and losses, written to its folder."""
        if model.finished is not None:
            return model.finished
        config, removed = self._job.config, model.removed
        self._job.say(f"{model.method}: removing {len(removed)} of {self._lm.grid.total_heads} heads, with repair")
        weights = repaired_weights(config.repair, self._lm, self._calibration, removed)
        changes = {}
        if not model.is_control and self._held_out is not None:
            with at_work("held-out losses"):
                changes = self._held_out.changes(Edits(removed, weights))
        with at_work("removing heads"):
            smaller = slice_heads(self._lm, removed, weights)
        with at_work("timing both models"):
            costs = compare_costs(self._lm, smaller, removed, None if model.is_control else config.timing)
        built = BuiltModel(
            folder=model.folder,
            method=model.method,
            share=model.share,
            unit=config.removed_unit,
            kv_counts=config.kv_counts,
            repair=config.repair.words,
            removed=removed,
            skipped=skipped_by(self._lm.grid, removed),
            costs=costs,
            seed=model.seed,
            is_control=model.is_control,
            losses=changes,
        )
        with at_work(f"writing {model.folder.name}"):
            write_model(smaller, built, config.remote_code)
        return built


def repaired_weights(
    choice: RepairChoice, lm: LoadedModel, calibration: Calibration, removed: Sequence[tuple[int, int]]
) -> dict[str, Tensor]:
    """Return new weights by parameter name, with progress on the terminal."""
    if choice.name == "mean":
        with at_work("mean outputs of heads"):
            return mean_outputs(lm, calibration, removed)
    layers = lm.grid.num_layers - min((layer for layer, _ in removed), default=0)
    with Progress("repairing", layers, "layer") as progress:
        weights = repair(lm, calibration, removed, RepairConfig(choice.targets), progress=lambda _: progress.update())
    if not choice.distill_steps or not weights:
        return weights
    with Progress("distilling", choice.distill_steps, "step") as progress:
        config = DistillConfig(choice.distill_steps)
        return distill(lm, calibration, removed, weights, config, progress=lambda _: progress.update())
