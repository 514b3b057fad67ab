"""Agreement of criteria against counting pairs by hand."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest

from headscan.store.records import ArmKind, ArmRecord
from headscan.verdicts.arm_verdict import ArmVerdict
from headscan.verdicts.criterion_points import CriterionPoint, agreements

HEADS = list(product(range(2), range(4)))
SETS = {
    "first": {0.25: {(0, 0), (1, 3)}, 0.5: {(0, 0), (1, 3), (0, 1), (0, 2)}},
    "second": {0.25: {(0, 0), (0, 1)}, 0.5: {(0, 0), (0, 1), (1, 1), (1, 3)}},
    "whole": {0.5: {(0, 0), (0, 1), (0, 2), (0, 3)}},
}


def points() -> list[CriterionPoint]:
    return [
        CriterionPoint(
            name,
            "",
            share,
            ArmVerdict(arm=ArmRecord(name=f"{name} {share}", kind=ArmKind.MASK, ablated_share=share)),
            frozenset(heads),
        )
        for name, of_share in SETS.items()
        for share, heads in of_share.items()
    ]


def tau_b(first: list[float], second: list[float]) -> float:
    signs = [
        ((a > b) - (a < b), (c > d) - (c < d)) for (a, c), (b, d) in combinations(zip(first, second, strict=True), 2)
    ]
    same = sum(one * two for one, two in signs)
    return same / math.sqrt(sum(one != 0 for one, _ in signs) * sum(two != 0 for _, two in signs))


def test_tau_counts_pairs_of_heads_and_overlap_counts_heads() -> None:
    found = {(each.first[0], each.second[0]): each for each in agreements(points(), HEADS)}
    assert set(found) == {("first", "second"), ("first", "whole"), ("second", "whole")}
    ranks = {
        name: [min((share for share, heads in sets.items() if head in heads), default=9.0) for head in HEADS]
        for name, sets in SETS.items()
    }
    for (one, two), each in found.items():
        assert each.tau == pytest.approx(tau_b(ranks[one], ranks[two]))
    assert found["first", "second"].overlap == {0.25: 0.5, 0.5: 0.75}
    assert found["first", "whole"].overlap == {0.5: 0.75}


def test_equal_criteria_agree_fully() -> None:
    twins = [point for point in points() if point.criterion == "first"]
    others = [CriterionPoint("twin", "", point.share, point.verdict, point.heads) for point in twins]
    (found,) = agreements([*twins, *others], HEADS)
    assert found.tau == pytest.approx(1) and set(found.overlap.values()) == {1.0}
