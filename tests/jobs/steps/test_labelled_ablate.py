"""Single heads of models on labelled examples: effects, resuming, the verb, and faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headscan.architectures import HEADS, LAYERS
from headscan.errors import InterventionError
from headscan.settings.corpus_settings import CorpusSpec, LabelledMetric
from headscan.settings.evaluation_settings import CriteriaComparison, ReplacementConfig, TaskConfig
from headscan.steps.ablate import effects_text
from headscan.steps.referee.referee_step import Referee
from headscan.store.store import Store
from headscan.store.tables import ALL_BUT_ONE, EACH
from headscan.verdicts.head_effects import HeadEffect, read_effects
from tests.jobs.cli.test_cli import fails
from tests.jobs.conftest import THREADS
from tests.jobs.steps.labelled_models import LABELLED, write_lines
from tests.jobs.steps.labelled_oracle import Oracle, Refusing, config_of, execute
from tests.jobs.steps.test_answering import CountingPool, Interrupted, answers, dying


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
    for effect in effects[::5]:
        after = oracle.metric(metric, [(effect.site, effect.layer, effect.head)])
        assert effect.effect == pytest.approx(after - before, abs=1e-4)
    assert max(abs(effect.effect) for effect in effects) > 0.01
    shown = effects_text(effects)
    assert "heads with a significant effect" in shown and "with ablated heads at zero" in shown
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


#: Examples of one item: three items for each arm.
GROUP = 5
ARMS = 1 + LAYERS * HEADS


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscan.engine.answering._CHUNK_EXAMPLES", GROUP)


def assert_equal_rows(ours: Store, whole: Store) -> None:
    for table, expected in zip(answers(ours), answers(whole), strict=True):
        assert table.num_rows and table.equals(expected)
    arms = "select * exclude (started_at, finished_at) from arms order by all"
    assert ours.query(arms).equals(whole.query(arms))


@pytest.mark.parametrize(
    ("family", "metric"),
    [
        ("bert", "loss"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("bert", "accuracy"), ("bart", "bleu"))),
    ],
)
def test_an_arm_that_stops_asks_only_the_rest(
    family: str, metric: LabelledMetric, tmp_path: Path, store: Store
) -> None:
    config = config_of(tmp_path, family, metric)
    whole = Store(tmp_path / "whole.duckdb")
    undisturbed = CountingPool(config.model)
    run_id, effects = execute(config, whole, undisturbed)
    pool = CountingPool(config.model, dying(4))
    with pytest.raises(Interrupted):  # four of the items of the first two arms are answered
        execute(config, store, pool)
    assert store.query("from arms where status = 'finished'").num_rows == 1
    [numbers] = store.query("from units")["numbers"].to_pylist()
    assert len(numbers) == 3 * GROUP and pool.asked == len(LABELLED) + GROUP
    assert store.runs("ablate")[0]["status"] == "failed"
    rest = CountingPool(config.model)
    assert execute(config, store, rest) == (run_id, effects)
    assert f"Change of {'loss, in nats' if metric == 'loss' else metric}" in effects_text(effects)
    assert rest.asked == undisturbed.asked - pool.asked
    assert store.query("from units").num_rows == 0
    assert_equal_rows(store, whole)


@pytest.mark.slow
def test_a_referee_resumes_within_an_arm_with_the_same_heads(tmp_path: Path, store: Store) -> None:
    config = config_of(tmp_path, "bert", "loss")
    compared = CriteriaComparison(("importance",), (0.5, 1.0), 1)
    asked = Referee(config.model, data=config.data, metric="loss", compared=compared, rank_data=config.data)
    whole = Store(tmp_path / "whole.duckdb")
    undisturbed = CountingPool(config.model)
    expected = execute(asked, whole, undisturbed)
    pool = CountingPool(config.model, dying(5))
    with pytest.raises(Interrupted):
        execute(asked, store, pool)
    rest = CountingPool(config.model)
    said: list[str] = []
    assert execute(asked, store, rest, say=said.append) == expected
    assert rest.asked == undisturbed.asked - pool.asked
    assert not any("measuring" in line for line in said)
    assert_equal_rows(store, whole)


def test_faults_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], model_folder: Path) -> None:
    data = str(write_lines(tmp_path / "d.tsv", LABELLED))
    start = ["ablate", str(model_folder), "--store", str(tmp_path / "s.duckdb")]
    fails(capsys, [*start, "--data", data], "has no loss on labels")
    fails(capsys, [*start, "--metric", "loss", "--corpus", "c"], "--metric has no effect without --data")
    fails(capsys, [*start, "--data", data, "--corpus", "c"], "--corpus has no effect with --data")
    fails(capsys, [*start, "--data", str(tmp_path / "e.tsv")], "no file")
