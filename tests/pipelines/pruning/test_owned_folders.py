"""Temporary folders of dead processes go, those of living ones stay."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from headscan.analysis.store.provenance import this_process
from headscan.errors import PruningError
from headscan.pipelines.pruning import work_folder
from headscan.pipelines.pruning.work_folder import own, owned_folder, owner_of
from tests.warm_python import WarmProcess

_HOLDS = """
import sys, time
from pathlib import Path
from headscan.pipelines.pruning.work_folder import owned_folder
with owned_folder(Path(sys.argv[1]), ".mine-") as folder:
    (folder / "model").mkdir()
    print(folder, flush=True)
    while not (Path(sys.argv[1]) / "end").exists():
        time.sleep(0.02)
"""


def test_only_folders_of_ended_processes_are_removed(tmp_path: Path) -> None:
    holders = [WarmProcess("-c", _HOLDS, str(tmp_path)) for _ in range(2)]
    folders = [Path(holder.line() or "none") for holder in holders]
    (tmp_path / ".mine-of-a-user").mkdir()
    os.kill(holders[0].pid, signal.SIGKILL)
    holders[0].result()
    assert all(folder.is_dir() for folder in folders)
    assert owner_of(folders[0]) is None and owner_of(folders[1]) is not None
    with owned_folder(tmp_path, ".mine-") as own:
        assert sorted(tmp_path.iterdir()) == sorted([own, folders[1], tmp_path / ".mine-of-a-user"])
    assert not own.exists()
    (tmp_path / "end").touch()
    assert holders[1].result().returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine-of-a-user", "end"]


def test_a_folder_has_one_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the other process became it after this one had seen that there was none."""
    holder = WarmProcess("-c", _HOLDS, str(tmp_path))
    folder = Path(holder.line() or "none")
    mark = (folder / "owner").read_text()
    assert own(folder) == mark != this_process()
    seen = iter([None])
    monkeypatch.setattr(work_folder, "owner_of", lambda folder: next(seen, mark))
    assert own(folder) == mark and (folder / "owner").read_text() == mark
    out = tmp_path / "out"
    folder.rename(tmp_path / ".out-pruning")
    with (
        pytest.raises(PruningError, match=rf"^{out} is being built by process {holder.pid} on "),
        work_folder.work_folder(out, [out], "settings", print),
    ):
        pass
    (tmp_path / ".out-pruning").rename(folder)
    monkeypatch.undo()
    os.kill(holder.pid, signal.SIGKILL)
    holder.result()
    assert own(folder) is None and (folder / "owner").read_text() == this_process()
    assert sorted(path.name for path in folder.iterdir()) == ["model", "owner"]


def test_a_refused_place_leaves_no_work_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(PruningError, match="not empty"), work_folder.work_folder(out, [out], "settings", print):
        pass
    assert list(tmp_path.iterdir()) == [out]
