"""The transformers class that loads a text model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from headscan.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def auto_class(config: PreTrainedConfig, source: str, trust_remote_code: bool) -> Any:
    """Return the class that loads a text model of this configuration.

    Raises:
        ModelLoadError: The model does not predict text tokens.
    """
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    order: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForImageTextToText)
    if config.is_encoder_decoder:
        order = (AutoModelForSeq2SeqLM,)
    elif is_encoder(config):
        order = (AutoModelForSequenceClassification if is_classifier(config) else AutoModelForMaskedLM,)
    for auto in order:
        if type(config) in auto._model_mapping:
            return auto
    raise ModelLoadError(f"{source} does not predict text tokens: model type {config.model_type!r}. Choose another")


def is_encoder(config: PreTrainedConfig) -> bool:
    """Return True for an encoder.

    Some encoders also have a decoder class, for checkpoints trained as decoders.
    """
    return (
        type(config) in AutoModelForMaskedLM._model_mapping
        and not config.is_encoder_decoder
        and not getattr(config, "is_decoder", False)
    )


def is_classifier(config: PreTrainedConfig) -> bool:
    """Return True for an encoder that was saved with a classification head."""
    saved = config.architectures or ()
    return is_encoder(config) and any(name.endswith("ForSequenceClassification") for name in saved)
