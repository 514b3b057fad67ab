"""The jobs that run a model as Python functions.

Each function takes the settings of its verb, chooses a placement, opens the store and calls
``run_VERB(settings, run)``; the verb calls the function, too. Importance, ablation and referee have a second function
for labelled examples, which calls ``run_labelled_VERB``. Verbs that read a store or a plan only have no function here.

Every function raises `HeadscanError`, or an error derived from it, if a setting, a file or the model does not fit. What
was stored before stays, and the same call again resumes.

The settings and the results of all jobs can be imported from here:

    from headscan.pipelines import jobs

    config = jobs.ScanConfig(jobs.ModelSpec("demo"), jobs.CorpusSpec("texts/"), jobs.TokenPlan(512))
    found = jobs.scan(config, "s.duckdb")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Names imported `as` themselves are public: type checkers let others import these alone from here.
    from headscan.analysis.plans import HeadPlan as HeadPlan
    from headscan.analysis.plans import KVBytes as KVBytes
    from headscan.analysis.plans import WindowHeads as WindowHeads
    from headscan.analysis.plans import WindowShare as WindowShare
    from headscan.analysis.verdicts.confirmation import SweepChoice as SweepChoice
    from headscan.analysis.verdicts.criterion_points import SitePoint as SitePoint
    from headscan.analysis.verdicts.decision import Outcome as Outcome
    from headscan.analysis.verdicts.head_effects import HeadEffect as HeadEffect
    from headscan.analysis.verdicts.judge import ArmVerdict as ArmVerdict
    from headscan.analysis.verdicts.judge import Verdict as Verdict
    from headscan.analysis.verdicts.ordered_shares import ShareVerdict as ShareVerdict
    from headscan.analysis.verdicts.paired import PairedDifference as PairedDifference
    from headscan.catalog import MassWidths as MassWidths
    from headscan.cluster.placement_base import PlacementRequest as PlacementRequest
    from headscan.cluster.placement_base import Timeouts as Timeouts
    from headscan.gates.gate_settings import GateFitConfig as GateFitConfig
    from headscan.measure.probe_settings import BehaviourProbe as BehaviourProbe
    from headscan.model_spec import ModelSpec as ModelSpec
    from headscan.pipelines.ablate.labelled_arms import LabelledAblateConfig as LabelledAblateConfig
    from headscan.pipelines.ablate.labelled_arms import LabelledConfig as LabelledConfig
    from headscan.pipelines.ablate.single_heads import AblateResult as AblateResult
    from headscan.pipelines.evaluate.held_out_text import HeldOutText as HeldOutText
    from headscan.pipelines.evaluate.run_sweep import SweepResult as SweepResult
    from headscan.pipelines.export.formats import ExportConfig as ExportConfig
    from headscan.pipelines.export.formats import Exported as Exported
    from headscan.pipelines.job_functions import JobOptions as JobOptions
    from headscan.pipelines.job_functions import ablate as ablate
    from headscan.pipelines.job_functions import evaluate as evaluate
    from headscan.pipelines.job_functions import export as export
    from headscan.pipelines.job_functions import gates as gates
    from headscan.pipelines.job_functions import generate as generate
    from headscan.pipelines.job_functions import importance as importance
    from headscan.pipelines.job_functions import labelled_ablate as labelled_ablate
    from headscan.pipelines.job_functions import labelled_importance as labelled_importance
    from headscan.pipelines.job_functions import labelled_referee as labelled_referee
    from headscan.pipelines.job_functions import plan as plan
    from headscan.pipelines.job_functions import probe as probe
    from headscan.pipelines.job_functions import prune as prune
    from headscan.pipelines.job_functions import referee as referee
    from headscan.pipelines.job_functions import scan as scan
    from headscan.pipelines.job_functions import study as study
    from headscan.pipelines.job_functions import sweep as sweep
    from headscan.pipelines.kv.compare_generation import Generated as Generated
    from headscan.pipelines.kv.compare_generation import GenerationComparison as GenerationComparison
    from headscan.pipelines.measure.run_corpus import CorpusRunResult as CorpusRunResult
    from headscan.pipelines.measure.run_gates import GatesResult as GatesResult
    from headscan.pipelines.measure.run_probe import ProbeResult as ProbeResult
    from headscan.pipelines.pruning.prune_config import PruneConfig as PruneConfig
    from headscan.pipelines.pruning.prune_config import RepairChoice as RepairChoice
    from headscan.pipelines.pruning.prune_config import Timing as Timing
    from headscan.pipelines.pruning.pruned_arms import BuiltModel as BuiltModel
    from headscan.pipelines.pruning.pruning_units import BytesBudget as BytesBudget
    from headscan.pipelines.pruning.pruning_units import LossBudget as LossBudget
    from headscan.pipelines.pruning.pruning_units import ShareBudget as ShareBudget
    from headscan.pipelines.pruning.run_prune import PruneResult as PruneResult
    from headscan.pipelines.referee.run_referee import RefereeConfig as RefereeConfig
    from headscan.pipelines.referee.site_referee import SiteRefereeConfig as SiteRefereeConfig
    from headscan.pipelines.referee.site_referee import SiteRefereeResult as SiteRefereeResult
    from headscan.pipelines.scoring.arms import BASELINE as BASELINE
    from headscan.pipelines.scoring.arms import Arm as Arm
    from headscan.pipelines.scoring.arms import mask_arm as mask_arm
    from headscan.pipelines.settings.corpus_settings import CorpusSpec as CorpusSpec
    from headscan.pipelines.settings.corpus_settings import DataSpec as DataSpec
    from headscan.pipelines.settings.corpus_settings import TokenPlan as TokenPlan
    from headscan.pipelines.settings.evaluation_settings import AblateConfig as AblateConfig
    from headscan.pipelines.settings.evaluation_settings import ChosenArms as ChosenArms
    from headscan.pipelines.settings.evaluation_settings import Comparison as Comparison
    from headscan.pipelines.settings.evaluation_settings import EvaluateConfig as EvaluateConfig
    from headscan.pipelines.settings.evaluation_settings import LossTexts as LossTexts
    from headscan.pipelines.settings.evaluation_settings import RecallPlan as RecallPlan
    from headscan.pipelines.settings.evaluation_settings import ReplacementConfig as ReplacementConfig
    from headscan.pipelines.settings.evaluation_settings import SweepConfig as SweepConfig
    from headscan.pipelines.settings.evaluation_settings import TaskConfig as TaskConfig
    from headscan.pipelines.settings.measure_settings import GatesConfig as GatesConfig
    from headscan.pipelines.settings.measure_settings import ImportanceConfig as ImportanceConfig
    from headscan.pipelines.settings.measure_settings import LabelledImportanceConfig as LabelledImportanceConfig
    from headscan.pipelines.settings.measure_settings import Part as Part
    from headscan.pipelines.settings.measure_settings import ProbeConfig as ProbeConfig
    from headscan.pipelines.settings.measure_settings import ScanConfig as ScanConfig
    from headscan.pipelines.settings.saving_settings import GenerateConfig as GenerateConfig
    from headscan.pipelines.settings.saving_settings import LossLimit as LossLimit
    from headscan.pipelines.settings.saving_settings import PlanConfig as PlanConfig
    from headscan.pipelines.settings.saving_settings import RecallConfig as RecallConfig
    from headscan.pipelines.settings.saving_settings import TextConfig as TextConfig
    from headscan.pipelines.study.study_answer import Saving as Saving
    from headscan.pipelines.study.study_answer import StudyAnswer as StudyAnswer
    from headscan.pipelines.study.study_config import StudyConfig as StudyConfig
    from headscan.pruning.head_selection import SelectionConfig as SelectionConfig

#: The public names of each module of `headscan`, which is imported when one of them is first used: some load torch. A
#: test holds them against the imports above, which type checkers read.
_NAMES = {
    "analysis.plans": ("HeadPlan", "KVBytes", "WindowHeads", "WindowShare"),
    "analysis.verdicts.confirmation": ("SweepChoice",),
    "analysis.verdicts.criterion_points": ("SitePoint",),
    "analysis.verdicts.decision": ("Outcome",),
    "analysis.verdicts.head_effects": ("HeadEffect",),
    "analysis.verdicts.judge": ("ArmVerdict", "Verdict"),
    "analysis.verdicts.ordered_shares": ("ShareVerdict",),
    "analysis.verdicts.paired": ("PairedDifference",),
    "catalog": ("MassWidths",),
    "cluster.placement_base": ("PlacementRequest", "Timeouts"),
    "gates.gate_settings": ("GateFitConfig",),
    "measure.probe_settings": ("BehaviourProbe",),
    "model_spec": ("ModelSpec",),
    "pipelines.ablate.labelled_arms": ("LabelledAblateConfig", "LabelledConfig"),
    "pipelines.ablate.single_heads": ("AblateResult",),
    "pipelines.evaluate.held_out_text": ("HeldOutText",),
    "pipelines.evaluate.run_sweep": ("SweepResult",),
    "pipelines.export.formats": ("ExportConfig", "Exported"),
    "pipelines.job_functions": (
        "JobOptions",
        "ablate",
        "evaluate",
        "export",
        "gates",
        "generate",
        "importance",
        "labelled_ablate",
        "labelled_importance",
        "labelled_referee",
        "plan",
        "probe",
        "prune",
        "referee",
        "scan",
        "study",
        "sweep",
    ),
    "pipelines.kv.compare_generation": ("Generated", "GenerationComparison"),
    "pipelines.measure.run_corpus": ("CorpusRunResult",),
    "pipelines.measure.run_gates": ("GatesResult",),
    "pipelines.measure.run_probe": ("ProbeResult",),
    "pipelines.pruning.prune_config": ("PruneConfig", "RepairChoice", "Timing"),
    "pipelines.pruning.pruned_arms": ("BuiltModel",),
    "pipelines.pruning.pruning_units": ("BytesBudget", "LossBudget", "ShareBudget"),
    "pipelines.pruning.run_prune": ("PruneResult",),
    "pipelines.referee.run_referee": ("RefereeConfig",),
    "pipelines.referee.site_referee": ("SiteRefereeConfig", "SiteRefereeResult"),
    "pipelines.scoring.arms": ("BASELINE", "Arm", "mask_arm"),
    "pipelines.settings.corpus_settings": ("CorpusSpec", "DataSpec", "TokenPlan"),
    "pipelines.settings.evaluation_settings": (
        "AblateConfig",
        "ChosenArms",
        "Comparison",
        "EvaluateConfig",
        "LossTexts",
        "RecallPlan",
        "ReplacementConfig",
        "SweepConfig",
        "TaskConfig",
    ),
    "pipelines.settings.measure_settings": (
        "GatesConfig",
        "ImportanceConfig",
        "LabelledImportanceConfig",
        "Part",
        "ProbeConfig",
        "ScanConfig",
    ),
    "pipelines.settings.saving_settings": ("GenerateConfig", "LossLimit", "PlanConfig", "RecallConfig", "TextConfig"),
    "pipelines.study.study_answer": ("Saving", "StudyAnswer"),
    "pipelines.study.study_config": ("StudyConfig",),
    "pruning.head_selection": ("SelectionConfig",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

# Type checkers read the imports above; a computed list would hide the names from them.
if not TYPE_CHECKING:
    __all__ = sorted(_HOMES)


def __dir__() -> list[str]:
    return sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"headscan.{_HOMES[name]}"), name)
