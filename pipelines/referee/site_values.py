"""Values by which criteria rank the heads of every site, measured on labelled examples.

Shapes: B examples, L layers, H query heads of the widest layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headscan.ablation.intervene import intervene
from headscan.ablation.masks import HeadMask
from headscan.catalog import IMPORTANCES, SCORES, statistics_for
from headscan.cluster.tasks.pool import Pool
from headscan.gradients.example_losses import Loss
from headscan.gradients.head_importance import head_gradients
from headscan.grid import Head
from headscan.measure.collect import collect
from headscan.measure.scores import score
from headscan.models.loaded_model import LoadedModel
from headscan.models.rope import UNVARYING, RopeLengths
from headscan.models.token_batches import run_halving
from headscan.pipelines.ablate_labelled.site_arms import SiteHeads, ablated
from headscan.pipelines.labelled.labelled_loss import labelled_loss
from headscan.pipelines.labelled.labelled_texts import Answers, LabelledText
from headscan.pipelines.scoring.batching import whole_batches
from headscan.pruning.selection.head_values import EFFECT, combined_with_entropy, inactive_first, scaled_by_layer

#: Examples of one item of a pool.
_GROUP = 256
#: Measures of the importances.
_TOKENS, _SEQUENCES, _ENTROPY = "gradient by token", "gradient by sequence", "relative entropy"

#: Sums over examples and numbers of examples (2, L, H), by site and measure.
Totals = dict[str, dict[str, Tensor]]
#: Values (L, H) by criterion and site; the heads with the smallest ones are removed first.
SiteValues = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class ValuesItem:
    """Examples on which criteria are measured.

    Attributes:
        names: Scores, importances and ``effect``.
        heads: Heads that are ablated all the while.
        batch_tokens: Tokens of one pass, padding included.
    """

    texts: tuple[LabelledText, ...]
    answers: Answers
    names: tuple[str, ...]
    heads: SiteHeads
    batch_tokens: int
    rope: RopeLengths = UNVARYING

    @property
    def name(self) -> str:
        return f"values from example {self.texts[0].index}"


def site_values(pool: Pool, item: ValuesItem) -> SiteValues:
    """Return the values of every head of every site by criterion, as means over the examples.

    ``effect`` is the change of the loss, with its sign: heads that do harm are removed first.

    Raises:
        NotFiniteError: A derivative is NaN or infinite.
    """
    groups = [item.texts[start : start + _GROUP] for start in range(0, len(item.texts), _GROUP)]
    parts = {
        done.item.texts[0].index: done.value
        for done in pool.map(total_values, [replace(item, texts=group) for group in groups])
    }
    total: Totals = {}
    for group in groups:  # a sum depends on its order
        _add(total, parts[group[0].index])
    found: dict[str, dict[str, Tensor]] = {name: {} for name in item.names}
    for site, tables in total.items():
        means = {measure: sums / counts for measure, (sums, counts) in tables.items()}
        for name in item.names:
            found[name][site] = _value(name, means)
    return found


def total_values(lm: LoadedModel, item: ValuesItem) -> Totals:
    """Pool task: sum what the criteria measure over examples."""
    lengths = [text.longest for text in item.texts]

    def measure(rows: list[int]) -> Totals:
        loss = labelled_loss(lm, item.answers, [item.texts[row] for row in rows])
        found: Totals = {}
        for site, name, values_BLH in _measured(lm, loss, item.names):
            values = values_BLH.double()
            found.setdefault(site, {})[name] = torch.stack([values.nansum(0), values.isfinite().sum(0)])
        return found

    total: Totals = {}
    with ablated(lm, item.heads):
        for batch in whole_batches(lengths, item.batch_tokens, item.rope):
            for _, found in run_halving(list(batch.rows), measure, lengths, lm.limits["importance"]):
                _add(total, found)
    return total


def _add(total: Totals, part: Totals) -> None:
    for site, tables in part.items():
        for name, table in tables.items():
            known = total.setdefault(site, {})
            known[name] = known[name] + table if name in known else table


def _measured(lm: LoadedModel, loss: Loss, names: Sequence[str]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield site, measure and its values (B, L, H), NaN where a layer lacks the head."""
    scores = [name for name in names if name in SCORES]
    statistics = set(statistics_for(scores)) | ({"entropy"} if "importance_entropy" in names else set())
    for kind in lm.grid.kinds if statistics else ():
        found = collect(lm.at(kind), **loss.texts, statistics=statistics)
        yield from ((kind, name, score(found, name)) for name in scores)
        if "importance_entropy" in names:
            yield kind, _ENTROPY, found["entropy"] / _keys(loss, kind).log()[:, None, None]
    if any(name in IMPORTANCES for name in names):
        for kind, gradients in head_gradients(lm, loss).items():
            yield kind, _TOKENS, gradients.tokens
            yield kind, _SEQUENCES, gradients.gates.abs()
    if EFFECT in names:
        yield from _effects(lm, loss)


def _keys(loss: Loss, kind: str) -> Tensor:
    """Return the number of tokens that the heads of a site attend to (B,), on the CPU."""
    own = "decoder_lengths" if kind == "self" and "decoder_lengths" in loss.texts else "lengths"
    return loss.texts[own].double().cpu()


@torch.no_grad()
def _effects(lm: LoadedModel, loss: Loss) -> Iterator[tuple[str, str, Tensor]]:
    """Yield how much the losses grow when each head alone is ablated."""
    before = loss.losses(lm).cpu()
    for kind in lm.grid.kinds:
        grid = lm.grid.at(kind)
        growth = torch.full((len(before), *grid.shape), float("nan"), dtype=torch.float64)
        for head in grid.heads():
            with intervene(lm.at(kind), HeadMask([Head(*head)])):
                growth[:, head.layer, head.head] = (loss.losses(lm).cpu() - before).double()
        yield kind, EFFECT, growth


def _value(name: str, means: Mapping[str, Tensor]) -> Tensor:
    if name in SCORES:
        return inactive_first(name, means[name])
    if name == EFFECT:
        return means[EFFECT]
    if name == "importance_ln":
        return scaled_by_layer(means[_TOKENS])
    if name == "importance_entropy":
        return combined_with_entropy(means[_TOKENS], means[_ENTROPY])
    return means[_SEQUENCES if name == "sequence_importance" else _TOKENS]
