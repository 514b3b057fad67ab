"""The state of a fit of gates between two steps, and its file."""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headscan.errors import GateError

_FORMAT = "headscan gates"


@dataclass(frozen=True)
class FitState:
    """Everything that the next step depends on, in addition to the model, the texts and the settings.

    Attributes:
        step: Number of finished steps.
        log_a: Locations of the gates of all heads of the site, layer by layer.
        mean, square: Moments of Adam, of the same shape.
        penalty: Integral part of the penalty per open gate, in nats.
        applied: Running mean of the whole penalty per open gate, in nats.
    """

    step: int
    log_a: Tensor
    mean: Tensor
    square: Tensor
    penalty: float
    applied: float

    def save(self, path: Path, mark: str) -> None:
        """Write the state atomically.

        Args:
            mark: Fingerprint of the fit.

        Raises:
            GateError: The file cannot be written.
        """
        numbers = {"step": self.step, "penalty": self.penalty, "applied": self.applied}
        tensors = {"log_a": self.log_a, "mean": self.mean, "square": self.square}
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, fresh, {"format": _FORMAT, "mark": mark, "numbers": json.dumps(numbers)})
            fresh.replace(path)
        except (OSError, SafetensorError) as problem:
            raise GateError(f"cannot write the state {path} ({problem}). Choose another path, or free space") from None
        finally:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path, mark: str) -> FitState | None:
        """Return a saved state; None if there is no file.

        Raises:
            GateError: The file is no state, or the state of another fit.
        """
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                facts = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as problem:
            raise GateError(f"cannot read the state {path} ({problem}). Remove it, or name another file") from None
        if facts.get("format") != _FORMAT:
            raise GateError(f"{path} is no state of gates. Name another file")
        if facts.get("mark") != mark:
            raise GateError(
                f"{path} is the state of another fit: the model, the texts or the settings differ. Restore them, or "
                "name another file"
            )
        return cls(**json.loads(facts["numbers"]), **tensors)


def first_state(heads: int, start: float, penalty: float, dtype: torch.dtype) -> FitState:
    """Return the state before the first step."""
    zeros = torch.zeros(heads, dtype=dtype)
    return FitState(0, torch.full((heads,), start, dtype=dtype), zeros, zeros.clone(), penalty, penalty)
