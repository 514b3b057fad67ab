"""The workers inside Ray actors: one holds a replica, or one stage of a pipeline.

Shapes: B sequences, N tokens, E width of a hidden state.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from headscan.cluster.placement_base import LayerRange
from headscan.cluster.pool import InspectionTask, PassTask, check_ranges, run_pass, working_on
from headscan.errors import HeadscanError
from headscan.layers.layer_ranges import Layers, Stage, open_layers
from headscan.loading import load_spec
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel, Sharding


class Heartbeat:
    """An actor that answers heartbeats during a task of any length, because Ray runs ``beat`` in its own thread (a
    concurrency group). It does not answer while the process is stopped, or while native code holds Python's global
    lock.
    """

    def beat(self) -> str:
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
        """Run a task; return its value, seconds and this worker's name. An error of the user is returned as the value,
        because Ray would wrap an exception in its own, with a remote traceback.
        """
        try:
            if self._lm is None:
                self._lm = load_spec(self._spec, self._target)
            started = time.perf_counter()
            with working_on(item):
                value = task(self._lm, item)
            return value, time.perf_counter() - started, self.name
        except HeadscanError as problem:
            return problem, 0.0, self.name


@dataclass(frozen=True)
class HiddenState:
    """Hidden states (B, N, E) in transit between two actors. Ray sends an array's bytes without a copy."""

    data: np.ndarray
    dtype: torch.dtype
    shape: torch.Size

    @classmethod
    def of(cls, hidden: Tensor) -> HiddenState:
        """Copy hidden states from any device."""
        # As bytes, because numpy has no bfloat16.
        return cls(hidden.cpu().contiguous().flatten().view(torch.uint8).numpy(), hidden.dtype, hidden.shape)

    def tensor(self) -> Tensor:
        """Return a copy on the CPU; Ray's array is read-only."""
        return torch.from_numpy(self.data.copy()).view(self.dtype).view(self.shape)


class StageWorker(Heartbeat):
    """An actor that runs passes through a range of a model's layers. An error of the user travels through the later
    stages as a value in place of the hidden states, because Ray would wrap an exception in its own, with a remote
    traceback.
    """

    def __init__(self, spec: ModelSpec, ranges: tuple[LayerRange, ...], index: int, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        transformers_logging.disable_progress_bar()
        self._spec, self._ranges, self._index, self._device = spec, ranges, index, device
        self._layers: Layers | None = None
        self._stage: Stage | None = None

    def run(
        self, task: PassTask[Any, Any, Any, Any], item: Any, batch: Any, hidden_in: HiddenState | HeadscanError | None
    ) -> tuple[HiddenState | HeadscanError | None, Any, float]:
        """Run a pass; return hidden states, partial result and seconds."""
        if isinstance(hidden_in, HeadscanError):
            return hidden_in, hidden_in, 0.0
        try:
            stage = self._loaded()
            started = time.perf_counter()
            with torch.no_grad(), working_on(item):
                partial, hidden = run_pass(task, stage, item, batch, None if hidden_in is None else hidden_in.tensor())
        except HeadscanError as problem:
            return problem, problem, 0.0
        hidden_out = None if hidden is None else HiddenState.of(hidden)
        return hidden_out, partial, time.perf_counter() - started

    def join(self, task: PassTask[Any, Any, Any, Any], item: Any, *partials: Any) -> tuple[Any, str]:
        """Join the partial results, pass by pass and stage by stage; return the result and this worker's name."""
        error = next((partial for partial in partials if isinstance(partial, HeadscanError)), None)
        if error is not None:
            return error, self.name
        stages = len(self._ranges)
        try:
            with working_on(item):
                value = task.join(item, [partials[i : i + stages] for i in range(0, len(partials), stages)])
        except HeadscanError as problem:
            return problem, self.name
        return value, self.name

    def ask(self, task: InspectionTask[Any, Any], item: Any) -> tuple[Any, str]:
        """Answer a question; return the answer and this worker's name."""
        try:
            with working_on(item):
                return task(self._opened().outline, item), self.name
        except HeadscanError as problem:
            return problem, self.name

    def _opened(self) -> Layers:
        if self._layers is None:
            layers = open_layers(self._spec, self._device)
            check_ranges(layers, self._ranges)
            self._layers = layers
        return self._layers

    def _loaded(self) -> Stage:
        if self._stage is None:
            self._stage = self._opened().load(*self._ranges[self._index])
        return self._stage
