"""Scans with failing workers, killed processes and full disks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headscan.cli.main import main
from headscan.cluster.pool import IncompleteError, InProcessPool
from headscan.model_spec import ModelSpec
from headscan.runs.run_context import Run
from headscan.steps.run_scan import run_scan
from headscan.steps.scan import Scan
from headscan.store.store import Store
from headscan.texts import CorpusSpec, TokenConfig
from tests.jobs.conftest import THREADS
from tests.jobs.steps.killed_scans import kill_after, stored_shards
from tests.sources import ROOT

ROWS = "from head_statistics order by sequence, site, layer, head"
OPTIONS = ["--mode", "chunk", "--max-tokens", "60", "--min-tokens", "5", "--shard-size", "4", "--batch-tokens", "150"]


class LosingPool(InProcessPool):
    """A pool that gives up shards 1 and 4, as Ray pools do after failures."""

    def map(self, task: Any, items: Iterable[Any]) -> Iterator[Any]:
        lost = []
        for item in items:
            if getattr(item, "name", None) in ("shard 1", "shard 4"):
                lost.append(item)
            else:
                yield from super().map(task, [item])
        if lost:
            raise IncompleteError(lost, "3 workers failed on it; the last: killed")


@pytest.fixture(scope="module")
def long_corpus(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So long that a scan of it takes seconds, and can be stopped."""
    folder = tmp_path_factory.mktemp("long")
    for path in corpus_folder.iterdir():
        for copy in range(5):
            (folder / f"{copy:02}-{path.name}").write_text(f"copy {copy} of {path.read_text()}")
    return folder


@pytest.fixture
def command(model_folder: Path, long_corpus: Path) -> list[str]:
    return ["scan", str(model_folder), "--corpus", str(long_corpus), "--device", "cpu", *OPTIONS, "--store"]


def run(command: list[str], store: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "headscan.cli.main", *command, str(store)]
    return subprocess.run(whole, capture_output=True, text=True, cwd=ROOT, timeout=300, **options)


def test_shards_that_are_given_up_are_named_and_tried_again(
    spec: ModelSpec, corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Scan(spec, CorpusSpec(str(corpus_folder)), TokenConfig(60), shard_size=2)
    lossy, whole = Store(tmp_path / "lossy.duckdb"), Store(tmp_path / "whole.duckdb")
    with pytest.raises(IncompleteError, match=r"^shard 1, shard 4: 3 workers failed on it"):
        run_scan(config, Run(spec, lossy, lambda _: LosingPool(spec, THREADS)))
    assert (lossy.runs()[0]["status"], lossy.runs()[0]["finished_shards"], lossy.runs()[0]["total_shards"]) == (
        "failed",
        3,
        5,
    )
    assert main(["status", "--store", str(lossy.path)]) == 0
    assert "3/5" in capsys.readouterr().out
    result = run_scan(config, Run(spec, lossy, lambda _: InProcessPool(spec, THREADS)))
    assert (result.measured, result.skipped) == (2, 3)
    run_scan(config, Run(spec, whole, lambda _: InProcessPool(spec, THREADS)))
    assert lossy.query(ROWS) == whole.query(ROWS)
    assert (lossy.runs()[0]["status"], lossy.runs()[0]["corpus_hash"]) == ("finished", whole.runs()[0]["corpus_hash"])


@pytest.mark.slow
def test_given_up_shards_have_an_exit_code_of_their_own(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opener = "headscan.runs.run_context.open_pool"
    monkeypatch.setattr(opener, lambda spec, place, **options: LosingPool(spec, place))
    store = tmp_path / "s.duckdb"
    assert main([*command, str(store)]) == 3
    assert "headscan: shard 1, shard 4: 3 workers failed on it" in capsys.readouterr().err
    monkeypatch.undo()
    assert main([*command, str(store)]) == 0


def killed_after(command: list[str], store: Path, reached: Callable[[], bool]) -> None:
    """Start a scan and SIGKILL it as soon as it has come so far."""
    whole = [sys.executable, "-m", "headscan.cli.main", *command, str(store)]
    process = subprocess.Popen(whole, stdout=-3, stderr=-3, start_new_session=True, cwd=ROOT)
    try:
        while process.poll() is None and not reached():
            time.sleep(0.01)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def first_status(store: Path) -> str:
    return str(Store(store).runs()[0]["status"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_scan_killed_at_random_moments_has_the_rows_of_a_quiet_one(
    command: list[str], tmp_path: Path, seed: int
) -> None:
    store, quiet = tmp_path / "killed.duckdb", tmp_path / "quiet.duckdb"
    generator = random.Random(seed)
    replicas = [*command[:-1], "--replicas", str(1 + seed % 2), "--store"]
    for _ in range(4):
        end = time.monotonic() + generator.uniform(4, 16)
        killed_after(replicas, store, lambda: time.monotonic() > end)  # noqa: B023 - called before it changes
    assert run(command, store).returncode == 0
    assert run(command, quiet).returncode == 0
    assert Store(store).query(ROWS) == Store(quiet).query(ROWS)
    assert first_status(store) == "finished"


@pytest.mark.slow
def test_a_full_device_ends_the_scan_and_nothing_is_lost(command: list[str], tmp_path: Path) -> None:
    """A limit on the size of files stands in for the device."""
    store, quiet = tmp_path / "s.duckdb", tmp_path / "quiet.duckdb"
    kill_after(1, [*command, str(store)])
    before = stored_shards(store)
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from headscan.cli.main import main\n"
        f"sys.exit(main({[*command, str(store)]!r}))"
    )
    full = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert full.returncode == 2, full.stderr
    assert full.stderr.splitlines()[-1].startswith(f"headscan: cannot write {store}: no space left on its device")
    assert stored_shards(store) >= before
    assert first_status(store) in ("failed", "interrupted")
    resumed = run(command, store)
    assert resumed.returncode == 0, resumed.stderr
    assert f"{stored_shards(store)} stored before" not in resumed.stdout
    assert run(command, quiet).returncode == 0
    assert Store(store).query(ROWS) == Store(quiet).query(ROWS)
