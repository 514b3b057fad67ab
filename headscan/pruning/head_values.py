"""Values by which published methods rank heads, all on the same texts.

Shapes: B sequences, L layers, H query heads of the widest layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headscan.catalog import CRITERIA, EFFECT, IMPORTANCES, PROMPT_IMPORTANCE, SCORES, TermScale, statistics_for
from headscan.errors import PruningError
from headscan.gradients.head_importance import default_loss, entropies, head_gradients
from headscan.gradients.losses import Loss
from headscan.grid import Head
from headscan.measure.collect import collect
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration
from headscan.pruning.edited_model import Divergence, Edits, LayerEdits, edited
from headscan.statistics.scores import score

#: Calibration tokens of effects: each head runs the layers from its own on.
_EFFECT_TOKENS = 8192


def head_values(
    lm: LoadedModel,
    calibration: Calibration,
    names: Sequence[str],
    removed: Sequence[Head] = (),
    *,
    prompts: Calibration | None = None,
) -> dict[str, Tensor]:
    """Return values (L, H) of scores, importances and ``effect`` by name; the smallest heads are removed first.
    ``prompts`` are the recall prompts of criteria that need some; None refuses these.
    """
    if unknown := [name for name in names if name not in CRITERIA or not CRITERIA[name].by_value]:
        raise PruningError(f"unknown criterion {unknown[0]!r}. Choose a score, an importance or {EFFECT}")
    means = _means(lm, calibration, names, removed)
    if on_recall := [name for name in names if CRITERIA[name].on_recall]:
        if prompts is None:
            raise PruningError(f"{on_recall[0]} needs recall prompts: none given. Pass `prompts`")
        means[PROMPT_IMPORTANCE] = _means(lm, prompts, on_recall, removed)["importance"]
    if EFFECT in names:
        means[EFFECT] = _effects(lm, calibration, removed)
    return {name: criterion_values(name, means) for name in names}


def ranked(values: Tensor, without: Sequence[Head] = ()) -> list[Head]:
    """Return the heads of values (L, H), NaN where a layer lacks one, by growing value, then layer and head."""
    heads = [Head(*place) for place in values.isfinite().nonzero().tolist()]
    gone = set(without)
    return sorted((head for head in heads if head not in gone), key=lambda head: (float(values[head]), head))


def criterion_inputs(
    lm: LoadedModel, texts: Mapping[str, Any], loss: Loss | None, names: Sequence[str]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield what scores and importances are computed from: site, measure and values (B, L, H), NaN where a layer lacks
    the head. Scores are of ``texts``, the arguments of `collect`; importances need a loss of the same sequences.
    """
    if scores := [name for name in names if name in SCORES]:
        for kind in lm.grid.kinds:
            statistics = collect(lm.at(kind), **texts, statistics=statistics_for(scores))
            yield from ((kind, name, score(statistics, name)) for name in scores)
    if loss is not None:
        for kind, gradients in head_gradients(lm, loss).items():
            yield kind, "importance", gradients.tokens
            yield kind, "sequence_importance", gradients.gates.abs()
        means = {term.mean for name in names if name in IMPORTANCES for term in IMPORTANCES[name].terms}
        for kind in lm.grid.kinds if "relative_entropy" in means else ():
            yield kind, "relative_entropy", entropies(lm.at(kind), loss) / _keys(loss, kind).log()[:, None, None]


def _keys(loss: Loss, kind: str) -> Tensor:
    """Return the number of tokens that the heads of a site attend to (B,), on the CPU."""
    decoder = "decoder_lengths" if "decoder_lengths" in loss.texts else "lengths"
    sides = {"self": (decoder,), "merged": (decoder, "lengths")}.get(kind, ("lengths",))
    return torch.stack([torch.as_tensor(loss.texts[side]).double().cpu() for side in sides]).sum(0)


def criterion_values(name: str, means: Mapping[str, Tensor]) -> Tensor:
    """Return the values (L, H) of a criterion, the smallest of which are removed first, from means over texts by name.
    Those of the importances are the values of `TermMean`.
    """
    if name in SCORES:
        return means[name] if SCORES[name].inactive == "low" else -means[name]
    if name not in IMPORTANCES:
        return means[name]
    declared = IMPORTANCES[name]
    terms = torch.stack([term.weight * _SCALES[term.scale](means[term.mean]) for term in declared.terms])
    return terms.sum(0) if declared.combined == "sum" else terms.amax(0)


def _over(values: Tensor, divisor: Tensor) -> Tensor:
    """Return a quotient; zeros over zero stay zeros."""
    return values / divisor.where(divisor != 0, 1.0)


def _in_range(values: Tensor) -> Tensor:
    """Return values scaled to 0 to 1 over all heads."""
    present = values[values.isfinite()]
    least = present.min()
    return _over(values - least, present.max() - least)


#: Every `TermScale`, which `headscan.store.views` writes as SQL.
_SCALES: Mapping[TermScale, Callable[[Tensor], Tensor]] = {
    "none": lambda values: values,
    "norm": lambda values: _over(values, values.nan_to_num().norm(dim=1, keepdim=True)),
    "mean": lambda values: _over(values, values.nanmean()),
    "range": _in_range,
    "1 - range": lambda values: 1 - _in_range(values),
}


def _means(
    lm: LoadedModel, calibration: Calibration, names: Sequence[str], removed: Sequence[Head]
) -> dict[str, Tensor]:
    """Return means over the sequences of what `criterion_inputs` yields at the site of ``lm``, without some heads."""
    parts: dict[str, list[Tensor]] = {}
    has_loss = any(name in IMPORTANCES for name in names)
    for batch in calibration.batches(lm.device):
        texts: dict[str, Any] = {"input_ids": batch.ids, "lengths": batch.lengths}
        with edited(lm, Edits(tuple(removed))):
            loss = default_loss(lm, **texts) if has_loss else None
            for kind, name, values in criterion_inputs(lm, texts, loss, names):
                if kind == lm.grid.kind:
                    parts.setdefault(name, []).append(values.double())
    return {name: torch.cat(values).nanmean(0) for name, values in parts.items()}


def _effects(lm: LoadedModel, calibration: Calibration, removed: Sequence[Head]) -> Tensor:
    divergence = Divergence(lm, calibration.first(_EFFECT_TOKENS))
    effects = torch.full(lm.grid.shape, float("nan"), dtype=torch.float64)

    def without(head: Head) -> LayerEdits:
        return LayerEdits((head,), partial(Edits, tuple({*removed, head})))

    candidates = {
        site.layer: [without(Head(site.layer, head)) for head in range(site.num_attention_heads)]
        for site in lm.grid.sites
        if site.num_attention_heads
    }
    for layer, values in divergence.of_layers(candidates, Edits(tuple(removed))).items():
        effects[layer, : len(values)] = torch.tensor(values, dtype=torch.float64)
    return effects
