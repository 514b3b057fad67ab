"""Heads that criteria chose, kept as masks of the store so that an interrupted referee need not choose again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headscan.analysis.store.store import Store
from headscan.grid import Head
from headscan.pipelines.referee.choose_heads import Choices


@dataclass(frozen=True)
class StoredChoices:
    """The choices on one model and its texts.

    Attributes:
        mark: Hash of everything that choices depend on, apart from criterion and number.
    """

    store: Store
    mark: str

    def read(self, criterion: str, counts: Sequence[int]) -> Choices | None:
        """Return the stored heads of a criterion; None if one of the numbers is missing."""
        if not self.store.path.exists():
            return None
        rows = self.store.query(
            "SELECT name, layer, head FROM masks JOIN mask_heads USING (mask_id) WHERE list_contains(?, name)"
            " ORDER BY name, layer, head",
            [[self._name(criterion, count) for count in counts]],
        ).to_pylist()
        found = {
            count: tuple(Head(row["layer"], row["head"]) for row in rows if row["name"] == self._name(criterion, count))
            for count in counts
        }
        return found if all(found.values()) else None

    def write(self, criterion: str, choices: Choices) -> None:
        """Store the heads of a criterion, of all counts or none."""
        with self.store.one_transaction():
            for count, heads in choices.items():
                self.store.add_mask(self._name(criterion, count), heads, score=criterion)

    def _name(self, criterion: str, count: int) -> str:
        return f"{criterion}, {count} heads, texts {self.mark}"
