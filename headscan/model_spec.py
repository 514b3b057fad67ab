"""The arguments for loading a model, without loading it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from headscan.checkpoints.source_folder import DEMO_FOLDER, check_folder, locate
from headscan.errors import ModelLoadError
from headscan.options import Option, check_limits

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

#: Dtypes of loaded weights.
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class ModelSpec:
    """The arguments of `headscan.load`, except for the device; ``demo`` becomes the folder of the bundled model."""

    source: Annotated[
        str,
        Option(
            "folder saved by transformers, name on the hub, GGUF file, `smollm2`, or `demo` for the bundled model",
            flag="MODEL",
            parse=check_folder,
        ),
    ]
    dtype: Annotated[str, Option("dtype of the weights; auto keeps the saved one", choices=DTYPES)] = "auto"
    revision: Annotated[str | None, Option("branch, tag or commit on the hub (default: main)")] = None
    trust_remote_code: Annotated[bool, Option("permission to run Python code from the model's files")] = False
    safetensors: Annotated[
        bool, Option("permission to load pickled weights, which can run code", flag="--pickled-weights", negated=True)
    ] = True
    unused_weights: Annotated[bool, Option("permission to leave out weights that config.json does not use")] = False

    def __post_init__(self) -> None:
        check_limits(self, ModelLoadError)
        object.__setattr__(self, "source", locate(os.fspath(self.source)))

    @property
    def is_demo(self) -> bool:
        """True for the bundled model."""
        return self.source == str(DEMO_FOLDER)

    def in_full_precision(self) -> ModelSpec:
        """Return the model; the bundled one in float32, because half precision is slower on most CPUs, and rounds
        repairs.
        """
        return replace(self, dtype="float32") if self.is_demo and self.dtype == "auto" else self

    def config(self) -> PreTrainedConfig:
        """Load the configuration, without the weights."""
        from headscan.checkpoints.sources import load_config

        return load_config(self.source, self.revision, self.trust_remote_code)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Load the tokenizer; None if the model has none."""
        from headscan.checkpoints.sources import load_tokenizer

        return load_tokenizer(self.source, self.revision, self.trust_remote_code)
