"""A pruning that was stopped resumes: the same heads and weights, and no damage is measured twice."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from headscan.cluster.pool import InProcessPool
from headscan.long_work import WorkKey
from headscan.model_spec import ModelSpec
from headscan.pruning.edited_model import Divergence
from headscan.pruning.selection_settings import SelectionConfig
from headscan.runs.ledger import Ledger
from headscan.runs.run_context import Run
from headscan.settings.saving_settings import PruneTexts, RecallPrompts
from headscan.steps.prune.prune_step import Prune, RepairChoice, Timing
from headscan.steps.prune.pruned_arms import BuiltModel
from headscan.steps.prune.run_prune import run_prune
from headscan.store.store import Store
from headscan.texts import CorpusSpec
from tests.jobs.conftest import THREADS
from tests.stores import copy_store

#: Two stages, choices nearby, and a search for a size by its loss.
SELECTION = SelectionConfig(first_share=0.2, next_share=0.2, tries=3, judged_tokens=200)


class Stopped(Exception):
    pass


@dataclass
class Counts:
    """Units that were stored, and passes that measured a divergence."""

    units: int = 0
    passes: int = 0


def pruned(
    model: Path, corpus: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, most: int | None = None
) -> tuple[list[tuple[tuple[int, int], ...]], dict[str, str], Counts]:
    """Prune into a folder, and stop after ``most`` units; return heads, hashes of the weights and counts."""
    counts = Counts()
    add, measured = Ledger.add, Divergence._cross_entropy

    def added(self: Ledger, unit: WorkKey, numbers: object) -> None:
        add(self, unit, numbers)  # type: ignore[arg-type]
        counts.units += 1
        if counts.units == most:
            raise Stopped

    def counted(self, batch, expected):  # type: ignore[no-untyped-def]
        counts.passes += 1
        return measured(self, batch, expected)

    spec = ModelSpec(str(model), "float32")
    with monkeypatch.context() as patched, InProcessPool(spec, THREADS) as pool:
        patched.setattr(Ledger, "add", added)
        patched.setattr(Divergence, "_cross_entropy", counted)
        run = Run(spec, Store(folder / "s.duckdb"), lambda _: pool, batch_tokens=512)
        found = run_prune(config(spec, corpus, folder), run)
    weights = {
        each.folder.name: hashlib.sha256((each.folder / "model.safetensors").read_bytes()).hexdigest()
        for each in found.models
    }
    return [tuple((head.layer, head.head) for head in each.removed) for each in found.models], weights, counts


def config(spec: ModelSpec, corpus: Path, folder: Path) -> Prune:
    return Prune(
        spec,
        out=folder / "smaller",
        max_divergence=0.02,
        texts=PruneTexts(CorpusSpec(str(corpus)), sequences=16, max_tokens=64),
        recall_prompts=RecallPrompts(prompts=0),
        selection=SELECTION,
        repair=RepairChoice("o"),
        timing=None,
        skip_verdict=True,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `undisturbed`."""
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture(scope="module")
def undisturbed(model_folder: Path, corpus_folder: Path, finished: Path):  # type: ignore[no-untyped-def]
    folder = finished
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = pruned(model_folder, corpus_folder, folder, monkeypatch)
    rows = Store(folder / "s.duckdb").query("SELECT what, count(*) AS n FROM units GROUP BY what").to_pylist()
    assert {row["what"] for row in rows} == {
        "best subsets of the heads of a layer",
        "cross-entropy of a batch without heads",
        "divergence of a repaired choice",
        "divergence of a model within a loss limit",
    }
    return found


@pytest.mark.parametrize("share", [0.4, pytest.param(0.8, marks=pytest.mark.slow)])
def test_a_stopped_pruning_resumes(
    undisturbed, model_folder: Path, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:  # type: ignore[no-untyped-def]
    heads, weights, whole = undisturbed
    first = max(1, int(share * whole.units))
    with pytest.raises(Stopped):
        pruned(model_folder, corpus_folder, tmp_path, monkeypatch, first)
    (left,) = Store(tmp_path / "s.duckdb").runs("prune")
    assert left["status"] == "failed"
    assert Store(tmp_path / "s.duckdb").query("FROM units").num_rows == first
    found, again, rest = pruned(model_folder, corpus_folder, tmp_path, monkeypatch)
    assert (found, again) == (heads, weights)
    assert rest.units == whole.units - first
    (ended,) = Store(tmp_path / "s.duckdb").runs("prune")
    assert ended["status"] == "finished"


def test_a_finished_pruning_leaves_nothing_to_measure(
    undisturbed,
    finished: Path,
    model_folder: Path,
    corpus_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # type: ignore[no-untyped-def]
    heads, weights, _ = undisturbed
    copy_store(finished / "s.duckdb", tmp_path)
    found, again, rest = pruned(model_folder, corpus_folder, tmp_path, monkeypatch)
    assert (found, again, rest.units, rest.passes) == (heads, weights, 0, 0)


@pytest.mark.parametrize("changed", ["held-out text", "timing"])
def test_a_stopped_pruning_builds_again_with_another_judgement(
    model_folder: Path, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """Losses and times are in the record of a finished model, which another text or timing makes wrong."""
    judging = tmp_path / "judging.txt"
    judging.write_text("one two three four five six seven eight nine ten " * 40)
    spec = ModelSpec(str(model_folder), "float32")
    before = replace(
        config(spec, corpus_folder, tmp_path),
        max_divergence=None,
        selection=SelectionConfig(),
        heads=((0, 1),),
        texts=PruneTexts(CorpusSpec(str(corpus_folder)), CorpusSpec(str(judging)), sequences=16, max_tokens=64),
        repair=RepairChoice("none"),
    )

    def found(settings: Prune) -> BuiltModel:
        with InProcessPool(spec, THREADS) as pool:
            return run_prune(settings, Run(spec, Store(tmp_path / "s.duckdb"), lambda _: pool)).models[0]

    def stop(folders: object) -> None:
        raise Stopped

    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr("headscan.steps.prune.work_folder.check_reload", stop)
        found(before)
    (old,) = json.loads((tmp_path / ".smaller-pruning" / "0.json").read_text())["losses"].values()
    monkeypatch.setattr("headscan.steps.prune.work_folder.check_reload", lambda folders: None)
    if changed == "timing":
        assert found(replace(before, timing=Timing())).costs.after.prefill_seconds is not None
    else:
        judging.write_text("ten nine eight seven six five four three two one " * 40)
        (new,) = found(before).losses.values()
        assert new.original != old["original"]
