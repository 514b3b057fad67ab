"""The class that loads a model, bounds of its heads from its configuration, and errors of its own code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from headscan.errors import HeadIndexError, HeadscanError, ModelLoadError
from headscan.models.token_batches import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedConfig


def auto_class(config: PreTrainedConfig, source: str, trust_remote_code: bool) -> Any:
    """Return the class that loads a text model of this configuration."""
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    order: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForImageTextToText)
    if config.is_encoder_decoder:
        order = (AutoModelForSeq2SeqLM,)
    elif is_encoder(config):
        order = (AutoModelForSequenceClassification if is_classifier(config) else AutoModelForMaskedLM,)
        if is_headless(config):
            return AutoModel
    for auto in order:
        if type(config) in auto._model_mapping:
            return auto
    raise ModelLoadError(f"{source} does not predict text tokens: model type {config.model_type!r}. Choose another")


def is_encoder(config: PreTrainedConfig) -> bool:
    """Return True for an encoder. Some encoders also have a decoder class, for checkpoints trained as decoders."""
    return (
        type(config) in AutoModelForMaskedLM._model_mapping
        and not config.is_encoder_decoder
        and not getattr(config, "is_decoder", False)
    )


def is_classifier(config: PreTrainedConfig) -> bool:
    """Return True for an encoder that was saved with a classification head."""
    saved = config.architectures or ()
    return is_encoder(config) and any(name.endswith("ForSequenceClassification") for name in saved)


def is_headless(config: PreTrainedConfig) -> bool:
    """Return True for an encoder that was saved without a head, as sentence encoders are."""
    saved = config.architectures or ()
    return is_encoder(config) and bool(saved) and all(name.endswith("Model") for name in saved)


#: What a model's code raises for a kind of call that it does not support. Anything else is a bug or a full machine.
MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    HeadscanError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def raise_if_out_of_memory(problem: Exception) -> None:
    """Raise an out-of-memory error again. It must not count as an unsupported call."""
    if isinstance(problem, RuntimeError) and is_out_of_memory(problem):
        raise problem


def first_line(problem: Exception) -> str:
    """Return an error's type and the first line of its message."""
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0]}" if lines else type(problem).__name__


def check_bounds(config: PreTrainedConfig, heads: Iterable[tuple[int, int]]) -> None:
    """Raise if a head exceeds a configuration's bounds, before weights are read. Heads per layer differ in some models
    and show only in the loaded model: its grid checks them.
    """
    text = config.get_text_config(decoder=True)
    layers, widest = (_count(getattr(text, name, None)) for name in ("num_hidden_layers", "num_attention_heads"))
    for layer, head in heads:
        if layers is not None and layer >= layers:
            raise HeadIndexError(
                f"no head {layer}:{head} in the model: layer {layer} (limit {layers - 1}). Choose another"
            )
        if widest is not None and head >= widest:
            raise HeadIndexError(
                f"no head {layer}:{head} in the model: head {head} (limit {widest - 1}). Choose another"
            )


def _count(value: object) -> int | None:
    """Return a count, or the largest of a list per layer. It is None if the configuration has neither."""
    if isinstance(value, list | tuple):
        return max((each for each in value if isinstance(each, int)), default=None)
    return value if isinstance(value, int) else None
