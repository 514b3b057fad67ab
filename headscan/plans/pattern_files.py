"""Head patterns of other projects: their files, and their conversion from and to plans."""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headscan.errors import first_line
from headscan.plans.head_plan import HeadPlan
from headscan.plans.plan_records import PatternFormat, PlanError, PlannedModel
from headscan.store.output_files import write_text
from headscan.windows import DROPPED

#: Values below it stand for window heads if a pattern states no sparsity; DuoAttention and PruLong use the same.
THRESHOLD = 0.5


@dataclass(frozen=True)
class HeadPattern:
    """Numbers of a pattern file, with its settings.

    Attributes:
        values: (layers, heads) as in the file, turned around if ``inverted``: high = keeps its full cache.
        heads: What a column stands for.
        sink_size: First tokens of a window head; None if not stated, as for ``recent_size``.
        sparsity: Share of window heads; None if not stated.
        inverted: Low numbers keep the full cache in the file.
        notes: Doubts about the numbers.
    """

    format: PatternFormat
    path: str
    sha256: str
    values: np.ndarray
    heads: Literal["kv_head", "query_head"]
    sink_size: int | None = None
    recent_size: int | None = None
    sparsity: float | None = None
    inverted: bool = False
    notes: tuple[str, ...] = ()

    @property
    def keep(self) -> np.ndarray:
        """Numbers clipped to 0 to 1, as consumers do."""
        return np.clip(self.values, 0, 1)

    @property
    def binary(self) -> bool:
        """True if all numbers are 0 or 1."""
        return bool(np.isin(self.keep, (0, 1)).all())

    @property
    def stated_window_heads(self) -> int | None:
        """Number of window heads by the stated sparsity, as consumers cut at its quantile; None if not stated."""
        if self.sparsity is None:
            return None
        if self.sparsity >= 1:
            return self.values.size
        return math.ceil((self.values.size - 1) * self.sparsity - 1e-9)

    def for_model(self, model: PlannedModel) -> dict[tuple[int, int], float]:
        """Return the number of each (layer, KV head); a KV head gets the largest of its query heads."""
        rows, columns = self.values.shape
        kinds = {(layer.num_attention_heads, layer.num_key_value_heads) for layer in model.layers}
        per_layer = " and ".join(f"{queries} query and {kvs} KV heads" for queries, kvs in sorted(kinds))
        expected = {queries if self.heads == "query_head" else kvs for queries, kvs in kinds}
        if [layer.layer for layer in model.layers] != list(range(rows)) or expected != {columns}:
            unit = self.heads.replace("_", " ").replace("kv", "KV")
            raise PlanError(
                f"{self.path} has {rows} layers of {columns} {unit}s, but {model.name} has {model.num_layers} layers,"
                f" {len(model.layers)} of them with attention of {per_layer}. Import a pattern of this model"
            )
        value_of: dict[tuple[int, int], float] = {}
        for layer in model.layers:
            groups = self.values[layer.layer].reshape(layer.num_key_value_heads, -1).max(1)
            value_of |= {(layer.layer, kv_head): float(value) for kv_head, value in enumerate(groups)}
        return value_of


def checked_polarity(pattern: HeadPattern, inverted: bool | None) -> HeadPattern:
    """Return a pattern read as in its file with high = keeps its full cache. True for ``inverted`` turns the numbers
    around, False trusts them, and None checks them: the count of low numbers shows the polarity where the pattern
    states its sparsity, which is the share of window heads; so does a stated window that no head would use.
    """
    if inverted:
        return replace(pattern, values=1 - pattern.values, inverted=True)
    if inverted is False or pattern.heads == "query_head":
        return pattern
    total = pattern.values.size
    low = int((pattern.values < THRESHOLD).sum())
    ways = "`inverted=True` if low numbers keep the full cache, or with `inverted=False` if the numbers are right"
    stated = pattern.stated_window_heads
    if stated is None:
        if pattern.binary and low == 0 and pattern.recent_size:
            raise PlanError(
                f"inverted polarity: all {total} heads of {pattern.path} have 1, so none would use its window of"
                f" {pattern.sink_size} + {pattern.recent_size} tokens. Import it with {ways}"
            )
        return pattern
    # Tools round the share to a count in different ways.
    fits, inverse_fits = abs(low - stated) <= 1, abs(total - low - stated) <= 1
    if inverse_fits and not fits:
        raise PlanError(
            f"inverted polarity: {low} of {total} heads of {pattern.path} are low, but it states sparsity"
            f" {pattern.sparsity:g}, that is {stated} window heads, which is the number of high ones. Import it with"
            f" {ways}"
        )
    if pattern.binary and not fits:
        doubt = f"{low} of {total} heads of the pattern are 0, but it states sparsity {pattern.sparsity:g}"
        return replace(pattern, notes=(*pattern.notes, doubt))
    return pattern


