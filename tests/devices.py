"""Models and comparisons on the device of ``--device``."""

from __future__ import annotations

import torch
from torch import Tensor

from headscan.attention.discovery import discover
from headscan.models.loaded_model import LoadedModel

#: A GPU sums float32 numbers in another order than a CPU.
_LOOSER = 10


def on(device: torch.device, lm: LoadedModel) -> LoadedModel:
    """Return a model, moved to a device. Its experts run eagerly there, since their own kernels are not under test."""
    if device.type == "cpu":
        return lm
    lm.model.set_experts_implementation("eager")
    lm.model.to(device)
    return LoadedModel(lm.model, lm.tokenizer, discover(lm.model), lm.source)


def assert_close(found: Tensor, expected: Tensor, *, rtol: float, atol: float, **more: object) -> None:
    """Compare tensors of any devices; the bounds are those of a CPU."""
    looser = 1 if {found.device.type, expected.device.type} == {"cpu"} else _LOOSER
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=looser * rtol, atol=looser * atol, **more)


def assert_near(
    found: Tensor, expected: Tensor, bound: float, name: str, *, mean: bool = False, smallest: float = 1e-2
) -> None:
    """Compare numbers of one kind; NaN must match NaN.

    The error is that of the worst number (or the mean error), in units of the largest expected number, or of
    ``smallest`` where that is larger.
    """
    wide, reference = found.detach().cpu().double(), expected.detach().cpu().double()
    assert wide.shape == reference.shape and torch.equal(wide.isfinite(), reference.isfinite()), name
    known = reference.isfinite()
    if not known.any():
        return
    error = (wide - reference)[known].abs()
    scale = max(float(reference[known].abs().max()), smallest)
    worst = float(error.mean() if mean else error.max()) / scale
    assert worst <= bound, f"{name}: error {worst:.1e} (limit {bound:.1e})"
