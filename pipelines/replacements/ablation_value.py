"""The value that an arm tests: what replaces the output of its heads, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, field

from headscan.ablation.replacements import ZERO, Replacement


@dataclass(frozen=True)
class AblationValue:
    """A replacement, identified by the texts that it was collected on.

    Its numbers do not identify it, because other kernels round them differently.

    Attributes:
        replacement: What replaces the output of ablated heads.
        mark: First digits of a hash of its texts; empty for zero.
        source: Further settings for the store.
    """

    replacement: Replacement = ZERO
    mark: str = ""
    source: tuple[tuple[str, object], ...] = field(default=())

    @property
    def suffix(self) -> str:
        """The end of an arm's name; empty for zero."""
        return f" by {self.replacement.value} {self.mark}" if self.mark else ""

    @property
    def details(self) -> tuple[tuple[str, object], ...]:
        """Settings of an arm; empty for zero."""
        return (("replacement_texts", dict(self.source)),) if self.mark else ()


ZERO_VALUE = AblationValue()
