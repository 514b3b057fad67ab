"""Effects of the heads of an ablate run: computed from stored answers, recorded, read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headscan.analysis.effects.paired_effects import Outcomes, TableEffect, best_of_each, each_effect
from headscan.analysis.effects.stored_outcomes import read_arms, read_baseline
from headscan.analysis.errors import EffectError
from headscan.analysis.schema.effect_tables import (
    ALL_BUT_ONE,
    EACH,
    FALSE_DISCOVERY_RATE,
    HEAD_EFFECTS,
    HIGHER_IS_BETTER,
)
from headscan.analysis.store.store import Store


@dataclass(frozen=True)
class HeadEffect:
    """A row of the table ``head_effects``, without the run; see the comments of its columns."""

    mode: str
    site: str
    layer: int
    head: int
    kv_head: int
    replacement: str
    metric: str
    baseline: float
    effect: float
    standard_error: float | None
    low: float | None
    high: float | None
    p_value: float
    q_value: float
    n: int
    confirmed: bool | None

    @property
    def harm(self) -> float:
        """The effect with the sign that is positive if the model gets worse."""
        return -self.effect if self.metric in HIGHER_IS_BETTER else self.effect

    @property
    def significant(self) -> bool:
        """True if the q-value is at most the false discovery rate.

        A loss that falls must also be confirmed.
        """
        believed = self.harm >= 0 or self.metric in HIGHER_IS_BETTER or bool(self.confirmed)
        return self.q_value <= FALSE_DISCOVERY_RATE and believed


class _HeadArm(NamedTuple):
    """A finished arm of one head."""

    arm_id: str
    mode: str
    site: str
    layer: int
    head: int
    kv_head: int
    replacement: str


def record_effects(store: Store, run_id: str) -> list[HeadEffect]:
    """Compute the effects of a run's finished modes, replace the stored ones, and return them.

    Raises:
        EffectError: The run has no baseline, no arms of heads, or no metric that can be paired.
    """
    arms = _head_arms(store, run_id)
    baseline, outcomes = read_baseline(store, run_id)
    found: list[HeadEffect] = []
    each = [arm for arm in arms if arm.mode == EACH]
    if each:
        values = read_arms(store, baseline, outcomes, [arm.arm_id for arm in each])
        rows = each_effect(outcomes, values)
        found += [_row(arm, outcomes, rows[arm.arm_id]) for arm in each]
    others = {arm.arm_id: arm for arm in arms if arm.mode == ALL_BUT_ONE}
    if others:
        values = read_arms(store, baseline, outcomes, list(others))
        layers: dict[object, dict[str, np.ndarray]] = defaultdict(dict)
        for arm_id, arm in others.items():
            layers[arm.site, arm.layer][arm_id] = values[arm_id]
        best = best_of_each(outcomes, layers)
        found += [_row(others[arm_id], outcomes, effect) for arm_id, effect in best.values()]
    if not found:
        raise EffectError(f"run {run_id} has 0 finished arms of heads (limit 1). Run `headscan ablate`")
    table = pa.Table.from_pylist([{"run_id": run_id, **asdict(effect)} for effect in found])
    store.replace_rows("head_effects", run_id, table.select(HEAD_EFFECTS.names))
    return found


def read_effects(store: Store, run_id: str, mode: str = EACH, *, site: str | None = None) -> list[HeadEffect]:
    """Return the stored effects of a run by layer and head; none if the run has none.

    Args:
        mode: Single heads, or all other heads of a layer.
        site: Kind of attention; None returns all.
    """
    rows = store.query(
        "SELECT * EXCLUDE (run_id) FROM head_effects WHERE run_id = ? AND mode = ? AND site = coalesce(?, site)"
        " ORDER BY site, layer, head",
        [run_id, mode, site],
    ).to_pylist()
    return [HeadEffect(**row) for row in rows]


def rank_effects(store: Store, run_id: str, *, site: str = "self", descending: bool = False) -> list[HeadEffect]:
    """Return the effects of single heads, least harm first; layer and head break ties.

    Args:
        descending: Most harm first.

    Raises:
        EffectError: The run has no effects of single heads at the site.
    """
    found = read_effects(store, run_id, site=site)
    if not found:
        raise EffectError(f"run {run_id} has no effects of single heads at site {site}. Run `headscan ablate --each`")
    return sorted(found, key=lambda effect: (-effect.harm if descending else effect.harm, effect.layer, effect.head))


def _row(arm: _HeadArm, outcomes: Outcomes, found: TableEffect) -> HeadEffect:
    effect = found.effect
    error, low, high = (
        value if isfinite(value) else None for value in (effect.standard_error, effect.low, effect.high)
    )
    return HeadEffect(
        *arm[1:],
        metric=outcomes.metric,
        baseline=effect.baseline,
        effect=effect.effect,
        standard_error=error,
        low=low,
        high=high,
        p_value=effect.p_value,
        q_value=found.q_value,
        n=effect.n,
        confirmed=found.confirmed,
    )


def _head_arms(store: Store, run_id: str) -> list[_HeadArm]:
    settings = ", ".join(
        f"(config ->> '$.{name}')::{kind} AS {name}"
        for name, kind in {"site": "VARCHAR", "layer": "INT", "head": "INT", "kv_head": "INT"}.items()
    )
    rows = store.query(
        f"SELECT arm_id, config ->> '$.mode' AS mode, {settings}, replacement FROM arms"
        " WHERE run_id = $1 AND status = 'finished' AND mode IS NOT NULL AND mode NOT IN"
        # A part of a table would give other q-values and other best heads.
        " (SELECT config ->> '$.mode' FROM arms WHERE run_id = $1 AND status <> 'finished'"
        " AND config ->> '$.mode' IS NOT NULL) ORDER BY ALL",
        [run_id],
    ).to_pylist()
    arms = [_HeadArm(**row) for row in rows]
    return sorted(arms, key=lambda arm: (arm.mode, arm.site, arm.layer, arm.head))


def effect_facts(effects: Sequence[HeadEffect]) -> dict[str, Any]:
    """Return counts of a table of effects."""
    significant = [effect for effect in effects if effect.significant]
    return {
        "heads": len(effects),
        "significant": len(significant),
        "harmful": sum(effect.harm > 0 for effect in significant),
        "helpful": sum(effect.harm < 0 for effect in significant),
        "confirmed": sum(bool(effect.confirmed) for effect in significant),
    }
