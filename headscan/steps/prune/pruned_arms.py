"""Arms of pruned models, and of their controls: models of about the same size with the same repair, without random
units or without whole attention layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from headscan.catalog import RANDOM
from headscan.engine.arms import Arm, model_arm, model_settings
from headscan.grid import Head
from headscan.model_spec import ModelSpec
from headscan.runs.model_identity import ModelIdentity, fingerprint, identify
from headscan.settings.saving_settings import KvCounts
from headscan.steps.prune.held_out_losses import LossChange
from headscan.steps.prune.model_costs import CostComparison
from headscan.store.records import ArmKind
from headscan.text_tables import counted


@dataclass(frozen=True)
class BuiltModel:
    """A pruned model in a folder.

    Attributes:
        share: Nominal share of the units that are removed, 0 to 1; controls have that of their model.
        unit: ``head``, ``group`` or ``layer``.
        skipped: Layers that have no attention any more.
        seed: Seed of random heads; None for other methods.
        is_control: The model is a control of another one, and is deleted when it is judged.
        losses: Held-out losses by task; empty for controls.
        kv_counts: Numbers of KV heads that its layers may have.
    """

    folder: Path
    method: str
    share: float
    unit: str
    repair: str
    removed: tuple[Head, ...]
    skipped: tuple[int, ...]
    costs: CostComparison
    seed: int | None = None
    is_control: bool = False
    losses: Mapping[str, LossChange] = field(default_factory=dict)
    kv_counts: KvCounts = "any"

    @property
    def kind(self) -> ArmKind:
        if not self.is_control:
            return ArmKind.PRUNED
        return ArmKind.RANDOM_PRUNED if self.method == RANDOM else ArmKind.LAYERS_DROPPED

    @property
    def has_equal_groups(self) -> bool:
        """Every layer has attention, and all its KV heads have as many query heads."""
        return self.unit == "group" and not self.skipped

    @property
    def selection(self) -> str:
        """Unit and repair, the settings that a model shares with its controls."""
        numbers = "" if self.kv_counts == "any" else f", KV counts {self.kv_counts}"
        return f"unit {self.unit}{numbers}, repair {self.repair}"


def pruned_arm(built: BuiltModel, baseline: ModelSpec, identity: ModelIdentity) -> Arm:
    spec = replace(baseline, source=str(built.folder), revision=None, safetensors=True)
    own = identify(spec)
    arm = model_arm(spec, own, identity)
    costs = built.costs
    details = {
        "method": built.method,
        "unit": built.unit,
        "repair": built.repair,
        "weights_left": costs.weights_left,
        "cache_left": costs.cache_left,
        "skipped_layers": list(built.skipped),
    }
    if built.kind is ArmKind.LAYERS_DROPPED:
        details["layers_dropped"] = len(built.skipped)
    return replace(
        arm,
        name=_arm_name(built, fingerprint(own.fingerprint())[:6]),
        kind=built.kind,
        criterion=built.method,
        share=built.share,
        selection=built.selection,
        seed=built.seed,
        # The name of the folder is no setting: that of a control is random.
        details=(*model_settings(own), *details.items()),
        removed=built.removed,
        measured=(("folder", str(built.folder)), ("before", asdict(costs.before)), ("after", asdict(costs.after))),
    )


def _arm_name(built: BuiltModel, mark: str) -> str:
    if built.kind is ArmKind.LAYERS_DROPPED:
        # Two shares can drop the same layers, and each needs its control.
        layers = counted(len(built.skipped), "attention layer")
        return f"{layers} dropped for {100 * built.share:.3g}% {mark}"
    if built.kind is ArmKind.RANDOM_PRUNED:
        return f"random pruned {100 * built.share:.3g}% seed {built.seed} {mark}"
    return f"pruned {built.method} {100 * built.share:.3g}% {mark}"


def skipped_layers(layers: Sequence[int]) -> str:
    """Return a note on layers that lose their attention; empty without any."""
    if not layers:
        return ""
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}: no head is left, so the attention is skipped"
