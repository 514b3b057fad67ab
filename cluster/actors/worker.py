"""The worker that holds a replica inside a Ray actor."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from headscan.cluster.tasks.pool import run_task
from headscan.errors import HeadscanError
from headscan.model_spec import ModelSpec
from headscan.models.layout import Sharding
from headscan.models.loaded_model import LoadedModel


class Heartbeat:
    """An actor that answers heartbeats while it works.

    Ray runs ``beat`` in its own thread (a concurrency group), so it answers during a task of any length. It does not
    answer while the process is stopped, or while native code holds Python's global lock.
    """

    def beat(self) -> str:
        """Return this worker's name."""
        return self.name

    @property
    def name(self) -> str:
        """Host and process id."""
        return f"{socket.gethostname()}:{os.getpid()}"


class Worker(Heartbeat):
    """An actor that runs tasks on one loaded model."""

    def __init__(self, spec: ModelSpec, target: str | Sharding, threads: int) -> None:
        torch.set_num_threads(threads)
        self._spec, self._target = spec, target
        self._lm: LoadedModel | None = None
        transformers_logging.disable_progress_bar()

    def run(self, task: Callable[[LoadedModel, Any], Any], item: Any) -> tuple[Any, float, str]:
        """Run a task; return its value, seconds and this worker's name.

        An error of the user is returned as the value, because Ray would wrap an exception in its own, with a remote
        traceback.
        """
        try:
            if self._lm is None:
                self._lm = self._spec.load(self._target)
            return *run_task(self._lm, task, item), self.name
        except HeadscanError as problem:
            return problem, 0.0, self.name
