"""Stopped arms resume, and end with the numbers of an undisturbed run, in one process and in ranges of layers."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
import torch

import headscan
from headscan.cluster.placements import StreamedPlacement
from headscan.cluster.pool import IncompleteError, InProcessPool, Pool, StagingError, open_pool
from headscan.engine.answer import AnswerItem
from headscan.engine.arms import BASELINE, Arm, mask_arm, random_rules
from headscan.engine.bundles import BUNDLE_SIZE
from headscan.errors import NotFiniteError, StoreFullError
from headscan.kv.kv_windows import KvEviction, KvWindows
from headscan.model_spec import ModelSpec
from headscan.settings.evaluation_settings import TaskConfig
from headscan.steps.evaluate import Evaluate
from headscan.steps.run_evaluation import run_evaluation
from headscan.steps.run_sweep import run_sweep
from headscan.steps.sweep import Sweep
from headscan.store.records import ArmKind
from headscan.store.store import Store
from headscan.windows import DROPPED, KeptKeys, Window
from tests.instrument.kv.cache_plans import NARROW, plan_of
from tests.jobs.conftest import THREADS, make_tokenizer, run_on
from tests.small_models import make_model
from tests.stores import copy_store

#: The first two are answered together.
ARMS = [
    BASELINE,
    mask_arm([(2, 1), (2, 3)]),
    Arm("rule", ArmKind.RULE, headscan.HeadRule("output_norm_ln", 0.9), "output_norm_ln"),
]
#: Of each arm: three to each of six questions, and six texts.
REQUESTS = 3 * 6 + 6


@pytest.fixture(scope="module")
def config(spec: ModelSpec, task_folder: Path) -> Evaluate:
    tasks = TaskConfig(("counting", "telling"), include_path=str(task_folder), limit=6)
    return Evaluate(spec, tasks, recall=None)


class Interrupted(Exception):
    pass


class CountingPool(InProcessPool):
    """Counts the items of each arm, and calls a function of the test before each item's answers."""

    def __init__(self, spec: ModelSpec, before: Callable[[int], None] = lambda items: None) -> None:
        super().__init__(spec, THREADS)
        self.items = self.asked = 0
        self._before = before

    def map(self, task, items):  # type: ignore[no-untyped-def]
        for finished in super().map(task, items):
            if isinstance(finished.item, AnswerItem):
                self._before(self.items)
                self.items += 1
                self.asked += len(finished.item.changes) * len(finished.item.requests)
            yield finished


def answers(store: Store) -> list[pa.Table]:
    """Everything that the arms of a store with one run came to."""
    return [
        store.query(f"select * exclude ({left_out}) from {table} join arms using (arm_id) order by all")
        for table, left_out in (
            ("answers", "started_at, finished_at, arm_id, run_id"),
            ("arm_results", "started_at, finished_at, arm_id, run_id"),
        )
    ]


def run(config: Evaluate, store: Store, pool: InProcessPool, arms: Sequence[Arm] = ARMS, **options: Any) -> str:
    return run_evaluation(config, run_on(pool, store, **{"batch_tokens": 50, **options}), arms)


@pytest.fixture(scope="module")
def undisturbed(config: Evaluate, tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("whole") / "s.duckdb")
    pool = CountingPool(config.model)
    run(config, store, pool)
    assert pool.items > 10
    return store


def written(store: Store) -> int:
    """Stored requests of all arms."""
    rows = store.query(
        "select (select coalesce(sum(len(numbers)), 0)::int // 3 from units) as some,"
        " (select count(*) from arms where status = 'finished') as all"
    ).to_pylist()[0]
    return rows["some"] + REQUESTS * rows["all"]


def resumes(config: Evaluate, store: Store, undisturbed: Store) -> None:
    """Only missing requests are answered, and the result equals that of an undisturbed run."""
    before = written(store)
    assert 0 < before < REQUESTS * len(ARMS)
    pool = CountingPool(config.model)
    run(config, store, pool)
    assert pool.asked == REQUESTS * len(ARMS) - before
    for ours, whole in zip(answers(store), answers(undisturbed), strict=True):
        assert ours.equals(whole)
    assert store.query("from units").num_rows == 0
    assert store.runs("evaluate")[0]["status"] == "finished"


def dying(after: int) -> Callable[[int], None]:
    def die(items: int) -> None:
        if items == after:
            raise Interrupted

    return die


class LosingPool(CountingPool):
    """A pool that gives up the fourth item, as Ray pools do after failures."""

    def map(self, task, items):  # type: ignore[no-untyped-def]
        lost = []
        for finished in super().map(task, items):
            if isinstance(finished.item, AnswerItem) and self.items == 4:
                self.asked -= len(finished.item.changes) * len(finished.item.requests)
                lost.append(finished.item)
            else:
                yield finished
        if lost:
            raise IncompleteError(lost, "3 workers failed on it")


