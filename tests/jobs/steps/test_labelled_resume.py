"""Arms on labelled examples that stop in their middle resume there, and end with the rows of an undisturbed run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headscan.architectures import HEADS, LAYERS
from headscan.settings.corpus_settings import ExamplesSpec, LabelledMetric
from headscan.settings.evaluation_settings import CriteriaComparison
from headscan.steps.referee.run_labelled_referee import LabelledRefereeConfig, run_labelled_referee
from headscan.steps.run_labelled_ablate import LabelledAblateConfig, run_labelled_ablate
from headscan.store.store import Store
from tests.jobs.conftest import run_on
from tests.jobs.steps.labelled_models import LABELLED
from tests.jobs.steps.labelled_oracle import config_of, on_examples
from tests.jobs.steps.test_answering import CountingPool, Interrupted, answers, dying

#: Examples of one item: three items for each arm.
GROUP = 5
ARMS = 1 + LAYERS * HEADS


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscan.steps.run_labelled_ablate._CHUNK_EXAMPLES", GROUP)


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
    run_id, effects = on_examples(run_labelled_ablate, LabelledAblateConfig(config), run_on(undisturbed, whole))
    pool = CountingPool(config.model, dying(4))
    with pytest.raises(Interrupted):  # four of the items of the first two arms are answered
        on_examples(run_labelled_ablate, LabelledAblateConfig(config), run_on(pool, store))
    assert store.query("from arms where status = 'finished'").num_rows == 1
    assert store.query("from responses").num_rows == GROUP and pool.asked == len(LABELLED) + GROUP
    assert store.runs("ablate")[0]["status"] == "failed"
    rest = CountingPool(config.model)
    assert on_examples(run_labelled_ablate, LabelledAblateConfig(config), run_on(rest, store)) == (run_id, effects)
    assert rest.asked == undisturbed.asked - pool.asked
    assert store.query("from responses").num_rows == 0
    assert_equal_rows(store, whole)


def test_answers_are_stored_while_an_arm_runs(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process leaves the rows that were stored before."""
    config = config_of(tmp_path, "bert", "loss")
    left = Store(tmp_path / "left.duckdb")

    def copy(items: int) -> None:
        seconds = 0.0 if items in (3, 4, 5) else 1e9  # the second arm
        monkeypatch.setattr("headscan.engine.answering._SECONDS_BETWEEN_WRITES", seconds)
        if items == 5:  # its last item
            shutil.copy(store.path, left.path)

    _, effects = on_examples(
        run_labelled_ablate, LabelledAblateConfig(config), run_on(CountingPool(config.model, copy), store)
    )
    kept = len(LABELLED) + left.query("from responses").num_rows
    assert left.query("from responses").num_rows == 2 * GROUP
    rest = CountingPool(config.model)
    assert on_examples(run_labelled_ablate, LabelledAblateConfig(config), run_on(rest, left))[1] == effects
    assert rest.asked == ARMS * len(LABELLED) - kept
    assert_equal_rows(left, store)


def test_a_referee_resumes_within_an_arm_with_the_same_heads(tmp_path: Path, store: Store) -> None:
    config = config_of(tmp_path, "bert", "loss")
    asked = LabelledRefereeConfig(
        config, CriteriaComparison(("importance",), (0.5, 1.0), 1), ExamplesSpec(config.data.path)
    )
    whole = Store(tmp_path / "whole.duckdb")
    undisturbed = CountingPool(config.model)
    expected = on_examples(run_labelled_referee, asked, run_on(undisturbed, whole))
    pool = CountingPool(config.model, dying(5))
    with pytest.raises(Interrupted):
        on_examples(run_labelled_referee, asked, run_on(pool, store))
    rest = CountingPool(config.model)
    said: list[str] = []
    assert on_examples(run_labelled_referee, asked, run_on(rest, store, say=said.append)) == expected
    assert rest.asked == undisturbed.asked - pool.asked
    assert not any("measuring" in line for line in said)
    assert_equal_rows(store, whole)
