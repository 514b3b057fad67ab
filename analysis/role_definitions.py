"""The roles of heads: the number that decides each, and its threshold.

The view ``head_roles``, the verb ``roles`` and the documentation read these declarations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headscan.analysis.verdict_limits import MARGIN
from headscan.catalog import BEHAVIOURS

#: Thresholds without a paper.
OWN = "headscan"

#: Weight above which a head attends mostly to one kind of key.
_MOSTLY = 0.5

_HARM = "upper end of the 95 % interval of the harm"
_SCALE = "the harm is the accuracy lost (0 to 1), the hundredth of the BLEU lost, or the loss added divided by the loss"


@dataclass(frozen=True)
class Role:
    """A role: a number of a query head, compared with a threshold.

    Attributes:
        name: Our name.
        formula: The number.
        measured_by: Kind of the run that measures it.
        comparison: How the number of a head with the role compares with the threshold.
        threshold: The threshold, in the number's unit.
        source: Paper that defines the number.
        threshold_source: Paper that defines the threshold, or headscan.
    """

    name: str
    formula: str
    measured_by: Literal["scan", "probe", "ablate"]
    comparison: Literal[">", ">=", "<"]
    threshold: float
    source: str
    threshold_source: str = OWN

    @property
    def rule(self) -> str:
        """Comparison and threshold, such as ``> 0.3``."""
        return f"{self.comparison} {self.threshold:g}"


def _behaviour(role: str, behaviour: str) -> Role:
    """Return the role of a probed behaviour."""
    declared = BEHAVIOURS[behaviour]
    limit, source = (_MOSTLY, OWN) if declared.threshold is None else (declared.threshold, declared.source)
    return Role(role, behaviour, "probe", ">", limit, declared.source, source)


ROLES: dict[str, Role] = {
    role.name: role
    for role in (
        Role(
            "positional",
            "largest share of queries whose largest weight is at one offset k - q; key_offset is the offset",
            "scan",
            ">=",
            0.9,
            "arXiv 1905.09418",
            "arXiv 1905.09418",
        ),
        Role("confident", "confidence", "scan", ">", _MOSTLY, "arXiv 1905.09418"),
        _behaviour("previous_token", "previous_token_score"),
        _behaviour("induction", "induction_score"),
        _behaviour("retrieval", "retrieval_score"),
        Role("sink", "first_token_weight", "scan", ">", 0.3, "arXiv 2410.10781", "arXiv 2410.10781"),
        Role(
            "low_output",
            "output_norm_ln_inactive: share of sequences in which output_norm_ln is among the lowest of the scan",
            "scan",
            ">",
            _MOSTLY,
            "arXiv 2504.03889",
        ),
        Role(
            "inactive",
            f"{_HARM} when zeros replace the head's output; {_SCALE}",
            "ablate",
            "<",
            MARGIN / 100,
            "arXiv 2504.03889",
            "arXiv 2504.03889 for accuracy, headscan for losses",
        ),
        Role(
            "constant",
            f"{_HARM} when its mean replaces the head's output; {_SCALE}",
            "ablate",
            "<",
            MARGIN / 100,
            OWN,
        ),
    )
}
