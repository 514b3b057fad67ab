"""Checks and fingerprints of the models and texts of fits."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

import torch

from headscan.attention.hooks import refuse_compiled, refuse_training
from headscan.checkpoints.fingerprints import config_hash, weights_hash
from headscan.errors import UnsupportedModelError
from headscan.gates.gate_config import GateConfig
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration

#: Numbers of each weight that its fingerprint reads.
_SAMPLES = 256


def check_model(lm: LoadedModel) -> None:
    """Raise if gates of a model cannot be fitted.

    Raises:
        UnsupportedModelError: The model is quantised, compiled or in train mode, or has no heads.
    """
    quantised = getattr(lm.model.config, "quantization_config", None) is not None
    if quantised or getattr(lm.model, "is_quantized", False):
        raise UnsupportedModelError(
            f"{lm.source} is quantised, and gates need derivatives through its weights. Load the model without "
            "quantisation"
        )
    if not lm.grid.sites:
        raise UnsupportedModelError(f"{lm.source} has 0 attention heads (limit 1). Load another model")
    refuse_compiled(lm)
    refuse_training(lm.model)


def fit_mark(lm: LoadedModel, calibration: Calibration, config: GateConfig) -> str:
    """Return the fingerprint of a fit: model, site, texts and settings.

    Large weights are represented by evenly spaced samples, offloaded ones by samples of their files.
    """
    digest = hashlib.sha256(config_hash(lm.model.config).encode())
    digest.update(json.dumps([asdict(config), lm.grid.kind, lm.dtype], sort_keys=True).encode())
    digest.update(calibration.ids.long().numpy().tobytes() + calibration.lengths.long().numpy().tobytes())
    weights = list(lm.model.named_parameters())
    for name, weight in weights:
        if not weight.is_meta:
            flat = weight.detach().flatten()
            sample = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].to("cpu", torch.float64)
            digest.update(name.encode() + sample.numpy().tobytes())
    if any(weight.is_meta for _, weight in weights):
        digest.update(str(weights_hash(lm.source)).encode())
    return digest.hexdigest()[:32]
