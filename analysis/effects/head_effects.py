"""Effects of the heads of an ablate run: computed from stored answers, recorded, read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headscan.analysis.effects.paired_effects import Outcomes, TableEffect, best_of_each, each_effect
from headscan.analysis.errors import EffectError
from headscan.analysis.schema.effect_tables import (
    ACCURACY,
    ALL_BUT_ONE,
    BITS_PER_BYTE,
    EACH,
    FALSE_DISCOVERY_RATE,
    HEAD_EFFECTS,
    LOSS,
)
from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.answer_sheets import CLOZE_SUFFIX
from headscan.analysis.verdicts.measures import RATES

#: Arms whose answers are in memory at a time.
_ARMS = 64


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
        return -self.effect if self.metric == ACCURACY else self.effect

    @property
    def significant(self) -> bool:
        """True if the q-value is at most the false discovery rate."""
        return self.q_value <= FALSE_DISCOVERY_RATE


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
    """Compute the effects of a run's finished arms, replace the stored ones, and return them.

    Raises:
        EffectError: The run has no baseline, or no metric that can be paired.
    """
    arms = _head_arms(store, run_id)
    baseline = _baseline(store, run_id)
    outcomes = _read_baseline(store, run_id, baseline)
    found: list[HeadEffect] = []
    each = [arm for arm in arms if arm.mode == EACH]
    if each:
        values = _read_arms(store, baseline, outcomes, each)
        rows = each_effect(outcomes, values)
        found += [_row(arm, outcomes, rows[arm.arm_id]) for arm in each]
    others = {arm.arm_id: arm for arm in arms if arm.mode == ALL_BUT_ONE}
    if others:
        values = _read_arms(store, baseline, outcomes, list(others.values()))
        layers: dict[object, dict[str, np.ndarray]] = defaultdict(dict)
        for arm_id, arm in others.items():
            layers[arm.site, arm.layer][arm_id] = values[arm_id]
        best = best_of_each(outcomes, layers)
        found += [_row(others[arm_id], outcomes, effect) for arm_id, effect in best.values()]
    columns = {column.name: [] for column in HEAD_EFFECTS.columns}
    rows_found = [{"run_id": run_id, **asdict(effect)} for effect in found]
    store.replace_effects(run_id, pa.Table.from_pylist(rows_found) if rows_found else pa.table(columns))
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
        " WHERE run_id = ? AND status = 'finished' AND config ->> '$.mode' IS NOT NULL ORDER BY ALL",
        [run_id],
    ).to_pylist()
    arms = [_HeadArm(**row) for row in rows]
    return sorted(arms, key=lambda arm: (arm.mode, arm.site, arm.layer, arm.head))


def _baseline(store: Store, run_id: str) -> str:
    """Return the id of the run's finished baseline."""
    found = store.query(
        "SELECT arm_id FROM arms WHERE run_id = ? AND kind = 'baseline' AND status = 'finished'", [run_id]
    )["arm_id"].to_pylist()
    if len(found) != 1:
        raise EffectError(f"run {run_id} has {len(found)} finished baselines (limit 1). Run its command again")
    return str(found[0])


def _read_baseline(store: Store, run_id: str, arm_id: str) -> Outcomes:
    """Return the outcomes of a baseline, of the first metric that it has."""
    for metric in (ACCURACY, LOSS, BITS_PER_BYTE):
        table = store.query(
            "SELECT task, coalesce(doc_hash, task || ' ' || question) AS document, question,"
            f" {_value(metric)} AS value, {_size(metric)} AS size"
            f" FROM answers WHERE arm_id = ? AND {_counts(metric)} ORDER BY task, question",
            [arm_id],
        )
        if not table.num_rows:
            continue
        tasks = [str(task).removesuffix(CLOZE_SUFFIX) for task in table["task"].to_pylist()]
        documents = table["document"].to_pylist()
        if len(set(documents)) == 1:  # texts of one document are the only units
            documents = [f"{documents[0]} {number}" for number in table["question"].to_pylist()]
        values, sizes = (table[name].to_numpy().astype(np.float64) for name in ("value", "size"))
        return Outcomes.of(metric, values, sizes, tasks, documents)
    raise EffectError(f"run {run_id} has neither right answers nor losses by text. Use other tasks, or a corpus")


def _read_arms(store: Store, baseline: str, outcomes: Outcomes, arms: Sequence[_HeadArm]) -> Mapping[str, np.ndarray]:
    """Return the outcomes (rows,) of arms by id."""
    chunks = (arms[start : start + _ARMS] for start in range(0, len(arms), _ARMS))
    return dict(pair for chunk in chunks for pair in _read_chunk(store, baseline, outcomes, chunk))


def _read_chunk(
    store: Store, baseline: str, outcomes: Outcomes, arms: Sequence[_HeadArm]
) -> Iterator[tuple[str, np.ndarray]]:
    metric = outcomes.metric
    table = store.query(
        f"SELECT a.arm_id, {_value(metric, 'a.')} AS value FROM answers a JOIN answers b USING (task, question)"
        f" WHERE b.arm_id = ? AND list_contains(?, a.arm_id) AND {_counts(metric, 'a.')} AND {_counts(metric, 'b.')}"
        f" AND {_size(metric, 'a.')} = {_size(metric, 'b.')} ORDER BY a.arm_id, task, question",
        [baseline, [arm.arm_id for arm in arms]],
    )
    arm_ids, values = table["arm_id"].to_numpy(), table["value"].to_numpy().astype(np.float64)
    for arm in arms:
        found = values[arm_ids == arm.arm_id]
        if len(found) != len(outcomes.baseline):
            raise EffectError(
                f"arm {arm.arm_id} has {len(found)} answers in common with the baseline (limit"
                f" {len(outcomes.baseline)}). Use a new store, and run its command again"
            )
        yield arm.arm_id, found


def _value(metric: str, prefix: str = "") -> str:
    """Return SQL of an outcome."""
    if metric == ACCURACY:
        return f"{prefix}correct"
    return f"{RATES[metric].factor} * ({prefix}metrics ->> '$.{metric}[0]')::DOUBLE"


def _size(metric: str, prefix: str = "") -> str:
    """Return SQL of the tokens or bytes of an outcome."""
    return "1.0" if metric == ACCURACY else f"({prefix}metrics ->> '$.{metric}[1]')::DOUBLE"


def _counts(metric: str, prefix: str = "") -> str:
    """Return SQL that is true for answers with an outcome."""
    if metric == ACCURACY:
        return f"{prefix}correct IS NOT NULL AND NOT {prefix}recall"
    return f"{prefix}correct IS NULL AND {_size(metric, prefix)} > 0"


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
