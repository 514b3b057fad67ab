"""What a configuration says of a model: its class, bounds of its heads, its positions and rotary frequencies.

transformers chooses some rotary frequencies by the largest position of a pass
(``modeling_rope_utils.dynamic_rope_update``). Padding, or a longer sequence in the same batch, then changes the numbers
of a shorter sequence, and so does a KV cache. Two types do this: *longrope* (Phi-3.5, Phi-4-mini, MiniCPM3; arXiv
2402.13753) has one set of frequencies up to the original length and another above it; *dynamic* NTK scaling has a
different set for every length above it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForNextSentencePrediction,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from headscan.errors import HeadIndexError, HeadscanError, ModelLoadError, SequenceError, first_line
from headscan.models.token_batches import is_out_of_memory

#: Classes of models whose heads predict no tokens; only their attention has a use here.
_OTHER_HEADS = (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForQuestionAnswering,
    AutoModelForMultipleChoice,
    AutoModelForNextSentencePrediction,
)
#: Classes that code of a repository may define, in order of preference.
_OWN_CLASSES = (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModel,
)


def auto_class(config: PreTrainedConfig, source: str, trust_remote_code: bool) -> Any:
    """Return the class that loads a text model of this configuration: the one that saved it, unless that has another
    head next to one that predicts tokens.
    """
    if trust_remote_code and (own := getattr(config, "auto_map", None)):
        offered = [auto for auto in _OWN_CLASSES if auto.__name__ in own]
        as_saved = [auto for auto in offered if str(own[auto.__name__]).endswith(f".{saved_class(config)}")]
        if offered:
            return (as_saved or offered)[0]
    order: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForImageTextToText)
    if config.is_encoder_decoder:
        order = (AutoModelForSeq2SeqLM,)
    elif is_encoder(config):
        order = (AutoModelForMaskedLM,)
    predicting = next((auto for auto in order if type(config) in auto._model_mapping), None)
    if predicting is not None and is_saved_as(config, predicting):
        return predicting
    reads_text = predicting is not None or hasattr(config.get_text_config(decoder=True), "vocab_size")
    # A decoder without a head predicts tokens by its embedding, if the two are tied.
    is_tied = predicting is AutoModelForCausalLM and getattr(config, "tie_word_embeddings", False)
    for auto in (*_OTHER_HEADS, AutoModelForTextEncoding, *(() if is_tied else (AutoModel,))):
        if reads_text and is_saved_as(config, auto):
            return auto
    if is_encoder(config) and saved_class(config).endswith("Model"):
        return AutoModel  # sentence encoders
    if predicting is None:
        raise ModelLoadError(f"{source} does not predict text tokens: model type {config.model_type!r}. Choose another")
    return predicting


def saved_class(config: PreTrainedConfig) -> str:
    """Return the name of the class that saved a configuration; empty if the configuration does not have it."""
    return str((config.architectures or [""])[0])


def is_saved_as(config: PreTrainedConfig, auto: Any) -> bool:
    """Return True if a model was saved by a class that ``auto`` chooses for its configuration."""
    chosen = auto._model_mapping.get(type(config), ())
    classes = chosen if isinstance(chosen, tuple | list) else (chosen,)
    return saved_class(config) in {each.__name__ for each in classes}


def is_encoder(config: PreTrainedConfig) -> bool:
    """Return True for an encoder. Some encoders also have a decoder class, for checkpoints trained as decoders."""
    return (
        type(config) in AutoModelForMaskedLM._model_mapping
        and not config.is_encoder_decoder
        and not getattr(config, "is_decoder", False)
    )


def is_classifier(config: PreTrainedConfig) -> bool:
    """Return True for an encoder that was saved with a classification head."""
    return is_encoder(config) and is_saved_as(config, AutoModelForSequenceClassification)


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
    """Raise an out-of-memory error again, so that it does not count as an unsupported call."""
    if isinstance(problem, RuntimeError) and is_out_of_memory(problem):
        raise problem


def typed_line(problem: Exception) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(problem).__name__}: {first_line(problem)}" if str(problem).strip() else type(problem).__name__


def check_bounds(config: PreTrainedConfig, heads: Iterable[tuple[int, int]]) -> None:
    """Raise if a head exceeds a configuration's bounds; heads of single layers show only in a loaded model."""
    text = config.get_text_config(decoder=True)
    layers, widest = (_count(getattr(text, name, None)) for name in ("num_hidden_layers", "num_attention_heads"))
    for layer, head in heads:
        for what, at, count in (("layer", layer, layers), ("head", head, widest)):
            if count is not None and at >= count:
                raise HeadIndexError(
                    f"no head {layer}:{head} in the model: {what} {at} (limit {count - 1}). Choose another"
                )


