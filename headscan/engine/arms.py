"""Arms of an evaluation: their heads, ablations and names, and what replaces the outputs of their heads."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headscan.ablation.intervention import ZERO, Ablation, Intervention, LayerwiseAblation, Replacement
from headscan.ablation.masks import HeadMask, RandomHeads, SiteMask
from headscan.ablation.rules import HeadRule
from headscan.catalog import SCORES, MassWidths
from headscan.engine.replacements import ZERO_REPLACEMENT, ArmReplacement
from headscan.errors import InterventionError, unknown_name
from headscan.grid import Head, HeadGrid
from headscan.model_spec import ModelSpec
from headscan.ranking.head_ranking import OrderedHead, random_heads, rank_heads, select_heads, thresholds
from headscan.runs.head_orders import head_order, run_kind
from headscan.runs.model_identity import ModelIdentity, fingerprint
from headscan.settings.evaluation_settings import MaskOrder
from headscan.store.records import ArmKind, ArmRecord
from headscan.store.store import Store, short_hash, to_json


@dataclass(frozen=True)
class Arm:
    """One way of running the model.

    Attributes:
        name: Unique in an evaluation, for people; `id` identifies the arm.
        intervention: None for the baseline.
        share: Nominal share of heads, 0 to 1; a rule may ablate another share.
        selection: Further description of the selection; arms that differ in it are points of different curves.
        model: Model that answers and ablates nothing; None uses the baseline's.
        removed: Heads that this model lacks.
        details: Further settings that identify the arm, as JSON data by name.
        measured: What differs between runs of one arm, for the store: measured sizes and times, ``swept`` in a sweep.
    """

    name: str
    kind: ArmKind
    intervention: Intervention | None = None
    criterion: str | None = None
    share: float | None = None
    ranking_run: str | None = None
    selection: str | None = None
    seed: int | None = None
    details: tuple[tuple[str, object], ...] = ()
    model: ModelSpec | None = None
    removed: tuple[Head, ...] = ()
    measured: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        if self.model is not None and self.intervention is not None:
            raise InterventionError(
                f"{self.name} has a model of its own and ablates heads (limit one of them). Set `model` or"
                " `intervention`"
            )
        if isinstance(self.intervention, Ablation) and "replacement_texts" not in dict(self.details):
            # Where no texts are named, the outputs themselves identify what replaces those of ablated heads.
            own = ArmReplacement.of(self.intervention.replacement).details
            object.__setattr__(self, "details", (*self.details, *own))

    @property
    def id(self) -> dict[str, object]:
        """Plain data that identifies the arm among those of a run: arms with equal ids are one arm, which resumes,
        whatever its name is, and what was ``measured``.
        """
        return {
            "kind": self.kind,
            "criterion": self.criterion,
            "share": self.share,
            "selection": self.selection,
            "seed": self.seed,
            "change": None if self.intervention is None else self.intervention.id,
            "settings": self.settings,
        }

    @property
    def fixed_heads(self) -> tuple[Head, ...] | None:
        """Ablated heads, if they are the same for every input. None for the baseline, and where inputs decide."""
        return None if self.intervention is None else self.intervention.fixed_heads

    @property
    def stored_mask(self) -> tuple[str, tuple[Head, ...]]:
        """The site and the heads of the arm's mask in the store. Without heads none is stored; heads of several sites
        are in the settings alone.
        """
        if isinstance(self.intervention, SiteMask):
            return self.intervention.sites[0] if len(self.intervention.sites) == 1 else ("", ())
        return "self", self.fixed_heads or self.removed

    @property
    def settings(self) -> dict[str, object]:
        """Settings that identify the arm, as JSON data; the store shows them."""
        return {"scan_run": self.ranking_run, **dict(self.details)}

    def record(self, run_id: str, mask_id: str | None) -> ArmRecord:
        """Return the arm's row in a run, with the mask of its heads."""
        return ArmRecord(
            arm_id=short_hash(run_id, self.id),
            run_id=run_id,
            name=self.name,
            kind=self.kind,
            mask_id=mask_id,
            criterion=self.criterion,
            threshold=self.intervention.score_threshold if isinstance(self.intervention, LayerwiseAblation) else None,
            share=self.share,
            seed=self.seed,
            selection=self.selection,
            replacement=self.intervention.kind if isinstance(self.intervention, Ablation) else None,
            config={**self.settings, **dict(self.measured)},
        )


BASELINE = Arm("baseline", ArmKind.BASELINE)


def mask_arm(heads: Sequence[tuple[int, int]], replacement: Replacement | ArmReplacement = ZERO_REPLACEMENT) -> Arm:
    """Return an arm that ablates the given heads, replaced by zero, or by what `headscan.head_means` and
    `headscan.head_samples` return.
    """
    if isinstance(replacement, Replacement):
        replacement = ArmReplacement.of(replacement)
    if not heads:
        raise InterventionError("empty mask: 0 heads (limit 1). Give at least one head")
    mask = HeadMask(heads, replacement.outputs)
    text = " ".join(f"{layer}:{head}" for layer, head in mask.heads)
    if len(text) > 40:
        text = f"of {len(mask.heads)} heads {hashlib.sha256(text.encode()).hexdigest()[:6]}"
    return Arm(f"mask {text}{replacement.suffix}", ArmKind.MASK, mask, details=replacement.details)


