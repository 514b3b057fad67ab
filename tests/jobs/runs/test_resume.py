"""Runs that resume with other software, another device or other code of the model, and runs whose inputs changed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headscan
from headscan.cli.main import main
from headscan.cluster.pool import InProcessPool
from headscan.engine.arms import BASELINE, mask_arm
from headscan.errors import ResumeError
from headscan.loading import load_spec
from headscan.measure.probe_settings import BehaviourProbe
from headscan.model_spec import ModelSpec
from headscan.runs import code_version as software
from headscan.runs.code_version import code_version, package_versions
from headscan.runs.model_identity import identify
from headscan.runs.run_context import Run
from headscan.settings.evaluation_settings import TaskConfig
from headscan.steps.evaluate import Evaluate
from headscan.steps.probe import Probe
from headscan.steps.run_corpus import CorpusRunResult
from headscan.steps.run_evaluation import run_evaluation
from headscan.steps.run_probe import run_probe
from headscan.steps.run_scan import MeasureShard, run_scan
from headscan.steps.scan import Scan
from headscan.store.store import Store
from headscan.texts import CorpusSpec, TokenConfig
from tests.jobs.conftest import THREADS, make_tokenizer, of_threads, refuse, run_on
from tests.small_models import make_model
from tests.stores import copy_store

ROWS = "from head_statistics order by run_id, sequence, layer, head"
ARMS = [BASELINE, mask_arm([(2, 1), (2, 3)])]
TORCH = package_versions()["torch"]


def scan_of(model: str | Path, texts: str | Path) -> Scan:
    """Return a scan of five shards."""
    tokens = TokenConfig(20, min_tokens=5)
    return Scan(ModelSpec(str(model)), CorpusSpec(str(texts)), tokens, shard_size=2, statistics=("entropy",))


@pytest.fixture
def config(spec: ModelSpec, corpus_folder: Path, tmp_path: Path) -> Scan:
    """A scan of a corpus and a model that a test may change."""
    model = shutil.copytree(spec.source, tmp_path / "tiny-llama")
    return scan_of(model, shutil.copytree(corpus_folder, tmp_path / "texts"))


@pytest.fixture(scope="module")
def interrupted(spec: ModelSpec, corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Scan, Path]:
    """A scan that stopped after two shards, and its store."""
    store, config = Store(tmp_path_factory.mktemp("left") / "s.duckdb"), scan_of(spec.source, corpus_folder)
    interrupt(config, store)
    return config, store.path


@pytest.fixture
def left(interrupted: tuple[Scan, Path], tmp_path: Path) -> tuple[Scan, Store, str]:
    """The interrupted scan with a store of its own, and the id of its run."""
    config, path = interrupted
    store = Store(copy_store(path, tmp_path / "left.duckdb"))
    return config, store, str(store.runs()[0]["run_id"])


class Interrupted(Exception):
    pass


class DyingPool(InProcessPool):
    """Measures two shards."""

    def map(self, task, items):  # type: ignore[no-untyped-def]
        for count, finished in enumerate(super().map(task, items)):
            if isinstance(getattr(task, "func", task), MeasureShard) and count == 2:
                raise Interrupted
            yield finished


def run(config: Scan, store: Store, **options: Any) -> CorpusRunResult:
    return run_scan(config, Run(config.model, store, of_threads, **options))


def interrupt(config: Scan, store: Store) -> str:
    """Leave a scan with two shards."""
    with pytest.raises(Interrupted):
        run_scan(config, Run(config.model, store, lambda _: DyingPool(config.model, THREADS)))
    (left,) = store.runs()
    assert (left["status"], left["finished_shards"], left["total_shards"]) == ("failed", 2, 5)
    return str(left["run_id"])


def other_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscan.runs.code_version.package_versions", lambda: package_versions() | {"torch": "99.0"})


def other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscan.runs.code_version.code_version", lambda: "0.1.0+00000000")


def other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscan.runs.model_identity._hardware", lambda lm: "cuda (NVIDIA H200)")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (other_torch, f"torch {TORCH} -> 99.0"),
        (other_code, f"headscan {code_version()} -> 0.1.0+00000000"),
        (other_device, "device cpu -> cuda (NVIDIA H200)"),
    ],
)
def test_a_scan_resumes_with_other_software_only_on_request(
    left: tuple[Scan, Store, str],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
    named: str,
) -> None:
    config, store, run_id = left
    before, rows = store.runs(), store.query(ROWS)
    change(monkeypatch)
    with pytest.raises(ResumeError) as refused:
        if change is other_device:  # known once the model is loaded
            run(config, store)
        else:
            run_scan(config, Run(config.model, store, refuse))
    assert f"cannot resume run {run_id}" in str(refused.value) and named in str(refused.value)
    assert store.runs() == before and store.query(ROWS).equals(rows)

    said: list[str] = []
    resumed = run(config, store, resume_anyway=True, say=said.append)
    assert (resumed.run_id, resumed.measured, resumed.skipped) == (run_id, 3, 2)
    assert f"run {run_id} resumes with {named}; both are recorded in runs.provenance" in said
    first, second = store.resolve_run(run_id)["provenance"]
    assert first | {"since": ""} == {
        "since": "",
        "packages": package_versions(),
        "code_version": code_version(),
        "device": "cpu",
        "code_files_hash": None,
    }
    keys = ("packages", "code_version", "device", "code_files_hash")
    assert sum(first[key] != second[key] for key in keys) == 1
    if change is other_torch:  # and a finished scan is done with any software
        monkeypatch.undo()
        said.clear()
        assert run_scan(config, Run(config.model, store, refuse, say=said.append)).already_done
        changes = f"torch 99.0 -> {TORCH}"
        assert said == [f"run {run_id} is complete, with other software or another device ({changes}); its rows stay"]
        assert len(store.resolve_run(run_id)["provenance"]) == 2


def test_the_command_line_refuses_and_resumes(
    left: tuple[Scan, Store, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, store, _ = left
    command = ["scan", config.model.source, "--corpus", config.corpus.name, "--store", str(store.path)]
    command += ["--max-tokens", "20", "--min-tokens", "5", "--shard-size", "2", "--statistics", "entropy"]
    command += ["--device", "cpu"]
    rows = store.query(ROWS)
    other_torch(monkeypatch)
    capsys.readouterr()
    assert main(command) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"torch {TORCH} -> 99.0. Restore them, or give --resume-anyway" in said.err.splitlines()[-1]
    assert store.query(ROWS).equals(rows)
    assert main([*command, "--resume-anyway"]) == 0
    assert "3 shards measured, 2 stored before" in capsys.readouterr().out


@pytest.mark.slow
def test_an_evaluation_asks_before_more_arms_are_added(
    spec: ModelSpec, task_folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = TaskConfig(("counting",), include_path=str(task_folder), limit=3)
    config = Evaluate(spec, tasks, recall=None)
    pool = InProcessPool(spec, THREADS)
    run_id = run_evaluation(config, run_on(pool, store), ARMS[:1])
    before = store.query("from answers").to_pylist()
    other_torch(monkeypatch)
    # Nothing is added to a finished run.
    said: list[str] = []
    assert run_evaluation(config, run_on(pool, store, say=said.append), ARMS[:1]) == run_id
    assert said[0].startswith(f"run {run_id} is complete, with other software")
    # An arm would be compared with a baseline that other software answered.
    with pytest.raises(ResumeError, match=rf"cannot resume run {run_id}.*torch {TORCH.replace('+', '.')} -> 99.0"):
        run_evaluation(config, run_on(pool, store), ARMS)
    assert store.query("from answers").to_pylist() == before
    assert store.query("from arms").num_rows == 1
    assert store.resolve_run(run_id, "evaluate")["status"] == "finished"
    assert run_evaluation(config, run_on(pool, store, resume_anyway=True), ARMS) == run_id
    row = store.resolve_run(run_id, "evaluate")
    assert [entry["packages"]["torch"] for entry in row["provenance"]] == [TORCH, "99.0"]
    assert store.query("from arms where status = 'finished'").num_rows == 2


def test_a_probe_asks_as_scans_do(spec: ModelSpec, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = BehaviourProbe(sequences=2, tokens=8)
    config = Probe(spec, ("induction_score",), probe=settings)
    run_id = run_probe(config, Run(spec, store, of_threads)).run_id
    store.finish_run(run_id, status="failed")
    other_torch(monkeypatch)
    with pytest.raises(ResumeError, match=run_id):
        run_probe(config, Run(spec, store, of_threads))
    assert run_probe(config, Run(spec, store, of_threads, resume_anyway=True)).run_id == run_id
    (row,) = store.runs("probe")
    assert [entry["packages"]["torch"] for entry in row["provenance"]] == [TORCH, "99.0"]


# Code that comes with a model


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose class is in files of its own, one of which imports another."""
    # Or the test's modules would go into the user's cache.
    for module in ("transformers.dynamic_module_utils", "headscan.checkpoints.sources"):
        monkeypatch.setattr(f"{module}.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder = tmp_path / "own-llama"
    make_model("llama", vocabulary=300).save_pretrained(folder)
    make_tokenizer(300).save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    described["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnLlama"}
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "scaling.py").write_text("SCALE = 1.0\n")
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\n\nfrom .scaling import SCALE\n\n\n"
        "class OwnLlama(LlamaForCausalLM):\n    scale = SCALE\n"
    )
    (folder / "unrelated.py").write_text("print('nobody imports this')\n")
    return folder


