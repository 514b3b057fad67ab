"""Every declared criterion is implemented wherever its declaration says so."""

from __future__ import annotations

import pytest

from headscan.catalog import CRITERIA
from headscan.pruning.head_values import head_values
from headscan.runs.head_orders import RUN_ORDERS, run_kind
from headscan.steps.prune.calibration_texts import CalibrationTexts
from headscan.steps.referee.run_referee import FAMILY_CHOICES, ChoiceJob, choose_heads, families
from tests.instrument.pruning.texts import random_texts
from tests.small_models import make_loaded


@pytest.mark.parametrize("family", families(CRITERIA))
def test_every_criterion_chooses_heads(family: tuple[str, ...]) -> None:
    lm = make_loaded("llama")
    texts = random_texts(lm, sequences=4, tokens=16)
    count = lm.grid.total_heads // lm.grid.num_layers  # one layer has as many
    calibration = CalibrationTexts("random", texts.ids.numpy(), texts.lengths.numpy())
    job = ChoiceJob(calibration, family, (count,), prompts=calibration)
    found = choose_heads(lm, job)
    assert set(found) == set(family)
    for name, choices in found.items():
        assert len(set(choices[count])) == count, name


def test_every_criterion_has_a_value_of_every_head_or_an_order() -> None:
    lm = make_loaded("llama")
    names = [name for name, declared in CRITERIA.items() if declared.by_value]
    texts = random_texts(lm, sequences=4, tokens=16)
    found = head_values(lm, texts, names, prompts=texts)
    assert set(found) == set(names)
    for name, values in found.items():
        assert values.shape == lm.grid.shape and bool(values.isfinite().all()), name
    for name, declared in CRITERIA.items():
        if declared.run is not None:
            assert run_kind(name) == declared.run and declared.run in RUN_ORDERS, name
    declared = {criterion.family for criterion in CRITERIA.values()}
    assert set(FAMILY_CHOICES) == declared
