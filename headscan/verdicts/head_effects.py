"""Effects of ablated heads on one metric, paired by question or document, and the table of single heads."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headscan.errors import EffectError
from headscan.store.store import Store
from headscan.store.tables import (
    ACCURACY,
    ALL_BUT_ONE,
    BITS_PER_BYTE,
    BLEU,
    EACH,
    FALSE_DISCOVERY_RATE,
    HEAD_EFFECTS,
    HIGHER_IS_BETTER,
    LOSS,
)
from headscan.store.verdict_limits import TAIL, z_quantile
from headscan.verdicts.answer_sheets import CLOZE_SUFFIX, finished_arms
from headscan.verdicts.metrics import RATES
from headscan.verdicts.paired import Interval, QuestionClusters, paired_difference, t_quantile
from headscan.verdicts.ratio_estimates import estimate_ratio, resample_weights


def q_values(p_values: np.ndarray) -> np.ndarray:
    """Return the p-values (tests,) adjusted by Benjamini and Hochberg (1995). Among the tests with a q-value of at most
    q, the expected share of true null hypotheses is at most q, if the tests are independent or positively dependent.
    """
    from scipy.stats import false_discovery_control  # slow to import, and stored effects are read without it

    return np.asarray(false_discovery_control(p_values)) if len(p_values) else np.empty(0)


#: Least questions or documents in each half of a split.
_MIN_HALF_DOCUMENTS = 2


class Effect(NamedTuple):
    """Change of a metric by an ablation, with ablation minus baseline, in the metric's unit.

    Attributes:
        standard_error: Infinite with one document.
        low, high: 95 % interval; unbounded with too few documents.
        p_value: Two-sided; 1 with too few documents.
        n: Number of questions, or of documents.
    """

    baseline: float
    effect: float
    standard_error: float
    low: float
    high: float
    p_value: float
    n: int

    @property
    def interval(self) -> Interval:
        return Interval(self.low, self.effect, self.high)


@dataclass(frozen=True)
class PairedOutcomes:
    """Outcomes of a baseline, and the numbers that pair them with those of other arms, by row (rows,).

    Attributes:
        baseline: 0 to 1 for accuracy, otherwise a loss summed over a text.
        sizes: Tokens or bytes of the text; 1 for accuracy.
        strata: Numbers of the tasks.
        documents: Rows of one document are correlated, and in the same half.
        selecting: True for rows of the half that selects; the other half judges.
    """

    metric: str
    baseline: np.ndarray
    sizes: np.ndarray
    strata: np.ndarray
    documents: np.ndarray
    selecting: np.ndarray
    _clusters_by_rows: dict[bytes, QuestionClusters] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @classmethod
    def of(
        cls, metric: str, baseline: np.ndarray, sizes: np.ndarray, tasks: Sequence[str], documents: Sequence[str]
    ) -> PairedOutcomes:
        """Return outcomes of tasks and documents with names (rows,)."""
        strata, numbers = (np.unique(names, return_inverse=True)[1] for names in (tasks, documents))
        return cls(metric, baseline, sizes, strata, numbers, halves(documents, tasks))

    @property
    def can_split(self) -> bool:
        """True if each half has enough documents."""
        return all(
            len(np.unique(self.documents[part])) >= _MIN_HALF_DOCUMENTS for part in (self.selecting, ~self.selecting)
        )

    @property
    def better(self) -> int:
        """1 if more of the metric is better, otherwise -1."""
        return 1 if self.metric == ACCURACY else -1

    def effect(self, arm: np.ndarray, rows: np.ndarray | None = None) -> Effect:
        """Return the effect of an arm's outcomes (rows,) on ``rows`` (rows,) bool; None uses all rows."""
        kept = self._kept(rows)
        baseline_values, arm_values, sizes = self.baseline[kept], arm[kept], self.sizes[kept]
        level = float(baseline_values.sum() / sizes.sum())
        if self.metric == ACCURACY:
            clusters = self._clusters(kept)
            paired = paired_difference(baseline_values, arm_values, clusters)
            return Effect(
                level,
                paired.difference / 100,
                clusters.standard_error(arm_values - baseline_values),
                paired.low / 100,
                paired.high / 100,
                paired.p_value,
                len(baseline_values),
            )
        return Effect(level, *estimate_ratio(arm_values - baseline_values, sizes, self.documents[kept]))

    def change(self, arm: np.ndarray, rows: np.ndarray | None = None) -> float:
        """Return the change of the metric; `effect` also computes its interval."""
        kept = self._kept(rows)
        return float((arm[kept] - self.baseline[kept]).sum() / self.sizes[kept].sum())

    def _clusters(self, kept: np.ndarray) -> QuestionClusters:
        """Return how the kept rows fall into tasks and documents, which all arms share."""
        key = kept.tobytes()
        if key not in self._clusters_by_rows:
            self._clusters_by_rows[key] = QuestionClusters(int(kept.sum()), self.strata[kept], self.documents[kept])
        return self._clusters_by_rows[key]

    def _kept(self, rows: np.ndarray | None) -> np.ndarray:
        return np.ones(len(self.baseline), dtype=bool) if rows is None else rows


