"""Pool task of a referee: the heads that criteria remove, chosen on the same texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from headscan.catalog import EFFECT, IMPORTANCES, SCORES
from headscan.gates.fit_gates import fit_gates
from headscan.grid import Head, HeadGrid
from headscan.models.loaded_model import LoadedModel
from headscan.options import GateConfig
from headscan.pipelines.pruning.calibration_texts import CalibrationTexts
from headscan.pipelines.settings.evaluation_settings import DAMAGE, GATE, LAYER_DROP, MEASURED
from headscan.pruning.calibration import Calibration
from headscan.pruning.head_selection import QUICK, HeadSelection
from headscan.pruning.head_values import head_values, ranked

#: Heads by their number.
Choices = Mapping[int, tuple[Head, ...]]


@dataclass(frozen=True)
class ChoiceJob:
    """Criteria to apply.

    Attributes:
        criteria: Criteria of one family, see `families`.
        counts: Numbers of heads.
        iterative: Measured criteria are measured again after each number of heads.
        batch_tokens: Tokens of one pass, padding included.
        say: Called with lines of progress.
    """

    texts: CalibrationTexts
    criteria: tuple[str, ...]
    counts: tuple[int, ...]
    iterative: bool = False
    batch_tokens: int = 8192
    say: Callable[[str], None] = lambda line: None
    name: str = "choice of heads"


def families(criteria: Sequence[str]) -> list[tuple[str, ...]]:
    """Return criteria in groups that share their measurements."""
    groups = (tuple(SCORES), tuple(IMPORTANCES), (EFFECT,), (GATE,), (DAMAGE, LAYER_DROP))
    found = [tuple(name for name in group if name in criteria) for group in groups]
    return [group for group in found if group]


def possible_counts(criterion: str, grid: HeadGrid, counts: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of heads for which a criterion has a choice: whole layers cannot be few heads."""
    if criterion != LAYER_DROP:
        return tuple(counts)
    return tuple(count for count in counts if 0 < layer_count(grid, count) < len(grid.sites))


def layer_count(grid: HeadGrid, heads: int) -> int:
    """Return the number of layers that have about as many heads."""
    return round(heads * len(grid.sites) / grid.total_heads)


def choose_heads(lm: LoadedModel, job: ChoiceJob) -> dict[str, Choices]:
    """Pool task: return the heads that each criterion removes, by their number."""
    ids, lengths = (torch.from_numpy(each) for each in (job.texts.ids, job.texts.lengths))
    calibration = Calibration(ids, lengths, job.batch_tokens)
    found: dict[str, Choices] = {}
    if measured := [name for name in job.criteria if name in MEASURED]:
        found |= _by_value(lm, calibration, job, measured)
    if GATE in job.criteria:
        job.say("fitting gates")
        share = job.counts[len(job.counts) // 2] / lm.grid.total_heads
        gates = fit_gates(lm, calibration, GateConfig(share=share))
        found[GATE] = {count: gates.closed(count) for count in job.counts}
    # Every criterion is one measurement: none compares its own choices with others nearby.
    selection = HeadSelection(lm, calibration, config=QUICK, say=job.say)
    if DAMAGE in job.criteria:
        found[DAMAGE] = {count: selection.choose(count=count) for count in job.counts}
    if LAYER_DROP in job.criteria:
        found[LAYER_DROP] = {
            count: selection.choose(method=LAYER_DROP, count=layer_count(lm.grid, count))
            for count in possible_counts(LAYER_DROP, lm.grid, job.counts)
        }
    return found


def _by_value(
    lm: LoadedModel, calibration: Calibration, job: ChoiceJob, names: Sequence[str]
) -> dict[str, dict[int, tuple[Head, ...]]]:
    """Return the heads with the smallest values."""
    if not job.iterative:
        job.say(f"measuring {', '.join(names)}")
        orders = {name: ranked(values) for name, values in head_values(lm, calibration, names).items()}
        return {name: {count: tuple(sorted(order[:count])) for count in job.counts} for name, order in orders.items()}
    found: dict[str, dict[int, tuple[Head, ...]]] = {name: {} for name in names}
    for name in names:
        removed: tuple[Head, ...] = ()
        for count in sorted(job.counts):
            job.say(f"measuring {name} without {len(removed)} heads")
            order = ranked(head_values(lm, calibration, [name], removed)[name], removed)
            removed = tuple(sorted([*removed, *order[: count - len(removed)]]))
            found[name][count] = removed
    return found
