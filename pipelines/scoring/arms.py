"""Arms of an evaluation: their heads, ablations and names, and what replaces the outputs of their heads."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from headscan.ablation.ablation import ZERO, Ablation, Replacement, StoredOutputs
from headscan.ablation.collect_outputs import head_means, head_samples
from headscan.ablation.masks import HeadMask, RandomHeads
from headscan.ablation.rules import HeadRule
from headscan.analysis.heads.head_ranking import random_heads, select_heads, thresholds
from headscan.analysis.store.provenance import same_model
from headscan.analysis.store.records import ArmKind, ArmRecord
from headscan.analysis.store.store import Store
from headscan.catalog import CRITERIA, RANKED_CRITERIA, SCORES, MassWidths
from headscan.cluster.tasks.pool import refuse_staged
from headscan.errors import InterventionError, PruningError, unknown_name
from headscan.grid import Head, HeadGrid
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.pipelines.corpora.sequences import read_spread
from headscan.pipelines.runs.head_orders import finished_runs, head_order, run_kind
from headscan.pipelines.runs.model_identity import ModelIdentity, fingerprint
from headscan.pipelines.runs.run_records import ModelContext
from headscan.pipelines.scoring.token_requests import pad
from headscan.pipelines.settings.corpus_settings import SHORTEST, longest_text
from headscan.pipelines.settings.evaluation_settings import MaskOrder, ReplacementConfig
from headscan.pipelines.settings.measure_settings import RECALL_PROMPTS


@dataclass(frozen=True)
class ArmReplacement:
    """What replaces the ``outputs`` of ablated heads. ``texts_hash``, the first digits of a hash of the texts that it
    was collected on (empty for zero), identifies it; its numbers do not, because other kernels round them differently.
    """

    outputs: Replacement = ZERO
    texts_hash: str = ""
    source: tuple[tuple[str, object], ...] = field(default=())

    @property
    def suffix(self) -> str:
        """The end of an arm's name; empty for zero."""
        return f" by {self.outputs.value} {self.texts_hash}" if self.texts_hash else ""

    @property
    def details(self) -> tuple[tuple[str, object], ...]:
        """Settings of an arm; empty for zero."""
        return (("replacement_texts", dict(self.source)),) if self.texts_hash else ()


ZERO_REPLACEMENT = ArmReplacement()


@dataclass(frozen=True)
class Arm:
    """One way of running the model.

    Attributes:
        name: Unique in an evaluation; arms with the same name ablate the same heads and have the same ``details``.
        ablated: None for the baseline.
        share: Nominal share of heads, 0 to 1; a rule may ablate another share.
        selection: Further description of the selection; arms that differ in it are points of different curves.
        model: Model that answers and ablates nothing; None uses the baseline's.
        removed: Heads that this model lacks.
        measured: Measured sizes and times for the store, which differ between runs of one arm.
    """

    name: str
    kind: ArmKind
    ablated: Ablation | None = None
    score: str | None = None
    share: float | None = None
    scan_run: str | None = None
    selection: str | None = None
    seed: int | None = None
    details: tuple[tuple[str, object], ...] = ()
    model: ModelSpec | None = None
    removed: tuple[Head, ...] = ()
    measured: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        if self.model is not None and self.ablated is not None:
            raise InterventionError(
                f"{self.name} has a model of its own and ablates heads (limit one of them). Set `model` or `ablated`"
            )

    @property
    def fixed_heads(self) -> tuple[Head, ...] | None:
        """Ablated heads, if they are the same for every input. None for the baseline, and where inputs decide."""
        return None if self.ablated is None else self.ablated.fixed_heads

    @property
    def masked(self) -> tuple[str, tuple[Head, ...]]:
        """The site and the heads of the arm's mask in the store; an arm without heads has no mask."""
        return "self", self.fixed_heads or self.removed

    @property
    def settings(self) -> dict[str, object]:
        """Settings that identify the arm in its run, as JSON data."""
        return {"scan_run": self.scan_run, **dict(self.details)}

    def record(self, run_id: str, mask_id: str | None) -> ArmRecord:
        """Return the arm's row in a run, with the mask of its heads."""
        return ArmRecord(
            run_id=run_id,
            name=self.name,
            kind=self.kind,
            mask_id=mask_id,
            score=self.score,
            threshold=None if self.ablated is None else self.ablated.score_threshold,
            share=self.share,
            seed=self.seed,
            selection=self.selection,
            replacement=self.ablated.value if self.ablated is not None and self.kind.ablates else None,
            config=self.settings,
            measured=dict(self.measured),
        )


BASELINE = Arm("baseline", ArmKind.BASELINE)