def site_arm(name: str, mask: SiteMask, settings: Mapping[str, object]) -> Arm:
    """Return an arm that ablates heads of several sites; ``settings`` are further JSON data that identify it."""
    sites = {site: [list(head) for head in heads] for site, heads in mask.sites}
    return Arm(name, ArmKind.MASK, mask, details=(*settings.items(), ("sites", sites)))


def rule_arm(rule: HeadRule, share: float | None = None) -> Arm:
    """Return an arm that ablates, for each input, the heads that a rule chooses.

    Args:
        share: Share of the heads that the rule is expected to ablate, above 0, up to 1; `random_controls` draws as
            many. None if the arm gets no controls.
    """
    if share is not None and not 0 < share <= 1:
        raise InterventionError(f"`share={share}` (limit above 0, at most 1). Change `share`")
    threshold, replacement = float(rule.threshold), ArmReplacement.of(rule.replacement)
    widths = () if rule.widths == MassWidths() else (("sink", rule.widths.sink), ("recent", rule.widths.recent))
    name = f"rule {rule.score} {threshold}" + ("" if share is None else f" {100 * share:g}%")
    return Arm(
        name + "".join(f", {width} {keys}" for width, keys in widths) + replacement.suffix,
        ArmKind.RULE,
        replace(rule, threshold=threshold),
        rule.score,
        share,
        details=(*replacement.details, *widths),
    )


def model_arm(spec: ModelSpec, identity: ModelIdentity, baseline: ModelIdentity) -> Arm:
    """Return an arm that another model answers. Another content of the model's files makes another arm."""
    check_tokenizer(identity, baseline)
    model_hash = fingerprint(identity.fingerprint())[:6]
    details = (("model", identity.name), *model_settings(identity))
    return Arm(f"model {identity.name} {model_hash}", ArmKind.MODEL, details=details, model=spec)


def model_settings(identity: ModelIdentity) -> tuple[tuple[str, object], ...]:
    """Return the settings that identify the model of an arm, wherever it is."""
    return (
        ("model_revision", identity.revision),
        ("model_config_hash", identity.config_hash),
        ("weights_hash", identity.weights_hash),
    )


def check_tokenizer(identity: ModelIdentity, baseline: ModelIdentity) -> None:
    """Raise InterventionError unless the ids of two models mean the same tokens."""
    if identity.tokenizer_hash == baseline.tokenizer_hash:
        return
    ours, theirs = baseline.tokenizer.get_vocab(), identity.tokenizer.get_vocab()
    if ours != theirs:
        differing = len(set(ours.items()) ^ set(theirs.items()))
        raise InterventionError(
            f"{identity.name} has another tokenizer than {baseline.name}: {differing} vocabulary entries differ (limit"
            " 0). Compare models with one tokenizer"
        )


def criterion_masks(
    store: Store,
    run_id: str,
    criterion: str,
    shares: Sequence[float],
    mask_order: MaskOrder = "mean",
    replacement: ArmReplacement = ZERO_REPLACEMENT,
) -> list[Arm]:
    """Return a mask for each share, by the order that a run gives; ``criterion`` is a name in `RANKED_CRITERIA`, and
    only a score has the order ``inactive``.
    """
    ranked = head_order(store, run_id, criterion) if mask_order == "mean" else _by_inactivity(store, run_id, criterion)
    order = "" if mask_order == "mean" else " by inactivity"
    selection = f"{run_kind(criterion)} {run_id[:4]}{order}{replacement.suffix}"
    masks = [HeadMask(select_heads(ranked, share=share), replacement.outputs) for share in shares]
    names = [f"mask {criterion} {100 * share:g}% of {selection}" for share in shares]
    return [
        Arm(name, ArmKind.MASK, mask, criterion, share, run_id, selection, details=replacement.details)
        for name, share, mask in zip(names, shares, masks, strict=True)
    ]


def _by_inactivity(store: Store, run_id: str, score: str) -> Sequence[OrderedHead]:
    """Return the heads of a scan, those first that are inactive in most sequences."""
    if score not in SCORES:
        raise unknown_name("score of masks by inactivity", score, SCORES)
    # The sort is stable: the mean score decides between heads that are inactive equally often.
    return sorted(rank_heads(store, run_id, score), key=lambda head: -(head.inactive_share or 0.0))


def rules_by_score(
    store: Store, run_id: str, score: str, shares: Sequence[float], replacement: ArmReplacement = ZERO_REPLACEMENT
) -> list[Arm]:
    """Return the rules whose thresholds are quantiles of a scan's pooled scores; they measure the scan's widths."""
    selection = f"scan {run_id[:4]}{replacement.suffix}"
    limits = thresholds(store, run_id, score, shares)
    widths = _measured_widths(store, run_id)
    rules = [HeadRule(score, limit, replacement.outputs, widths) for limit in limits]
    names = [f"rule {score} {100 * share:g}% of {selection}" for share in shares]
    return [
        Arm(name, ArmKind.RULE, rule, score, share, run_id, selection, details=replacement.details)
        for name, share, rule in zip(names, shares, rules, strict=True)
    ]


