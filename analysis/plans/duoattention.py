"""The DuoAttention folder format (arXiv 2410.10819), which kvpress also reads.

``full_attention_heads.tsv``: layers x KV heads, tab-separated, no header, 1 = keeps its full cache, 0 = streaming.
``config.json``: ``sink_size`` and ``recent_size`` in tokens, and ``sparsity``: consumers binarise the numbers at the
quantile of that sparsity, which reproduces a plan of zeros and ones exactly.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headscan.analysis.atomic_files import write_text
from headscan.analysis.plans.head_plan import HeadPlan, PlanError

HEADS_FILE = "full_attention_heads.tsv"
CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class DuoAttentionPattern:
    """Content of a DuoAttention folder.

    Attributes:
        heads: (layers, KV heads) 0 to 1, high = keeps its full cache.
        sparsity: Intended share of streaming heads; None in folders of other tools.
    """

    heads: np.ndarray
    sink_size: int
    recent_size: int
    sparsity: float | None


def export_duoattention(plan: HeadPlan, folder: str | Path) -> list[Path]:
    """Write a plan as a DuoAttention folder, each file atomically.

    Heads that cannot get a window (sliding layers, MLA, layers that share a cache) are written as 1.

    Returns:
        The paths of both files.

    Raises:
        PlanError: The format cannot hold the plan: layers without attention or with different numbers of KV heads, no
            window heads, or windows of several widths.
        OutputError: The folder cannot be written.
    """
    target = Path(folder)
    counts = {layer.num_key_value_heads for layer in plan.model.layers}
    if len(counts) != 1:
        raise PlanError(
            f"layers of {plan.model.name} have {' and '.join(map(str, sorted(counts)))} KV heads; a DuoAttention folder"
            " has one number for all layers. Use head_plan.json"
        )
    if [layer.layer for layer in plan.model.layers] != list(range(plan.model.num_layers)):
        raise PlanError(
            f"{len(plan.model.layers)} of the {plan.model.num_layers} layers of {plan.model.name} have attention; a"
            " DuoAttention folder has a row for every layer. Use head_plan.json"
        )
    widths = {(head.sink, head.recent) for head in plan.heads if head.action == "window"}
    if len(widths) != 1:
        found = " and ".join(f"{s} + {r}" for s, r in sorted(widths, key=str)) or "none"
        raise PlanError(
            f"the plan has windows of sink + recent {found}; a DuoAttention folder has exactly one width. Give all"
            " window heads the same width, or use head_plan.json"
        )
    (sink, recent) = widths.pop()
    full = np.array([head.action == "full" for head in plan.heads], dtype=np.float64).reshape(-1, counts.pop())
    text = io.StringIO()
    np.savetxt(text, full, delimiter="\t")
    config = {"sink_size": sink, "recent_size": recent, "sparsity": 1.0 - float(full.mean())}
    # The configuration is written last, so a folder without it is incomplete.
    return [
        write_text(target / HEADS_FILE, text.getvalue()),
        write_text(target / CONFIG_FILE, json.dumps(config, indent=2) + "\n"),
    ]


def load_duoattention(folder: str | Path) -> DuoAttentionPattern:
    """Read a DuoAttention folder; numbers are clipped to 0 to 1, as its consumers do.

    Raises:
        PlanError: A file is missing or has another format.
    """
    source = Path(folder)
    try:
        heads = np.loadtxt(source / HEADS_FILE, dtype=np.float64, delimiter="\t", ndmin=2)
        config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
        sparsity = config.get("sparsity")
        return DuoAttentionPattern(
            heads=np.clip(heads, 0, 1),
            sink_size=int(config["sink_size"]),
            recent_size=int(config["recent_size"]),
            sparsity=None if sparsity is None else float(sparsity),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(
            f"{source} is not a DuoAttention folder ({error}). Name a folder with {HEADS_FILE} and {CONFIG_FILE}"
        ) from error
