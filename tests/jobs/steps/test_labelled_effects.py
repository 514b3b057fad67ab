"""The table of single heads equals one example and one masked head at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headscan.architectures import HEADS, LAYERS
from headscan.errors import InterventionError
from headscan.settings.corpus_settings import CorpusSpec, LabelledMetric
from headscan.settings.evaluation_settings import ReplacementConfig, TaskConfig
from headscan.store.store import Store
from headscan.store.tables import ALL_BUT_ONE, EACH
from headscan.verdicts.head_effects import HeadEffect, read_effects
from tests.jobs.conftest import THREADS
from tests.jobs.steps.labelled_oracle import Oracle, Refusing, config_of, execute


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "metric", "sites"),
    [
        ("bert", "accuracy", ["self"]),
        pytest.param("bert", "loss", ["self"], marks=pytest.mark.slow),
        pytest.param("t5", "loss", ["encoder", "self", "cross"], marks=pytest.mark.slow),
        pytest.param("bart", "bleu", ["encoder", "self", "cross"], marks=pytest.mark.slow),
        pytest.param("marian", "loss", ["encoder", "self", "cross"], marks=pytest.mark.slow),
    ],
)
def test_effects_equal_one_masked_head_at_a_time(
    family: str, metric: LabelledMetric, sites: list[str], tmp_path: Path, store: Store
) -> None:
    config = config_of(tmp_path, family, metric)
    run_id, effects = execute(config, store)
    oracle = Oracle(config, family)
    assert sorted({effect.site for effect in effects}) == sorted(sites)
    assert len(effects) == len(sites) * LAYERS * HEADS and {effect.metric for effect in effects} == {metric}
    before = oracle.metric(metric, [])
    assert effects[0].baseline == pytest.approx(before, abs=1e-4)
    for effect in effects[:: 1 if metric == "accuracy" else 5]:
        after = oracle.metric(metric, [(effect.site, effect.layer, effect.head)])
        assert effect.effect == pytest.approx(after - before, abs=1e-4)
    assert max(abs(effect.effect) for effect in effects) > 0.01
    assert store.resolve_run(run_id, "ablate")["status"] == "finished"


def key(effect: HeadEffect) -> tuple[str, str, int, int]:
    return effect.mode, effect.site, effect.layer, effect.head


@pytest.mark.slow
def test_all_but_one_joins_the_run_and_nothing_runs_again(tmp_path: Path, store: Store) -> None:
    config = config_of(tmp_path, "bert", "loss")
    run_id, first = execute(config, store)
    asked = replace(config, each=True, all_but_one=True)
    again, both = execute(asked, store)
    assert again == run_id and len(first) == LAYERS * HEADS
    layers = [effect for effect in both if effect.mode == ALL_BUT_ONE]
    assert [key(effect) for effect in both if effect.mode == EACH] == [key(effect) for effect in first]
    assert [effect.layer for effect in layers] == list(range(LAYERS))
    assert execute(asked, store, Refusing(config.model, THREADS))[1] == both
    assert read_effects(store, run_id, ALL_BUT_ONE) == layers
    kept = layers[0]
    oracle = Oracle(config, "bert")
    others = [("self", kept.layer, head) for head in range(HEADS) if head != kept.head]
    rows = store.query(
        "select value from arm_results join arms using (arm_id) where run_id = ? and name = ?",
        [run_id, f"self all but {kept.layer}:{kept.head}"],
    )
    assert rows["value"][0].as_py() == pytest.approx(oracle.metric("loss", others), abs=1e-4)


def test_unknown_metrics_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, "bert")
    with pytest.raises(InterventionError, match=r"`metric='f1'` is unknown. Choose accuracy or bleu or loss"):
        replace(config, metric="f1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ignored",
    [
        {"sequences": 5},
        {"share_prefixes": True},
        {"tasks": TaskConfig(bos="never")},
        {"replacement": ReplacementConfig("mean", CorpusSpec("texts/"))},
    ],
)
def test_settings_of_tasks_and_texts_are_refused(ignored: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InterventionError, match=f"^`{min(ignored)}` has no effect with `data`: leave it out$"):
        replace(config_of(tmp_path, "bert"), **ignored)


def test_metrics_that_targets_lack_are_refused(tmp_path: Path, store: Store) -> None:
    config = config_of(tmp_path, "bert", "bleu")
    with pytest.raises(InterventionError, match=r"metric 'bleu' of class targets \(limit accuracy, loss\)"):
        execute(config, store)