def _measured_widths(store: Store, run_id: str) -> MassWidths:
    """Return the widths of sink and recent mass in a scan or a recording."""
    [run] = store.query("SELECT config FROM runs WHERE run_id = ?", [run_id]).to_pylist()
    config = json.loads(run["config"])
    return MassWidths(**{width: config[width] for width in ("sink", "recent") if width in config})


def random_masks(
    grid: HeadGrid, share: float, count: int, controls: int, replacement: ArmReplacement = ZERO_REPLACEMENT
) -> list[Arm]:
    """Return random masks of ``count`` heads, one per seed; ``share`` is the nominal share of their arms."""
    return [
        Arm(
            f"random mask {100 * share:g}% seed {seed}{replacement.suffix}",
            ArmKind.RANDOM_MASK,
            HeadMask(random_heads(grid.heads(), count, seed), replacement.outputs),
            share=share,
            seed=seed,
            details=replacement.details,
        )
        for seed in range(controls)
    ]


def random_rules(share: float, controls: int, replacement: ArmReplacement = ZERO_REPLACEMENT) -> list[Arm]:
    """Return random rules (arXiv 2504.03889) that ablate each head of each input with probability ``share``."""
    return [
        Arm(
            f"random rule {100 * share:g}% seed {seed}{replacement.suffix}",
            ArmKind.RANDOM_RULE,
            RandomHeads(share, seed, replacement.outputs),
            share=share,
            seed=seed,
            details=replacement.details,
        )
        for seed in range(controls)
    ]


def random_controls(
    grid: HeadGrid, arms: Sequence[Arm], controls: int, replacement: ArmReplacement | None = None
) -> list[Arm]:
    """Return random arms of each size in ``arms``: masks for masks, rules for rules.

    Args:
        grid: The heads of the model, such as ``headscan.load("demo").grid``.
        arms: Arms to control; a rule needs a share.
        controls: Number of random arms of each size. At least 19 can show that a choice of heads is better than chance.
        replacement: What replaces the outputs of the drawn heads; None uses the replacement of ``arms``.

    Raises:
        InterventionError: A rule has no share, or arms replace the outputs of their heads in different ways.
    """
    if controls < 0:
        raise InterventionError(f"random controls per arm: {controls} (limit 0). Set `controls` to 0 or more")
    if replacement is None:
        outputs = {arm.intervention.replacement for arm in arms if isinstance(arm.intervention, Ablation)} or {ZERO}
        if len(outputs) > 1:
            raise InterventionError(
                f"the arms replace the outputs of their heads in {len(outputs)} ways (limit 1). Draw controls for each"
            )
        replacement = ArmReplacement.of(outputs.pop())
    if unsized := [arm.name for arm in arms if arm.kind is ArmKind.RULE and arm.share is None]:
        raise InterventionError(f"{unsized[0]} has no share, so no random rule has its size. Pass `share` to rule_arm")
    share_of_count = {len(heads): arm.share for arm in arms if (heads := arm.fixed_heads) is not None}
    random_arms = []
    for count, share in sorted(share_of_count.items()):
        nominal_share = count / grid.total_heads if share is None else share
        random_arms += random_masks(grid, nominal_share, count, controls, replacement)
    for share in sorted({arm.share for arm in arms if arm.kind is ArmKind.RULE and arm.share}):
        random_arms += random_rules(share, controls, replacement)
    return random_arms


def distinct_arms(arms: Sequence[Arm]) -> list[Arm]:
    """Return arms without repetitions, such as the random controls of two plans."""
    by_id: dict[str, Arm] = {}
    ids: dict[str, str] = {}
    for arm in arms:
        arm_id = to_json(arm.id)
        if ids.setdefault(arm.name, arm_id) != arm_id:
            raise InterventionError(f"2 different arms are named {arm.name!r} (limit 1). Give each a name of its own")
        if (first := by_id.setdefault(arm_id, arm)).name != arm.name:
            raise InterventionError(
                f"{first.name!r} and {arm.name!r} are one arm (limit 1 name). Leave one of them out"
            )
    return list(by_id.values())


def check_arms(grid: HeadGrid, arms: Sequence[Arm]) -> list[str]:
    """Return warnings about the masks of the arms; raise if a mask has every head."""
    notes = []
    total = grid.total_heads
    for arm in arms:
        if arm.fixed_heads is None:
            continue
        heads = grid.check(arm.fixed_heads)
        if len(heads) == total:
            raise InterventionError(
                f"{arm.name} ablates all {len(heads)} heads of the model (limit {total - 1}). Use fewer heads"
            )
        layer_heads = Counter(layer for layer, _ in heads)
        whole_layers = [site.layer for site in grid.sites if layer_heads[site.layer] == site.num_attention_heads]
        if whole_layers and not arm.kind.is_random:
            plural = "s" if len(whole_layers) > 1 else ""
            notes.append(f"{arm.name} ablates every head of layer{plural} {', '.join(map(str, whole_layers))}")
    return notes
