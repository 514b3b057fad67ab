"""Median times of several functions, run in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

#: Largest number of timed rounds.
_MOST = 10


def medians(
    ways: Mapping[str, Callable[[], object]], device: torch.device, seconds: float, fewest: int = 3
) -> dict[str, float]:
    """Return the median time of each way, in seconds.

    Every way runs once untimed, then all run in turn, so that a temporary slowdown of the machine affects all.

    Args:
        seconds: Time after which no further round starts, once ``fewest`` rounds are done.
        fewest: Smallest number of timed rounds.
    """
    for way in ways.values():
        way()
    _wait(device)
    times: dict[str, list[float]] = {name: [] for name in ways}
    began = time.perf_counter()
    for turn in range(_MOST):
        if turn >= fewest and time.perf_counter() - began > seconds:
            break
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            _wait(device)
            times[name].append(time.perf_counter() - started)
    return {name: median(of_way) for name, of_way in times.items()}


def _wait(device: torch.device) -> None:
    """Wait until a GPU has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
