"""lm-eval with the model ``headscan``: the numbers of ``headscan evaluate`` on every kind of task."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

import headscan
from headscan.cluster.pool import InProcessPool
from headscan.engine.arms import BASELINE, Arm, ArmKind, mask_arm
from headscan.errors import HeadscanError
from headscan.model_spec import ModelSpec
from headscan.settings.evaluation_settings import TaskConfig
from headscan.steps.evaluate import Evaluate
from headscan.steps.lm_eval_model import HeadscanModel
from headscan.steps.plan_arms import plan_arms
from headscan.steps.run_evaluation import run_evaluation
from headscan.store.store import Store
from tests.jobs.conftest import run_on
from tests.jobs.steps.kv_plans import model_of, plan_for

pytestmark = pytest.mark.usefixtures("own_tasks_alone")

#: Multiple choice, perplexity, rolling perplexity, and generation, and the number of questions of each.
TASKS = ("counting", "ending", "reading", "telling")


def results_of(model: Any, manager: TaskManager) -> dict[tuple[str, str], float]:
    with patch("lm_eval.evaluator.add_env_info"):  # starts a dozen programs
        found = simple_evaluate(model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
    assert found is not None
    return {
        (task, metric.partition(",")[0]): value
        for task, values in found["results"].items()
        for metric, value in values.items()
        if "," in metric and isinstance(value, float) and "stderr" not in metric
    }


def test_every_kind_of_task_gives_the_numbers_of_evaluate(
    spec: ModelSpec, pool: InProcessPool, task_folder: Path, tmp_path: Path
) -> None:
    store = Store(tmp_path / "s.duckdb")
    rule = Arm("rule output_norm_ln 0.9", ArmKind.RULE, headscan.HeadRule("output_norm_ln", threshold=0.9))
    mask = mask_arm([(1, 2), (0, 0)])
    plan = plan_for(model_of(spec, headscan.load(spec.source)), [(0, 0), (1, 1), (2, 0)])
    file = plan.save(tmp_path / "plan.json")
    forward, decode = plan_arms(plan, ("forward", "decode"), 0)
    config = Evaluate(spec, TaskConfig(TASKS, include_path=str(task_folder)), recall=None)
    run_evaluation(config, run_on(pool, store), [BASELINE, mask, rule, forward, decode])
    rows = store.query("select name, task, metric, value from arm_results join arms using (arm_id)").to_pylist()
    heads = tmp_path / "heads.json"
    heads.write_text("[[1, 2], [0, 0]]")
    ways: list[tuple[Arm, dict[str, Any]]] = [
        (BASELINE, {}),
        (mask, {"heads": "1:2+0:0"}),
        (mask, {"mask": str(heads)}),
        (rule, {"rule": "output_norm_ln", "threshold": 0.9}),
        (forward, {"plan": str(file)}),
        (decode, {"plan": str(file), "plan_mode": "decode"}),
    ]
    manager = TaskManager(include_path=str(task_folder), include_defaults=False)  # reading all defaults takes seconds
    seen = []
    for arm, arguments in ways:
        words = ",".join(f"{name}={value}" for name, value in {"pretrained": spec.source, **arguments}.items())
        model = get_model("headscan").create_from_arg_string(words, {"batch_size": 1, "device": "cuda:0"})
        found = results_of(model, manager)
        seen.append(found)
        expected = {(row["task"], row["metric"]): row["value"] for row in rows if row["name"] == arm.name}
        shared = found.keys() & expected.keys()
        assert {task for task, _ in shared} == set(TASKS)
        assert {key: found[key] for key in shared} == pytest.approx({key: expected[key] for key in shared}, rel=1e-5)
    assert seen[1] == seen[2]
    assert all(a != b for a, b in combinations([seen[0], *seen[2:]], 2))
    assert json.loads(json.dumps(model.get_model_info()))["headscan_arm"] == decode.name


def test_arguments_that_do_not_go_together(spec: ModelSpec) -> None:
    for arguments, problem in (
        ({"heads": "1:2", "mask": "x.json"}, "heads and mask exclude each other"),
        ({"rule": "entropy"}, "rule and threshold go together"),
        ({"heads": "1-2"}, "Write LAYER:HEAD"),
        ({"plan_mode": "mask"}, "Choose forward or decode"),
        ({"heads": "7:0"}, "layer 7 has no attention heads"),
    ):
        with pytest.raises(HeadscanError, match=problem):
            HeadscanModel(spec.source, **arguments)


def test_arguments_of_other_models_of_lm_eval_are_one_line(spec: ModelSpec) -> None:
    for words, problem in (
        (
            "load_in_4bit=True",
            r"no argument load_in_4bit=True \(limit pretrained, heads, .*\)\. Save the quantised model",
        ),
        ("peft=adapter", "no argument peft='adapter' .* Merge the adapter"),
        ("parallelize=True", "the placement is automatic"),
        ("attn_implementation=eager", "headscan chooses the attention"),
        ("thresold=0.5", r"Did you mean threshold\?"),
        ("subfolder=x", "Leave it out$"),
        ("dtype=int4", "`dtype='int4'` is unknown"),
        ("rule=entropy,threshold=high", "`threshold='high'` is not a number"),
        ("batch_tokens=many", "`batch_tokens='many'` is not a whole number"),
        ("bos=True", "`bos=True`. Choose auto or always or never"),
        ("heads=3", "`heads=3` names no heads"),
        ("trust_remote_code=maybe", "`trust_remote_code='maybe'` is not True or False"),
        ("mask=7", "cannot read the heads of 7"),
        ("plan=7", "cannot read 7"),
    ):
        with pytest.raises(HeadscanError, match=problem) as found:
            get_model("headscan").create_from_arg_string(f"pretrained={spec.source},{words}", {"batch_size": 1})
        assert "\n" not in str(found.value)
    with pytest.raises(HeadscanError, match="`pretrained` is missing"):
        get_model("headscan").create_from_arg_string("dtype=float32", {})
    with pytest.raises(HeadscanError, match="no model"):
        get_model("headscan").create_from_arg_string("pretrained=77", {})
