"""Evidence of query heads, from a scan, and its reduction to KV heads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headscan.analysis.plans.format.calibrations import LengthBin, ScanCalibration
from headscan.analysis.plans.format.plan_records import Evidence, GroupValue, PlanError, PlannedModel, QueryHead
from headscan.analysis.store.store import Store


def measure_calibration(store: Store, run: Mapping[str, Any], bounded: int, sink: int, recent: int) -> ScanCalibration:
    """Return corpus and lengths of a scan; sequences of at most ``bounded`` tokens have no distant keys."""
    row = store.query(
        "SELECT count(*) AS sequences, coalesce(sum(tokens), 0)::BIGINT AS tokens, max(tokens) AS longest,"
        " count(*) FILTER (tokens > $2) AS evidence, coalesce(sum(greatest(tokens - $2, 0)), 0)::BIGINT AS queries"
        " FROM sequences WHERE run_id = $1",
        [run["run_id"], bounded],
    ).to_pylist()[0]
    if not row["evidence"]:
        raise PlanError(
            f"the longest of the {row['sequences']} sequences of run {run['run_id']} has {row['longest'] or 0} tokens,"
            f" at most the {bounded} of sink and recent, so their distant mass is zero by definition. Scan longer"
            f" sequences, or scan again with recent below {recent}"
        )
    bins = store.query(
        "SELECT floor(log2(greatest(tokens, 1)))::INTEGER AS power, count(*) AS sequences FROM sequences"
        " WHERE run_id = ? GROUP BY 1 ORDER BY 1",
        [run["run_id"]],
    ).to_pylist()
    return ScanCalibration(
        run_id=run["run_id"],
        corpus=run["corpus"],
        corpus_hash=run["corpus_hash"],
        tokenizer_hash=run["tokenizer_hash"],
        bos_policy=run["bos_policy"],
        dtype=str(run["dtype"]).removeprefix("torch."),
        attention_path=run["attention_path"],
        sequences=row["sequences"],
        tokens=row["tokens"],
        length_histogram=tuple(LengthBin(2 ** b["power"], 2 ** (b["power"] + 1), b["sequences"]) for b in bins),
        sink=sink,
        recent=recent,
        evidence_sequences=row["evidence"],
        evidence_queries=row["queries"],
        code_version=run["code_version"],
    )


def measure_query_heads(store: Store, run_id: str, bounded: int) -> list[QueryHead]:
    """Return the means of every measured query head over sequences of more than ``bounded`` tokens."""
    masses = store.query(
        "SELECT h.layer, h.head, h.kv_head, avg(h.sink_mass) AS sink_mass, avg(h.recent_mass) AS recent_mass,"
        " avg(h.distant_mass) AS distant_mass, sum(s.tokens * h.distant_mass::DOUBLE)"
        " / sum(s.tokens - $2) FILTER (h.distant_mass IS NOT NULL) AS far_mass"
        " FROM head_statistics h JOIN sequences s USING (run_id, sequence)"
        " WHERE run_id = $1 AND site = 'self' AND s.tokens > $2 GROUP BY ALL ORDER BY ALL",
        [run_id, bounded],
    ).to_pylist()
    scores = store.query(
        "SELECT layer, head, avg(entropy) AS entropy, avg(output_norm) AS output_norm,"
        " avg(output_norm_ln) AS output_norm_ln FROM head_scores WHERE run_id = $1 AND site = 'self'"
        " AND sequence IN (SELECT sequence FROM sequences WHERE run_id = $1 AND tokens > $2) GROUP BY ALL",
        [run_id, bounded],
    ).to_pylist()
    by_head = {(row["layer"], row["head"]): row for row in scores}
    rows = [{**row, **by_head[row["layer"], row["head"]]} for row in masses]
    for name in ("distant_mass", "output_norm"):
        if all(row[name] is None for row in rows):
            raise PlanError(
                f"run {run_id} did not measure {name}, which a plan requires. Scan again with {name} among the"
                " statistics"
            )
    for row in rows:
        far, norm = row["far_mass"], row["output_norm_ln"]
        if far is not None:
            # A share by definition, but single-precision rounding can exceed 0 or 1.
            row["far_mass"] = far = min(max(far, 0.0), 1.0)
        row["need"] = None if far is None or norm is None else far * norm
    return [QueryHead(**row) for row in rows]


def by_kv_head(query_heads: Iterable[QueryHead]) -> dict[tuple[int, int], list[QueryHead]]:
    """Group query heads by (layer, KV head)."""
    groups = defaultdict(list)
    for head in query_heads:
        groups[head.layer, head.kv_head].append(head)
    return dict(groups)


def reduce_group(group: Sequence[QueryHead]) -> Evidence:
    """Return the evidence of a KV head from the query heads that read it."""

    def reduced(name: str) -> GroupValue:
        values = [value for value in (getattr(head, name) for head in group) if value is not None]
        return GroupValue(max(values), sum(values) / len(values)) if values else GroupValue(None, None)

    values: dict[str, Any] = {name: reduced(name) for name in _GROUP_VALUES}
    return Evidence(**values)


#: Fields of ``Evidence`` that reduce a field of ``QueryHead``.
_GROUP_VALUES = tuple(name for name in Evidence.__dataclass_fields__ if name in QueryHead.__dataclass_fields__)


def readers_of(model: PlannedModel, query_heads: Sequence[QueryHead]) -> dict[tuple[int, int], list[QueryHead]]:
    """Return the query heads that read each KV head, including those of layers that share its cache."""
    own = by_kv_head(query_heads)
    readers = {place: list(group) for place, group in own.items()}
    for layer in model.layers:
        if layer.kv_shared_from is not None:
            for k in range(layer.num_key_value_heads):
                readers.setdefault((layer.kv_shared_from, k), []).extend(own.get((layer.layer, k), []))
    return readers


def group_maxima(
    model: PlannedModel, readers: Mapping[tuple[int, int], Sequence[QueryHead]], name: str
) -> dict[tuple[int, int], float]:
    """Return the largest value of the readers of each KV head of full layers; without heads that lack a value."""
    found: dict[tuple[int, int], float] = {}
    for layer in model.layers:
        if layer.type != "full":
            continue
        served = [each for each in model.layers if layer.layer in (each.layer, each.kv_shared_from)]
        expected = sum(each.num_attention_heads // each.num_key_value_heads for each in served)
        for k in range(layer.num_key_value_heads):
            values = [getattr(head, name) for head in readers.get((layer.layer, k), ())]
            known = [value for value in values if value is not None]
            if known and len(known) == expected:
                found[layer.layer, k] = max(known)
    return found


def sharing_notes(model: PlannedModel) -> list[str]:
    """Return a note for each layer whose cache later layers read too."""
    notes = []
    for layer in sorted({each.kv_shared_from for each in model.layers if each.kv_shared_from is not None}):
        readers = [str(each.layer) for each in model.layers if each.kv_shared_from == layer]
        notes.append(
            f"the cache of layer {layer} is also read by layer {', '.join(readers)}: its scores cover those query heads"
        )
    return notes
