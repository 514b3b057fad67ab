"""Temporary folders of dead processes go, those of living ones stay."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from headscan.cli.main import main
from headscan.errors import PruningError
from headscan.steps.prune.work_folder import check_place, owned_folder, work_folder
from tests.warm_python import WarmProcess

_HOLDS = """
import sys, time
from pathlib import Path
from headscan.steps.prune.work_folder import owned_folder
with owned_folder(Path(sys.argv[1]), ".mine-") as folder:
    (folder / "model").mkdir()
    print(folder, flush=True)
    while not (Path(sys.argv[1]) / "end").exists():
        time.sleep(0.02)
"""

_BUILDS = """
import sys, time
from pathlib import Path
from headscan.steps.prune.work_folder import work_folder
out = Path(sys.argv[1])
with work_folder(out, [out], "settings", print):
    print("building", flush=True)
    time.sleep(600)
"""


def test_only_folders_of_ended_processes_are_removed(tmp_path: Path) -> None:
    holders = [WarmProcess("-c", _HOLDS, str(tmp_path)) for _ in range(2)]
    folders = [Path(holder.line() or "none") for holder in holders]
    (tmp_path / ".mine-of-a-user").mkdir()
    os.kill(holders[0].pid, signal.SIGKILL)
    holders[0].result()
    assert all(folder.is_dir() for folder in folders)
    with owned_folder(tmp_path, ".mine-") as own:
        assert sorted(tmp_path.iterdir()) == sorted([own, folders[1], tmp_path / ".mine-of-a-user"])
    assert not own.exists()
    (tmp_path / "end").touch()
    assert holders[1].result().returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine-of-a-user", "end"]


def test_a_folder_has_one_owner_until_its_process_ends(tmp_path: Path) -> None:
    out = tmp_path / "out"
    holder = WarmProcess("-c", _BUILDS, str(out))
    assert holder.line() == "building"
    taken = rf"^{out} is being built by another process \(limit 1\)"
    with pytest.raises(PruningError, match=taken), work_folder(out, [out], "settings", print):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.result()
    with work_folder(out, [out], "settings", print) as work:
        assert work.path.is_dir()
        with pytest.raises(PruningError, match=taken), work_folder(out, [out], "settings", print):
            pass
        assert work.path.is_dir()
    assert not work.path.exists()


def test_a_refused_place_leaves_no_work_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(PruningError, match="not empty"), work_folder(out, [out], "settings", print):
        pass
    assert list(tmp_path.iterdir()) == [out]


def test_a_place_that_no_folder_can_replace_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models are built beside the place, and renamed."""
    mount, here, link = (tmp_path / name for name in ("mount", "here", "link"))
    mount.mkdir()
    here.mkdir()
    link.symlink_to(here)
    monkeypatch.chdir(here)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == mount)
    refused = {mount: f"{mount}, a mount point", Path(): f"{here}, the current folder", link: f"{link}, a link"}
    for out, named in refused.items():
        with pytest.raises(PruningError, match=rf"^no model can be moved to {named}\. Choose a new folder, such as "):
            check_place(out)
    check_place(mount / "model")
    check_place(Path("model"))
    words = ["prune", "demo", "--share", "0.3", "--out", ".", "--device", "cpu", "--store", str(tmp_path / "s.duckdb")]
    assert main(words) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "link", "mount"] and not any(here.iterdir())
