"""From what an attention call found, per query and per key, to numbers per sequence.

Shapes: B sequences, N queries, S keys, H query heads, K KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headscan.attention.attention_request import POSITIONAL, AttentionRequest
from headscan.catalog import DISTANCE_BINS, MAX_OFFSET
from headscan.models.token_means import mean_over_tokens, real_tokens


@dataclass(frozen=True)
class Geometry:
    """How queries and keys of a call stand to each other.

    Attributes:
        queries: N.
        keys: S.
        causal: Whether no query sees a later key.
        cross: Whether the keys are another sequence's.
    """

    queries: int
    keys: int
    causal: bool
    cross: bool


@dataclass
class Findings:
    """What an attention call found.

    Attributes:
        per_query: (B, H, N) for each name of `AttentionRequest.per_query`.
        mass_by_distance: Weight by doubling distance, summed over real queries (B, H, bins).
        received: Weight each key received, summed over real queries (B, H, S).
    """

    per_query: dict[str, Tensor] = field(default_factory=dict)
    mass_by_distance: Tensor | None = None
    received: Tensor | None = None


def summarise(findings: Findings, request: AttentionRequest, geometry: Geometry) -> dict[str, Tensor]:
    """The asked weight statistics (B, H) and profiles (B, H, bins) of the real tokens, float32."""
    lengths = request.lengths
    found = findings.per_query
    summary: dict[str, Tensor] = {}
    for name in request.statistics:
        if geometry.cross and name in POSITIONAL:
            continue
        if name == "relative_entropy":
            summary[name] = _relative_entropy(found["entropy"], request, geometry)
        elif name == "distant_mass":
            near = found["sink_mass"] + found["recent_mass"]
            summary[name] = mean_over_tokens((found["weight_sum"] - near).clamp_min(0.0), lengths)
        elif name == "learned_sink_mass":
            summary[name] = mean_over_tokens((1.0 - found["weight_sum"]).clamp_min(0.0), lengths)
        elif name == "previous_token_weight":
            summary[name] = mean_over_tokens(found[name], lengths, skip_first=True)
        elif name == "argmax_offsets":
            summary[name] = _offset_histogram(found[name], lengths)
        elif name in found:
            summary[name] = mean_over_tokens(found[name], lengths)
    if findings.mass_by_distance is not None and "mass_by_distance" in request.statistics:
        summary["mass_by_distance"] = findings.mass_by_distance / lengths[:, None, None]
    if findings.received is not None:
        received = findings.received / lengths[:, None, None]
        if "received_max" in request.statistics:
            summary["received_max"] = received.amax(-1)
        if "received_concentration" in request.statistics:
            share = received / received.sum(-1, keepdim=True)
            entropy = -torch.special.xlogy(share, share).sum(-1)
            # One key can only receive all there is: 0 / 0, undefined.
            summary["received_concentration"] = 1.0 - entropy / request.key_lengths.log()[:, None]
            summary["received_concentration"][request.key_lengths < 2] = float("nan")
        if "received_by_position" in request.statistics:
            bins = doubling_bin(torch.arange(received.shape[-1], device=received.device))
            # A GPU adds in whatever order: in float32 the last digits would differ from run to run.
            wide = received.double()
            by_position = wide.new_zeros(*wide.shape[:2], DISTANCE_BINS)
            summary["received_by_position"] = by_position.index_add_(-1, bins, wide)
    return {name: values.float() for name, values in summary.items()}


def undefined(statistics: frozenset[str], lengths: Tensor, key_lengths: Tensor, *, cross: bool) -> dict[str, Tensor]:
    """Where a statistic is NaN by definition: bool (B,) for each that ever is."""
    one = (key_lengths if cross else lengths) < 2
    where = dict.fromkeys(("relative_entropy", "previous_token_weight", "received_concentration"), one)
    if cross:
        where.update((name, torch.ones_like(one)) for name in POSITIONAL)
    return {name: rows for name, rows in where.items() if name in statistics}


def doubling_bin(distance: Tensor) -> Tensor:
    """Bin of a distance, a whole number: 0, 1, 2-3, 4-7, ..., the last one open."""
    # A logarithm would do on a CPU; on a GPU that of 8 is a little less than 3.
    lower_ends = 2 ** torch.arange(DISTANCE_BINS - 1, device=distance.device)
    return torch.bucketize(distance, lower_ends, right=True)


def _relative_entropy(entropy_BHN: Tensor, request: AttentionRequest, geometry: Geometry) -> Tensor:
    """Mean of the entropy over the largest that the keys in sight allow; queries that see one key are left out."""
    if geometry.causal:
        bound = torch.arange(1, geometry.queries + 1, device=entropy_BHN.device, dtype=entropy_BHN.dtype).log()
        bound[:1] = 1.0
        return mean_over_tokens(entropy_BHN / bound, request.lengths, skip_first=True)
    bound = request.key_lengths.to(entropy_BHN.dtype).log()[:, None, None]
    return mean_over_tokens(entropy_BHN / bound, request.lengths)


def _offset_histogram(offsets_BHN: Tensor, lengths: Tensor) -> Tensor:
    real = real_tokens(lengths, offsets_BHN.shape[-1])[:, None].expand_as(offsets_BHN)
    bins = offsets_BHN.nan_to_num().clamp(-MAX_OFFSET - 1, MAX_OFFSET + 1).long() + MAX_OFFSET + 1
    counts = torch.zeros(*bins.shape[:2], 2 * MAX_OFFSET + 3, device=bins.device)
    shares = counts.scatter_add_(-1, bins, real.float()) / lengths[:, None, None]
    broken = (offsets_BHN.isnan() & real).any(-1, keepdim=True)
    return shares.masked_fill(broken, float("nan"))
