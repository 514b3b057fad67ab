"""A float64 reference of every statistic, from eager attention.

It runs one unpadded sequence at a time, is slow and simple, and shares no code with the instrument. Weights come from
``output_attentions``, the heads' outputs from the input of the output projection (found by its name), values from the
KV cache or, if it does not hold them, from the module that computes them. Without a gate between ``A V`` and the
projection, both are asserted to be equal.

Letters, unlike the library's: B sequences, L layers, H heads, G KV heads, Q queries, K keys, D width of a value.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconAttention

from headscan.architectures import ALL, ENCODERS, LAYERS, Family

#: Largest offset of an arg-max with its own bin, and number of doubling buckets of distance.
OFFSETS, BUCKETS = 8, 20


def reference(
    model: PreTrainedModel,
    family: str,
    sequences: list[Tensor],
    *,
    sink: int,
    recent: int,
    site: str = "self",
    decoder_sequences: list[Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return statistics (B, L, H) and profiles (B, L, H, bins) of unpadded ``sequences``, in float64.

    Layers without attention and missing heads are NaN. For an encoder-decoder, ``site`` is "encoder", "self" or
    "cross", and the encoder reads ``sequences``; for an encoder, ``site`` is ignored.
    """
    oracle = _eager_float64(model)
    kind = "encoder" if family in ENCODERS else site
    decoder: list[Tensor] | list[None] = decoder_sequences or [None] * len(sequences)
    rows = [
        _sequence(oracle, ALL[family], kind, ids, decoder_ids, sink, recent)
        for ids, decoder_ids in zip(sequences, decoder, strict=True)
    ]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _eager_float64(model: PreTrainedModel) -> PreTrainedModel:
    """Return a float64 copy with eager attention. transformers still casts some tensors to float32."""
    oracle: Any = copy.deepcopy(model).double()
    oracle.set_attn_implementation("eager")
    oracle.config._attn_implementation = "eager"  # falcon ignores the call above and reads this
    oracle.set_experts_implementation("eager")  # the other implementations do not support float64
    for module in oracle.modules():
        if isinstance(module, FalconAttention):
            module.register_forward_pre_hook(_without_alibi, with_kwargs=True)
    return oracle