def halves(documents: Sequence[str], tasks: Sequence[str]) -> np.ndarray:
    """Return which rows select (rows,); the others judge. Whole documents are split, alternating by hash within each
    task, so that the order of rows decides nothing.
    """
    first: dict[str, str] = {}
    for document, task in zip(documents, tasks, strict=True):
        first[document] = min(first.get(document, task), task)
    members: dict[str, list[str]] = {}
    for document in sorted(first, key=lambda text: (hashlib.md5(text.encode()).hexdigest(), text)):
        members.setdefault(first[document], []).append(document)
    selecting = {document for task_members in members.values() for document in task_members[1::2]}
    return np.array([document in selecting for document in documents], dtype=bool)


class TableEffect(NamedTuple):
    """An effect in a table of effects; ``confirmed`` is the column of ``head_effects``."""

    effect: Effect
    q_value: float
    confirmed: bool | None


def each_effect(outcomes: PairedOutcomes, arms: Mapping[str, np.ndarray]) -> dict[str, TableEffect]:
    """Return the effects of arms, given as outcomes (rows,), on all rows, and whether halves agree."""
    effects = {name: outcomes.effect(arm) for name, arm in arms.items()}
    q = q_values(np.array([effect.p_value for effect in effects.values()]))
    confirmed: dict[str, bool | None] = dict.fromkeys(arms)
    if outcomes.can_split:
        confirmed = dict(_confirmed(outcomes, arms))
    return {
        name: TableEffect(effect, float(adjusted), confirmed[name])
        for (name, effect), adjusted in zip(effects.items(), q, strict=True)
    }


def _confirmed(outcomes: PairedOutcomes, arms: Mapping[str, np.ndarray]) -> dict[str, bool]:
    """Return which arms are significant in one half and judged alike by the other."""
    selecting = outcomes.selecting
    effects = {name: outcomes.effect(arm, selecting) for name, arm in arms.items()}
    q = q_values(np.array([effect.p_value for effect in effects.values()]))
    confirmed = {}
    for (name, effect), adjusted in zip(effects.items(), q, strict=True):
        confirmed[name] = bool(adjusted <= FALSE_DISCOVERY_RATE)
        if confirmed[name]:
            judging = outcomes.effect(arms[name], ~selecting)
            confirmed[name] = judging.low > 0 if effect.effect > 0 else judging.high < 0
    return confirmed


def best_of_each(
    outcomes: PairedOutcomes, groups: Mapping[object, Mapping[str, np.ndarray]]
) -> dict[object, tuple[str, TableEffect]]:
    """Return the best arm of each group, chosen by one half and judged by the other, from outcomes (rows,) by arm. If
    there are too few documents to split, all rows do both and the result is not confirmed. The first arm wins ties.
    """
    split = outcomes.can_split
    choosing, judging = (outcomes.selecting, ~outcomes.selecting) if split else (None, None)
    best: dict[object, tuple[str, Effect]] = {}
    for group, arms in groups.items():
        by_metric = {name: outcomes.better * outcomes.change(arm, choosing) for name, arm in arms.items()}
        name = max(by_metric, key=lambda each: by_metric[each])
        best[group] = (name, outcomes.effect(arms[name], judging))
    q = q_values(np.array([effect.p_value for _, effect in best.values()]))
    return {
        group: (name, TableEffect(effect, float(adjusted), True if split else None))
        for (group, (name, effect)), adjusted in zip(best.items(), q, strict=True)
    }


#: Counts of a sentence.
COUNTS = 10
#: Resamples of the bootstrap.
RESAMPLES = 1000


