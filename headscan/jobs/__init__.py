"""The jobs that run a model as Python functions.

Each function takes the settings of its verb, chooses a placement, opens the store and calls
``run_VERB(settings, run)``; the verb calls the function, too. Importance, ablation and referee have a second function
for labelled examples, which calls ``run_labelled_VERB``. Verbs that read a store or a plan only have no function here.

Every function raises ``HeadscanError``, or an error derived from it, if a setting, a file or the model does not fit.
What was stored before stays, and the same call again resumes.

The import lets idle threads of torch sleep, if torch was not imported before (`headscan.cluster`).

The settings and the results of all jobs can be imported from here:

    from headscan import jobs

    config = jobs.ScanConfig(jobs.ModelSpec("demo"), jobs.CorpusSpec("texts/"), jobs.TokenConfig(512))
    found = jobs.scan(config, "s.duckdb")
"""

# Names imported `as` themselves are public: type checkers let others import these alone from here.
from headscan.catalog import MassWidths as MassWidths
from headscan.cluster.placement_base import PlacementRequest as PlacementRequest
from headscan.cluster.placement_base import Timeouts as Timeouts
from headscan.engine.arms import BASELINE as BASELINE
from headscan.engine.arms import Arm as Arm
from headscan.engine.arms import mask_arm as mask_arm
from headscan.engine.arms import random_controls as random_controls
from headscan.engine.arms import rule_arm as rule_arm
from headscan.export.formats import ExportConfig as ExportConfig
from headscan.export.formats import Exported as Exported
from headscan.gates.gate_settings import GateFitConfig as GateFitConfig
from headscan.jobs.job_functions import JobOptions as JobOptions
from headscan.jobs.job_functions import LocalJobOptions as LocalJobOptions
from headscan.jobs.job_functions import ablate as ablate
from headscan.jobs.job_functions import evaluate as evaluate
from headscan.jobs.job_functions import export as export
from headscan.jobs.job_functions import gates as gates
from headscan.jobs.job_functions import generate as generate
from headscan.jobs.job_functions import importance as importance
from headscan.jobs.job_functions import labelled_ablate as labelled_ablate
from headscan.jobs.job_functions import labelled_importance as labelled_importance
from headscan.jobs.job_functions import labelled_referee as labelled_referee
from headscan.jobs.job_functions import plan as plan
from headscan.jobs.job_functions import probe as probe
from headscan.jobs.job_functions import prune as prune
from headscan.jobs.job_functions import referee as referee
from headscan.jobs.job_functions import scan as scan
from headscan.jobs.job_functions import study as study
from headscan.jobs.job_functions import sweep as sweep
from headscan.measure.probe_settings import BehaviourProbe as BehaviourProbe
from headscan.model_spec import ModelSpec as ModelSpec
from headscan.plans import HeadPlan as HeadPlan
from headscan.plans import KVBytes as KVBytes
from headscan.plans import WindowHeads as WindowHeads
from headscan.plans import WindowShare as WindowShare
from headscan.pruning.head_selection import SelectionConfig as SelectionConfig
from headscan.settings.corpus_settings import CorpusSpec as CorpusSpec
from headscan.settings.corpus_settings import ExamplesSpec as ExamplesSpec
from headscan.settings.corpus_settings import TokenConfig as TokenConfig
from headscan.settings.evaluation_settings import AblateConfig as AblateConfig
from headscan.settings.evaluation_settings import ChosenArms as ChosenArms
from headscan.settings.evaluation_settings import CriteriaComparison as CriteriaComparison
from headscan.settings.evaluation_settings import EvaluateConfig as EvaluateConfig
from headscan.settings.evaluation_settings import LossTexts as LossTexts
from headscan.settings.evaluation_settings import RecallQuestions as RecallQuestions
from headscan.settings.evaluation_settings import ReplacementConfig as ReplacementConfig
from headscan.settings.evaluation_settings import SweepConfig as SweepConfig
from headscan.settings.evaluation_settings import TaskConfig as TaskConfig
from headscan.settings.measure_settings import GatesConfig as GatesConfig
from headscan.settings.measure_settings import ImportanceConfig as ImportanceConfig
from headscan.settings.measure_settings import LabelledImportanceConfig as LabelledImportanceConfig
from headscan.settings.measure_settings import Part as Part
from headscan.settings.measure_settings import ProbeConfig as ProbeConfig
from headscan.settings.measure_settings import ScanConfig as ScanConfig
from headscan.settings.saving_settings import GenerateConfig as GenerateConfig
from headscan.settings.saving_settings import LossLimit as LossLimit
from headscan.settings.saving_settings import PlanConfig as PlanConfig
from headscan.settings.saving_settings import PruneTexts as PruneTexts
from headscan.settings.saving_settings import RecallPrompts as RecallPrompts
from headscan.steps.prune.prune_config import PruneConfig as PruneConfig
from headscan.steps.prune.prune_config import RepairChoice as RepairChoice
from headscan.steps.prune.prune_config import Timing as Timing
from headscan.steps.prune.pruned_arms import BuiltModel as BuiltModel
from headscan.steps.prune.pruning_units import BytesBudget as BytesBudget
from headscan.steps.prune.pruning_units import LossBudget as LossBudget
from headscan.steps.prune.pruning_units import ShareBudget as ShareBudget
from headscan.steps.prune.run_prune import PruneResult as PruneResult
from headscan.steps.referee.run_labelled_referee import LabelledRefereeConfig as LabelledRefereeConfig
from headscan.steps.referee.run_labelled_referee import LabelledRefereeResult as LabelledRefereeResult
from headscan.steps.referee.run_referee import RefereeConfig as RefereeConfig
from headscan.steps.run_ablate import AblateResult as AblateResult
from headscan.steps.run_corpus import CorpusRunResult as CorpusRunResult
from headscan.steps.run_gates import GatesResult as GatesResult
from headscan.steps.run_generate import Generated as Generated
from headscan.steps.run_generate import GenerationComparison as GenerationComparison
from headscan.steps.run_labelled_ablate import LabelledAblateConfig as LabelledAblateConfig
from headscan.steps.run_labelled_ablate import LabelledEvaluateConfig as LabelledEvaluateConfig
from headscan.steps.run_probe import ProbeResult as ProbeResult
from headscan.steps.run_sweep import SweepResult as SweepResult
from headscan.store.records import ArmKind as ArmKind
from headscan.study.study_answer import Saving as Saving
from headscan.study.study_answer import StudyAnswer as StudyAnswer
from headscan.study.study_config import StudyConfig as StudyConfig
from headscan.texts.held_out_text import HeldOutText as HeldOutText
from headscan.verdicts.confirmation import SweepChoice as SweepChoice
from headscan.verdicts.criterion_points import SitePoint as SitePoint
from headscan.verdicts.decision import Outcome as Outcome
from headscan.verdicts.head_effects import HeadEffect as HeadEffect
from headscan.verdicts.judge import Verdict as Verdict
from headscan.verdicts.ordered_shares import ShareVerdict as ShareVerdict
from headscan.verdicts.paired import PairedDifference as PairedDifference
from headscan.verdicts.verdict_words import ArmVerdict as ArmVerdict
