"""A pool around a loaded model, for tests and benchmarks."""

from __future__ import annotations

from headscan.cluster.pool import InProcessPool
from headscan.models.loaded_model import LoadedModel


class LoadedPool(InProcessPool):
    """The pool of a model that is loaded already."""

    def __init__(self, lm: LoadedModel) -> None:
        self._lm = lm
