"""How many heads are inactive, by which criterion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headscan.analysis.report.answers.answer import Answer, Commands
from headscan.analysis.report.numbers.head_spread import MOSTLY, Spread, inactive_counts, persistence_text
from headscan.analysis.schema.views import INACTIVE_QUANTILE

QUESTION = "How many heads are inactive?"


def inactive_answer(
    spreads: Mapping[str, Spread], heads: int, preferred: Sequence[str], link: str, commands: Commands
) -> Answer:
    """Return the answer by the first measured score of ``preferred``, with the range of the others."""
    counts = dict(inactive_counts(spreads))
    name = next((name for name in (*preferred, *counts) if name in counts), None)
    if name is None:
        command = commands.on_model("scan", *commands.own_texts)
        why = "This scan has no score with an inactive end."
        return Answer(QUESTION, "Not measured", why, "missing", None, command)
    found = counts[name]
    detail = (
        f"By {name}: {persistence_text(found, heads)} are among the {INACTIVE_QUANTILE:.0%} most inactive"
        f" (sequence, head) of the scan in at least {MOSTLY:.0%} of the sequences."
    )
    if found.low is None:
        detail += " One sequence gives no interval."
    others = [other.heads for each, other in counts.items() if each != name]
    if others:
        detail += f" The {len(others)} other scores give {min(others):,} to {max(others):,} heads."
    detail += " Inactive is not removable: only an ablation shows that."
    return Answer(QUESTION, f"{found.heads:,} of {heads:,}", detail, "known", link)