def mask_arm(heads: Sequence[tuple[int, int]], replacement: ArmReplacement = ZERO_REPLACEMENT) -> Arm:
    """Return an arm that ablates the given heads, replaced by ``replacement``."""
    if not heads:
        raise InterventionError("empty mask: 0 heads (limit 1). Give at least one head")
    mask = HeadMask(heads, replacement.outputs)
    text = " ".join(f"{layer}:{head}" for layer, head in mask.heads)
    if len(text) > 40:
        text = f"of {len(mask.heads)} heads {hashlib.sha256(text.encode()).hexdigest()[:6]}"
    return Arm(f"mask {text}{replacement.suffix}", ArmKind.MASK, mask, details=replacement.details)


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


def scored_masks(
    store: Store,
    run_id: str,
    score: str,
    shares: Sequence[float],
    order: MaskOrder = "mean",
    replacement: ArmReplacement = ZERO_REPLACEMENT,
) -> list[Arm]:
    """Return a mask for each share, by the order that a run gives; ``score`` is a name in `RANKED_CRITERIA`, and only
    a score has the order ``inactive``.
    """
    ranked = head_order(store, run_id, score)
    if order == "inactive":
        if score not in SCORES:
            raise unknown_name("score of masks by inactivity", score, SCORES)
        # The sort is stable: the mean score decides between heads that are inactive equally often.
        ranked = sorted(ranked, key=lambda head: -(head.inactive_share or 0.0))
    selection = f"{run_kind(score)} {run_id[:4]}{'' if order == 'mean' else ' by inactivity'}{replacement.suffix}"
    masks = [HeadMask(select_heads(ranked, share=share), replacement.outputs) for share in shares]
    names = [f"mask {score} {100 * share:g}% of {selection}" for share in shares]
    return [
        Arm(name, ArmKind.MASK, mask, score, share, run_id, selection, details=replacement.details)
        for name, share, mask in zip(names, shares, masks, strict=True)
    ]


def scored_rules(
    store: Store, run_id: str, score: str, quantiles: Sequence[float], replacement: ArmReplacement = ZERO_REPLACEMENT
) -> list[Arm]:
    """Return the rules whose thresholds are quantiles of a scan's pooled scores; they measure the scan's widths."""
    selection = f"scan {run_id[:4]}{replacement.suffix}"
    limits = thresholds(store, run_id, score, quantiles)
    widths = _measured_widths(store, run_id)
    rules = [HeadRule(score, limit, replacement.outputs, widths) for limit in limits]
    names = [f"rule {score} {100 * quantile:g}% of {selection}" for quantile in quantiles]
    return [
        Arm(name, ArmKind.RULE, rule, score, quantile, run_id, selection, details=replacement.details)
        for name, quantile, rule in zip(names, quantiles, rules, strict=True)
    ]


def _measured_widths(store: Store, run_id: str) -> MassWidths:
    """Return the widths of sink and recent mass in a scan or a recording."""
    [run] = store.query("SELECT config FROM runs WHERE run_id = ?", [run_id]).to_pylist()
    config = json.loads(run["config"])
    return MassWidths(config["sink"], config["recent"])


def random_masks(
    grid: HeadGrid, share: float, count: int, seeds: int, replacement: ArmReplacement = ZERO_REPLACEMENT
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
        for seed in range(seeds)
    ]


def random_rules(share: float, seeds: int, replacement: ArmReplacement = ZERO_REPLACEMENT) -> list[Arm]:
    """Return random rules (arXiv 2504.03889) that ablate each head of each input with probability ``share``."""
    heads = [RandomHeads(share, seed, replacement.outputs) for seed in range(seeds)]
    names = [f"random rule {100 * share:g}% seed {seed}{replacement.suffix}" for seed in range(seeds)]
    return [
        Arm(name, ArmKind.RANDOM_RULE, drawn, share=share, seed=drawn.seed, details=replacement.details)
        for name, drawn in zip(names, heads, strict=True)
    ]


def controls(
    grid: HeadGrid, arms: Sequence[Arm], seeds: int, replacement: ArmReplacement = ZERO_REPLACEMENT
) -> list[Arm]:
    """Return ``seeds`` random arms of each size in ``arms``: masks for masks, rules for rules."""
    if seeds < 0:
        raise InterventionError(f"random controls per arm: {seeds} (limit 0). Set `seeds` to 0 or more")
    total = grid.total_heads
    masks = {len(heads): arm.share for arm in arms if (heads := arm.fixed_heads) is not None}
    drawn_arms = []
    for count, share in sorted(masks.items()):
        drawn_arms += random_masks(grid, count / total if share is None else share, count, seeds, replacement)
    for share in sorted({arm.share for arm in arms if arm.kind is ArmKind.RULE and arm.share}):
        drawn_arms += random_rules(share, seeds, replacement)
    return drawn_arms


def check_arms(grid: HeadGrid, arms: Sequence[Arm]) -> list[str]:
    """Return warnings about the masks of the arms."""
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
        of_layer = Counter(layer for layer, _ in heads)
        whole = [site.layer for site in grid.sites if of_layer[site.layer] == site.num_attention_heads]
        if whole and not arm.kind.is_random:
            plural = "s" if len(whole) > 1 else ""
            notes.append(f"{arm.name} ablates every head of layer{plural} {', '.join(map(str, whole))}")
    return notes


