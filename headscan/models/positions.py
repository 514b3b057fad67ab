"""The largest number of tokens with positions, and rotary frequencies that depend on the length of a pass.

transformers chooses such frequencies by the largest position of a pass (``modeling_rope_utils.dynamic_rope_update``).
Padding, or a longer sequence in the same batch, then changes the numbers of a shorter sequence, and so does a KV
cache. Two types do this: *longrope* (Phi-3.5, Phi-4-mini, MiniCPM3; arXiv 2402.13753) has one set of frequencies up
to the original length and another above it; *dynamic* NTK scaling has a different set for every length above it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForMaskedLM

from headscan.errors import SequenceError
from headscan.models.model_class import is_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


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
        """Raise if padding changes the frequencies of a sequence.

        Args:
            width: Tokens of the batch, padding included.
            lengths: Real tokens of each sequence.
        """
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
    """Reset dynamic rotary embeddings to their original frequencies before every pass. transformers keeps the
    frequencies of the longest pass so far, so numbers would depend on earlier passes.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        named = {f"{layer}_": kind for layer, kind in kinds.items()} if isinstance(kinds, dict) else {"": kinds}
        prefixes = [
            p for p, kind in named.items() if "dynamic" in str(kind) and hasattr(module, f"{p}original_inv_freq")
        ]
        if prefixes:
            module.register_forward_pre_hook(_Restart(prefixes))


class _Restart:
    def __init__(self, prefixes: Sequence[str]) -> None:
        self._prefixes = prefixes

    def __call__(self, module: Any, _: object) -> None:
        for prefix in self._prefixes:
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
    """Return a model's largest number of tokens; None without a limit. RoBERTa and similar models number positions from
    after the padding position, in a table of the length they name.
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