#: Formats that can be written, and the file of their table.
TABLE_FILES: dict[PatternFormat, str] = {
    "duoattention": "full_attention_heads.tsv",
    "rlkv": "adapter_weights.tsv",
    "prulong": "masks.tsv",
}
CONFIG_FILE = "config.json"

_PRULONG_SPARSITY = re.compile(r"masks_sp(?P<sparsity>\d+(\.\d+)?)\.tsv")
_KEY = re.compile(r"(?P<layer>\d+)-(?P<head>\d+)")


def write_pattern(plan: HeadPlan, folder: str | Path, format: PatternFormat = "duoattention") -> list[Path]:
    """Write a plan as a table of zeros (window) and ones (full), each file atomically; return the paths of the table
    and of ``config.json``. Heads that cannot get a window (sliding layers, MLA, layers that share a cache) are written
    as 1.
    """
    if format not in TABLE_FILES:
        raise PlanError(f"{format} cannot be written. Choose one of {', '.join(TABLE_FILES)}")
    target = Path(folder)
    counts = {layer.num_key_value_heads for layer in plan.model.layers}
    if len(counts) != 1:
        raise PlanError(
            f"layers of {plan.model.name} have {' and '.join(map(str, sorted(counts)))} KV heads; {format} has one"
            " number for all layers. Use head_plan.json"
        )
    if len(plan.model.layers) != plan.model.num_layers:
        raise PlanError(
            f"{len(plan.model.layers)} of the {plan.model.num_layers} layers of {plan.model.name} have attention;"
            f" {format} has a row for every layer. Use head_plan.json"
        )
    if dropped := sum(head.window == DROPPED for head in plan.heads):
        raise PlanError(f"the plan drops {dropped} KV heads; {format} has windows only. Use head_plan.json")
    widths = sorted({(window.sink, window.recent) for window in plan.windows.values() if window is not None})
    if len(widths) != 1:
        shown_widths = " and ".join(f"{s} + {r}" for s, r in widths) or "none"
        raise PlanError(
            f"the plan has windows of sink + recent {shown_widths}; {format} has exactly one width. Give all window"
            " heads the same width, or use head_plan.json"
        )
    ((sink, recent),) = widths
    full = np.array([head.window is None for head in plan.heads], dtype=np.float64).reshape(-1, counts.pop())
    text = io.StringIO()
    np.savetxt(text, full, delimiter="\t")
    config = {"sink_size": sink, "recent_size": recent, "sparsity": 1.0 - float(full.mean())}
    _check_config(target / CONFIG_FILE, config.keys())
    # The configuration is written last, so a folder without it is incomplete.
    return [
        write_text(target / TABLE_FILES[format], text.getvalue()),
        write_text(target / CONFIG_FILE, json.dumps(config, indent=2) + "\n"),
    ]


def _check_config(file: Path, names: Set[str]) -> None:
    """Raise if a file that would be replaced has more than the settings of a pattern: it is that of a model, or of the
    tool that trained the pattern.
    """
    if not file.exists():
        return
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        held = None
    if not isinstance(held, dict) or not held.keys() <= names:
        raise PlanError(f"{file} has further settings, which would be lost. Choose another folder")