def test_the_hash_of_code_files_follows_the_files_that_run(own_code: Path) -> None:
    trusted = ModelSpec(str(own_code), trust_remote_code=True)
    lm = load_spec(trusted, "cpu")
    assert type(lm.model).__name__ == "OwnLlama" and type(lm.model).scale == 1.0
    first = identify(trusted)
    assert first.code_files_hash is not None
    assert identify(trusted).code_files_hash == first.code_files_hash
    assert identify(ModelSpec(str(own_code))).code_files_hash is None
    (own_code / "unrelated.py").write_text("print('changed')\n")
    assert identify(trusted).code_files_hash == first.code_files_hash
    (own_code / "scaling.py").write_text("SCALE = 2.0\n")
    second = identify(trusted)
    assert second.code_files_hash not in (None, first.code_files_hash)
    assert second.fingerprint() == first.fingerprint()
    assert type(load_spec(trusted, "cpu").model).scale == 2.0


def test_a_model_with_other_code_files_resumes_only_on_request(config: Scan, own_code: Path, store: Store) -> None:
    config = dataclasses.replace(config, model=ModelSpec(str(own_code), trust_remote_code=True))
    run_id = interrupt(config, store)
    (old,) = store.resolve_run(run_id)["provenance"]
    (own_code / "scaling.py").write_text("SCALE = 2.0\n")
    with pytest.raises(ResumeError, match=f"model code files {old['code_files_hash']} -> [0-9a-f]{{16}}"):
        run_scan(config, Run(config.model, store, refuse))
    assert run(config, store, resume_anyway=True).skipped == 2
    hashes = [entry["code_files_hash"] for entry in store.resolve_run(run_id)["provenance"]]
    assert hashes == [old["code_files_hash"], identify(config.model).code_files_hash]


