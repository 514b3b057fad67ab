"""The arguments for loading a model, without loading it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

from headscan.checkpoints.source_folder import DEMO_FOLDER, DEMO_MODEL, check_folder, locate
from headscan.errors import ModelLoadError
from headscan.options import Option, check_limits, short

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

#: Dtypes of loaded weights.
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@short
@dataclass(frozen=True)
class ModelSpec:
    """The arguments of `headscan.load`, except for the device."""

    source: Annotated[
        str,
        Option(
            "folder saved by transformers, name on the hub, GGUF file, `smollm2`, or `demo` for the bundled model",
            flag="MODEL",
            parse=check_folder,
        ),
    ]
    dtype: Annotated[str, Option("dtype of the weights; auto keeps the saved one", names=DTYPES)] = "auto"
    revision: Annotated[str | None, Option("branch, tag or commit on the hub (default: main)")] = None
    trust_remote_code: Annotated[bool, Option("permission to run Python code from the model's files")] = False
    safetensors: Annotated[
        bool, Option("permission to load pickled weights, which can run code", flag="--pickled-weights")
    ] = True
    unused_weights: Annotated[bool, Option("permission to leave out weights that config.json does not use")] = False

    def __post_init__(self) -> None:
        check_limits(self, ModelLoadError)
        object.__setattr__(self, "source", os.fspath(self.source))

    @cached_property
    def folder(self) -> str:
        """The folder, or the name on the hub, that is loaded; a file is converted first (`locate`)."""
        return locate(self.source)

    @property
    def is_demo(self) -> bool:
        """True for the bundled model."""
        return self.source in (DEMO_MODEL, str(DEMO_FOLDER)) and self.folder == str(DEMO_FOLDER)

    def in_full_precision(self) -> ModelSpec:
        """Return the model; the bundled one in float32, because half precision is slower on most CPUs, and rounds
        repairs.
        """
        return replace(self, dtype="float32") if self.is_demo and self.dtype == "auto" else self

    def config(self) -> PreTrainedConfig:
        """Load the configuration, without the weights."""
        from headscan.checkpoints.sources import load_config

        return load_config(self.folder, self.revision, self.trust_remote_code)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Load the tokenizer; None if the model has none."""
        from headscan.checkpoints.sources import load_tokenizer

        return load_tokenizer(self.folder, self.revision, self.trust_remote_code)
