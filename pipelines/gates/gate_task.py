"""The pool task of a gates run: some steps of a fit.

A fit is a chain of tasks, each of which begins with the state that the one before returned. So the driver can save it
after each, on any pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headscan.gates.fit_gates import GateFit
from headscan.gates.fit_state import FitState
from headscan.gates.gate_config import GateConfig
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration


@dataclass(frozen=True)
class GateItem:
    """Steps of a fit for one replica.

    Attributes:
        name: Name of the fit.
        site: Attention whose heads have gates: ``self``, ``encoder`` or ``cross``.
        ids, lengths: Token ids of the texts (B, N), padded on the right, and their real tokens (B,).
        config: Settings of the fit.
        state: The state to begin with; None begins the fit.
        steps: Largest number of steps.
    """

    name: str
    site: str
    ids: np.ndarray
    lengths: np.ndarray
    config: GateConfig
    state: FitState | None
    steps: int


def fit_steps(lm: LoadedModel, item: GateItem) -> FitState:
    """Pool task: return the state after the steps.

    Raises:
        UnsupportedModelError: Gates of the model cannot be fitted.
        NotFiniteError: A derivative is NaN or infinite.
    """
    texts = Calibration(torch.from_numpy(item.ids), torch.from_numpy(item.lengths))
    fit = GateFit(lm.at(item.site), texts, item.config)
    return fit.advance(fit.start() if item.state is None else item.state, item.steps)
