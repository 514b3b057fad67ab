"""What a referee compares."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from headscan.errors import InterventionError, unknown_name
from headscan.pipelines.referee.choose_heads import CRITERIA, DEFAULT_CRITERIA


@dataclass(frozen=True)
class Comparison:
    """Criteria and shares of removed heads.

    Attributes:
        criteria: Names in `CRITERIA`.
        shares: Shares of heads that each criterion removes, above 0; repeated ones count once.
        seeds: Random controls of each share.
        iterative: Scores, importances and effects are measured again after each share.

    Raises:
        UnknownNameError: There is no such criterion.
        InterventionError: A share or ``seeds`` is out of range, or nothing is compared.
    """

    criteria: tuple[str, ...] = DEFAULT_CRITERIA
    shares: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5)
    seeds: int = 3
    iterative: bool = False

    def __post_init__(self) -> None:
        for field in ("criteria", "shares"):
            object.__setattr__(self, field, tuple(dict.fromkeys(getattr(self, field))))
        for name in self.criteria:
            if name not in CRITERIA:
                raise unknown_name("criterion", name, CRITERIA)
        for share in self.shares:
            if not 0 < share <= 1:
                raise InterventionError(f"share {share:g} is out of range (limits above 0, at most 1). Change `shares`")
        if not self.criteria or not self.shares:
            raise InterventionError("nothing to compare: 0 criteria or shares (limit 1). Set `criteria` and `shares`")
        if self.seeds < 0:
            raise InterventionError(f"random controls per share: {self.seeds} (limit 0). Set `seeds` to 0 or more")


def head_count(share: float, total: int) -> int:
    """Return the number of heads of a share, at least 1."""
    return max(1, floor(share * total + 0.5))
