"""Importance of heads: derivatives of each sequence's loss by gates of 1 on a head's output.

The derivative by a head's gate equals the sum over tokens of the head's output times the derivative by it. Equation 2
of arXiv 1905.10650 takes the absolute value of this sum for each sequence; the code that its authors published takes it
for each token, as if every token had a gate of its own, so that tokens of opposite sign do not cancel.

Shapes: B sequences, N tokens, L layers, H query heads of the widest layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscan.errors import NamedValues, NotFiniteError, SequenceError, UnsupportedModelError, check_type
from headscan.gradients.backward import backward
from headscan.gradients.losses import Loss, MaskedTokenLoss, NextTokenLoss, TargetTextLoss
from headscan.grid import AttentionSite
from headscan.measure.collect import TokenIds, check_ids, collect
from headscan.models.loaded_model import LoadedModel, check_loaded

#: Largest estimate of a graph that is kept whole, which takes less time than running the blocks again.
GRAPH_BYTES = 1 << 29
#: Hidden states that the graph of a block keeps, about.
_KEPT_STATES = 20


@dataclass(frozen=True)
class HeadGradients:
    """Derivatives of each sequence's loss by gates on heads, and sums over tokens of the absolute ones by gates on each
    token: in nats, float32 (B, L, H) on the CPU, NaN where a layer lacks the head.
    """

    gates: Tensor
    tokens: Tensor


def importance(
    lm: LoadedModel,
    input_ids: TokenIds,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    loss: Loss | None = None,
    summed: bool = False,
) -> dict[str, Tensor]:
    """Measure the importance of every head on a batch, from one backward pass.

    Args:
        lm: A model from `headscan.load`; `LoadedModel.at` chooses the site of an encoder-decoder.
        input_ids: Token ids (B, N), padded on the right with any id, as a tensor or NumPy array; or B texts, or B
            lists of ids.
        lengths: Real tokens of each sequence (B,); None means all N. Texts and lists have their own.
        loss: The loss of each sequence; None uses `default_loss`.
        summed: The default loss of a sequence is the sum over its tokens instead of the mean.

    Returns:
        ``gate_gradient``: the derivative of each sequence's loss by a gate on each head, in nats;
        ``sequence_importance``: its absolute value; ``importance``: the sum over tokens of the absolute derivatives by
        a gate on each token; ``entropy``: as from `collect`. float32 (B, L, H) each, on the CPU, NaN where a layer
        lacks the head.

    Raises:
        SequenceError: Invalid ids or lengths, or a sequence of one token.
        UnsupportedModelError: The model is compiled, in train mode, or has no default loss.
        NotFiniteError: A derivative is NaN or infinite.
    """
    check_loaded(lm)
    check_type("loss", loss, Loss | None, "a loss of headscan.gradients.losses", SequenceError)
    if loss is None:
        loss = default_loss(lm, input_ids, lengths, summed=summed)
    gradients = head_gradients(lm, loss)[lm.grid.kind]
    scores = {
        "gate_gradient": gradients.gates,
        "importance": gradients.tokens,
        "sequence_importance": gradients.gates.abs(),
        "entropy": entropies(lm, loss),
    }
    return NamedValues("importance", scores)


def default_loss(
    lm: LoadedModel,
    input_ids: TokenIds,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    input_keys: Sequence[int] | None = None,
    summed: bool = False,
) -> Loss:
    """Return the loss of a model on plain text: a decoder predicts the next token, an encoder 15 % of the tokens behind
    masks, whose places the keys seed, an encoder-decoder its own input.
    """
    ids, real = check_ids(lm, input_ids, lengths)
    counts = real.tolist()
    if "ForSequenceClassification" in type(lm.model).__name__:
        raise UnsupportedModelError(
            f"{lm.source} is a classifier, and text has no labels. Pass `loss=ClassificationLoss`"
        )
    if lm.is_encoder_decoder:
        return TargetTextLoss.of(lm, ids, counts, ids, counts, summed=summed)
    if lm.grid.predicts_next_token:
        return NextTokenLoss.of(ids, counts, summed=summed)
    mask_id = getattr(lm.tokenizer, "mask_token_id", None)
    if mask_id is None:
        raise UnsupportedModelError(
            f"{lm.source} has no mask token. Save its tokenizer, or pass `loss=MaskedTokenLoss`"
        )
    special = tuple(lm.require_tokenizer().all_special_ids)
    return MaskedTokenLoss.of(ids, counts, int(mask_id), never=special, input_keys=input_keys, summed=summed)


def head_gradients(lm: LoadedModel, loss: Loss) -> dict[str, HeadGradients]:
    """Return the derivatives of each sequence's loss by the heads, by kind of site. Sums are float32 or wider."""
    gradients: dict[AttentionSite, tuple[Tensor, Tensor]] = {}

    def add(site: AttentionSite, outputs_BNHD: Tensor, gradient_BNHD: Tensor) -> None:
        by_token_BNH = torch.linalg.vecdot(outputs_BNHD.to(gradient_BNHD.dtype), gradient_BNHD)
        gradients[site] = by_token_BNH.sum(1), by_token_BNH.abs().sum(1)

    backward(lm, loss, on_heads=add, recompute=must_recompute(lm, loss))
    tables: dict[str, HeadGradients] = {}
    for kind in lm.grid.kinds:
        grid = lm.grid.at(kind)
        for site in grid.sites:
            if site not in gradients:
                raise UnsupportedModelError(
                    f"layer {site.layer} did not run, so it has no derivative. Load a model that runs all layers"
                )
            gates_BH, tokens_BH = (values.float().cpu() for values in gradients[site])
            # A sum over tokens is not finite if its absolute terms are not.
            if wrong := int((~tokens_BH.isfinite()).sum()):
                raise NotFiniteError(
                    f"NaN or infinite derivatives in layer {site.layer}, {kind} attention: {wrong} of "
                    f"{tokens_BH.numel()} (limit 0). Load the model in another dtype"
                )
            if kind not in tables:
                tables[kind] = HeadGradients(
                    *(torch.full((len(tokens_BH), *grid.shape), float("nan")) for _ in range(2))
                )
            heads = slice(site.num_attention_heads)
            tables[kind].gates[:, site.layer, heads] = gates_BH
            tables[kind].tokens[:, site.layer, heads] = tokens_BH
    return tables


def must_recompute(lm: LoadedModel, loss: Loss) -> bool:
    """Return True if the graph of all blocks may be too large to keep."""
    if any(weight.is_meta for weight in lm.model.parameters()):
        return True  # the graph would keep weights that accelerate offloads
    embeddings: Any = lm.model.get_input_embeddings()
    tokens, width = loss.inputs["input_ids"].numel(), embeddings.weight.shape[-1]
    return _KEPT_STATES * tokens * width * lm.grid.num_layers * lm.model.dtype.itemsize > GRAPH_BYTES


def entropies(lm: LoadedModel, loss: Loss) -> Tensor:
    """Return the entropy of every head's attention in the loss's forward pass: float32 (B, L, H)."""
    return collect(lm, **loss.texts, statistics=["entropy"])["entropy"]
