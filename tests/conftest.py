"""The suite's environment, and the device that tests marked ``gpu`` run on (``--device``)."""

from __future__ import annotations

import faulthandler
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

# Nothing in the suite may reach for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
# The models are tiny: a second thread would only wait for the first, and `make test` runs several processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Clusters that tests start would give their workers a low priority, Ray's default. `RaySession` sets this, too.
os.environ.setdefault("RAY_worker_niceness", "0")

import pytest

if TYPE_CHECKING:
    import torch

#: Exit code of a suite that ran out of time, and the seconds after which a hanging test is killed.
_INCOMPLETE, _GRACE = 3, 45
_STARTED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device of the tests marked gpu: cpu, cuda, cuda:1 (default: cpu)")
    parser.addoption("--minutes", type=float, help="time after which no test starts and the exit code is 3")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STARTED] = time.monotonic()
    if config.getoption("--minutes") is not None:
        faulthandler.dump_traceback_later(60 * config.getoption("--minutes") + _GRACE, exit=True)
    if config.getoption("--device").startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.exit("No CUDA device here: nothing was run (--device cpu runs the same tests on the CPU).", 0)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False  # a GPU rounds float32 convolutions to TF32 by default


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without tests of a device unread by ``-m gpu``: they may import libraries that it does without."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    left_out = config.option.markexpr == "gpu" and is_test and "mark.gpu" not in collection_path.read_text("utf-8")
    return True if left_out else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest file, which would otherwise end the suite on one core."""
    items.sort(key=lambda item: item.path.name != "test_study.py")


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - item.config.stash[_STARTED] > 60 * minutes:
        pytest.exit(f"stopped before {item.name}: {minutes:g} minutes are over", _INCOMPLETE)


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.getoption("--minutes") is not None:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of ``--device``."""
    import torch

    found = torch.device(request.config.getoption("--device"))
    return torch.device("cuda", found.index or 0) if found.type == "cuda" else found
