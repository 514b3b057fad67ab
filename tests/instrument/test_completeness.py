"""Every catalogued statistic has one implementation and one reference, and nothing else has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headscan.catalog import PROFILES, SCORES, STATISTICS, panel_names
from headscan.errors import UnknownNameError
from headscan.statistics.norm_statistics import OUTPUT_NORMS, VALUE_NORMS, OutputStatistic, ValueStatistic
from headscan.statistics.registry import (
    EXPLICIT,
    KEY_MASKS,
    OUTPUT_STATISTICS,
    QUERY_NUMBERS,
    VALUE_STATISTICS,
    WEIGHT_STATISTICS,
    masks_read,
)
from headscan.statistics.weight_statistics import (
    OF_WEIGHTS,
    MeanOverQueries,
    QueryMean,
    QueryNumber,
    WeightStatistic,
    WholeCallStatistic,
)
from tests.instrument.reference import reference
from tests.small_models import make_model

FAMILIES_OF_STATISTICS = (OF_WEIGHTS, VALUE_NORMS, OUTPUT_NORMS)


def test_every_declaration_has_an_implementation_and_every_implementation_a_declaration() -> None:
    at_attention = {s.name for s in STATISTICS.values() if s.hook == "attention"} | set(PROFILES)
    assert set(WEIGHT_STATISTICS) | set(VALUE_STATISTICS) == at_attention
    assert set(OUTPUT_STATISTICS) == {s.name for s in STATISTICS.values() if s.hook == "output"}


def test_no_name_is_implemented_twice() -> None:
    names = [statistic.name for family in FAMILIES_OF_STATISTICS for statistic in family]
    assert len(names) == len(set(names)) == len(STATISTICS) + len(PROFILES)


def test_every_implementation_is_registered() -> None:
    """A class that its family does not list would never run."""
    bases = (
        WeightStatistic,
        WholeCallStatistic,
        QueryMean,
        QueryNumber,
        MeanOverQueries,
        ValueStatistic,
        OutputStatistic,
    )
    kinds = {kind for base in bases for kind in base.__subclasses__() if kind.__module__.startswith("headscan.")}
    written = {kind.name for kind in kinds.difference(bases)}
    registered = {*WEIGHT_STATISTICS, *VALUE_STATISTICS, *OUTPUT_STATISTICS, *QUERY_NUMBERS}
    assert written == registered


def test_every_key_mask_that_a_statistic_reads_is_made() -> None:
    assert set(masks_read(WEIGHT_STATISTICS.keys())) == set(KEY_MASKS)


def test_the_fast_panel_is_computed_by_fused_calls() -> None:
    assert set(panel_names("full")) - set(panel_names("fast")) == EXPLICIT


def test_every_statistic_has_a_reference() -> None:
    model = make_model("llama")
    found = reference(model, "llama", [torch.arange(2, 8)], sink=2, recent=2)
    assert set(found) == {*STATISTICS, *PROFILES}
    for name, profile in PROFILES.items():
        assert found[name].shape[-1] == len(profile.bins), name


def test_a_score_names_statistics_and_has_a_denominator_and_its_kind_or_neither() -> None:
    score = SCORES["output_norm_ln"]
    for wrong in ({"statistic": "output_nrom"}, {"normaliser": "output_nrom"}):
        with pytest.raises(UnknownNameError, match="unknown statistic 'output_nrom'; did you mean output_norm"):
            replace(score, **wrong)
    for absent in ("normaliser", "over"):
        with pytest.raises(ValueError, match=f"score 'output_norm_ln' has .* and no `{absent}`. Pass both or neither"):
            replace(score, **{absent: None})
