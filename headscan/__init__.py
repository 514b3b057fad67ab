"""Measure, ablate and rank the attention heads of a language model.

    lm = headscan.load("path-or-hub-name")
    stats = headscan.collect(lm, input_ids, lengths)
    headscan.score(stats, "output_norm_ln")
    with headscan.intervene(lm, headscan.HeadMask([(3, 5)])): ...
    lm.model.generate(**inputs, past_key_values=headscan.PlanCache(plan))
    headscan.save_pruned(headscan.slice_heads(lm, [(3, 5)]), "smaller-model")

Importing this package does not load torch; each public name imports its module when it is first used. The import also
registers pruned models with transformers, which has no entry point for model types: a finder on ``sys.meta_path`` waits
until a program imports transformers, and then removes itself.

At the top of the package, `loading` loads a model by its `model_spec`, and `grid` names its heads. `catalog` declares
statistics, scores and criteria. `windows` says which keys a KV cache keeps. `options` describes settings to the command
line, `errors` holds the errors of users, `long_work` keeps the numbers of long jobs, `text_tables` writes tables for a
terminal, and `architectures` holds small random models for tests.

The folders: `models`, `checkpoints` and `sizing` (a model, its files, its costs); `attention`, `statistics` and
`measure` (statistics of heads); `ablation` and `layers` (heads ablated, parts of a model run); `gradients` and `gates`
(heads judged by derivatives of the loss); `kv` and `pruning` (smaller caches, smaller models).

`cluster` does the same work on many devices. `store`, `ranking`, `verdicts`, `plans` and `report` say what the numbers
mean. The verbs: `steps` and their `settings`, `texts`, the `engine` that answers requests, the records of `runs`,
`export` and `study`; `jobs` calls them from Python, `cli` from the command line, and `demo` is the bundled model.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from headscan.catalog import BEHAVIOURS as BEHAVIOURS
from headscan.catalog import SCORES as SCORES
from headscan.catalog import STATISTICS as STATISTICS

if TYPE_CHECKING:
    # Not `open_store`, `load_plan` and `make_plan`: type checkers would follow them to the packages above this one,
    # which need duckdb.
    from headscan.ablation.collect_outputs import HeadSamples as HeadSamples
    from headscan.ablation.collect_outputs import head_means as head_means
    from headscan.ablation.collect_outputs import head_samples as head_samples
    from headscan.ablation.intervention import HeadMeans as HeadMeans
    from headscan.ablation.intervention import InterventionRecord as InterventionRecord
    from headscan.ablation.intervention import intervene as intervene
    from headscan.ablation.masks import HeadMask as HeadMask
    from headscan.ablation.masks import RandomHeads as RandomHeads
    from headscan.ablation.masks import SiteMask as SiteMask
    from headscan.ablation.rules import HeadRule as HeadRule
    from headscan.ablation.rules import ScoredAblation as ScoredAblation
    from headscan.catalog import MassWidths as MassWidths
    from headscan.errors import HeadscanError as HeadscanError
    from headscan.gradients.head_importance import importance as importance
    from headscan.grid import AttentionSite as AttentionSite
    from headscan.grid import Head as Head
    from headscan.grid import HeadGrid as HeadGrid
    from headscan.kv.kv_damage import kv_damage as kv_damage
    from headscan.kv.kv_windows import KvWindows as KvWindows
    from headscan.kv.plan_cache import PlanCache as PlanCache
    from headscan.loading import load as load
    from headscan.measure.behaviour_probes import Needle as Needle
    from headscan.measure.behaviour_probes import probe as probe
    from headscan.measure.collect import collect as collect
    from headscan.measure.probe_settings import BehaviourProbe as BehaviourProbe
    from headscan.models.loaded_model import LoadedModel as LoadedModel
    from headscan.models.loaded_model import Sharding as Sharding
    from headscan.pruning.save_model import save_pruned as save_pruned
    from headscan.pruning.slice_heads import slice_heads as slice_heads
    from headscan.statistics.scores import score as score
    from headscan.windows import KeptKeys as KeptKeys
    from headscan.windows import Window as Window

__version__ = "1.0.0rc1"

#: Home of each public name, which is imported when it is first used. Type checkers cannot read a table, and the imports
#: above would load torch if they ran, so both list the names; tests hold them against each other.
_HOMES = {
    "BEHAVIOURS": "catalog",
    "SCORES": "catalog",
    "STATISTICS": "catalog",
    "AttentionSite": "grid",
    "BehaviourProbe": "measure.probe_settings",
    "Head": "grid",
    "HeadGrid": "grid",
    "HeadMask": "ablation.masks",
    "HeadMeans": "ablation.intervention",
    "HeadRule": "ablation.rules",
    "HeadSamples": "ablation.collect_outputs",
    "HeadscanError": "errors",
    "InterventionRecord": "ablation.intervention",
    "KeptKeys": "windows",
    "KvWindows": "kv.kv_windows",
    "LoadedModel": "models.loaded_model",
    "MassWidths": "catalog",
    "Needle": "measure.behaviour_probes",
    "PlanCache": "kv.plan_cache",
    "RandomHeads": "ablation.masks",
    "ScoredAblation": "ablation.rules",
    "Sharding": "models.loaded_model",
    "SiteMask": "ablation.masks",
    "Window": "windows",
    "collect": "measure.collect",
    "head_means": "ablation.collect_outputs",
    "head_samples": "ablation.collect_outputs",
    "importance": "gradients.head_importance",
    "intervene": "ablation.intervention",
    "kv_damage": "kv.kv_damage",
    "load": "loading",
    "load_plan": "plans.head_plan",
    "make_plan": "plans.allocate",
    "open_store": "report.notebook_tables",
    "probe": "measure.behaviour_probes",
    "save_pruned": "pruning.save_model",
    "score": "statistics.scores",
    "slice_heads": "pruning.slice_heads",
}

# Type checkers read the imports above; a computed list would hide the names from them.
if not TYPE_CHECKING:
    __all__ = list(_HOMES)


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


#: The module of transformers that reads a model type from ``config.json``.
_MAPPINGS = "transformers.models.auto.configuration_auto"


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


# Let `AutoConfig` and `AutoModelForCausalLM` load pruned models, at once or when they are imported.
if _MAPPINGS in sys.modules:
    _register(sys.modules[_MAPPINGS])
elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
    sys.meta_path.insert(0, _AfterImport())