# The version of the code


def test_the_version_covers_the_code_that_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name for name, _ in software._measuring_files()}
    assert {"measure/collect.py", "cluster/streamed_pool.py", "texts/sequences.py"} <= files
    assert not [name for name in files if name.startswith(("cli/", "demo/", "store/", "plans/", "report/"))]
    assert code_version().startswith(f"{headscan.__version__}+")
    copy = tmp_path / "code.py"

    def version(content: bytes) -> str:
        copy.write_bytes(content)
        code_version.cache_clear()
        return code_version()

    with monkeypatch.context() as patch:
        patch.setattr(software, "_measuring_files", lambda: iter([("headscan/code.py", copy)]))
        assert version(b"x = 1\n") == version(b"x = 1\r\n") != version(b"x = 2\n")
        tidied = version(b'"""Hold a number."""\n\n# The only one.\nx = (\n    1\n)\n')
        assert tidied == version(b"x = 1\n")
        documented = version(b'class A:\n    """Doc."""\n\n    def f(self):\n        """Doc."""\n        return "a"\n')
        assert documented == version(b'class A:\n    def f(self):\n        return "a"\n')
        assert documented != version(b'class A:\n    def f(self):\n        return "b"\n')
    code_version.cache_clear()


def changed_line(said: list[str], run_id: str) -> str:
    (line,) = (line for line in said if run_id in line)
    return line


