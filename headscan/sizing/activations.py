"""Peak memory of activations, from a forward pass on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscan.attention.attention_request import AttentionRequest, MassWidths
from headscan.attention.calls import AttentionCall, ScoredCall, Session
from headscan.attention.interface import (
    IMPLEMENTATION,
    MASKED,
    PROBE,
    attention_implementation,
    open_session,
    window_is_named,
)
from headscan.catalog import panel_names
from headscan.models.forward_inputs import run
from headscan.sizing.meta_pass import Allocations, FusedAttention, meta_inputs
from headscan.statistics.registry import OUTPUT_STATISTICS, output_statistics

#: Tokens of the pass that detects how the model names its windows.
_FEW = 4


@dataclass(frozen=True)
class DryRun:
    """Peak bytes of one sequence in addition to weights and KV cache.

    Attributes:
        plain: Peak of a forward pass without logits.
        measured: Peak of a pass that measures the fast panel. It is lower than `plain` if the model's own attention
            computes explicit weights.
    """

    plain: int
    measured: int


@torch.no_grad()
def dry_run(model: PreTrainedModel, tokens: int) -> DryRun:
    """Run a model on the meta device over one sequence.

    The panel is measured as on a CPU, whose fused call runs in float32; a GPU's runs in half precision and needs less.

    Args:
        model: A model on the meta device, prepared by `meta_pass.shorten`.
        tokens: Length of the sequence.

    Raises:
        Exception: An error of the model's code, if it reads the contents of tensors.
    """
    with FusedAttention(), Allocations(model) as plain:
        run(model, meta_inputs(model, tokens))
    windows = _Windows()
    with _answered(model, PROBE, windows), Allocations(model):
        run(model, meta_inputs(model, _FEW))
    with _answered(model, IMPLEMENTATION if windows.named else MASKED, _Measuring()), Allocations(model) as measured:
        run(model, meta_inputs(model, tokens))
    return DryRun(plain.peak, measured.peak)


@contextmanager
def _answered(model: PreTrainedModel, implementation: str, session: Session) -> Iterator[None]:
    """Let a session answer all attention calls that use the interface."""
    with attention_implementation(model, implementation), open_session(model.modules(), session):
        yield


class _Windows:
    """A session that detects whether calls name their masks' windows."""

    named = True

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        self.named &= not isinstance(call, ScoredCall) or window_is_named(call)
        return call.output()


class _Measuring:
    """A session that measures the fast panel at both hooks."""

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        lengths = torch.ones(call.sequences, dtype=torch.long, device="meta")
        wanted = frozenset(panel_names("fast"))
        out, _ = call.measure(AttentionRequest(wanted - OUTPUT_STATISTICS.keys(), lengths, lengths, MassWidths()))
        factor = torch.empty(call.num_attention_heads, call.value_dim, call.value_dim, device="meta")
        output_statistics(out.transpose(1, 2), lengths, wanted, factor)
        return out
