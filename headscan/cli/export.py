"""The verb export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from headscan.cli.verb_base import StoreOptions, StoreVerb, quiet_libraries
from headscan.export.formats import OF_STORE, ExportConfig, run_export
from headscan.options import Group
from headscan.steps.results import Json, Result
from headscan.text_tables import percent, text_table

if TYPE_CHECKING:
    from headscan.export.servable_model import HeldSize


@dataclass(frozen=True, kw_only=True)
class Export(StoreVerb):
    """export a model for a serving engine, a plan for a KV-cache tool, or the store as a Parquet data set

        headscan export gguf smaller/ --out smaller.gguf
        headscan export decilm smaller/ --out served/
        headscan export layer-types MODEL --plan layers.json --out served/
        headscan export vllm MODEL --plan head_plan.json --out served.json
        headscan export tensorrt-llm --plan layers.json --out kv_cache.yaml
        headscan export duoattention --plan head_plan.json --out pattern/
        headscan export parquet --store s.duckdb --out tables/

    `headscan plan --method imported` reads tables of layers x KV heads back; pipelines/read_with_kvpress.py reads that
    of duoattention with kvpress.
    """

    settings: Annotated[ExportConfig, Group()]
    json: Json = False
    store: Annotated[StoreOptions, Group(needs=f"format {','.join(OF_STORE)}")]

    def run(self) -> Result:
        config = self.settings
        if config.model is not None:
            quiet_libraries()
        done = run_export(config, self.store.open() if config.format in OF_STORE else None)
        lines = [*_size_lines(done.sizes), *done.lines]
        return Result([*done.sizes, *done.rows], lambda: "\n".join(lines), done.facts)


def _size_lines(sizes: Sequence[HeldSize]) -> list[str]:
    """Return a table of what the original, the model and the exported form hold, and what that form saves."""
    if not sizes:
        return []
    original, model, exported = sizes
    table = [
        {
            "model": each.model,
            "query heads": each.query_heads,
            "KV heads": each.kv_heads,
            "layers with attention": each.attention_layers,
            "KV bytes per token (16 bits)": f"{each.kv_bytes:,}",
            "parameters": f"{each.parameters:,}",
        }
        for each in sizes
    ]
    lines = [
        text_table(table),
        f"saved in the engine: {_share(original.kv_bytes, exported.kv_bytes)} of the KV cache, "
        f"{_share(original.parameters, exported.parameters)} of the weights",
    ]
    if exported.kv_heads != model.kv_heads or exported.query_heads != model.query_heads:
        lines.append(
            f"padding with zeros gives back {exported.kv_bytes - model.kv_bytes:,} KV bytes per token and "
            f"{exported.parameters - model.parameters:,} parameters"
        )
    return lines


def _share(before: int, after: int) -> str:
    return percent(1 - after / before)
