"""Which of transformers' classes loads a model of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from headscan.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def auto_class(config: PreTrainedConfig, source: str, trust_remote_code: bool) -> Any:
    """The class that loads a text model of this configuration.

    Raises:
        ModelLoadError: Its tokens are not text's, or it has no head that predicts them.
    """
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    order: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForImageTextToText)
    if config.is_encoder_decoder:
        order = (AutoModelForSeq2SeqLM,)
    elif is_encoder(config):
        order = (AutoModelForMaskedLM,)
    for auto in order:
        if type(config) in auto._model_mapping:
            return auto
    raise ModelLoadError(f"{source} is a {config.model_type!r} model, which predicts no tokens of a text")


def is_encoder(config: PreTrainedConfig) -> bool:
    """Whether a model reads both ways; a class for decoders there may be, too, for those that were trained as such."""
    return (
        type(config) in AutoModelForMaskedLM._model_mapping
        and not config.is_encoder_decoder
        and not getattr(config, "is_decoder", False)
    )
