"""All statistics by name, and the functions that run them.

To add a statistic, declare it in `headscan.catalog`, implement it in one file of this folder, and compute its reference
in ``tests/instrument/reference.py``; ``tests/instrument/test_completeness.py`` fails if one of the three is missing.

Shapes: B sequences, N tokens, S keys, H query heads, K KV heads, D width of a head's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headscan.models.forward_inputs import TokenMeans, widened
from headscan.models.loaded_model import LoadedModel
from headscan.statistics.norm_statistics import (
    OUTPUT_NORMS,
    VALUE_NORMS,
    HeadOutputs,
    OutputStatistic,
    ValueStatistic,
    ValueVectors,
)
from headscan.statistics.weight_statistics import (
    OF_WEIGHTS,
    CallNumbers,
    Joins,
    QueryMean,
    QueryNumber,
    WeightStatistic,
    WholeCallStatistic,
)

if TYPE_CHECKING:
    from headscan.attention.fused import FusedCall


#: Measured from attention weights, at the attention hook.
WEIGHT_STATISTICS: dict[str, WeightStatistic] = {s.name: s for s in OF_WEIGHTS}
#: Measured from value vectors, at the attention hook.
VALUE_STATISTICS: dict[str, ValueStatistic] = {s.name: s for s in VALUE_NORMS}
#: Measured from the heads' outputs, at the output hook.
OUTPUT_STATISTICS: dict[str, OutputStatistic] = {s.name: s for s in OUTPUT_NORMS}

#: Make a mask of keys, bool (B, S), from a model, its tokenizer and the ids of the keys (B, S). ``sinks`` are the keys
#: that ``confidence`` leaves out.
KEY_MASKS: dict[str, Callable[[LoadedModel, Tensor], Tensor]] = {"sinks": lambda lm, ids: lm.sink_tokens(ids)}

QUERY_NUMBERS: dict[str, QueryNumber] = {
    number.name: number for s in WEIGHT_STATISTICS.values() for number in s.query_numbers
}

#: Computed from explicit weights only.
EXPLICIT = frozenset(s.name for s in WEIGHT_STATISTICS.values() if s.explicit)
#: Undefined in cross attention, whose keys are another sequence's.
POSITIONAL = frozenset(s.name for s in WEIGHT_STATISTICS.values() if s.positional)
#: How the numbers of a prefix and of an ending join, by name.
JOINS: dict[str, Joins | None] = {
    **{name: statistic.joins for name, statistic in WEIGHT_STATISTICS.items()},
    **{name: statistic.joins for name, statistic in VALUE_STATISTICS.items()},
    **{name: statistic.joins for name, statistic in OUTPUT_STATISTICS.items()},
}
#: Of whole sequences, computable from a prefix that is measured once and from each of its endings.
JOINABLE = frozenset(name for name, joins in JOINS.items() if joins)
#: Computable at the attention hook for the last tokens of a sequence alone, with the earlier ones in a KV cache.
CONTINUABLE = JOINABLE - OUTPUT_STATISTICS.keys()


def needed_numbers(names: Set[str]) -> tuple[QueryNumber, ...]:
    """Return the numbers per query from which the named statistics follow."""
    numbers = (number for name in names & WEIGHT_STATISTICS.keys() for number in WEIGHT_STATISTICS[name].query_numbers)
    return tuple({number.name: number for number in numbers}.values())


def fused_numbers(numbers: Iterable[QueryNumber], fused: FusedCall) -> dict[str, Tensor]:
    """Return numbers per query from a fused call: (B, H, N) by name, float32 or wider."""
    log_share = fused.log_share_BHN
    share = None if log_share is None else log_share.exp()
    per_query = {}
    for number in numbers:
        values = number.of_fused(fused)
        if log_share is not None and share is not None:
            values = number.with_learned_sink(values, share, log_share)
        per_query[number.name] = values
    return per_query


def weight_statistics(numbers: CallNumbers) -> dict[str, Tensor]:
    """Return the requested weight statistics (B, H) and profiles (B, H, bins) of the real tokens, float32."""
    names = numbers.request.statistics - POSITIONAL if numbers.geometry.cross else numbers.request.statistics
    requested = [statistic for name, statistic in WEIGHT_STATISTICS.items() if name in names]
    whole_call = [statistic for statistic in requested if isinstance(statistic, WholeCallStatistic)]
    query_means = [statistic for statistic in requested if isinstance(statistic, QueryMean)]
    values = {statistic.name: statistic.reduce(numbers).float() for statistic in whole_call}
    if query_means:
        values_BHN = [statistic.of_queries(numbers) for statistic in query_means]
        skip_first = [statistic.skips_first(numbers.geometry) for statistic in query_means]
        means_BH = numbers.request.over_queries.means(values_BHN, skip_first)
        values |= {statistic.name: mean_BH for statistic, mean_BH in zip(query_means, means_BH, strict=True)}
    return values


def value_statistics(value_BKSD: Tensor, over_keys: TokenMeans, names: Set[str], heads: int) -> dict[str, Tensor]:
    """Return the named statistics (B, H) of the real value vectors, in any floating dtype, for all query heads."""
    values = ValueVectors(value_BKSD, over_keys)
    group = heads // value_BKSD.shape[1]
    return {
        name: statistic.reduce(values).float().repeat_interleave(group, 1)
        for name, statistic in VALUE_STATISTICS.items()
        if name in names
    }


def output_statistics(
    outputs_BNHD: Tensor, over_tokens: TokenMeans, names: Set[str], factor_HDD: Tensor | None
) -> dict[str, Tensor]:
    """Return the named statistics of the heads' outputs, float32 (B, H); see `HeadOutputs`."""
    outputs = HeadOutputs(widened(outputs_BNHD), over_tokens, factor_HDD)
    return {name: statistic.reduce(outputs) for name, statistic in OUTPUT_STATISTICS.items() if name in names}


def needs_projection(names: Set[str]) -> bool:
    """Return True if a statistic reads the output projection's factor."""
    return any(OUTPUT_STATISTICS[name].needs_projection for name in names & OUTPUT_STATISTICS.keys())


def masks_read(names: Set[str]) -> list[str]:
    """Return the names of the key masks that the named statistics read."""
    masks = {WEIGHT_STATISTICS[name].reads_keys for name in names & WEIGHT_STATISTICS.keys()}
    return sorted(mask for mask in masks if mask is not None)


def key_masks(lm: LoadedModel, ids: Tensor, names: Set[str]) -> dict[str, Tensor]:
    """Return the masks of the keys ``ids`` (B, S) that the named statistics read: bool (B, S) by name."""
    return {mask: KEY_MASKS[mask](lm, ids) for mask in masks_read(names)}


def undefined(names: Set[str], lengths: Tensor, key_lengths: Tensor, *, cross: bool) -> dict[str, Tensor]:
    """Return which statistics and profiles are NaN by definition: bool (B,) by name."""
    has_one_token = (key_lengths if cross else lengths) < 2
    undefined_B: dict[str, Tensor] = {}
    for name, statistic in WEIGHT_STATISTICS.items():
        if name in names:
            if cross and statistic.positional:
                undefined_B[name] = torch.ones_like(has_one_token)
            elif statistic.undefined_for_one:
                undefined_B[name] = has_one_token
    return undefined_B
