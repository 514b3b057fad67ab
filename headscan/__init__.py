"""Measure, ablate and rank the attention heads of a language model.

    lm = headscan.load("path-or-hub-name")
    stats = headscan.collect(lm, input_ids, lengths)
    headscan.score(stats, "output_norm_ln")
    with headscan.intervene(lm, headscan.HeadMask([(3, 5)])): ...
    lm.model.generate(**inputs, past_key_values=headscan.PlanCache(plan))
    headscan.save_pruned(headscan.slice_heads(lm, [(3, 5)]), "smaller-model")
    headscan.Scan(model="path-or-hub-name", corpus="texts/").run("s.duckdb")

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
mean. The verbs: `steps` and the `settings` that they share, `texts`, the `engine` that answers requests, the records of
`runs`, `export` and `study`; `cli` is the command line, and `demo` the bundled model.
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
    from headscan.cluster.placement_base import PlacementRequest as PlacementRequest
    from headscan.cluster.placement_base import Timeouts as Timeouts
    from headscan.engine.arms import BASELINE as BASELINE
    from headscan.engine.arms import Arm as Arm
    from headscan.engine.arms import mask_arm as mask_arm
    from headscan.engine.arms import random_controls as random_controls
    from headscan.engine.arms import rule_arm as rule_arm
    from headscan.errors import HeadscanError as HeadscanError
    from headscan.export.formats import ExportConfig as ExportConfig
    from headscan.export.formats import Exported as Exported
    from headscan.export.formats import run_export as run_export
    from headscan.gates.gate_settings import GateFitConfig as GateFitConfig
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
    from headscan.model_spec import ModelSpec as ModelSpec
    from headscan.models.loaded_model import LoadedModel as LoadedModel
    from headscan.models.loaded_model import Sharding as Sharding
    from headscan.plans import HeadPlan as HeadPlan
    from headscan.plans import KVBytes as KVBytes
    from headscan.plans import LossLimit as LossLimit
    from headscan.plans import WindowHeads as WindowHeads
    from headscan.plans import WindowShare as WindowShare
    from headscan.plans.allocate import make_plan as make_plan
    from headscan.plans.head_plan import load_plan as load_plan
    from headscan.pruning.save_model import save_pruned as save_pruned
    from headscan.pruning.selection_settings import SelectionConfig as SelectionConfig
    from headscan.pruning.slice_heads import slice_heads as slice_heads
    from headscan.report.notebook_tables import open_store as open_store
    from headscan.settings.corpus_settings import CorpusSpec as CorpusSpec
    from headscan.settings.corpus_settings import ExamplesSpec as ExamplesSpec
    from headscan.settings.corpus_settings import TokenConfig as TokenConfig
    from headscan.settings.evaluation_settings import ChosenArms as ChosenArms
    from headscan.settings.evaluation_settings import CriteriaComparison as CriteriaComparison
    from headscan.settings.evaluation_settings import LossTexts as LossTexts
    from headscan.settings.evaluation_settings import RecallQuestions as RecallQuestions
    from headscan.settings.evaluation_settings import ReplacementConfig as ReplacementConfig
    from headscan.settings.evaluation_settings import TaskConfig as TaskConfig
    from headscan.settings.saving_settings import PruneTexts as PruneTexts
    from headscan.settings.saving_settings import RecallPrompts as RecallPrompts
    from headscan.statistics.scores import score as score
    from headscan.steps.ablate import Ablate as Ablate
    from headscan.steps.evaluate import Evaluate as Evaluate
    from headscan.steps.gates import Gates as Gates
    from headscan.steps.generate import Generate as Generate
    from headscan.steps.importance import Importance as Importance
    from headscan.steps.open_run import JobOptions as JobOptions
    from headscan.steps.plan import Plan as Plan
    from headscan.steps.probe import Probe as Probe
    from headscan.steps.prune.prune_step import Prune as Prune
    from headscan.steps.prune.prune_step import RepairChoice as RepairChoice
    from headscan.steps.prune.prune_step import Timing as Timing
    from headscan.steps.prune.pruned_arms import BuiltModel as BuiltModel
    from headscan.steps.prune.run_prune import PruneResult as PruneResult
    from headscan.steps.referee.referee_step import Referee as Referee
    from headscan.steps.referee.run_labelled_referee import LabelledRefereeResult as LabelledRefereeResult
    from headscan.steps.run_ablate import AblateResult as AblateResult
    from headscan.steps.run_corpus import CorpusRunResult as CorpusRunResult
    from headscan.steps.run_gates import GatesResult as GatesResult
    from headscan.steps.run_generate import Generated as Generated
    from headscan.steps.run_generate import GenerationComparison as GenerationComparison
    from headscan.steps.run_probe import ProbeResult as ProbeResult
    from headscan.steps.run_sweep import SweepResult as SweepResult
    from headscan.steps.scan import Part as Part
    from headscan.steps.scan import Scan as Scan
    from headscan.steps.sweep import Sweep as Sweep
    from headscan.store.records import ArmKind as ArmKind
    from headscan.study.study_answer import Saving as Saving
    from headscan.study.study_answer import StudyAnswer as StudyAnswer
    from headscan.study.study_step import Study as Study
    from headscan.texts.held_out_text import HeldOutText as HeldOutText
    from headscan.verdicts.arm_verdict import ArmVerdict as ArmVerdict
    from headscan.verdicts.arm_verdict import Outcome as Outcome
    from headscan.verdicts.confirmation import SweepChoice as SweepChoice
    from headscan.verdicts.criterion_points import SitePoint as SitePoint
    from headscan.verdicts.head_effects import HeadEffect as HeadEffect
    from headscan.verdicts.judge import Verdict as Verdict
    from headscan.verdicts.ordered_shares import ShareVerdict as ShareVerdict
    from headscan.verdicts.paired import PairedDifference as PairedDifference
    from headscan.windows import KeptKeys as KeptKeys
    from headscan.windows import Window as Window

__version__ = "1.0.0rc1"

#: Home of each public name, which is imported when it is first used. Type checkers cannot read a table, and the imports
#: above would load torch if they ran, so both list the names; tests hold them against each other.
_HOMES = {
    "BASELINE": "engine.arms",
    "BEHAVIOURS": "catalog",
    "SCORES": "catalog",
    "STATISTICS": "catalog",
    "Ablate": "steps.ablate",
    "AblateResult": "steps.run_ablate",
    "Arm": "engine.arms",
    "ArmKind": "store.records",
    "ArmVerdict": "verdicts.arm_verdict",
    "AttentionSite": "grid",
    "BehaviourProbe": "measure.probe_settings",
    "BuiltModel": "steps.prune.pruned_arms",
    "ChosenArms": "settings.evaluation_settings",
    "CorpusRunResult": "steps.run_corpus",
    "CorpusSpec": "settings.corpus_settings",
    "CriteriaComparison": "settings.evaluation_settings",
    "Evaluate": "steps.evaluate",
    "ExamplesSpec": "settings.corpus_settings",
    "ExportConfig": "export.formats",
    "Exported": "export.formats",
    "GateFitConfig": "gates.gate_settings",
    "Gates": "steps.gates",
    "GatesResult": "steps.run_gates",
    "Generate": "steps.generate",
    "Generated": "steps.run_generate",
    "GenerationComparison": "steps.run_generate",
    "Head": "grid",
    "HeadEffect": "verdicts.head_effects",
    "HeadGrid": "grid",
    "HeadMask": "ablation.masks",
    "HeadMeans": "ablation.intervention",
    "HeadPlan": "plans",
    "HeadRule": "ablation.rules",
    "HeadSamples": "ablation.collect_outputs",
    "HeadscanError": "errors",
    "HeldOutText": "texts.held_out_text",
    "Importance": "steps.importance",
    "InterventionRecord": "ablation.intervention",
    "JobOptions": "steps.open_run",
    "KVBytes": "plans",
    "KeptKeys": "windows",
    "KvWindows": "kv.kv_windows",
    "LabelledRefereeResult": "steps.referee.run_labelled_referee",
    "LoadedModel": "models.loaded_model",
    "LossLimit": "plans",
    "LossTexts": "settings.evaluation_settings",
    "MassWidths": "catalog",
    "ModelSpec": "model_spec",
    "Needle": "measure.behaviour_probes",
    "Outcome": "verdicts.arm_verdict",
    "PairedDifference": "verdicts.paired",
    "Part": "steps.scan",
    "PlacementRequest": "cluster.placement_base",
    "Plan": "steps.plan",
    "PlanCache": "kv.plan_cache",
    "Probe": "steps.probe",
    "ProbeResult": "steps.run_probe",
    "Prune": "steps.prune.prune_step",
    "PruneResult": "steps.prune.run_prune",
    "PruneTexts": "settings.saving_settings",
    "RandomHeads": "ablation.masks",
    "RecallPrompts": "settings.saving_settings",
    "RecallQuestions": "settings.evaluation_settings",
    "Referee": "steps.referee.referee_step",
    "RepairChoice": "steps.prune.prune_step",
    "ReplacementConfig": "settings.evaluation_settings",
    "Saving": "study.study_answer",
    "Scan": "steps.scan",
    "ScoredAblation": "ablation.rules",
    "SelectionConfig": "pruning.selection_settings",
    "Sharding": "models.loaded_model",
    "ShareVerdict": "verdicts.ordered_shares",
    "SiteMask": "ablation.masks",
    "SitePoint": "verdicts.criterion_points",
    "Study": "study.study_step",
    "StudyAnswer": "study.study_answer",
    "Sweep": "steps.sweep",
    "SweepChoice": "verdicts.confirmation",
    "SweepResult": "steps.run_sweep",
    "TaskConfig": "settings.evaluation_settings",
    "Timeouts": "cluster.placement_base",
    "Timing": "steps.prune.prune_step",
    "TokenConfig": "settings.corpus_settings",
    "Verdict": "verdicts.judge",
    "Window": "windows",
    "WindowHeads": "plans",
    "WindowShare": "plans",
    "collect": "measure.collect",
    "run_export": "export.formats",
    "head_means": "ablation.collect_outputs",
    "head_samples": "ablation.collect_outputs",
    "importance": "gradients.head_importance",
    "intervene": "ablation.intervention",
    "kv_damage": "kv.kv_damage",
    "load": "loading",
    "load_plan": "plans.head_plan",
    "make_plan": "plans.allocate",
    "mask_arm": "engine.arms",
    "open_store": "report.notebook_tables",
    "probe": "measure.behaviour_probes",
    "random_controls": "engine.arms",
    "rule_arm": "engine.arms",
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