def _without_alibi(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Remove falcon's alibi from an eager call. Its mask contains the alibi already, and the eager path adds it
    again.
    """
    alibi = kwargs["alibi"]
    return args, kwargs | {"alibi": None if alibi is None else torch.zeros_like(alibi)}


class _Cache(DynamicCache):
    """A KV cache that keeps all values, including those outside a window."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(config=model.config)
        self.given: dict[int, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.given[layer_idx] = value_states[0]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _sequence(
    oracle: PreTrainedModel, family: Family, kind: str, ids: Tensor, decoder_ids: Tensor | None, sink: int, recent: int
) -> dict[str, Tensor]:
    """Return the statistics (L, H) of one sequence."""
    projections = {layer: oracle.get_submodule(family.projection_of(layer, kind)) for layer in family.layers}
    given: dict[int, Tensor] = {}
    made: dict[int, Tensor] = {}
    with ExitStack() as hooks:
        for layer, projection in projections.items():
            keep = projection.register_forward_pre_hook(lambda _, args, i=layer: given.update({i: args[0][0]}))
            hooks.callback(keep.remove)
            if kind in family.values:
                maker = oracle.get_submodule(family.values[kind].format(layer))
                keep = maker.register_forward_hook(lambda _, args, out, i=layer: made.update({i: out.flatten(0, -2)}))
                hooks.callback(keep.remove)
        attentions, cached = _run(oracle, kind, ids, decoder_ids)

    eos = oracle.config.get_text_config().eos_token_id
    keys = decoder_ids if decoder_ids is not None and kind == "self" else ids
    leaves_out = (keys == eos) | (torch.arange(len(keys)) == 0)
    rows: dict[int, dict[str, Tensor]] = {}
    for layer, attention in zip(family.layers, attentions, strict=True):
        A, W = attention[0].double(), projections[layer].get_parameter("weight").double()
        H = len(A)
        out = given[layer].double().unflatten(-1, (H, -1)).transpose(0, 1)
        if layer in made:
            D = out.shape[-1]
            V = made[layer][:, -H * D :] if family.stacked else made[layer]
            V = V.unflatten(-1, (H, -1))[..., -D:].transpose(0, 1).double()
        else:
            V = cached[family.borrows.get(layer, layer)]
            V = V.repeat_interleave(H // len(V), 0).double()
        if not family.gated:
            torch.testing.assert_close(out, A @ V, rtol=1e-6, atol=1e-9)
        W = W.T if isinstance(projections[layer], nn.Linear) else W
        rows[layer] = {
            **_from_weights(A, kind, sink, recent, family.learned_sinks, leaves_out),
            **_profiles(A, kind),
            **_from_vectors(V, out, W.unflatten(0, (H, -1))),
        }
    heads = max(len(row["entropy"]) for row in rows.values())
    table = {
        name: value.new_full((LAYERS, heads, *value.shape[1:]), math.nan)
        for name, value in rows[family.layers[0]].items()
    }
    for layer, row in rows.items():
        for name, value in row.items():
            table[name][layer, : len(value)] = value
    return table


@contextmanager
def _double_by_default() -> Iterator[None]:
    """Set the default dtype to float64. xglm fills a tensor of default dtype with its activations' smallest number."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _run(
    oracle: PreTrainedModel, kind: str, ids: Tensor, decoder_ids: Tensor | None
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Return weights (1, H, Q, K) by layer, and values (G, K, D). Only layers with attention have weights; the values
    are those of the KV cache.
    """
    with torch.no_grad(), _double_by_default():
        if decoder_ids is not None:
            caches = {"self": _Cache(oracle), "cross": _Cache(oracle)}
            out = oracle(
                ids[None],
                decoder_input_ids=decoder_ids[None],
                past_key_values=EncoderDecoderCache(caches["self"], caches["cross"]),
                use_cache=True,
                output_attentions=True,
            )
            name = {"encoder": "encoder_attentions", "self": "decoder_attentions", "cross": "cross_attentions"}[kind]
            return list(out[name]), {} if kind == "encoder" else caches[kind].given
        if kind == "encoder":
            return list(oracle(ids[None], output_attentions=True).attentions), {}
        cache = _Cache(oracle)
        out = oracle(ids[None], past_key_values=cache, use_cache=True, output_attentions=True)
        return [attention for attention in out.attentions if attention is not None], cache.given


def _from_weights(
    A: Tensor, kind: str, sink: int, recent: int, learned_sinks: bool, leaves_out: Tensor
) -> dict[str, Tensor]:
    """Return statistics (H,) of weights A (H, Q, K). A window does not reduce the number of visible keys."""
    _, Q, K = A.shape
    q, k = torch.arange(Q)[:, None], torch.arange(K)
    is_sink = (k < sink).expand(Q, K)
    is_recent = ((q - k).abs() < recent) & ~is_sink
    entropy = -torch.special.xlogy(A, A).sum(-1)
    visible = torch.arange(1.0, Q + 1, dtype=A.dtype) if kind == "self" else A.new_full((Q,), K)
    several = visible > 1  # the mean over no query is NaN
    received = A.mean(1)
    share = received / received.sum(-1, keepdim=True)
    if not learned_sinks:
        torch.testing.assert_close(A.sum(-1), torch.ones_like(entropy), rtol=0, atol=1e-6)
    statistics = {
        "first_token_weight": A[:, :, 0].mean(1),
        "entropy": entropy.mean(1),
        "relative_entropy": (entropy[:, several] / visible[several].log()).mean(1),
        "sink_mass": (A * is_sink).sum(-1).mean(1),
        "learned_sink_mass": (1 - A.sum(-1)).mean(1) * learned_sinks,
        "recent_mass": (A * is_recent).sum(-1).mean(1),
        "distant_mass": (A * ~(is_sink | is_recent)).sum(-1).mean(1),
        "self_weight": A.diagonal(0, 1, 2).mean(1),
        "previous_token_weight": A.diagonal(-1, 1, 2).mean(1),
        "confidence": (A * ~leaves_out).amax(-1).mean(1),
        "received_max": received.amax(-1),
        "received_concentration": 1 + torch.special.xlogy(share, share).sum(-1) / A.new_tensor(K).log(),  # K = 1: NaN
    }
    if kind == "cross":  # the two sequences do not share positions
        for name in ("recent_mass", "distant_mass", "self_weight", "previous_token_weight"):
            statistics[name] = torch.full_like(statistics[name], math.nan)
    return statistics


def _profiles(A: Tensor, kind: str) -> dict[str, Tensor]:
    """Return profiles (H, bins) of weights A (H, Q, K)."""
    _, Q, K = A.shape
    q, k = torch.arange(Q), torch.arange(K)
    offsets = (A.argmax(-1) - q).clamp(-OFFSETS - 1, OFFSETS + 1) + OFFSETS + 1
    edges = 2 ** torch.arange(BUCKETS - 1)  # 0, 1, 2-3, 4-7, ...
    distance = torch.bucketize((q[:, None] - k).abs(), edges, right=True)
    position = torch.bucketize(k, edges, right=True)
    profiles = {
        "argmax_offsets": one_hot(offsets, 2 * OFFSETS + 3).double().mean(1),
        "mass_by_distance": torch.einsum("hqk,qkb->hb", A, one_hot(distance, BUCKETS).double()) / Q,
        "received_by_position": A.mean(1) @ one_hot(position, BUCKETS).double(),
    }
    if kind == "cross":
        for name in ("argmax_offsets", "mass_by_distance"):
            profiles[name] = torch.full_like(profiles[name], math.nan)
    return profiles


def _from_vectors(V: Tensor, out: Tensor, W: Tensor) -> dict[str, Tensor]:
    """Return statistics (H,) of values V (H, K, D), outputs (H, Q, D) and projection rows W (H, D, width)."""
    return {
        "first_value_norm": V[:, 0].norm(dim=-1),
        "value_norm": V.norm(dim=-1).mean(1),
        "last_output_norm": out[:, -1].norm(dim=-1),
        "output_norm": out.norm(dim=-1).mean(1),
        "projected_output_norm": (out @ W).norm(dim=-1).mean(1),
        "output_mean_norm": out.mean(1).norm(dim=-1),
    }
