"""The arguments for loading a model, without loading it."""

from __future__ import annotations

from dataclasses import dataclass

from headscan.checkpoints.source_folder import locate
from headscan.loading import load
from headscan.models.layout import Sharding
from headscan.models.loaded_model import LoadedModel
from headscan.sizing.model_sizes import ModelSizes, model_sizes


@dataclass(frozen=True)
class ModelSpec:
    """The arguments of `headscan.load`, except for the device.

    The name of the bundled model, ``demo``, becomes its folder.
    """

    source: str
    dtype: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    safetensors: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", locate(self.source))

    def load(self, target: str | Sharding) -> LoadedModel:
        """Load the model onto one device or several."""
        return load(
            self.source,
            device=target,
            dtype=self.dtype,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            safetensors=self.safetensors,
        )

    def sizes(self, tokens: int) -> ModelSizes:
        """Return the bytes of weights, activations and KV cache, without loading."""
        return model_sizes(
            self.source,
            dtype=self.dtype,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            tokens=tokens,
        )
