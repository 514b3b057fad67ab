"""Outputs of heads on texts, collected as replacements: their means, or what they are on another text.

Shapes: B sequences, N tokens, T texts, M their tokens, H query heads, D width of a head's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from headscan.ablation.intervention import HeadMeans, StoredOutputs
from headscan.attention.hooks import output_hook
from headscan.errors import InterventionError, SequenceError
from headscan.grid import AttentionSite
from headscan.measure.collect import TokenIds, check_ids
from headscan.models.forward_inputs import batch_kwargs, real_tokens, run_forward, widened
from headscan.models.loaded_model import LoadedModel
from headscan.options import BATCH_TOKENS, Seed, check_limits


@dataclass(frozen=True, eq=False)
class HeadSamples(StoredOutputs):
    """Outputs of heads on other texts, from `collect_outputs.head_samples`.

    ``by_layer`` holds (T, M, H, D) each. The text of a sequence depends on the seed and the sequence's key only, not on
    the batch.

    Attributes:
        seed: Integer, at least 0.
    """

    seed: Seed = 0
    kind = "resample"
    position_free = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self, InterventionError)

    def _settings(self) -> tuple[object, ...]:
        return (self.site, self.seed)

    def outputs(self, stored: Tensor, outputs_BNHD: Tensor, keys: Sequence[int]) -> Tensor:
        texts, most = stored.shape[:2]
        tokens = outputs_BNHD.shape[1]
        if tokens > most:
            raise InterventionError(
                f"sequences are longer than the samples: {tokens} tokens (limit {most}). Collect samples of longer "
                "texts"
            )
        chosen = [int(np.random.default_rng([self.seed, key]).integers(texts)) for key in keys]
        return stored[torch.tensor(chosen, device=stored.device), :tokens]

    @contextmanager
    def watching(self, lm: LoadedModel) -> Iterator[None]:
        """Refuse passes that continue from a KV cache: their first token is not at position 0."""

        def refuse(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Cache) and value.get_seq_length() > 0:
                    raise InterventionError(
                        f"resample ablation needs whole inputs: {value.get_seq_length()} tokens are in a KV cache "
                        "(limit 0). Use no KV cache (`use_cache=False`)"
                    )

        with lm.model.base_model.register_forward_pre_hook(refuse, with_kwargs=True):
            yield


def head_means(
    lm: LoadedModel,
    input_ids: TokenIds,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    batch_tokens: int = BATCH_TOKENS,
) -> HeadMeans:
    """Return the mean output of every head over all real tokens; every token counts equally.

    Args:
        lm: A model from `headscan.load`; `LoadedModel.at` chooses the site of an encoder-decoder, whose decoder reads
            the same texts.
        input_ids: Token ids (B, N), padded on the right with any id; or B texts, or B lists of ids.
        lengths: Real tokens of each sequence (B,); None means all N. Texts and lists have their own.
        batch_tokens: Tokens of one pass, padding included.

    Raises:
        SequenceError: Invalid ids or lengths.
        UnsupportedModelError: The model is compiled or in train mode.
    """
    sums: dict[int, Tensor] = {}
    ids, real = check_ids(lm, input_ids, lengths)

    def add(lengths_B: Tensor, site: AttentionSite, outputs_BNHD: Tensor) -> None:
        here = real_tokens(lengths_B.to(outputs_BNHD.device), outputs_BNHD.shape[1])
        # `where` instead of a product, since numbers at padding may be NaN.
        total_HD = torch.where(here[..., None, None], widened(outputs_BNHD), 0.0).sum((0, 1)).cpu().double()
        sums[site.layer] = sums[site.layer] + total_HD if site.layer in sums else total_HD

    _visit(lm, ids, real, batch_tokens, add)
    tokens = int(real.sum())
    wide = torch.promote_types(lm.model.dtype, torch.float32)
    return HeadMeans({layer: (total / tokens).to(wide) for layer, total in sums.items()}, lm.grid.kind)


def head_samples(
    lm: LoadedModel,
    input_ids: TokenIds,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    layers: Iterable[int] | None = None,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
) -> HeadSamples:
    """Return the outputs of every head on texts, cut to the shortest of them. The result takes the memory of one
    hidden state for each token and layer.

    Args:
        lm, input_ids, lengths, batch_tokens: As for `head_means`; the texts must be as long as the sequences on which
            heads will be ablated.
        layers: Layers to keep; None keeps all.
        seed: Seed of the choice of a text for each sequence.

    Raises:
        SequenceError: Invalid ids or lengths, or fewer than two texts.
        HeadIndexError: A layer has no heads.
        UnsupportedModelError: The model is compiled or in train mode.
    """
    ids, real = check_ids(lm, input_ids, lengths)
    if len(ids) < 2:
        raise SequenceError(f"{len(ids)} text to draw samples from (limit 2). Pass more texts")
    wanted = {site.layer for site in lm.grid.sites} if layers is None else set(layers)
    for layer in wanted:
        lm.grid.site_of(layer)  # raises for a layer without heads
    shortest = int(real.min())
    samples: dict[int, list[Tensor]] = {layer: [] for layer in sorted(wanted)}

    def keep(_: Tensor, site: AttentionSite, outputs_BNHD: Tensor) -> None:
        if site.layer in wanted:
            samples[site.layer].append(outputs_BNHD[:, :shortest].cpu())

    _visit(lm, ids, real, batch_tokens, keep)
    return HeadSamples({layer: torch.cat(parts) for layer, parts in samples.items()}, lm.grid.kind, seed)


def _visit(
    lm: LoadedModel,
    ids: Tensor,
    real: Tensor,
    batch_tokens: int,
    visit: Callable[[Tensor, AttentionSite, Tensor], None],
) -> None:
    """Call ``visit`` in every pass with the lengths of its sequences, each site, and its heads' outputs."""
    causal = all(site.causal for site in lm.grid.sites) and not lm.is_encoder_decoder
    rows = max(1, batch_tokens // ids.shape[1])
    for part, lengths_B in zip(ids.split(rows), real.split(rows), strict=True):
        decoder_ids = part if lm.is_encoder_decoder else None
        with torch.no_grad(), output_hook(lm, partial(visit, lengths_B)):
            run_forward(lm.model, batch_kwargs(part, lengths_B, causal=causal, decoder_input_ids=decoder_ids))
