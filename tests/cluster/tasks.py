"""Tasks that tests run on pools; Ray's workers import them from here."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import torch

import headscan
from headscan.errors import SequenceError
from headscan.loading import LoadedModel


class Job(NamedTuple):
    number: int
    folder: str

    @property
    def name(self) -> str:
        return f"job {self.number}"


def measure(lm: LoadedModel, job: Job) -> list[float]:
    ids = torch.arange(20)[None] * (job.number + 1) % lm.vocab_size
    return [float(value.mean()) for value in headscan.collect(lm, ids).values()]


def die_once(lm: LoadedModel, job: Job) -> int:
    """Kills its own worker the first time job 3 runs."""
    mark = Path(job.folder) / "died"
    if job.number == 3 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return job.number


def always_die(lm: LoadedModel, job: Job) -> int:
    if job.number == 1:
        with (Path(job.folder) / "deaths").open("a") as file:
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