def _count(value: object) -> int | None:
    """Return a count, or the largest of a list per layer; None if the configuration has neither."""
    if isinstance(value, list | tuple):
        return max((number for number in value if isinstance(number, int)), default=None)
    return value if isinstance(value, int) else None


@dataclass(frozen=True)
class RopeLengths:
    """The sequence lengths at which a model's rotary frequencies change.

    Attributes:
        switches: Lengths in tokens up to which the lower frequencies are used (longrope).
        scaled_above: Length above which every length has different frequencies (dynamic); None means no such scaling.
        scaled_to: Length for which this scaling is designed; None means no such scaling.
    """

    switches: tuple[int, ...] = ()
    scaled_above: int | None = None
    scaled_to: int | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> RopeLengths:
        """Return the lengths of a configuration, or of its text model."""
        switches: set[int] = set()
        above: list[int] = []
        to: list[int] = []
        for rope, original, positions in _ropes(config.get_text_config().to_dict(), None, None):
            kind = str(rope.get("rope_type") or rope.get("type"))
            if kind in ("longrope", "su"):
                switches.add(int(rope.get("original_max_position_embeddings") or original or positions or 0))
            elif "dynamic" in kind:
                above.append(int(positions or 0))
                to.append(int(above[-1] * max(1.0, float(rope.get("factor") or 1.0))))
        return cls(tuple(sorted(switches)), min(above, default=None), max(to, default=None))

    @property
    def vary(self) -> bool:
        """True if the frequencies depend on the length."""
        return bool(self.switches) or self.scaled_above is not None

    def group(self, tokens: int) -> tuple[int, int]:
        """Return a key that is equal for lengths with the same frequencies."""
        scaled = self.scaled_above is not None and tokens > self.scaled_above
        return sum(tokens > switch for switch in self.switches), tokens if scaled else 0

    def check(self, width: int, lengths: Sequence[int]) -> None:
        """Raise if padding to ``width`` changes the frequencies of a sequence of these lengths."""
        if not self.vary:
            return
        for row, length in enumerate(lengths):
            if self.group(length) != self.group(width):
                limit = max((s for s in (*self.switches, self.scaled_above) if s is not None and s < width), default=0)
                raise SequenceError(
                    f"sequence {row} has {length} tokens in a batch of width {width} (limit {limit}): the model's "
                    "rotary frequencies change with the length of the pass. Pass sequences on both sides of the limit "
                    "in separate batches, without padding beyond it"
                    + (", and longer ones by equal length" if self.scaled_above is not None else "")
                )


#: The value for frequencies that do not depend on the length.
UNVARYING = RopeLengths()


def _ropes(
    config: dict[str, Any], original: int | None, positions: int | None, *, inside: bool = False
) -> Iterator[tuple[dict[str, Any], int | None, int | None]]:
    """Yield rotary parameters at any depth, with original and current length."""
    original = config.get("original_max_position_embeddings") or original
    positions = config.get("max_position_embeddings") or positions
    if inside:
        yield config, original, positions
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _ropes(value, original, positions, inside=inside or name.startswith("rope_"))


def restart_dynamic_frequencies(model: nn.Module) -> None:
    """Reset dynamic rotary embeddings before every pass; transformers keeps those of the longest pass so far."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        named = {f"{layer}_": kind for layer, kind in kinds.items()} if isinstance(kinds, dict) else {"": kinds}
        prefixes = [
            p for p, kind in named.items() if "dynamic" in str(kind) and hasattr(module, f"{p}original_inv_freq")
        ]
        if prefixes:
            module.register_forward_pre_hook(partial(_restart, prefixes))


def _restart(prefixes: Sequence[str], module: Any, _: object) -> None:
    for prefix in prefixes:
        original = getattr(module, f"{prefix}original_inv_freq")
        setattr(module, f"{prefix}inv_freq", original.to(getattr(module, f"{prefix}inv_freq").device))
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def max_tokens(config: PreTrainedConfig) -> int | None:
    """Return a configuration's largest number of tokens; None without a limit."""
    if is_encoder(config):
        with torch.device("meta"):  # the limit shows in the modules, which take no time without weights
            return usable_positions(AutoModelForMaskedLM.from_config(config))
    return _named_positions(config)


def usable_positions(model: PreTrainedModel) -> int | None:
    """Return a model's largest number of tokens; None without a limit. RoBERTa numbers them behind the padding
    position.
    """
    limit = _named_positions(model.config)
    words = model.get_input_embeddings().weight  # encoder and decoder may have a table each with the same weight
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module.weight is not words]
    for table in tables:
        if limit and table.num_embeddings == limit and table.padding_idx is not None:
            return limit - table.padding_idx - 1
    return limit


def _named_positions(config: PreTrainedConfig) -> int | None:
    # With dynamic scaling the configuration names the length before scaling.
    limit = RopeLengths.of(config).scaled_to or getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None
