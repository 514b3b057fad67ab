"""The verb models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from headscan.cli.verb_base import quiet_libraries
from headscan.cluster.placement_base import device_name
from headscan.model_spec import ModelSpec
from headscan.options import Group, Option
from headscan.steps.results import Json, Result

if TYPE_CHECKING:
    from headscan.architectures import Family
    from headscan.grid import AttentionSite
    from headscan.models.loaded_model import LoadedModel


@dataclass(frozen=True, kw_only=True)
class Models:
    """list the architectures that can be measured, or the attention of one model

        headscan models
        headscan models MODEL

    The list holds the architectures that the tests compare with a float64 reference. Each is tried on a small random
    model with the installed transformers.
    """

    model: Annotated[ModelSpec | None, Group("model")] = None
    json: Json = False
    device: Annotated[str, Option("device for MODEL: auto, cpu, cuda or cuda:N", parse=device_name)] = "auto"

    def run(self) -> Result:
        import transformers

        from headscan.loading import load_spec

        quiet_libraries()
        rows = _known() if self.model is None else _sites(load_spec(self.model, self.device))
        held = None if self.model is not None else sum(row["fast"] != "refused" for row in rows)
        facts = {"model": None if self.model is None else self.model.source, "transformers": transformers.__version__}
        return Result(rows, lambda: _models_text(rows, held), facts)


def _models_text(rows: list[dict[str, Any]], held: int | None) -> str:
    """Return the table; with the number of architectures if it lists them."""
    import transformers

    from headscan.text_tables import text_table

    if held is None:
        return text_table(rows)
    return (
        f"{text_table(rows)}\n\n{held} architectures, with transformers {transformers.__version__}. Others are checked"
        " at load:\na model is refused if its heads cannot be separated or its attention function is unknown."
    )


def _known() -> list[dict[str, Any]]:
    from headscan.architectures import ENCODER_DECODERS, ENCODERS, FAMILIES, REFUSED, make_loaded
    from headscan.errors import UnsupportedModelError

    rows = []
    for kind, families in (("decoder", FAMILIES), ("encoder", ENCODERS), ("encoder-decoder", ENCODER_DECODERS)):
        for name, family in families.items():
            lm = make_loaded(name)
            rows.append({"architecture": name, "kind": kind, **_ways(lm), "notes": ", ".join(_notes(lm, family))})
    for name in REFUSED:
        try:
            make_loaded(name)
        except UnsupportedModelError as problem:
            rows.append({"architecture": name, "kind": "", "fast": "refused", "full": "refused", "notes": str(problem)})
    return rows


def _sites(lm: LoadedModel) -> list[dict[str, Any]]:
    rows = []
    for kind in lm.grid.kinds:
        seen = lm.at(kind)
        by_layer = {site.layer: site for site in seen.grid.sites}
        for layer in range(seen.grid.num_layers):
            rows.append({"site": kind, "layer": layer, **_facts(by_layer.get(layer))})
    return rows


def _facts(site: AttentionSite | None) -> dict[str, Any]:
    """Return the attention of a layer; None is a layer without attention."""
    return {
        "heads": site.num_attention_heads if site else 0,
        "kv_heads": site.num_key_value_heads if site else None,
        "key_width": (site.head_dim or None) if site else None,
        "value_width": site.value_dim if site else None,
        "window": site.sliding_window if site else None,
        "output_projection": site.output_projection if site else "(no softmax attention)",
    }


def _ways(lm: LoadedModel) -> dict[str, str]:
    """Return how each panel is measured: fused, blockwise, or from the model's own weights."""
    from headscan.catalog import PANELS, panel_names

    ways: dict[str, str] = {}
    for panel in PANELS:
        of_sites = [_way(lm.at(kind), panel_names(panel)) for kind in lm.grid.kinds]
        ways[panel] = " / ".join(dict.fromkeys(of_sites))
    return ways


def _way(lm: LoadedModel, statistics: tuple[str, ...]) -> str:
    import torch

    import headscan
    from headscan.errors import UnsupportedModelError

    try:
        headscan.collect(lm, torch.full((1, 40), 5), statistics=statistics, path="fused")
    except UnsupportedModelError:  # no fused path; 40 tokens exceed all windows of these models
        site = lm.grid.sites[0]
        return "blockwise" if site.by_interface or site.head_dim else "its own weights"
    return "fused"


def _notes(lm: LoadedModel, family: Family) -> list[str]:
    sites = [site for kind in lm.grid.kinds for site in lm.grid.at(kind).sites]
    notes = {
        "watched": not all(site.by_interface for site in sites),
        "hybrid": bool(lm.grid.layers_without_heads),
        "GQA": any(max(site.group_sizes) > 1 and site.num_key_value_heads > 1 for site in sites),
        "MQA": any(max(site.group_sizes) > 1 and site.num_key_value_heads == 1 for site in sites),
        "windows": any(site.sliding_window for site in sites),
        "values of another width": any(site.head_dim and site.head_dim != site.value_dim for site in sites),
        "learned sinks": family.learned_sinks,
        "gated": family.gated,
        "heads differ by layer": len({site.num_attention_heads for site in sites}) > 1,
    }
    return [note for note, holds in notes.items() if holds]
