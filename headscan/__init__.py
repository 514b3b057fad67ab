"""Measure, ablate and rank the attention heads of a decoder.

    lm = headscan.load("path-or-hub-name")
    stats = headscan.collect(lm, input_ids, lengths)
    headscan.score(stats, "output_norm_ln")
    with headscan.intervene(lm, headscan.HeadMask([(3, 5)])): ...
    lm.model.generate(**inputs, past_key_values=headscan.PlanCache(plan))
    headscan.save_pruned(headscan.slice_heads(lm, [(3, 5)]), "smaller-model")

Importing this package loads no torch; what needs it is imported when first asked for. It registers pruned models with
transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headscan.catalog import BEHAVIOURS, SCORES, STATISTICS
from headscan.pruning.format.registration import register_with_transformers

if TYPE_CHECKING:
    from headscan.ablation.ablation import intervene
    from headscan.ablation.collect_outputs import HeadSamples, head_means, head_samples
    from headscan.ablation.masks import HeadMask, RandomHeads
    from headscan.ablation.record import InterventionRecord
    from headscan.ablation.replacements import HeadMeans
    from headscan.ablation.rules import HeadRule
    from headscan.catalog import MassWidths
    from headscan.errors import HeadscanError
    from headscan.gradients.head_importance import importance
    from headscan.grid import AttentionSite, Head, HeadGrid
    from headscan.kv.kept_keys import KeptKeys, Window
    from headscan.kv.kv_damage import kv_damage
    from headscan.kv.kv_windows import KvWindows
    from headscan.kv.plan_cache import PlanCache
    from headscan.loading import load
    from headscan.measure.behaviour_probes import Needle, probe
    from headscan.measure.collect import collect, score
    from headscan.measure.probe_settings import BehaviourProbe
    from headscan.models.layout import Sharding
    from headscan.models.loaded_model import LoadedModel
    from headscan.pruning.save_model import save_pruned
    from headscan.pruning.slice_heads import slice_heads

__version__ = "1.0.0rc1"

_HOMES = {
    "AttentionSite": "grid",
    "BehaviourProbe": "measure.probe_settings",
    "Head": "grid",
    "HeadGrid": "grid",
    "HeadMask": "ablation.masks",
    "HeadMeans": "ablation.replacements",
    "HeadRule": "ablation.rules",
    "HeadSamples": "ablation.collect_outputs",
    "HeadscanError": "errors",
    "InterventionRecord": "ablation.record",
    "KeptKeys": "kv.kept_keys",
    "KvWindows": "kv.kv_windows",
    "LoadedModel": "models.loaded_model",
    "MassWidths": "catalog",
    "Needle": "measure.behaviour_probes",
    "PlanCache": "kv.plan_cache",
    "RandomHeads": "ablation.masks",
    "Sharding": "models.layout",
    "Window": "kv.kept_keys",
    "collect": "measure.collect",
    "head_means": "ablation.collect_outputs",
    "head_samples": "ablation.collect_outputs",
    "importance": "gradients.head_importance",
    "intervene": "ablation.ablation",
    "kv_damage": "kv.kv_damage",
    "load": "loading",
    "open_store": "analysis.store_tables",
    "probe": "measure.behaviour_probes",
    "save_pruned": "pruning.save_model",
    "score": "measure.collect",
    "slice_heads": "pruning.slice_heads",
}

__all__ = [
    "BEHAVIOURS",
    "SCORES",
    "STATISTICS",
    "AttentionSite",
    "BehaviourProbe",
    "Head",
    "HeadGrid",
    "HeadMask",
    "HeadMeans",
    "HeadRule",
    "HeadSamples",
    "HeadscanError",
    "InterventionRecord",
    "KeptKeys",
    "KvWindows",
    "LoadedModel",
    "MassWidths",
    "Needle",
    "PlanCache",
    "RandomHeads",
    "Sharding",
    "Window",
    "collect",
    "head_means",
    "head_samples",
    "importance",
    "intervene",
    "kv_damage",
    "load",
    "open_store",
    "probe",
    "save_pruned",
    "score",
    "slice_heads",
]

register_with_transformers()


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
