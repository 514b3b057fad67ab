"""Medians, tables and the machine of benchmarks that need torch, transformers and accelerate alone."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import accelerate
import torch
import transformers

#: Largest number of timed rounds.
_MOST = 10
#: Longest text of an error in a table.
_LONGEST_CELL = 100


def parser_of(doc: str | None, dtype: str = "float32") -> argparse.ArgumentParser:
    """Return a parser with the options ``--device`` and ``--dtype``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 (default: cpu)")
    parser.add_argument("--dtype", default=dtype, help=f"dtype of the weights (default: {dtype})")
    return parser


def numbers(text: str) -> tuple[int, ...]:
    """Read whole numbers with commas between, the value of an option."""
    return tuple(int(number) for number in text.split(","))


def device_of(options: argparse.Namespace) -> torch.device:
    """Return the device of ``--device`` and describe it; the benchmark ends without an error if it is missing."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        show("No CUDA device here: nothing was timed.")
        raise SystemExit(0)
    show(f"{machine(device)}, {options.dtype}")
    return device


def machine(device: torch.device) -> str:
    """Return the names of device, driver and libraries, in two lines."""
    libraries = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, accelerate {accelerate.__version__}, "
        f"Python {platform.python_version()}, {os.cpu_count()} CPU cores"
    )
    if device.type != "cuda":
        return f"{processor('cpu')}\n{libraries}"
    properties = torch.cuda.get_device_properties(device)
    gpu = (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability "
        f"{properties.major}.{properties.minor}, {properties.multi_processor_count} SMs, CUDA {torch.version.cuda}, "
        f"cuDNN {torch.backends.cudnn.version()}, driver {_driver()}"
    )
    return f"{gpu}\n{libraries}"


def _driver() -> str:
    """Return the version of NVIDIA's driver, or "unknown"."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    try:
        found = subprocess.run(
            [tool, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (found.stdout.split() or ["unknown"])[0]


def processor(device: str) -> str:
    """Return the name of the GPU, or of the CPU."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {torch.get_num_threads()} threads"


def free_bytes(device: str) -> int:
    """Return the free bytes of a device."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 8 << 30)


def medians(
    ways: Mapping[str, Callable[[], object]], device: torch.device, seconds: float, fewest: int = 3
) -> dict[str, float]:
    """Return the median time of each way, in seconds. Every way runs once untimed, then all run in turn, so that a
    temporary slowdown of the machine affects all.

    Args:
        seconds: Time after which no further round starts, once ``fewest`` rounds are done.
        fewest: Smallest number of timed rounds.
    """
    for way in ways.values():
        way()
    wait(device)
    times: dict[str, list[float]] = {name: [] for name in ways}
    began = time.perf_counter()
    for turn in range(_MOST):
        if turn >= fewest and time.perf_counter() - began > seconds:
            break
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            wait(device)
            times[name].append(time.perf_counter() - started)
    return {name: median(of_way) for name, of_way in times.items()}


def wait(device: torch.device) -> None:
    """Wait until a GPU has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class OutOfTime(BaseException):
    """A step was stopped because its time is over. No handler of errors catches it, as it does not catch Ctrl-C."""


class Clock:
    """The time that a benchmark has from now on, in seconds."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left; negative after the end."""
        return self._end - time.monotonic()

    @contextmanager
    def limit(self, most: float) -> Iterator[None]:
        """Raise OutOfTime in the block after ``most`` seconds, or when the clock ends; only in the main thread."""
        seconds = max(0.001, min(most, self.left))

        def stop(*_: object) -> None:
            raise OutOfTime(f"stopped after {seconds:.0f} s")

        handler = signal.signal(signal.SIGALRM, stop)
        timer = signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, handler)


class Table:
    """A Markdown table that is printed row by row, so that a killed run shows its results so far."""

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self._title, self._columns = title, tuple(columns)
        self._begun = False

    def row(self, *cells: object) -> None:
        """Print a row, the first with its header; missing cells are empty."""
        if not self._begun:
            show(f"\n{self._title}\n\n{_line(self._columns)}\n{_line(['---'] * len(self._columns))}")
            self._begun = True
        show(_line([*cells, *[""] * (len(self._columns) - len(cells))]))


def first_line(problem: Exception) -> str:
    """Return the first line of an error, for a cell of a table."""
    return (str(problem).strip().partition("\n")[0] or type(problem).__name__)[:_LONGEST_CELL]


def show(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"
