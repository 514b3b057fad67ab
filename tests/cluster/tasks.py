"""Tasks that tests run on pools; Ray's workers import them from here."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import headscan
from headscan.cluster.placements import WholePlacement
from headscan.cluster.pool import InProcessPool
from headscan.errors import SequenceError
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel


class Job(NamedTuple):
    number: int
    folder: str

    @property
    def name(self) -> str:
        return f"job {self.number}"


def measure(lm: LoadedModel, job: Job) -> list[float]:
    ids = torch.arange(20)[None] * (job.number + 1) % lm.vocab_size
    return [float(value.mean()) for value in headscan.collect(lm, ids).values()]


def quiet_values(spec: ModelSpec, jobs: Sequence[Job]) -> dict[int, list[float]]:
    """Return what `measure` finds in this process."""
    with InProcessPool(spec, WholePlacement(1, "cpu", 1)) as local:
        return {done.item.number: done.value for done in local.map(measure, jobs)}


def die_once(lm: LoadedModel, job: Job) -> int:
    """Kills its own worker the first time job 3 runs."""
    mark = Path(job.folder) / "died"
    if job.number == 3 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return job.number


def always_die(lm: LoadedModel, job: Job) -> int:
    if job.number == 1:
        with (Path(job.folder) / "failures").open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    return job.number


def user_error(lm: LoadedModel, job: Job) -> int:
    (Path(job.folder) / f"ran-{job.number}-{os.getpid()}-{time.monotonic_ns()}").touch()
    if job.number == 2:
        raise SequenceError("too long: shorten it")
    return job.number


def bug(lm: LoadedModel, job: Job) -> int:
    raise ZeroDivisionError(f"in {job.number}")


def slow_measure(lm: LoadedModel, job: Job) -> list[float]:
    """Run long enough to be killed; a file names the process meanwhile."""
    mark = Path(job.folder) / f"{job.number}-{os.getpid()}.running"
    mark.touch()
    time.sleep(0.2)
    found = measure(lm, job)
    mark.unlink()
    return found


def stop_once(lm: LoadedModel, job: Job) -> list[float]:
    """Stops its own process the first time job 1 runs: alive, and never heard of again."""
    mark = Path(job.folder) / "stopped"
    if job.number == 1 and not mark.exists():
        mark.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    return measure(lm, job)


def stick_once(lm: LoadedModel, job: Job) -> list[float]:
    """Stays in native code that keeps Python's lock the first time job 1 runs."""
    mark = Path(job.folder) / "stopped"
    if job.number == 1 and not mark.exists():
        mark.write_text(str(os.getpid()))
        ctypes.PyDLL(None).sleep(600)
    return measure(lm, job)


def take_long(lm: LoadedModel, job: Job) -> int:
    """Run for longer than the heartbeat timeout; a file counts the starts."""
    (Path(job.folder) / f"began-{job.number}-{time.monotonic_ns()}").touch()
    time.sleep(3.0 if job.number == 1 else 0.0)
    return job.number
