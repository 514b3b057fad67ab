"""An evaluation of a model in ranges of layers stores the same rows as one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headscan
from headscan.cluster.placements import PipelinePlacement, StreamedPlacement
from headscan.cluster.pool import Pool, StagingError, open_pool
from headscan.engine.arms import BASELINE, Arm, mask_arm, random_rules
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
from tests.jobs.conftest import THREADS, run_on

ARMS = [
    BASELINE,
    mask_arm([(0, 2), (2, 1), (2, 3)]),
    Arm("rule", ArmKind.RULE, headscan.HeadRule("output_norm_ln", 0.9), "output_norm_ln"),
    *random_rules(0.3, 1),
    Arm("plan", ArmKind.PLAN, KvWindows(KeptKeys.of([(0, 0, Window(1, 3)), (2, 0, Window(1, 3)), (2, 1, DROPPED)]))),
]
EVICTING = Arm("plan, decode", ArmKind.PLAN, KvEviction(plan_of([[NARROW, NARROW]] * 3).kept))
PLACEMENTS = {
    "streamed": StreamedPlacement("cpu", 1, 1 << 30, ((0, 1), (1, 3))),
    "pipeline": PipelinePlacement(1, ((0, 2), (2, 3)), "cpu", 1),
}


def asking(task_folder: Path, *tasks: str) -> dict[str, Any]:
    chosen = TaskConfig(tasks, include_path=str(task_folder), limit=6)
    return {"tasks": chosen, "recall": None, "share_prefixes": False}


def answers(store: Store) -> pa.Table:
    return store.query("select * exclude (arm_id, run_id) from answers join arms using (arm_id) order by all").drop(
        ["started_at", "finished_at"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind == "pipeline" else ()) for kind in PLACEMENTS]
)
def test_arms_get_the_answers_of_one_process(
    kind: str, spec: ModelSpec, task_folder: Path, store: Store, tmp_path: Path
) -> None:
    asked = Evaluate(spec, **asking(task_folder, "counting"))

    def run(pool: Pool, into: Store, arms: Sequence[Arm] = ARMS) -> str:
        return run_evaluation(asked, run_on(pool, into, batch_tokens=200), arms)

    with open_pool(spec, THREADS) as pool:
        run(pool, store)
    apart = Store(tmp_path / "apart.duckdb")
    with open_pool(spec, PLACEMENTS[kind]) as pool:
        with pytest.raises(
            StagingError, match=r"^plan, decode evicts keys, which needs all layers of the model at once"
        ):
            run(pool, apart, [BASELINE, EVICTING])
        run(pool, apart)
        # Finished arms are not answered again, on any placement.
        assert run(pool, apart) == apart.runs("evaluate")[0]["run_id"]
    ours, whole = answers(apart), answers(store)
    assert ours.num_rows == 6 * len(ARMS)
    assert len(set(whole["ablated_share"].to_pylist())) > 3
    for name in whole.column_names:
        values = ours[name].to_pylist()
        if pa.types.is_floating(whole[name].type):
            assert values == pytest.approx(whole[name].to_pylist(), abs=1e-6)
        elif not pa.types.is_list(whole[name].type):
            assert values == whole[name].to_pylist()


def test_texts_are_not_written_range_by_range(spec: ModelSpec, task_folder: Path, store: Store) -> None:
    telling = asking(task_folder, "telling")
    with open_pool(spec, PLACEMENTS["streamed"]) as pool, pytest.raises(StagingError, match="6 texts"):
        run_evaluation(Evaluate(spec, **telling), run_on(pool, store), ARMS)
    with open_pool(spec, PLACEMENTS["streamed"]) as pool, pytest.raises(StagingError, match="6 texts"):
        run_sweep(Sweep(spec, **telling), run_on(pool, store))
    assert not store.runs()  # nothing is recorded in vain
