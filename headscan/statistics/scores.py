"""Scores of heads, computed from statistics as `headscan.catalog` declares them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headscan.catalog import SCORES, Score
from headscan.errors import UnknownNameError, check_type, unknown_name


def find_score(name: str) -> Score:
    if not isinstance(name, str) or name not in SCORES:
        raise unknown_name("score", name, SCORES)
    return SCORES[name]


def score(statistics: Mapping[str, Tensor], name: str) -> Tensor:
    """Return one score of every head, per sequence: (B, L, H), or with any other axes before that of the heads of a
    layer. Layer means skip NaN, which marks heads that a layer lacks.

    Raises:
        UnknownNameError: The catalogue lacks the score, or ``statistics`` lack what it is derived from.
    """
    declaration = find_score(name)
    check_type("statistics", statistics, Mapping, "the result of `headscan.collect`", UnknownNameError)
    for statistic in (declaration.statistic, declaration.normaliser):
        if statistic is not None and statistic not in statistics:
            raise UnknownNameError(f"score {name!r} needs the statistic {statistic!r}. Pass it to collect")
    numerator = torch.as_tensor(statistics[declaration.statistic])
    if declaration.normaliser is None:
        return numerator
    denominator = torch.as_tensor(statistics[declaration.normaliser])
    if declaration.over == "layer":
        denominator = denominator.nanmean(-1, keepdim=True)
    return numerator / denominator
