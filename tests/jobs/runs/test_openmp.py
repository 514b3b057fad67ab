"""Idle threads of torch sleep, and a user's OpenMP variables are respected."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headscan.cluster.devices import max_threads, share_cores


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
        # Set and then deleted, so that what a test leaves behind is removed after it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_idle_threads_sleep() -> None:
    share_cores()
    assert os.environ["GOMP_SPINCOUNT"] == "3000"


def test_programs_and_the_command_line_import_torch_after_that() -> None:
    for module in ("headscan.steps.open_run", "headscan.cli.main"):
        code = (
            "import os, sys\nfrom importlib.abc import MetaPathFinder\nclass Watch(MetaPathFinder):\n"
            "    def find_spec(self, name, *rest):\n"
            "        if name == 'torch': print('torch with', os.environ.get('GOMP_SPINCOUNT')); sys.exit()\n"
            f"sys.meta_path.insert(0, Watch())\nimport {module}\nprint('at the end', os.environ['GOMP_SPINCOUNT'])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert set(done.stdout.split("\n")) <= {"torch with 3000", "at the end 3000", ""}, module
        assert ("torch with" in done.stdout) == (module == "headscan.steps.open_run")


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_the_user_chooses_how_threads_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7")
    share_cores()
    asked = {each: os.environ.get(each) for each in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    assert {each: value for each, value in asked.items() if value} == {name: "7"}


@pytest.mark.parametrize(("value", "threads"), [("3", 3), (" 4,2", 4), ("0", None), ("many", None), ("", None)])
def test_the_user_chooses_the_threads(value: str, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert max_threads() == threads
