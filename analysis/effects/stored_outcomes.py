"""Outcomes of a run's arms, read from stored answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from headscan.analysis.effects.bleu_outcomes import BleuOutcomes
from headscan.analysis.effects.paired_effects import Outcomes
from headscan.analysis.errors import EffectError
from headscan.analysis.schema.effect_tables import ACCURACY, BITS_PER_BYTE, BLEU, LOSS
from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.answer_sheets import CLOZE_SUFFIX
from headscan.analysis.verdicts.measures import RATES

#: Arms whose answers are in memory at a time.
_ARMS = 64


def _baseline_of(store: Store, run_id: str) -> str:
    """Return the id of the run's finished baseline."""
    found = store.query(
        "SELECT arm_id FROM arms WHERE run_id = ? AND kind = 'baseline' AND status = 'finished'", [run_id]
    )["arm_id"].to_pylist()
    if len(found) != 1:
        raise EffectError(f"run {run_id} has {len(found)} finished baselines (limit 1). Run its command again")
    return str(found[0])


def read_baseline(store: Store, run_id: str) -> tuple[str, Outcomes]:
    """Return the id and the outcomes of a run's baseline, of the first metric that it has.

    Raises:
        EffectError: The run has no baseline, or no metric that can be paired.
    """
    arm_id = _baseline_of(store, run_id)
    for metric in (ACCURACY, LOSS, BITS_PER_BYTE, BLEU):
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
        kind = BleuOutcomes if metric == BLEU else Outcomes
        return arm_id, kind.of(metric, _numbers(table["value"]), _numbers(table["size"]), tasks, documents)
    raise EffectError(f"run {run_id} has neither right answers nor losses by text. Use other tasks, or a corpus")


def read_arms(store: Store, baseline: str, outcomes: Outcomes, arms: Sequence[str]) -> Mapping[str, np.ndarray]:
    """Return the outcomes (rows, ...) of arms by id.

    Args:
        baseline: Id of the baseline.
        arms: Ids of the arms.

    Raises:
        EffectError: An arm lacks answers.
    """
    chunks = (arms[start : start + _ARMS] for start in range(0, len(arms), _ARMS))
    return dict(pair for chunk in chunks for pair in _read_chunk(store, baseline, outcomes, chunk))


def _read_chunk(
    store: Store, baseline: str, outcomes: Outcomes, arms: Sequence[str]
) -> Iterator[tuple[str, np.ndarray]]:
    metric = outcomes.metric
    table = store.query(
        f"SELECT a.arm_id, {_value(metric, 'a.')} AS value FROM answers a JOIN answers b USING (task, question)"
        f" WHERE b.arm_id = ? AND list_contains(?, a.arm_id) AND {_counts(metric, 'a.')} AND {_counts(metric, 'b.')}"
        f" AND {_size(metric, 'a.')} = {_size(metric, 'b.')} ORDER BY a.arm_id, task, question",
        [baseline, list(arms)],
    )
    arm_ids, values = table["arm_id"].to_numpy(), _numbers(table["value"])
    for arm in arms:
        found = values[arm_ids == arm]
        if len(found) != len(outcomes.baseline):
            raise EffectError(
                f"arm {arm} has {len(found)} answers in common with the baseline (limit"
                f" {len(outcomes.baseline)}). Use a new store, and run its command again"
            )
        yield arm, found


def _value(metric: str, prefix: str = "") -> str:
    """Return SQL of an outcome."""
    if metric == ACCURACY:
        return f"{prefix}correct"
    if metric == BLEU:
        return f"({prefix}metrics -> '$.{BLEU}')::DOUBLE[]"
    return f"{RATES[metric].factor} * ({prefix}metrics ->> '$.{metric}[0]')::DOUBLE"


def _size(metric: str, prefix: str = "") -> str:
    """Return SQL of the tokens or bytes of an outcome."""
    return "1.0" if metric in (ACCURACY, BLEU) else f"({prefix}metrics ->> '$.{metric}[1]')::DOUBLE"


def _counts(metric: str, prefix: str = "") -> str:
    """Return SQL that is true for answers with an outcome."""
    if metric == ACCURACY:
        return f"{prefix}correct IS NOT NULL AND NOT {prefix}recall"
    if metric == BLEU:
        return f"{prefix}correct IS NULL AND json_exists({prefix}metrics, '$.{BLEU}')"
    return f"{prefix}correct IS NULL AND {_size(metric, prefix)} > 0"


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """Return numbers (rows,), or lists of equal length (rows, numbers), as float64."""
    if pa.types.is_list(column.type):
        return np.array(column.to_pylist(), dtype=np.float64)
    return np.asarray(column.to_numpy()).astype(np.float64)
