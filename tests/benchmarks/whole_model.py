"""A whole Llama with random weights whose heads differ, some of which attend to the first token, as in trained models.

With the usual initialisation all heads have nearly equal scores, so a choice of heads, a rule and a window have nothing
to find. Here each head has a temperature of its own, and two coordinates of the residual stream, which no layer writes
to, mark the first token and all others (*massive activations*, arXiv 2402.17762). A head's queries read the one, the
keys of all heads the other, in the slowest rotary dimensions, so each head gives the first key a score of its own at
any distance.

Shapes: L layers, H query heads, D width of a head, E width of a hidden state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from headscan.models.loaded_model import LoadedModel
from tests.benchmarks.overhead import make_model

#: Standard deviations of a head's scores, least and most, and scores of its first key, least and most.
_SPREADS, _FIRST_SCORES = (0.2, 4.0), (-2.0, 14.0)
#: Coordinates that mark all tokens but the first, and the first, and their values as parts of a hidden state's norm.
_OTHERS, _FIRST = (0, 0.5), (1, 8.0)
#: Value of the first key in the slowest rotary dimensions; a large one leaves the scores of other keys as they are.
_FIRST_KEY = 16.0
#: Part of `_OTHERS` that is left in a normalised hidden state.
_LEFT = 0.4
#: That of Llama 3: at 32,768 tokens, the slowest dimensions have turned by less than a radian.
_ROPE_THETA = 5e5
#: Least range of the relative entropy over heads, and range of the share of heads that attend to the first token most.
_LEAST_RANGE, _SHARES = 0.3, (0.05, 0.95)


def whole_model(shape: str, tokens: int, device: torch.device, dtype: torch.dtype, **sizes: int) -> LoadedModel:
    """Return a model of a shape of `overhead` on the device. ``sizes`` are the layers and the vocabulary."""
    lm = make_model(shape, tokens, str(device), dtype, rope_theta=_ROPE_THETA, **sizes)
    vary_heads(lm)
    return lm


@torch.no_grad()
def vary_heads(lm: LoadedModel, seed: int = 0) -> None:
    """Let the heads of a Llama differ; the first token is BOS."""
    config, embedding = lm.model.config, lm.model.get_input_embeddings().weight
    E, root = embedding.shape[1], math.sqrt(embedding.shape[1])
    embedding.normal_()
    embedding[:, _OTHERS[0]], embedding[:, _FIRST[0]] = _OTHERS[1] * root, 0.0
    embedding[config.bos_token_id] = 0.0
    embedding[config.bos_token_id, _FIRST[0]] = _FIRST[1] * root
    generator = torch.Generator().manual_seed(seed)
    for site in lm.grid.sites:
        H, K, D = site.num_attention_heads, site.num_key_value_heads, site.head_dim
        block = lm.module(site.path.rpartition(".")[0])
        for writer in (block.self_attn.o_proj, block.mlp.down_proj):
            writer.weight /= math.sqrt(2 * lm.grid.num_layers)
            writer.weight[[_OTHERS[0], _FIRST[0]]] = 0.0
        spread_H, first_H = (
            low + (high - low) * torch.rand(H, generator=generator)
            for low, high in (map(math.log, _SPREADS), _FIRST_SCORES)
        )
        # Of each half of a head's dimensions, the last ones turn slowest.
        pairs = max(1, D // 16)
        slow = [*range(D // 2 - pairs, D // 2), *range(D - pairs, D)]
        query = block.self_attn.q_proj.weight.normal_(std=1 / root).view(H, D, E)
        query *= spread_H.exp().to(query)[:, None, None]
        bias_H = first_H * math.sqrt(D) / (_FIRST_KEY * len(slow) * _LEFT * root)
        query[:, slow, _OTHERS[0]] = bias_H.to(query)[:, None].expand(-1, len(slow))
        key = block.self_attn.k_proj.weight.normal_(std=1 / root).view(K, D, E)
        key[:, slow, _FIRST[0]] = _FIRST_KEY / root


def token_ids(lm: LoadedModel, sequences: int, tokens: int, seed: int = 0) -> Tensor:
    """Return random token ids (sequences, tokens) on the model's device, each sequence after BOS."""
    generator = torch.Generator().manual_seed(seed)
    bos = int(lm.model.config.bos_token_id)
    ids = torch.randint(bos + 2, lm.vocab_size, (sequences, tokens), generator=generator)
    ids[:, 0] = bos
    return ids.to(lm.device)


def spread_of_heads(statistics: Mapping[str, Tensor]) -> str:
    """Return how much the heads differ, in words, from ``relative_entropy`` and ``first_token_weight`` (B, L, H).

    Raises:
        ValueError: The heads are too similar for a choice between them.
    """
    entropy, first = (statistics[name].mean(0).flatten() for name in ("relative_entropy", "first_token_weight"))
    low, middle, high = entropy.quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    share = float((first > 0.5).float().mean())
    words = (
        f"relative entropy of the heads {low:.2f} to {high:.2f} (5 % to 95 %, median {middle:.2f}); {share:.0%} of them"
        f" give the first token more than half of their weight (median {float(first.median()):.2f})"
    )
    if high - low < _LEAST_RANGE or not _SHARES[0] <= share <= _SHARES[1]:
        raise ValueError(f"the heads are too similar: {words}")
    return words
