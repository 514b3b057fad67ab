"""The statistics that a rule's score needs, measured at both hooks while a layer runs.

Shapes: B sequences, N tokens, H query heads, Dv width of a head's output.
"""

from __future__ import annotations

from torch import Tensor

from headscan.attention.attention_request import AttentionRequest, MassWidths
from headscan.attention.calls import AttentionCall
from headscan.catalog import statistics_for
from headscan.errors import InterventionError
from headscan.grid import AttentionSite
from headscan.measure.projections import ProjectionFactors
from headscan.models.loaded_model import LoadedModel
from headscan.statistics.registry import OUTPUT_STATISTICS, needs_projection, output_statistics


class RuleStatistics:
    """The statistics of one score, measured layer by layer.

    Args:
        score: Name of the score; None measures nothing.

    Attributes:
        wanted: Names of the statistics.

    Raises:
        InterventionError: The model's chosen site is cross attention, whose keys belong to another text.
    """

    def __init__(self, lm: LoadedModel, score: str | None) -> None:
        if score is not None and lm.grid.kind == "cross":
            raise InterventionError(f"a rule cannot score cross attention: {score}. Use a HeadMask, or another site")
        self.wanted = statistics_for([] if score is None else [score])
        self._factors = ProjectionFactors(lm) if needs_projection(self.wanted) else None
        self._from_attention: dict[str, Tensor] = {}

    @property
    def of_attention(self) -> frozenset[str]:
        """Names of the statistics that the attention hook measures."""
        return self.wanted - OUTPUT_STATISTICS.keys()

    def attended(self, call: AttentionCall, lengths: Tensor, past: int = 0) -> Tensor:
        """Measure an attention call and return its output; ``past`` counts the cached tokens before it."""
        request = AttentionRequest(self.of_attention, lengths, lengths, MassWidths(), past=past)
        out, self._from_attention = call.measure(request)
        return out

    def visited(self, site: AttentionSite, heads_BNHD: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        """Add the statistics of the heads' outputs and return all of the layer, float32 (B, H) each."""
        factor = None if self._factors is None else self._factors.of(site).to(heads_BNHD.device)
        from_outputs = output_statistics(heads_BNHD, lengths, self.wanted, factor)
        return {**self._from_attention, **from_outputs}