def bleu(counts: np.ndarray) -> np.ndarray:
    """Return BLEU, 0 to 100, of summed counts (..., 10), with the exponential smoothing of sacrebleu: the k-th order
    without a match counts as 1 / 2^k matches.
    """
    matches, grams = counts[..., :4].astype(float), counts[..., 4:8].astype(float)
    empty = (matches == 0) & (grams > 0)
    smoothed = np.where(empty, 0.5 ** np.cumsum(empty, -1), matches)
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.log(np.where(grams > 0, smoothed / grams, 0)).mean(-1)
        brevity = np.minimum(0, 1 - counts[..., 9] / counts[..., 8])
        score = 100 * np.exp(precision + brevity)
    # Without any matching word, or without 4-grams in the whole output, BLEU is 0.
    usable = (counts[..., 8] > 0) & (matches.sum(-1) > 0) & (grams > 0).all(-1)
    return np.where(usable, score, 0.0)


@dataclass(frozen=True)
class BleuOutcomes(PairedOutcomes):
    """Outputs of a baseline as counts of sentences (rows, 10), paired as in `PairedOutcomes`."""

    @property
    def better(self) -> int:
        return 1

    def effect(self, arm: np.ndarray, rows: np.ndarray | None = None) -> Effect:
        kept = self._kept(rows)
        baseline_counts = _by_document(self.baseline[kept], self.documents[kept])
        arm_counts = _by_document(arm[kept], self.documents[kept])
        documents = len(baseline_counts)
        level = float(bleu(baseline_counts.sum(0)))
        effect = float(bleu(arm_counts.sum(0))) - level
        sentences = int(kept.sum())
        if documents < 2:
            return Effect(level, effect, np.inf, -np.inf, np.inf, 1.0, sentences)
        if np.array_equal(baseline_counts, arm_counts):
            return Effect(level, 0.0, 0.0, 0.0, 0.0, 1.0, sentences)
        # Drawing all documents would make the variance too small (Rao and Wu 1988).
        drawn = resample_weights(BLEU, documents, documents - 1, RESAMPLES)
        changes = bleu(drawn @ arm_counts) - bleu(drawn @ baseline_counts)
        from scipy.special import stdtr  # slow to import, and stored effects are read without it

        freedom, error = documents - 1, float(changes.std(ddof=1))
        quantile = t_quantile(TAIL, freedom)
        # With few sentences a percentile is too near: the ends move out by the ratio of the t to the normal quantile.
        low, high = effect + quantile / z_quantile(TAIL) * (np.quantile(changes, [TAIL, 1 - TAIL]) - effect)
        low, high = min(low, effect - quantile * error), max(high, effect + quantile * error)
        # Counted resamples cannot give the small p-values that a correction over hundreds of heads needs.
        p_value = 2 * float(stdtr(freedom, -abs(effect) / error)) if error else 1.0
        return Effect(level, effect, error, float(low), float(high), p_value, sentences)

    def change(self, arm: np.ndarray, rows: np.ndarray | None = None) -> float:
        kept = self._kept(rows)
        return float(bleu(arm[kept].sum(0)) - bleu(self.baseline[kept].sum(0)))


