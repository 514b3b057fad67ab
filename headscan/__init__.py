"""Measure, ablate and rank the attention heads of a language model.

    lm = headscan.load("path-or-hub-name")
    stats = headscan.collect(lm, input_ids, lengths)
    headscan.score(stats, "output_norm_ln")
    with headscan.intervene(lm, headscan.HeadMask([(3, 5)])): ...
    lm.model.generate(**inputs, past_key_values=headscan.PlanCache(plan))
    headscan.save_pruned(headscan.slice_heads(lm, [(3, 5)]), "smaller-model")

Importing this package loads no torch; what needs it is imported when first asked for. It registers pruned models with
transformers: a finder on ``sys.meta_path`` waits until a program imports transformers, which takes seconds, and then
removes itself. transformers has no entry point for model types.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from headscan.catalog import BEHAVIOURS, SCORES, STATISTICS

if TYPE_CHECKING:
    from headscan.ablation.ablation import HeadMeans, InterventionRecord, intervene
    from headscan.ablation.collect_outputs import HeadSamples, head_means, head_samples
    from headscan.ablation.masks import HeadMask, RandomHeads, SiteMask
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
    from headscan.models.loaded_model import LoadedModel, Sharding
    from headscan.pruning.save_model import save_pruned
    from headscan.pruning.slice_heads import slice_heads

    # Not `open_store`: type checkers would follow it to the packages above this one, which need duckdb.

__version__ = "1.0.0rc1"

_HOMES = {
    "AttentionSite": "grid",
    "BehaviourProbe": "measure.probe_settings",
    "Head": "grid",
    "HeadGrid": "grid",
    "HeadMask": "ablation.masks",
    "HeadMeans": "ablation.ablation",
    "HeadRule": "ablation.rules",
    "HeadSamples": "ablation.collect_outputs",
    "HeadscanError": "errors",
    "InterventionRecord": "ablation.ablation",
    "KeptKeys": "kv.kept_keys",
    "KvWindows": "kv.kv_windows",
    "LoadedModel": "models.loaded_model",
    "MassWidths": "catalog",
    "Needle": "measure.behaviour_probes",
    "PlanCache": "kv.plan_cache",
    "RandomHeads": "ablation.masks",
    "Sharding": "models.loaded_model",
    "SiteMask": "ablation.masks",
    "Window": "kv.kept_keys",
    "collect": "measure.collect",
    "head_means": "ablation.collect_outputs",
    "head_samples": "ablation.collect_outputs",
    "importance": "gradients.head_importance",
    "intervene": "ablation.ablation",
    "kv_damage": "kv.kv_damage",
    "load": "loading",
    "open_store": "analysis.notebook_tables",
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
    "SiteMask",
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


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


#: The module of transformers that reads a model type from ``config.json``.
_MAPPINGS = "transformers.models.auto.configuration_auto"


def register_with_transformers() -> None:
    """Let `AutoConfig` and `AutoModelForCausalLM` load pruned models, at once or when they are imported."""
    if _MAPPINGS in sys.modules:
        _register(sys.modules[_MAPPINGS])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register(mappings: ModuleType) -> None:
    # The import is here, because it loads torch.
    from headscan.pruning.format.pruned_model import MODEL_TYPE, PrunedConfig

    mappings.CONFIG_MAPPING.register(MODEL_TYPE, PrunedConfig, exist_ok=True)


class _AfterImport(MetaPathFinder):
    """A finder that registers pruned models after one import of `_MAPPINGS`, and then removes itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MAPPINGS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module)


register_with_transformers()
