"""Temporary folders of dead processes go, those of living ones stay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from headscan.pipelines.pruning.work_folder import owned_folder, owner_of
from tests.sources import ROOT

_HOLDS = """
import sys
from pathlib import Path
from headscan.pipelines.pruning.work_folder import owned_folder
with owned_folder(Path(sys.argv[1]), ".mine-") as folder:
    (folder / "model").mkdir()
    print(folder, flush=True)
    input()
"""


def test_only_folders_of_ended_processes_are_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLDS, str(tmp_path)]
    holders = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)
    ]
    folders = [Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout]
    (tmp_path / ".mine-of-a-user").mkdir()
    holders[0].kill()
    holders[0].wait()
    assert all(folder.is_dir() for folder in folders)
    assert owner_of(folders[0]) is None and owner_of(folders[1]) is not None
    with owned_folder(tmp_path, ".mine-") as own:
        assert sorted(tmp_path.iterdir()) == sorted([own, folders[1], tmp_path / ".mine-of-a-user"])
    assert not own.exists()
    holders[1].communicate("\n")
    assert [path.name for path in tmp_path.iterdir()] == [".mine-of-a-user"]