def _by_document(counts: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Return the counts of each document (documents, 10); equal sentences are one."""
    number = np.unique(documents, return_inverse=True)[1]
    total = np.zeros((number.max() + 1, COUNTS))
    np.add.at(total, number, counts)
    return total


#: Arms whose answers are in memory at a time.
_ARMS = 64


def read_baseline(store: Store, run_id: str) -> tuple[str, PairedOutcomes]:
    """Return the id and the outcomes of a run's baseline, of the first metric that it has."""
    arm_id = finished_arms(store, run_id).baseline.arm_id
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
        values = _numbers(table["value"])
        if np.isinf(values).any():
            raise EffectError(
                f"the whole model has an infinite loss in run {run_id}, so no effect is known. Use another dtype, or"
                " other texts"
            )
        kind = BleuOutcomes if metric == BLEU else PairedOutcomes
        return arm_id, kind.of(metric, values, _numbers(table["size"]), tasks, documents)
    raise EffectError(f"run {run_id} has neither right answers nor losses by text. Use other tasks, or a corpus")


def read_arms(store: Store, baseline: str, outcomes: PairedOutcomes, arms: Sequence[str]) -> Mapping[str, np.ndarray]:
    """Return the outcomes (rows, ...) of arms by id."""
    chunks = (arms[start : start + _ARMS] for start in range(0, len(arms), _ARMS))
    return dict(pair for chunk in chunks for pair in _read_chunk(store, baseline, outcomes, chunk))


def _read_chunk(
    store: Store, baseline: str, outcomes: PairedOutcomes, arms: Sequence[str]
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
        arm_values = values[arm_ids == arm]
        if len(arm_values) != len(outcomes.baseline):
            raise EffectError(
                f"arm {arm} has {len(arm_values)} answers in common with the baseline (limit"
                f" {len(outcomes.baseline)}). Use a new store, and run its command again"
            )
        yield arm, arm_values


def _value(metric: str, prefix: str = "") -> str:
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
    def value(self) -> float:
        """The harm, as the number that orders heads of any ranking."""
        return self.harm

    @property
    def harm(self) -> float:
        """The effect with the sign that is positive if the model gets worse."""
        return -self.effect if self.metric in HIGHER_IS_BETTER else self.effect

    @property
    def significant(self) -> bool:
        """True if the q-value is at most the false discovery rate; a loss that falls must also be confirmed."""
        evidence = self.harm >= 0 or self.metric in HIGHER_IS_BETTER or bool(self.confirmed)
        return self.q_value <= FALSE_DISCOVERY_RATE and evidence


def record_effects(store: Store, run_id: str) -> list[HeadEffect]:
    """Compute the effects of a run's finished modes, replace the stored ones, and return them."""
    arms = _head_arms(store, run_id)
    baseline, outcomes = read_baseline(store, run_id)
    effects: list[HeadEffect] = []
    each = [arm_id for arm_id, arm in arms.items() if arm["mode"] == EACH]
    if each:
        rows = each_effect(outcomes, read_arms(store, baseline, outcomes, each))
        effects += [_head_effect(arms[arm_id], outcomes, rows[arm_id]) for arm_id in each]
    others = [arm_id for arm_id, arm in arms.items() if arm["mode"] == ALL_BUT_ONE]
    if others:
        values = read_arms(store, baseline, outcomes, others)
        layers: dict[object, dict[str, np.ndarray]] = defaultdict(dict)
        for arm_id in others:
            layers[arms[arm_id]["site"], arms[arm_id]["layer"]][arm_id] = values[arm_id]
        best = best_of_each(outcomes, layers)
        effects += [_head_effect(arms[arm_id], outcomes, effect) for arm_id, effect in best.values()]
    if not effects:
        raise EffectError(f"run {run_id} has 0 finished arms of heads (limit 1). Run `headscan ablate`")
    table = pa.Table.from_pylist([{"run_id": run_id, **asdict(effect)} for effect in effects])
    store.replace_rows("head_effects", run_id, table.select(HEAD_EFFECTS.names))
    return effects


def read_effects(store: Store, run_id: str, mode: str = EACH, *, site: str | None = None) -> list[HeadEffect]:
    """Return the stored effects of a run by layer and head, of all sites if ``site`` is None; empty if it has none."""
    rows = store.query(
        "SELECT * EXCLUDE (run_id) FROM head_effects WHERE run_id = ? AND mode = ? AND site = coalesce(?, site)"
        " ORDER BY site, layer, head",
        [run_id, mode, site],
    ).to_pylist()
    return [HeadEffect(**row) for row in rows]


def rank_effects(store: Store, run_id: str, *, site: str = "self", descending: bool | None = None) -> list[HeadEffect]:
    """Return the effects of single heads, least harm first; layer and head break ties. ``descending`` orders by the
    effect itself instead, highest or lowest first.
    """
    effects = read_effects(store, run_id, site=site)
    if not effects:
        raise EffectError(
            f"run {run_id} has no effects of single heads at site {site}. Ablate each with `headscan ablate`"
        )
    ranked = sorted(effects, key=lambda head: (head.harm, head.layer, head.head))
    return ranked if descending is None else sorted(ranked, key=lambda head: head.effect, reverse=descending)


def _head_effect(arm: Mapping[str, Any], outcomes: PairedOutcomes, judged: TableEffect) -> HeadEffect:
    numbers = judged.effect._asdict()
    numbers |= {name: None for name in ("standard_error", "low", "high") if not isfinite(numbers[name])}
    return HeadEffect(**arm, metric=outcomes.metric, **numbers, q_value=judged.q_value, confirmed=judged.confirmed)


def _head_arms(store: Store, run_id: str) -> dict[str, dict[str, Any]]:
    """Return the columns of `HeadEffect` that say what an arm ablates, by arm id."""
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
    rows.sort(key=lambda row: (row["mode"], row["site"], row["layer"], row["head"]))
    return {row.pop("arm_id"): row for row in rows}


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
