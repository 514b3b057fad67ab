"""The kinds of arms of an evaluation."""

from __future__ import annotations

from enum import StrEnum


class ArmKind(StrEnum):
    """Kinds of arms; the values are those of the column ``arms.kind``."""

    BASELINE = "baseline"
    MASK = "mask"
    RULE = "rule"
    RANDOM_MASK = "random_mask"
    RANDOM_RULE = "random_rule"
    PLAN = "plan"
    RANDOM_PLAN = "random_plan"

    @property
    def is_random(self) -> bool:
        """True if the heads are drawn at random."""
        return self in _CONTROLS.values()

    @property
    def control(self) -> ArmKind | None:
        """The kind of its random controls; None if it has none."""
        return _CONTROLS.get(self)

    @property
    def shrinks_cache(self) -> bool:
        """True if KV heads keep fewer keys, and no head need be ablated."""
        return self in (ArmKind.PLAN, ArmKind.RANDOM_PLAN)

    @property
    def label(self) -> str:
        """The kind in words."""
        return self.value.replace("_", " ")


_CONTROLS = {
    ArmKind.MASK: ArmKind.RANDOM_MASK,
    ArmKind.RULE: ArmKind.RANDOM_RULE,
    ArmKind.PLAN: ArmKind.RANDOM_PLAN,
}

#: The random kinds as a list of SQL literals.
RANDOM_KINDS_SQL = ", ".join(f"'{kind}'" for kind in ArmKind if kind.is_random)
