"""The verbs `ablate`, `rank --by effect` and `evaluate --replace` and `sweep --replace`, as a user types them."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from headscan.cli.main import main
from headscan.model_spec import ModelSpec
from headscan.store.store import Store


def fails(capsys: pytest.CaptureFixture[str], command: list[str], message: str) -> None:
    capsys.readouterr()
    assert main(command) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()[-1]) < 300


@pytest.mark.slow
def test_it_prints_both_tables_and_ranks_the_heads(
    spec: ModelSpec, corpus_folder: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ablate", spec.source, "--each", "--all-but-one", "--corpus", str(corpus_folder), "--store"]
    command += [str(store.path), "--sequences", "10", "--max-tokens", "24"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "with ablated heads at zero; baseline" in printed and "on 10 documents" in printed
    assert "of 18 heads have a significant effect (q at most 0.05)" in printed
    assert "Each layer reduced to its best head (chosen on one half, judged on the other)" in printed
    assert main(["rank", "--by", "effect", "--store", str(store.path), "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["rank", "layer", "head", "kv_head", "effect"] and len(lines) == 4
    best = store.query("from effect_summary where mode = 'each' order by harm, layer, head limit 1").to_pylist()[0]
    assert lines[2].split()[1:3] == [str(best["layer"]), str(best["head"])]
    joined = store.query("select count(*) as n from effect_summary e join runs using (run_id) where kind = 'ablate'")
    assert joined.to_pylist() == [{"n": 18 + 3}]


@pytest.mark.slow
def test_an_evaluation_tests_whether_heads_are_constant(
    spec: ModelSpec, corpus_folder: Path, task_folder: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["--corpus", str(corpus_folder), "--max-tokens", "40", "--store", str(store.path)]
    assert main(["scan", spec.source, *texts]) == 0
    asked = ["evaluate", spec.source, "--tasks", "counting", "--include-path", str(task_folder), "--no-recall"]
    asked += ["--store", str(store.path)]
    arms = ["--heads", "1:2", "--share", "0.2", "--rule", "--controls", "1"]
    assert main([*asked, *arms]) == 0
    capsys.readouterr()
    for value in ("mean", "resample"):
        assert main([*asked, *arms, "--replace", value, "--corpus", str(corpus_folder)]) == 0
        printed = capsys.readouterr().out
        rows = [line.partition("  ")[0] for line in printed.splitlines() if line.startswith("mask 1:2 ")]
        assert rows[0] == "mask 1:2" and any(row.startswith(f"mask 1:2 by {value} ") for row in rows)
    found = store.query(
        "select kind, replacement, count(*) as arms from arms where kind <> 'baseline' group by all order by all"
    ).to_pylist()
    sizes = {"mask": 2, "rule": 1, "random_mask": 2, "random_rule": 1}
    assert {(row["kind"], row["replacement"]): row["arms"] for row in found} == {
        (kind, value): count for kind, count in sizes.items() for value in ("zero", "mean", "resample")
    }
    assert store.query("select count(distinct run_id) as n from arms").to_pylist() == [{"n": 1}]
    shares = store.query("select name, replacement from arms where kind = 'rule' and ablated_share = 0").to_pylist()
    assert shares == [], "every rule ablates heads"


@pytest.mark.slow
def test_a_sweep_tests_whether_heads_are_constant(
    spec: ModelSpec, corpus_folder: Path, task_folder: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = ["--tasks", "counting", "--include-path", str(task_folder), "--no-recall", "--limit", "4"]
    tasks += ["--store", str(store.path)]
    mean = ["--replace", "mean", "--corpus", str(corpus_folder)]
    arms = ["--scores", "output_norm_ln", "--quantiles", "0.2", "--controls", "1", "--no-confirm"]
    for value in ([], mean):
        assert main(["sweep", spec.source, *tasks, *arms, *value]) == 0
    found = store.query("select run_id, kind, replacement from arms where kind <> 'baseline'").to_pylist()
    kinds = ("rule", "mask", "random_rule", "random_mask")
    assert Counter((row["kind"], row["replacement"]) for row in found) == Counter(product(kinds, ("zero", "mean")))
    assert len({(row["run_id"], row["replacement"]) for row in found}) == 2, "each value has curves of its own"
    [mask] = store.query("select mask_id from arms where kind = 'mask' and replacement = 'mean'").to_pylist()
    # An arm of the same heads and value has the same answers.
    assert main(["evaluate", spec.source, *tasks, "--mask", mask["mask_id"], *mean]) == 0
    ours = store.query(
        "select a.* exclude (arm_id) from answers a join arms using (arm_id) where kind = 'mask' and replacement ="
        " 'mean' order by arms.name, task, question"
    ).to_pylist()
    assert ours[: len(ours) // 2] == ours[len(ours) // 2 :] != []


def test_a_mask_of_the_store_is_evaluated(
    spec: ModelSpec, task_folder: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["evaluate", spec.source, "--tasks", "counting", "--include-path", str(task_folder), "--no-recall"]
    asked += ["--store", str(store.path), "--limit", "2"]
    assert main([*asked, "--heads", "0:1,1:2"]) == 0
    printed = capsys.readouterr().out
    ((name, mask),) = (tuple(row.values()) for row in store.query("select name, mask_id from masks").to_pylist())
    for given in (name, mask):
        assert main([*asked, "--mask", given]) == 0
        assert capsys.readouterr().out == printed, "the same run has the answers already"
    fails(capsys, [*asked, "--mask", "theirs"], "theirs")


def test_bad_options_name_their_fix(
    spec: ModelSpec, task_folder: Path, corpus_folder: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--store", str(store.path)]
    tasks = ["--tasks", "counting", "--include-path", str(task_folder), *at]
    corpus = ["--corpus", str(corpus_folder)]
    fails(capsys, ["ablate", spec.source, *at], "--tasks or --corpus is required")
    fails(capsys, ["ablate", spec.source, *tasks, "--replace", "mean"], "needs texts: no corpus. Set --corpus")
    fails(capsys, ["ablate", spec.source, *tasks, *corpus], "--corpus has no effect with --replace zero")
    fails(capsys, ["ablate", spec.source, *tasks, "--sequences", "3"], "--sequences has no effect with --tasks")
    fails(capsys, ["evaluate", spec.source, *tasks, "--replace", "mean", "--heads", "0:1"], "Set --corpus")
    fails(capsys, ["evaluate", spec.source, *tasks, *corpus, "--heads", "0:1"], "--corpus has no effect with --replace")
    fails(capsys, ["evaluate", spec.source, *tasks, *corpus, "--replace", "mean"], "needs ablated heads")
    fails(capsys, ["sweep", spec.source, *tasks, *corpus], "--corpus has no effect with --replace zero")
    fails(capsys, ["sweep", spec.source, *tasks, "--replace", "mean"], "needs texts: no corpus. Set --corpus")
    fails(capsys, ["rank", "--by", "effect", *at], "Run `headscan ablate` first")
    generating = ["evaluate", spec.source, "--tasks", "telling", "--include-path", str(task_folder), "--no-recall", *at]
    fails(capsys, [*generating, "--heads", "0:1", "--replace", "resample", *corpus], "but a task generates text")
