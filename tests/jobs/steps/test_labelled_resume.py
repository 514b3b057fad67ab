"""Arms on labelled examples that stop in their middle resume there, and end with the rows of an undisturbed run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headscan.architectures import HEADS, LAYERS
from headscan.settings.corpus_settings import LabelledMetric
from headscan.settings.evaluation_settings import CriteriaComparison
from headscan.steps.referee.referee_step import Referee
from headscan.store.store import Store
from tests.jobs.steps.labelled_models import LABELLED
from tests.jobs.steps.labelled_oracle import config_of, execute
from tests.jobs.steps.test_answering import CountingPool, Interrupted, answers, dying

#: Examples of one item: three items for each arm.
GROUP = 5
ARMS = 1 + LAYERS * HEADS


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscan.engine.answering._CHUNK_EXAMPLES", GROUP)


def written(store: Store) -> int:
    """Return the number of stored answers of unfinished arms."""
    return sum(
        len(numbers) // 3 for numbers in store.query("from units where arm_id is not null")["numbers"].to_pylist()
    )


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
    assert written(store) == GROUP and pool.asked == len(LABELLED) + GROUP
    assert store.runs("ablate")[0]["status"] == "failed"
    rest = CountingPool(config.model)
    assert execute(config, store, rest) == (run_id, effects)
    assert rest.asked == undisturbed.asked - pool.asked
    assert store.query("from units").num_rows == 0
    assert_equal_rows(store, whole)


def test_answers_are_stored_while_an_arm_runs(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process leaves the rows that were stored before."""
    config = config_of(tmp_path, "bert", "loss")
    left = Store(tmp_path / "left.duckdb")

    def copy(items: int) -> None:
        seconds = 0.0 if items in (3, 4, 5) else 1e9  # the second arm
        monkeypatch.setattr("headscan.runs.ledger.WRITE_SECONDS", seconds)
        if items == 5:  # its last item
            shutil.copy(store.path, left.path)

    _, effects = execute(config, store, CountingPool(config.model, copy))
    kept = len(LABELLED) + written(left)
    assert written(left) == 2 * GROUP
    rest = CountingPool(config.model)
    assert execute(config, left, rest)[1] == effects
    assert rest.asked == ARMS * len(LABELLED) - kept
    assert_equal_rows(left, store)


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