def read_pattern(path: str | Path, *, inverted: bool | None = None) -> HeadPattern:
    """Read a pattern; the name of the file decides the format.

    Args:
        path: A table (``.tsv``), a HeadKV file (``.json``), or a folder with one of the tables.
        inverted: True if low numbers keep the full cache; False if high ones do; None assumes the latter and checks it
            where the pattern states its sparsity.
    """
    source = _table_file(Path(path))
    try:
        raw = source.read_bytes()
    except OSError as error:
        raise PlanError(f"cannot read {source} ({error.strerror}). Name a pattern's file or folder") from error
    sha256 = hashlib.sha256(raw).hexdigest()
    if source.suffix == ".json":
        scores = _headkv_scores(source, raw)
        return checked_polarity(HeadPattern("headkv", str(source), sha256, scores, "query_head"), inverted)
    format = _format_of(source)
    if not raw.strip():
        raise PlanError(f"{source} is empty. Name a complete {format} file")
    try:
        values = np.loadtxt(
            io.StringIO(raw.decode(json.detect_encoding(raw))), dtype=np.float64, delimiter="\t", ndmin=2
        )
    except ValueError as error:
        raise PlanError(
            f"{source} is not a complete table of numbers ({first_line(error)}). Name a {format} file with a number "
            "for every head"
        ) from error
    if not np.isfinite(values).all():
        layer, head = np.argwhere(~np.isfinite(values))[0].tolist()
        raise PlanError(
            f"{source} lacks head {head} of layer {layer}. Name a {format} file with a number for every head"
        )
    config = _settings(source, required=format == "duoattention")
    named = _PRULONG_SPARSITY.fullmatch(source.name)
    if named and config["sparsity"] is None:
        config["sparsity"] = float(named["sparsity"])
    return checked_polarity(HeadPattern(format, str(source), sha256, values, "kv_head", **config), inverted)


def _table_file(path: Path) -> Path:
    """Return the file of a pattern, which may be named by its folder."""
    if not path.is_dir():
        return path
    rows = sorted(
        p for p in path.glob("*.tsv") if p.name in TABLE_FILES.values() or _PRULONG_SPARSITY.fullmatch(p.name)
    )
    if len(rows) != 1:
        names = ", ".join(p.name for p in rows) or "none"
        raise PlanError(
            f"{path} has {len(rows)} tables of heads ({names}; limit 1 of {', '.join(TABLE_FILES.values())}). Name the"
            " file"
        )
    return rows[0]


def _format_of(source: Path) -> PatternFormat:
    for name, file in TABLE_FILES.items():
        if source.name == file:
            return name
    if _PRULONG_SPARSITY.fullmatch(source.name):
        return "prulong"
    known = ", ".join([*TABLE_FILES.values(), "masks_sp*.tsv", "*.json"])
    raise PlanError(f"cannot tell the format of {source} from its name. Rename it to one of {known}")


def _settings(source: Path, *, required: bool) -> dict[str, Any]:
    """Return sink, recent and sparsity of the configuration next to a table; None where not stated."""
    path = source.parent / CONFIG_FILE
    if not required and not path.exists():
        return {"sink_size": None, "recent_size": None, "sparsity": None}
    try:
        config = json.loads(path.read_bytes())
        settings: dict[str, Any] = {}
        for name in ("sink_size", "recent_size"):
            value = config[name] if required else config.get(name)
            settings[name] = None if value is None else int(value)
        sparsity = config.get("sparsity")
        settings["sparsity"] = None if sparsity is None else float(sparsity)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(
            f"{path} does not state sink_size and recent_size ({first_line(error)}). Complete it, or name "
            "another pattern"
        ) from error
    if settings["sparsity"] is not None and not 0 <= settings["sparsity"] <= 1:
        raise PlanError(f"sparsity of {path} out of range: {settings['sparsity']:g} (limit 0 to 1). Correct it")
    return settings


def _headkv_scores(source: Path, raw: bytes) -> np.ndarray:
    """Return the mean score of each query head over the largest mean, (layers, query heads)."""
    try:
        data = json.loads(raw)
    except ValueError as error:
        raise PlanError(f"{source} is not JSON ({first_line(error)}). Name a HeadKV file") from error
    means: dict[tuple[int, int], float] = {}
    for key, value in data.items() if isinstance(data, dict) else ():
        match = _KEY.fullmatch(key)
        numbers = value if isinstance(value, list) else [value]
        if match is None or not numbers or not all(isinstance(n, int | float) and np.isfinite(n) for n in numbers):
            raise PlanError(f"{source} has entry {key!r}, which is not 'layer-head' with numbers. Name a HeadKV file")
        means[int(match["layer"]), int(match["head"])] = float(np.mean(numbers))
    if not means or max(means.values()) <= 0:
        raise PlanError(f"{source} has no head with a score above 0. Name a HeadKV file")
    layers, heads = (1 + max(place[i] for place in means) for i in (0, 1))
    values = np.full((layers, heads), np.nan)
    for place, mean in means.items():
        values[place] = mean
    if np.isnan(values).any():
        layer, head = np.argwhere(np.isnan(values))[0].tolist()
        raise PlanError(f"{source} lacks query head {head} of layer {layer}. Name a complete HeadKV file")
    return values / max(means.values())