def test_a_corpus_that_changed_names_the_unfinished_scan(config: Scan, store: Store, tmp_path: Path) -> None:
    run_id = interrupt(config, store)
    (Path(config.corpus.name) / "07.txt").write_text("another text " * 20)
    said: list[str] = []
    new = run(config, store, say=said.append)
    assert new.run_id != run_id
    assert changed_line(said, run_id).startswith(
        f"corpus changed since run {run_id} (failed, 2 of 5 shards). A new run begins"
    )
    # It is named once: the run that began is finished, and the command finds it.
    said.clear()
    assert run(config, store, say=said.append).already_done and said == []
    # The corpus of another place is another command's.
    texts = Path(shutil.copytree(config.corpus.name, tmp_path / "more"))
    (texts / "07.txt").write_text("other text " * 20)
    run(dataclasses.replace(config, corpus=CorpusSpec(str(texts))), store, say=said.append)
    assert not [line for line in said if run_id in line]


def test_weights_or_settings_that_changed_name_the_unfinished_scan(config: Scan, store: Store) -> None:
    run_id = interrupt(config, store)
    said: list[str] = []
    run(config, store, batch_tokens=100, say=said.append)
    assert changed_line(said, run_id).startswith(f"batch_tokens changed since run {run_id}")
    model = make_model("llama", vocabulary=300)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    model.save_pretrained(config.model.source)
    said.clear()
    run(config, store, say=said.append)
    assert changed_line(said, run_id).startswith(f"weights changed since run {run_id} (failed, 2 of 5 shards)")


def test_questions_that_changed_name_the_unfinished_evaluation(
    spec: ModelSpec, task_folder: Path, store: Store, tmp_path: Path
) -> None:
    tasks = Path(shutil.copytree(task_folder, tmp_path / "tasks"))
    described = json.loads((tasks / "counting.yaml").read_text())
    config = Evaluate(spec, TaskConfig(("counting",), include_path=str(tasks), limit=3), recall=None)
    pool = InProcessPool(spec, THREADS)
    run_id = run_evaluation(config, run_on(pool, store), [BASELINE])
    store.finish_run(run_id, status="failed")
    described["doc_to_text"] = "What follows? {{q}}"
    (tasks / "counting.yaml").write_text(json.dumps(described))
    said: list[str] = []
    assert run_evaluation(config, run_on(pool, store, say=said.append), [BASELINE]) != run_id
    assert changed_line(said, run_id).startswith(f"questions changed since run {run_id} (failed). A new run begins")


def test_a_given_shard_size_resumes_only_runs_of_this_size(
    config: Scan, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the largest size, under which stores have the runs that chose their own."""
    monkeypatch.setattr("headscan.steps.run_corpus._SHARD_SECONDS", 1e-9)
    lines: list[str] = []
    chosen, one, largest = (dataclasses.replace(config, shard_size=size) for size in (None, 1, 64))
    with pytest.raises(Interrupted):
        run_scan(chosen, Run(config.model, store, lambda _: DyingPool(config.model, THREADS)))
    (begun,) = store.runs()
    assert (begun["config"]["shard_size"], begun["finished_shards"]) == (1, 2)
    own = run(largest, store, say=lines.append)
    assert own.run_id != begun["run_id"] and own.skipped == 0
    assert any(line.startswith(f"shard_size changed since run {begun['run_id']}") for line in lines)
    assert store.resolve_run(own.run_id, "scan")["config"]["shard_size"] == 64
    resumed = run(one, store)
    assert (resumed.run_id, resumed.skipped) == (begun["run_id"], 2)
    assert run(chosen, store) == CorpusRunResult(begun["run_id"], already_done=True)
    assert run(largest, store) == CorpusRunResult(own.run_id, already_done=True)
