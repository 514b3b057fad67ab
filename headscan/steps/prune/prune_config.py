"""Settings of a pruning, and the models that are built by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from torch import Tensor

from headscan.catalog import LAYER_DROP, RANDOM, RANKED_CRITERIA
from headscan.errors import PruningError, unknown_name
from headscan.grid import Unit, check_pairs
from headscan.models.loaded_model import LoadedModel
from headscan.options import Count, Limits, check_limits
from headscan.pruning.calibration import Calibration
from headscan.pruning.head_selection import SelectionConfig
from headscan.pruning.repair import DistillConfig, RepairConfig, Target, distill, mean_outputs, repair
from headscan.runs.model_identity import ModelIdentity
from headscan.runs.progress import Progress
from headscan.settings.evaluation_settings import TASK_TOKENS, EvaluateConfig
from headscan.settings.saving_settings import PRUNE_METHODS, REPAIRS, KvCounts, PruneTexts, RecallPrompts
from headscan.steps.prune.pruning_units import PruneBudget


@dataclass(frozen=True)
class RepairChoice:
    """A repair.

    Attributes:
        name: Name in `REPAIRS`, which lists the projections that are solved again.
        distill_steps: Gradient steps after it; 0 omits them.
    """

    name: str = "o+down"
    distill_steps: Annotated[int, Limits(least=0)] = 0

    def __post_init__(self) -> None:
        check_limits(self, PruningError)
        if self.name not in REPAIRS:
            raise PruningError(f"unknown repair {self.name!r}. Choose one of {', '.join(REPAIRS)}")
        if self.distill_steps and not self.targets:
            raise PruningError(
                f"`distill_steps={self.distill_steps}` without a repair (limit 0). Repair a projection, too"
            )

    @property
    def targets(self) -> tuple[Target, ...]:
        return REPAIRS[self.name]

    @property
    def is_none(self) -> bool:
        return self.name == "none"

    @property
    def words(self) -> str:
        return f"{self.name}, distill {self.distill_steps}" if self.distill_steps else self.name

    def weights(
        self, lm: LoadedModel, calibration: Calibration, removed: Sequence[tuple[int, int]]
    ) -> dict[str, Tensor]:
        """Return new weights by parameter name, with progress on the terminal."""
        if self.name == "mean":
            return mean_outputs(lm, calibration, removed)
        layers = lm.grid.num_layers - min((layer for layer, _ in removed), default=0)
        with Progress("repairing", layers, "layer") as progress:
            weights = repair(lm, calibration, removed, RepairConfig(self.targets), progress=lambda _: progress.update())
        if not self.distill_steps or not weights:
            return weights
        with Progress("distilling", self.distill_steps, "steps") as progress:
            config = DistillConfig(self.distill_steps)
            return distill(lm, calibration, removed, weights, config, progress=lambda _: progress.update())


@dataclass(frozen=True)
class Timing:
    """Timing of prefill and decoding.

    Attributes:
        prompt_tokens: Length of the prompt, at most the model's context.
        rounds: Repetitions, which alternate with the original model; times are their medians.
    """

    prompt_tokens: Count = 512
    new_tokens: Count = 16
    rounds: Count = 5

    def __post_init__(self) -> None:
        check_limits(self, PruningError)


@dataclass(frozen=True)
class WantedModel:
    """A pruned model to build.

    Attributes:
        budget: Size; None removes ``heads``.
        heads: Heads to remove; empty if the method chooses them.
        random_folders: Folders of its controls without random units.
        layers_folder: Folder of its control without whole attention layers; None builds none.
    """

    folder: Path
    method: str
    budget: PruneBudget | None
    heads: tuple[tuple[int, int], ...] = ()
    random_folders: tuple[Path, ...] = ()
    layers_folder: Path | None = None


def _check_heads(field: str, by_name: Mapping[str, Sequence[tuple[int, int]]]) -> None:
    """Raise if a field is no mapping, and if the value of a name is no list of heads, or empty."""
    if not isinstance(by_name, Mapping):
        raise PruningError(f"`{field}={by_name!r}` is no mapping. Pass (layer, head) pairs by name")
    for name, heads in by_name.items():
        if not isinstance(heads, Sequence):
            raise PruningError(f"`{field}` of {name!r} are {heads!r}. Pass a tuple of (layer, head) pairs")
        if not heads:
            raise PruningError(f"`{field}` of {name!r} are empty (limit 1 head). Name heads, or leave {name!r} out")
        check_pairs(heads)


@dataclass(frozen=True)
class PruneConfig:
    """Settings of a pruning.

    Attributes:
        evaluation: Questions that judge the models, without ``text``: the held-out text is added.
        out: Folder of the model; with several models, of their folders. It becomes a `Path`.
        budgets: Sizes of the models; empty if ``heads`` names the heads.
        methods: Methods that choose heads, of `PRUNE_METHODS` or ``orders``; one model is built for each size and
            method.
        heads: Heads to remove by the name of their mask or list; empty lets the methods choose.
        orders: All heads, the least important first, by method; criteria without an entry take the order of a run in
            the store.
        texts: Texts that choose, repair and judge.
        recall_prompts: Recall prompts that choose heads, repair and measure held-out losses, next to the texts.
        unit: Unit of removal.
        kv_counts: ``divisors`` leaves each layer a number of KV heads that a DeciLM folder holds without KV heads of
            zeros: a divisor of the query heads, or 0 except in the first layer. The removed share may be smaller than
            the budget's by less than one step of a layer.
        selection: Effort of the methods ``damage`` and ``layer-drop``.
        repair: Projections that are solved again.
        controls: Number of random controls of each model: models of about the same size with the same repair, without
            random units. One more control lacks whole attention layers, except with 0.
        remote_code: Copy the code of pruned models into the folders.
        timing: How prefill and decoding are timed; None skips it.
        skip_verdict: Judge nothing, and build no controls.
        run_id: First characters of the id of the run whose numbers order heads by a criterion; None uses the newest run
            of this model.

    Raises:
        HeadIndexError: One of ``heads`` or ``orders`` is no pair of indices.
        PruningError: There is nothing to build, a value is out of range, two models have one folder, or a setting has
            no effect.
        UnknownNameError: A method is unknown.
    """

    evaluation: EvaluateConfig
    out: str | Path
    budgets: tuple[PruneBudget, ...] = ()
    methods: tuple[str, ...] = ("damage",)
    heads: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    orders: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    texts: PruneTexts = field(kw_only=True)
    recall_prompts: RecallPrompts = field(default_factory=RecallPrompts)
    unit: Unit = "head"
    kv_counts: KvCounts = "any"
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    repair: RepairChoice = field(default_factory=RepairChoice)
    controls: Annotated[int, Limits(least=0)] = 1
    remote_code: bool = False
    timing: Timing | None = field(default_factory=Timing)
    skip_verdict: bool = False
    run_id: str | None = None

    def __post_init__(self) -> None:
        check_limits(self, PruningError)
        object.__setattr__(self, "out", Path(self.out))
        if self.evaluation.text is not None:
            raise PruningError("`evaluation.text` has no effect on a pruning: leave it out, or set `texts.held_out`")
        if not (self.budgets and self.methods) and not self.heads:
            raise PruningError("nothing to prune: 0 sizes (limit 1). Set `budgets` and `methods`, or `heads`")
        if not self.budgets and self.methods != PruneConfig.methods:
            raise PruningError("`methods` has no effect without `budgets`: leave it out")
        # The layers of a control are selected with the same effort.
        has_controls = self.controls and not self.skip_verdict
        if not self.budgets and not has_controls and self.selection != SelectionConfig():
            raise PruningError("`selection` has no effect on named heads without controls: leave it out")
        # A pruning that builds no controls may also ask for none.
        if self.skip_verdict and self.controls not in (0, PruneConfig.controls):
            raise PruningError(f"`controls={self.controls}` has no effect with `skip_verdict`: leave one of them out")
        _check_heads("heads", self.heads)
        _check_heads("orders", self.orders)
        known = (*PRUNE_METHODS, *self.orders)
        for method in self.methods:
            if method not in known:
                raise unknown_name("method", method, known)
        if self.run_id is not None and not set(self.methods) & set(RANKED_CRITERIA):
            raise PruningError("`run_id` has no effect without a criterion of a run in `methods`: leave it out")
        if self.kv_counts != "any" and (self.unit != "group" or self.heads):
            raise PruningError(
                f"`kv_counts={self.kv_counts}` with `unit={self.unit}` or named heads (limit: `unit=group`). Choose"
                " `unit=group`, or leave it out"
            )
        if self.unit == "head" and any(budget.is_of_cache for budget in self.budgets):
            raise PruningError("`kv_bytes` with `unit=head`: single query heads free no KV cache. Change `unit`")
        names = self._folder_names
        for name in names:
            if name in ("", "..") or Path(name).name != name or "\\" in name:
                raise PruningError(f"{name!r} names no folder in `out`. Change its name in `heads` or `methods`")
            if names.count(name) > 1:
                raise PruningError(
                    f"{names.count(name)} models have the folder {name!r} (limit 1). Give each of `budgets`, `methods`"
                    " and `heads` once"
                )

    def placed_tokens(self, identity: ModelIdentity) -> int:
        """Return the tokens that placement reserves memory for: those of the longest text, or question asked."""
        asked = TASK_TOKENS if self.skip_verdict else self.evaluation.placed_tokens(identity)
        return max(asked, self.texts.longest(identity))

    @property
    def _folder_names(self) -> list[str]:
        return [_folder_name(method, budget) for method, budget, _ in self._sizes]

    @property
    def folders(self) -> tuple[Path, ...]:
        names, out = self._folder_names, Path(self.out)
        return (out,) if len(names) == 1 else tuple(out / name for name in names)

    @property
    def _sizes(self) -> list[tuple[str, PruneBudget | None, tuple[tuple[int, int], ...]]]:
        sizes: list[tuple[str, PruneBudget | None, tuple[tuple[int, int], ...]]] = [
            (method, budget, ()) for budget in self.budgets for method in self.methods
        ]
        return sizes + [(name, None, heads) for name, heads in self.heads.items()]

    def wanted(self, scratch: Path) -> tuple[WantedModel, ...]:
        """Return the models to build in the folder ``scratch``, in the order of `folders`."""
        wanted = []
        for number, (method, budget, heads) in enumerate(self._sizes):
            seeds, layers = self._controls(method, budget)
            wanted.append(
                WantedModel(
                    scratch / str(number),
                    method,
                    budget,
                    heads,
                    tuple(scratch / f"{number}-random-{seed}" for seed in range(seeds)),
                    scratch / f"{number}-layers" if layers else None,
                )
            )
        return tuple(wanted)

    def _controls(self, method: str, budget: PruneBudget | None) -> tuple[int, bool]:
        """Return the number of random controls of a model, and True if it has a control without whole layers."""
        if self.skip_verdict or not self.controls:
            return 0, False
        if budget is None:
            return self.controls, True
        # Methods that remove as many units have common controls, built with the first of them that needs each.
        methods = self.methods if budget.same_for_all_methods else (method,)
        first_of_heads = next((each for each in methods if each != LAYER_DROP), None)
        # Whole layers are another number of heads, so their controls are random only without another choice.
        chosen = [each for each in methods if each != RANDOM]
        first_chosen = next((each for each in chosen if each != LAYER_DROP), chosen[0] if chosen else None)
        # Whole layers chosen by damage would be their own control.
        is_control = self.unit == "layer" and "damage" in methods
        return self.controls if method == first_chosen else 0, method == first_of_heads and not is_control


def _folder_name(method: str, budget: PruneBudget | None) -> str:
    if budget is None:
        return method
    share = budget.nominal_share
    return f"{method}-{budget.label.replace(' ', '-') if share is None else f'{share:g}'}"
