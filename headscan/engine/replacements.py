"""What replaces the outputs of ablated heads in an arm: zero, or outputs that are collected on texts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headscan.ablation.collect_outputs import head_means, head_samples
from headscan.ablation.intervention import ZERO, Replacement, StoredOutputs
from headscan.cluster.pool import refuse_staged
from headscan.errors import InterventionError
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import pad
from headscan.runs.model_identity import fingerprint
from headscan.runs.run_context import ModelContext
from headscan.settings.corpus_settings import SHORTEST, longest_text
from headscan.settings.evaluation_settings import ReplacementConfig
from headscan.texts.sequences import read_spread


@dataclass(frozen=True)
class ArmReplacement:
    """What replaces the ``outputs`` of ablated heads. ``texts_hash``, the first digits of a hash of the texts that it
    was collected on (empty for zero), identifies it; its numbers do not, because other kernels round them differently.
    """

    outputs: Replacement = ZERO
    texts_hash: str = ""
    source: tuple[tuple[str, object], ...] = ()

    @classmethod
    def of(cls, outputs: Replacement) -> ArmReplacement:
        """Return the replacement by outputs whose texts are unknown: their own hash identifies them."""
        if outputs == ZERO:
            return ZERO_REPLACEMENT
        if not isinstance(outputs, StoredOutputs):
            raise InterventionError(
                f"arms replace outputs by zero, HeadMeans or HeadSamples, not by {type(outputs).__name__}. Use one of"
                " these"
            )
        return cls(outputs, outputs.digest[:6], (("outputs_hash", outputs.digest),))

    @property
    def suffix(self) -> str:
        """The end of an arm's name; empty for zero."""
        return f" by {self.outputs.kind} {self.texts_hash}" if self.texts_hash else ""

    @property
    def details(self) -> tuple[tuple[str, object], ...]:
        """Settings of an arm; empty for zero."""
        return (("replacement_texts", dict(self.source)),) if self.texts_hash else ()


ZERO_REPLACEMENT = ArmReplacement()


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
    if config.kind == "zero" or config.corpus is None:
        return ZERO_REPLACEMENT
    refuse_staged(model.pool, f"`kind={config.kind}`", instead="`kind=zero`")
    resamples = config.kind == "resample"
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
    name = f"{config.kind} outputs of heads on {config.corpus.name}"
    outputs = model.pool.one(collect_outputs, _OutputsItem(name, ids, lengths, seed))
    # The key is part of the names of arms in stores.
    return ArmReplacement(outputs, fingerprint({"value": config.kind, **source})[:6], tuple(source.items()))


def collect_outputs(lm: LoadedModel, item: _OutputsItem) -> StoredOutputs:
    """Pool task: collect the outputs of all heads on texts."""
    with torch.no_grad():
        if item.seed is None:
            return head_means(lm, item.ids, item.lengths)
        return head_samples(lm, item.ids, item.lengths, seed=item.seed)