#: Options of the verb that measures a criterion, where the verb alone does not.
_MEASURED_BY = {"ablate": "ablate --each"}


def find_run(store: Store, identity: ModelIdentity, criterion: str, prefix: str | None) -> str:
    """Return the id of the run whose numbers order heads by a criterion: the newest finished one of this model, or the
    one whose id begins with ``prefix``.
    """
    kind = run_kind(criterion)
    if prefix:
        run = store.resolve_run(prefix, kind)
        if not same_model(identity.columns(), run):
            raise InterventionError(
                f"run {run['run_id']} measured {run['model']}, another model than {identity.name}. Choose a run of it"
            )
        if run["status"] != "finished":
            # The numbers of an unfinished run select other heads and thresholds than those of the finished one.
            raise InterventionError(f"run {run['run_id']} is {run['status']}. Run its command again to finish it")
        return str(run["run_id"])
    for run in finished_runs(store, criterion):
        if same_model(identity.columns(), run):
            return str(run["run_id"])
    verb = _MEASURED_BY.get(kind, kind)
    if CRITERIA[criterion].on_recall:
        verb = f"{verb} --recall-prompts {RECALL_PROMPTS}"
    raise InterventionError(
        f"{store.path} has no finished {kind} of {identity.name} for {criterion}. Run `headscan {verb}` on it first"
    )


@dataclass(frozen=True)
class _OutputsItem:
    """Texts for one replica; a resampling has a seed."""

    name: str
    ids: Tensor
    lengths: Tensor
    seed: int | None


def collect_replacement(config: ReplacementConfig, model: ModelContext, longest: int) -> ArmReplacement:
    """Return what replaces the outputs of ablated heads; collect it unless it is zero. ``longest`` is the
    number of tokens of the longest input on which heads will be ablated.
    """
    if config.value == "zero" or config.corpus is None:
        return ZERO_REPLACEMENT
    refuse_staged(model.pool, f"replace={config.value}", instead="replace=zero")
    resamples = config.value == "resample"
    tokens = longest if resamples else longest_text(model.identity, None)
    shortest, count = (tokens, config.samples) if resamples else (min(SHORTEST, tokens), config.texts)
    texts = read_spread(
        config.corpus,
        model.identity.tokenizer,
        tokens,
        count,
        shortest=shortest,
        mode="pack" if resamples else "chunk",  # samples are all as long as the longest input
    )
    if resamples and len(texts) < 2:
        raise InterventionError(
            f"{config.corpus.name} has {len(texts)} text of {shortest} tokens or more (limit 2). Choose another corpus"
        )
    ids, lengths = pad([text.ids for text in texts])
    seed = config.seed if resamples else None
    source = {
        "corpus": config.corpus.name,
        "texts": len(texts),
        "tokens": int(lengths.sum()),
        "seed": seed,
        "hash": fingerprint({"texts": [text.content_hash for text in texts]})[:16],
    }
    name = f"{config.value} outputs of heads on {config.corpus.name}"
    outputs = model.pool.one(collect_outputs, _OutputsItem(name, ids, lengths, seed))
    return ArmReplacement(outputs, fingerprint({"value": config.value, **source})[:6], tuple(source.items()))


def collect_outputs(lm: LoadedModel, item: _OutputsItem) -> StoredOutputs:
    """Pool task: collect the outputs of all heads on texts."""
    with torch.no_grad():
        if item.seed is None:
            return head_means(lm, item.ids, item.lengths)
        return head_samples(lm, item.ids, item.lengths, seed=item.seed)


def stored_orders(
    store: Store, identity: ModelIdentity, methods: Sequence[str], prefix: str | None
) -> dict[str, list[tuple[int, int]]]:
    """Return the heads in the order in which they are removed, for the methods that are in `RANKED_CRITERIA`. The ids
    of the runs start with ``prefix``; None uses the newest runs of the model.
    """
    runs = {name: find_run(store, identity, name, prefix) for name in methods if name in RANKED_CRITERIA}
    return {
        name: [(head.layer, head.head) for head in head_order(store, run_id, name)] for name, run_id in runs.items()
    }


def imported_heads(path: str | Path) -> list[tuple[int, int]]:
    """Return the heads of a JSON file in order: ``[layer, head]`` pairs in a list, alone or under ``heads``."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise PruningError(f"cannot read the heads of {path}: {problem}. Give a JSON list of [layer, head]") from None
    pairs = content.get("heads") if isinstance(content, dict) else content
    if not isinstance(pairs, list) or not pairs:
        raise PruningError(f"{path} names 0 heads (limit 1). Give a JSON list of [layer, head]")
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n >= 0 for n in pair)):
            raise PruningError(f"{path}: {json.dumps(pair)[:60]} is no head. Give a JSON list of [layer, head]")
    return [(layer, head) for layer, head in pairs]
