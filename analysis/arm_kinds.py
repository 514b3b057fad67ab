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
    MODEL = "model"
    PRUNED = "pruned"
    RANDOM_PRUNED = "random_pruned"
    LAYERS_DROPPED = "layers_dropped"

    @property
    def is_random(self) -> bool:
        """True if the heads are drawn at random."""
        return self in _CONTROLS.values()

    @property
    def is_control(self) -> bool:
        """True if the arm is a control: random heads, or whole attention layers."""
        return self.is_random or self is ArmKind.LAYERS_DROPPED

    @property
    def control(self) -> ArmKind | None:
        """The kind of its random controls; None if it has none."""
        return _CONTROLS.get(self)

    @property
    def shrinks_cache(self) -> bool:
        """True if KV heads keep fewer keys, and no head need be ablated."""
        return self in (ArmKind.PLAN, ArmKind.RANDOM_PLAN)

    @property
    def is_pruned(self) -> bool:
        """True if heads are removed from the model's files."""
        return self in (ArmKind.PRUNED, ArmKind.RANDOM_PRUNED, ArmKind.LAYERS_DROPPED)

    @property
    def ablates(self) -> bool:
        """True if heads of the baseline's own model are ablated."""
        return self in _ABLATING

    @property
    def praise(self) -> str:
        """The word for an arm that loses at most one point."""
        if self.shrinks_cache:
            return "safe"
        return "as good" if self is ArmKind.MODEL else "removable"

    @property
    def label(self) -> str:
        """The kind in words."""
        return self.value.replace("_", " ")


_CONTROLS = {
    ArmKind.MASK: ArmKind.RANDOM_MASK,
    ArmKind.RULE: ArmKind.RANDOM_RULE,
    ArmKind.PLAN: ArmKind.RANDOM_PLAN,
    ArmKind.PRUNED: ArmKind.RANDOM_PRUNED,
}

_ABLATING = (ArmKind.MASK, ArmKind.RULE, ArmKind.RANDOM_MASK, ArmKind.RANDOM_RULE)

#: The kinds of controls as a list of SQL literals.
CONTROL_KINDS_SQL = ", ".join(f"'{kind}'" for kind in ArmKind if kind.is_control)
#: The random kinds as a list of SQL literals.
RANDOM_KINDS_SQL = ", ".join(f"'{kind}'" for kind in ArmKind if kind.is_random)
#: The kinds that ablate heads of the baseline's own model as a list of SQL literals.
ABLATING_KINDS_SQL = ", ".join(f"'{kind}'" for kind in _ABLATING)
