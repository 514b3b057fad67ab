"""The replica that runs inside a Ray actor."""

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


class Living:
    """An actor that gives a sign of life while it works.

    Ray runs ``beat`` in a thread of its own (a concurrency group), so it is answered during a task of any length; it is
    not while the process is stopped, or while native code keeps Python's lock.
    """

    def beat(self) -> str:
        """Answer, with this worker's name."""
        return self.name

    @property
    def name(self) -> str:
        """Where this process runs."""
        return f"{socket.gethostname()}:{os.getpid()}"


class Worker(Living):
    """Holds one loaded model and runs tasks on it."""

    def __init__(self, spec: ModelSpec, target: str | Sharding, threads: int) -> None:
        torch.set_num_threads(threads)
        self._spec, self._target = spec, target
        self._lm: LoadedModel | None = None
        transformers_logging.disable_progress_bar()

    def run(self, task: Callable[[LoadedModel, Any], Any], item: Any) -> tuple[Any, float, str]:
        """Run a task: its value, the seconds it took and this worker's name.

        What a user can mend comes back as a value: Ray would wrap an exception in one of its own, with a remote
        traceback.
        """
        try:
            if self._lm is None:
                self._lm = self._spec.load(self._target)
            return *run_task(self._lm, task, item), self.name
        except HeadscanError as problem:
            return problem, 0.0, self.name
