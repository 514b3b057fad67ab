"""Collecting the outputs that replace those of ablated heads, on a corpus.

Shapes: B texts, N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headscan.ablation.ablation import StoredOutputs
from headscan.ablation.collect_outputs import head_means, head_samples
from headscan.errors import InterventionError
from headscan.models.loaded_model import LoadedModel
from headscan.pipelines.corpora.sequences import read_spread
from headscan.pipelines.runs.identity import fingerprint
from headscan.pipelines.runs.run_records import ModelContext
from headscan.pipelines.scoring.arms import ZERO_VALUE, AblationValue
from headscan.pipelines.settings.evaluation_settings import ValueConfig

#: Longest text of a mean, in tokens, and the shortest.
_LONGEST, _SHORTEST = 2048, 16


@dataclass(frozen=True)
class _ValueItem:
    """Texts for one replica; a resampling has a seed."""

    name: str
    ids: Tensor
    lengths: Tensor
    seed: int | None


def collect_value(config: ValueConfig, model: ModelContext, longest: int) -> AblationValue:
    """Return the value that ablated heads are replaced by; collect it unless it is zero.

    Args:
        longest: Tokens of the longest input that heads will be ablated on.
    """
    if config.value == "zero" or config.corpus is None:
        return ZERO_VALUE
    if model.pool.staged:
        raise InterventionError(
            f"replace={config.value} needs all layers of the model at once. Use replace=zero, or placement=whole or"
            " placement=sharded"
        )
    resamples = config.value == "resample"
    limit = model.identity.max_tokens
    tokens = longest if resamples else min(_LONGEST, limit or _LONGEST)
    shortest, count = (tokens, config.samples) if resamples else (min(_SHORTEST, tokens), config.texts)
    found = read_spread(
        config.corpus,
        model.identity.tokenizer,
        tokens,
        count,
        shortest=shortest,
        mode="pack" if resamples else "chunk",  # samples are all as long as the longest input
    )
    least = 2 if resamples else 1
    if len(found) < least:
        raise InterventionError(
            f"{config.corpus.name} has {len(found)} texts of {shortest} tokens or more (limit {least}). Choose another"
            " corpus"
        )
    ids = pad_sequence([torch.as_tensor(text.ids, dtype=torch.long) for text in found], batch_first=True)
    lengths = torch.tensor([len(text) for text in found])
    seed = config.seed if resamples else None
    source = {
        "corpus": config.corpus.name,
        "texts": len(found),
        "tokens": int(lengths.sum()),
        "seed": seed,
        "hash": fingerprint({"texts": [text.content_hash for text in found]})[:16],
    }
    name = f"{config.value} outputs of heads on {config.corpus.name}"
    outputs = model.pool.one(collect_outputs, _ValueItem(name, ids, lengths, seed))
    return AblationValue(outputs, fingerprint({"value": config.value, **source})[:6], tuple(source.items()))


def collect_outputs(lm: LoadedModel, item: _ValueItem) -> StoredOutputs:
    """Pool task: collect the outputs of all heads on texts."""
    with torch.no_grad():
        if item.seed is None:
            return head_means(lm, item.ids, item.lengths)
        return head_samples(lm, item.ids, item.lengths, seed=item.seed)