@pytest.mark.parametrize("way", ["replicas fail", pytest.param("requests are given up", marks=pytest.mark.slow)])
def test_a_failed_run_resumes(way: str, config: Evaluate, store: Store, undisturbed: Store) -> None:
    lost = way != "replicas fail"
    pool = LosingPool(config.model) if lost else CountingPool(config.model, dying(5))
    message = r"^[^;]*, requests \d+: 3 workers failed on it\. All others are done" if lost else None
    with pytest.raises(IncompleteError if lost else Interrupted, match=message):
        run(config, store, pool)
    assert written(store) == pool.asked  # no answer is lost
    assert [run["status"] for run in store.runs("evaluate")] == ["failed"]
    resumes(config, store, undisturbed)


def test_a_run_resumes_after_its_process_is_killed(
    config: Evaluate, store: Store, tmp_path: Path, undisturbed: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = Store(tmp_path / "left.duckdb")

    def copy(items: int) -> None:
        """The rows that a killed process leaves behind: those stored before the kill."""
        monkeypatch.setattr("headscan.runs.ledger.WRITE_SECONDS", 0.0 if items == 6 else 1e9)
        if items == 9:
            shutil.copy(store.path, left.path)

    run(config, store, CountingPool(config.model, copy))
    resumes(config, left, undisturbed)


def test_finished_arms_are_not_run_again(config: Evaluate, tmp_path: Path, undisturbed: Store) -> None:
    store = Store(tmp_path / "s.duckdb")
    copy_store(undisturbed.path, store.path)
    said: list[str] = []
    pool = CountingPool(config.model)
    run(config, store, pool, say=said.append)
    assert said == [f"{arm.name}: finished before" for arm in ARMS]
    assert pool.asked == 0


def test_other_settings_are_another_run_and_named(config: Evaluate, store: Store, undisturbed: Store) -> None:
    with pytest.raises(Interrupted):
        run(config, store, CountingPool(config.model, dying(3)), ARMS[:1])
    (first,) = [run["run_id"] for run in store.runs("evaluate")]
    said: list[str] = []
    other = dataclasses.replace(config, tasks=dataclasses.replace(config.tasks, limit=5))
    second = run(other, store, CountingPool(config.model), ARMS[:1], batch_tokens=5000, say=said.append)
    (line,) = (line for line in said if first in line)
    assert line.startswith(
        f"questions, limit, batch_tokens, requests changed since run {first} (failed). A new run begins"
    )
    assert second != first
    # The digits of another budget are others, the answers are not.
    rows = "from answers join arms using (arm_id) where run_id = ? and name = 'baseline' and not recall"
    theirs = undisturbed.query(rows, [undisturbed.runs("evaluate")[0]["run_id"]]).to_pylist()
    by_text = {(row["task"], row["doc_hash"]): row for row in theirs}
    found = store.query(rows, [second]).to_pylist()
    assert len(found) == 10  # of two tasks
    for ours in found:
        whole = by_text[ours["task"], ours["doc_hash"]]
        assert ours["log_likelihoods"] == pytest.approx(whole["log_likelihoods"], abs=1e-4)
        assert ours["response"] == whole["response"]


def test_a_failed_write_does_not_hide_what_stopped_a_run(
    config: Evaluate, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise StoreFullError("no space left on its device")

    monkeypatch.setattr(store, "add_units", full)
    with pytest.raises(Interrupted):
        run(config, store, CountingPool(config.model, dying(3)))


class ShufflingPool(InProcessPool):
    """Results come in another order, and items and results by way of pickle, as from other processes."""

    def map(self, task, items):  # type: ignore[no-untyped-def]
        sent = pickle.loads(pickle.dumps(list(items)))
        Random(0).shuffle(sent)
        for finished in super().map(task, sent):
            yield pickle.loads(pickle.dumps(finished))


def test_the_order_in_which_results_come_changes_no_digit(config: Evaluate, store: Store, undisturbed: Store) -> None:
    run(config, store, ShufflingPool(config.model, THREADS))
    for ours, whole in zip(answers(store), answers(undisturbed), strict=True):
        assert ours.equals(whole)


class PacedPool(InProcessPool):
    """Reports so many seconds for each item, and notes the number of its arms."""

    def __init__(self, spec: ModelSpec, seconds: float) -> None:
        super().__init__(spec, THREADS)
        self._seconds = seconds
        self.arms: list[int] = []

    def map(self, task, items):  # type: ignore[no-untyped-def]
        for finished in super().map(task, items):
            if isinstance(finished.item, AnswerItem):
                self.arms.append(len(finished.item.changes))
            yield dataclasses.replace(finished, seconds=self._seconds)


def test_slow_arms_are_answered_in_small_bundles(spec: ModelSpec, task_folder: Path, tmp_path: Path) -> None:
    """A stop loses one bundle, and progress is printed when one ends; the size of bundles changes no digit."""
    tasks = TaskConfig(("counting",), include_path=str(task_folder), limit=6)
    config = Evaluate(spec, tasks, recall=None)
    arms = [BASELINE, *(mask_arm([(2, head), (1, other)]) for head in range(5) for other in range(2))]
    sizes, stores = [], []
    for seconds in (1e-6, 60.0):
        pool, store = PacedPool(spec, seconds), Store(tmp_path / f"{seconds}.duckdb")
        run(config, store, pool, arms)
        sizes.append(pool.arms)
        stores.append(store)
    assert sizes[0][0] == BUNDLE_SIZE and max(sizes[0]) == len(arms)
    assert max(sizes[1]) == BUNDLE_SIZE
    for fast, slow in zip(*map(answers, stores), strict=True):
        assert fast.equals(slow)


def test_a_model_that_cannot_continue_a_prefix_is_reported(task_folder: Path, tmp_path: Path) -> None:
    make_model("jamba", vocabulary=300).save_pretrained(tmp_path / "jamba")
    make_tokenizer(300).save_pretrained(tmp_path / "jamba")
    spec = ModelSpec(str(tmp_path / "jamba"))
    config = Evaluate(spec, TaskConfig(("few",), include_path=str(task_folder)), recall=None)
    said: list[str] = []
    run(config, Store(tmp_path / "s.duckdb"), CountingPool(spec), ARMS[:1], say=said.append)
    assert "prompts are read whole: continuing from a cached prefix changes the hidden states of this model" in said


def test_an_arm_with_nan_answers_is_named_and_the_others_stay(config: Evaluate, store: Store) -> None:
    pool = CountingPool(config.model)
    with torch.no_grad():  # the three heads of a KV head come to NaN, unless they are ablated
        pool._model().model.model.layers[2].self_attn.v_proj.weight[0, 0] = float("nan")
    arms = [BASELINE, mask_arm([(2, head) for head in range(3)])]
    said: list[str] = []
    counting = dataclasses.replace(config, tasks=dataclasses.replace(config.tasks, names=("counting",)))
    with pytest.raises(NotFiniteError, match="in 1 of 2 arms: baseline"):
        run(counting, store, pool, arms, say=said.append)
    assert [arm["name"] for arm in store.query("from arms where status = 'finished'").to_pylist()] == [arms[1].name]
    assert store.runs("evaluate")[0]["status"] == "failed"


ALL_ARMS = [
    BASELINE,
    mask_arm([(0, 2), (2, 1), (2, 3)]),
    Arm("rule", ArmKind.RULE, headscan.HeadRule("output_norm_ln", 0.9), "output_norm_ln"),
    *random_rules(0.3, 1),
    Arm("plan", ArmKind.PLAN, KvWindows(KeptKeys.of([(0, 0, Window(1, 3)), (2, 0, Window(1, 3)), (2, 1, DROPPED)]))),
]
EVICTING = Arm("plan, decode", ArmKind.PLAN, KvEviction(plan_of([[NARROW, NARROW]] * 3).kept))
STREAMED = StreamedPlacement("cpu", 1, 1 << 30, ((0, 1), (1, 3)))


def asking(task_folder: Path, *tasks: str) -> dict[str, Any]:
    chosen = TaskConfig(tasks, include_path=str(task_folder), limit=6)
    return {"tasks": chosen, "recall": None, "share_prefixes": False}


def test_arms_get_the_answers_of_one_process(spec: ModelSpec, task_folder: Path, store: Store, tmp_path: Path) -> None:
    asked = Evaluate(spec, **asking(task_folder, "counting"))

    def run(pool: Pool, into: Store, arms: Sequence[Arm] = ALL_ARMS) -> str:
        return run_evaluation(asked, run_on(pool, into, batch_tokens=200), arms)

    with open_pool(spec, THREADS) as pool:
        run(pool, store)
    apart = Store(tmp_path / "apart.duckdb")
    with open_pool(spec, STREAMED) as pool:
        with pytest.raises(
            StagingError, match=r"^plan, decode evicts keys, which needs all layers of the model at once"
        ):
            run(pool, apart, [BASELINE, EVICTING])
        run(pool, apart)
        # Finished arms are not answered again, on any placement.
        assert run(pool, apart) == apart.runs("evaluate")[0]["run_id"]
    ours, whole = answers(apart)[0], answers(store)[0]
    assert ours.num_rows == 6 * len(ALL_ARMS)
    assert len(set(whole["ablated_share"].to_pylist())) > 3
    for name in whole.column_names:
        values = ours[name].to_pylist()
        if pa.types.is_floating(whole[name].type):
            assert values == pytest.approx(whole[name].to_pylist(), abs=1e-6)
        elif not pa.types.is_list(whole[name].type):
            assert values == whole[name].to_pylist()


def test_texts_are_not_written_range_by_range(spec: ModelSpec, task_folder: Path, store: Store) -> None:
    telling = asking(task_folder, "telling")
    with open_pool(spec, STREAMED) as pool, pytest.raises(StagingError, match="6 texts"):
        run_evaluation(Evaluate(spec, **telling), run_on(pool, store), ALL_ARMS)
    with open_pool(spec, STREAMED) as pool, pytest.raises(StagingError, match="6 texts"):
        run_sweep(Sweep(spec, **telling), run_on(pool, store))
    assert not store.runs()  # nothing is recorded in vain
