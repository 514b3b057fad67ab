"""The jobs that run a model as Python functions.

Each function takes the settings of its verb, chooses a placement, opens the store and calls
``run_VERB(settings, run)``; the verb calls the function, too. Importance, ablation and referee have a second function
for labelled examples, which calls ``run_labelled_VERB``. `generate`, and verbs that read a store or a plan only, have
no function here. The settings and the results of all jobs can be imported from here:

    from headscan.pipelines import jobs

    config = jobs.ScanConfig(jobs.ModelSpec("demo"), jobs.CorpusSpec("texts/"), jobs.TokenPlan(512))
    found = jobs.scan(config, "s.duckdb")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypedDict, TypeVar, Unpack

# Names imported `as` themselves are public: type checkers let others import these alone from here.
from headscan.analysis.plans import BudgetRequest, PlanError
from headscan.analysis.plans import HeadPlan as HeadPlan
from headscan.analysis.plans import KVBytes as KVBytes
from headscan.analysis.plans import WindowHeads as WindowHeads
from headscan.analysis.plans import WindowShare as WindowShare
from headscan.analysis.store.parquet_store import store_at
from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.confirmation import SweepChoice as SweepChoice
from headscan.analysis.verdicts.criterion_points import SitePoint as SitePoint
from headscan.analysis.verdicts.head_effects import HeadEffect as HeadEffect
from headscan.analysis.verdicts.judge import ArmVerdict as ArmVerdict
from headscan.analysis.verdicts.judge import Outcome as Outcome
from headscan.analysis.verdicts.judge import Verdict as Verdict
from headscan.analysis.verdicts.judge import judge
from headscan.analysis.verdicts.ordered_shares import ShareVerdict as ShareVerdict
from headscan.analysis.verdicts.paired import PairedDifference as PairedDifference
from headscan.catalog import MassWidths as MassWidths
from headscan.cluster.placement_base import PlacementError, ray_address
from headscan.cluster.placement_base import PlacementRequest as PlacementRequest
from headscan.cluster.placement_base import Timeouts as Timeouts
from headscan.gates.gate_settings import GateFitConfig as GateFitConfig
from headscan.measure.probe_settings import BehaviourProbe as BehaviourProbe
from headscan.model_spec import ModelSpec as ModelSpec
from headscan.options import LOCK_TIMEOUT, LONGEST_WAIT, Limits, check_limits
from headscan.pipelines.ablate.labelled_arms import LabelledAblateConfig as LabelledAblateConfig
from headscan.pipelines.ablate.labelled_arms import LabelledConfig as LabelledConfig
from headscan.pipelines.ablate.labelled_arms import run_labelled_ablate
from headscan.pipelines.ablate.single_heads import AblateResult as AblateResult
from headscan.pipelines.ablate.single_heads import run_ablate
from headscan.pipelines.evaluate.held_out_text import HeldOutText as HeldOutText
from headscan.pipelines.evaluate.run_evaluation import evaluate_chosen, judge_evaluation, run_evaluation
from headscan.pipelines.evaluate.run_sweep import SweepResult as SweepResult
from headscan.pipelines.evaluate.run_sweep import judge_runs, run_sweep
from headscan.pipelines.export.formats import ExportConfig as ExportConfig
from headscan.pipelines.export.formats import Exported as Exported
from headscan.pipelines.export.formats import run_export
from headscan.pipelines.kv.measured_plan import run_plan
from headscan.pipelines.measure.labelled_texts import LabelledTexts, read_labelled
from headscan.pipelines.measure.run_corpus import CorpusRunResult as CorpusRunResult
from headscan.pipelines.measure.run_gates import GatesResult as GatesResult
from headscan.pipelines.measure.run_gates import run_gates
from headscan.pipelines.measure.run_importance import run_importance, run_labelled_importance
from headscan.pipelines.measure.run_probe import ProbeResult as ProbeResult
from headscan.pipelines.measure.run_probe import run_probe
from headscan.pipelines.measure.run_scan import run_scan
from headscan.pipelines.pruning.prune_config import PruneConfig as PruneConfig
from headscan.pipelines.pruning.prune_config import RepairChoice as RepairChoice
from headscan.pipelines.pruning.prune_config import Timing as Timing
from headscan.pipelines.pruning.pruned_arms import BuiltModel as BuiltModel
from headscan.pipelines.pruning.pruning_units import BytesBudget as BytesBudget
from headscan.pipelines.pruning.pruning_units import LossBudget as LossBudget
from headscan.pipelines.pruning.pruning_units import ShareBudget as ShareBudget
from headscan.pipelines.pruning.run_prune import PruneResult as PruneResult
from headscan.pipelines.pruning.run_prune import run_prune
from headscan.pipelines.referee.run_referee import RefereeConfig as RefereeConfig
from headscan.pipelines.referee.run_referee import run_referee
from headscan.pipelines.referee.site_referee import SiteRefereeConfig as SiteRefereeConfig
from headscan.pipelines.referee.site_referee import SiteRefereeResult as SiteRefereeResult
from headscan.pipelines.referee.site_referee import run_labelled_referee
from headscan.pipelines.runs.model_identity import ModelIdentity, identify
from headscan.pipelines.runs.run_context import ModelContext, ModelOpener, Run
from headscan.pipelines.scoring.arms import BASELINE as BASELINE
from headscan.pipelines.scoring.arms import Arm as Arm
from headscan.pipelines.scoring.arms import mask_arm as mask_arm
from headscan.pipelines.settings.corpus_settings import CorpusSpec as CorpusSpec
from headscan.pipelines.settings.corpus_settings import DataSpec as DataSpec
from headscan.pipelines.settings.corpus_settings import TokenPlan as TokenPlan
from headscan.pipelines.settings.evaluation_settings import TASK_TOKENS
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
from headscan.pipelines.settings.saving_settings import LossLimit as LossLimit
from headscan.pipelines.settings.saving_settings import PlanConfig as PlanConfig
from headscan.pipelines.settings.saving_settings import RecallConfig as RecallConfig
from headscan.pipelines.settings.saving_settings import TextConfig as TextConfig
from headscan.pipelines.study.run_study import run_study
from headscan.pipelines.study.study_answer import Saving as Saving
from headscan.pipelines.study.study_answer import StudyAnswer as StudyAnswer
from headscan.pipelines.study.study_config import StudyConfig as StudyConfig
from headscan.pruning.head_selection import SelectionConfig as SelectionConfig

#: Settings of jobs on labelled examples.
_L = TypeVar("_L", LabelledConfig, LabelledImportanceConfig)


class JobOptions(TypedDict, total=False):
    """Options of every job but `export`.

    Attributes:
        devices: Placement and devices; None, the default, chooses them. ``devices.batch_tokens``, if given, replaces
            the ``batch_tokens`` of the settings. If it is not given, ``devices.memory`` lowers those of the settings to
            what fits, and a line reports that.
        ray_address: Address of a running Ray cluster, such as ``first:6379``; None, the default, uses this machine, and
            a local Ray for several replicas. The process stays connected, so that all its jobs use one cluster. Jobs
            that remove heads (`referee`, `prune`, `study`) run here, and refuse an address.
        timeouts: Timeouts of workers on Ray; None uses their defaults.
        resume_anyway: Resume although software, device or the model's code changed; the store records both versions.
        lock_timeout: Seconds to wait while another process has the store open.
        identity: Names and hashes of the model, if they are known; None reads its files.
        say: Function that receives lines for the user; the default prints them.
    """

    devices: PlacementRequest | None
    ray_address: str | None
    timeouts: Timeouts | None
    resume_anyway: bool
    lock_timeout: float
    identity: ModelIdentity | None
    say: Callable[[str], None]


def scan(config: ScanConfig, store: str | Path, **options: Unpack[JobOptions]) -> CorpusRunResult:
    """Scan a corpus into a store; the same call again resumes.

    Args:
        store: DuckDB file; a missing one is created.
        options: See `JobOptions`.

    Raises:
        HeadscanError: A setting, a file or the model does not fit; shards stored before stay.
    """
    opener = _opener(config.model, config.tokens.max_tokens, options, config.batch_tokens)
    with _run(opener, store, options) as run:
        return run_scan(opener.sized(config), run)


def importance(config: ImportanceConfig, store: str | Path, **options: Unpack[JobOptions]) -> CorpusRunResult:
    """Measure the importance of every head on a corpus, and on recall prompts if ``config`` asks for some.

    Raises:
        HeadscanError: A setting, a file or the model does not fit; shards stored before stay.
    """
    opener = _opener(config.model, config.tokens.max_tokens, options, config.batch_tokens)
    with _run(opener, store, options) as run:
        return run_importance(opener.sized(config), run)


def probe(config: ProbeConfig, store: str | Path, **options: Unpack[JobOptions]) -> ProbeResult:
    """Score every head on each behaviour, and store the scores.

    Raises:
        HeadscanError: A setting does not fit, such as lengths beyond the model's context.
    """
    opener = _opener(config.model, max(config.settings.lengths), options, config.batch_tokens)
    with _run(opener, store, options) as run:
        return run_probe(opener.sized(config), run)


def gates(config: GatesConfig, store: str | Path, **options: Unpack[JobOptions]) -> GatesResult:
    """Fit gates on the heads of a frozen model, and store them and the mask of the closed heads.

    Raises:
        HeadscanError: A setting, a file or the model does not fit; the same call again continues the fit.
    """
    opener = _opener(config.model, config.max_tokens, options, config.fit.batch_tokens)
    with _run(opener, store, options) as run:
        return run_gates(replace(config, fit=opener.sized(config.fit)), run)


def ablate(config: AblateConfig, store: str | Path, **options: Unpack[JobOptions]) -> AblateResult:
    """Measure the effect of every head, ablated alone, on tasks or on the loss of texts.

    Raises:
        HeadscanError: A setting, a file or the model does not fit; answers stored before stay.
    """
    evaluation = config.evaluation
    opener = _opener(evaluation.model, TASK_TOKENS, options, evaluation.batch_tokens, evaluates=True)
    with _run(opener, store, options) as run:
        return run_ablate(replace(config, evaluation=opener.sized(evaluation)), run)


def labelled_importance(
    config: LabelledImportanceConfig, store: str | Path, **options: Unpack[JobOptions]
) -> CorpusRunResult:
    """Measure the importance of every head of a classifier or an encoder-decoder on labelled examples.

    Raises:
        HeadscanError: A setting, a file or the model does not fit; shards stored before stay.
    """
    with _on_examples(config, store, options) as (sized, texts, run):
        return run_labelled_importance(sized, run, texts=texts)


def labelled_ablate(config: LabelledAblateConfig, store: str | Path, **options: Unpack[JobOptions]) -> AblateResult:
    """Measure the effect of every head, ablated alone, on labelled examples.

    Raises:
        HeadscanError: A setting, a file or the model does not fit; answers stored before stay.
    """
    with _on_examples(config.judging, store, options) as (sized, texts, run):
        return run_labelled_ablate(replace(config, judging=sized), run, texts=texts)


def labelled_referee(config: SiteRefereeConfig, store: str | Path, **options: Unpack[JobOptions]) -> SiteRefereeResult:
    """Ablate heads of every site by every criterion, and measure the metric of labelled examples.

    Raises:
        HeadscanError: A setting, a file or the model does not fit; answers stored before stay.
    """
    with _on_examples(config.judging, store, options) as (sized, texts, run):
        return run_labelled_referee(replace(config, judging=sized), run, texts=texts)


def evaluate(
    config: EvaluateConfig, store: str | Path, arms: Sequence[Arm] | ChosenArms, **options: Unpack[JobOptions]
) -> Verdict:
    """Ask the baseline and further arms the questions of tasks, and judge the arms.

    Args:
        arms: Arms next to the baseline, such as ``[mask_arm([(3, 5)])]``, or how to choose them, such as
            ``ChosenArms(score="output_norm_ln", rule=True, controls=19)`` by a scan in the store. Without any, only the
            baseline answers, and the verdict has no arms.

    Raises:
        HeadscanError: A setting, a file or the model does not fit; answers stored before stay.
    """
    opener = _opener(config.model, TASK_TOKENS, options, config.batch_tokens, evaluates=True)
    with _run(opener, store, options) as run:
        sized = opener.sized(config)
        if isinstance(arms, ChosenArms):
            run_id = evaluate_chosen(sized, run, arms)
        else:
            run_id = run_evaluation(sized, run, [BASELINE, *(arm for arm in arms if arm is not BASELINE)])
        return judge_evaluation(run, run_id)


def sweep(config: SweepConfig, store: str | Path, **options: Unpack[JobOptions]) -> SweepResult:
    """Evaluate rules and masks of scores at every share.

    The best of many arms looks better than it is. So the result has the best rule and the best mask, judged on the
    questions that did not select them, in addition to the verdict on all arms and all questions.

    Raises:
        HeadscanError: A setting, a file or the model does not fit; answers stored before stay.
    """
    evaluation = config.evaluation
    opener = _opener(evaluation.model, TASK_TOKENS, options, evaluation.batch_tokens, evaluates=True)
    with _run(opener, store, options) as run:
        runs = run_sweep(replace(config, evaluation=opener.sized(evaluation)), run)
        return judge_runs(run.store, runs, confirm=config.confirm)


def referee(config: RefereeConfig, store: str | Path, **options: Unpack[JobOptions]) -> Verdict:
    """Ablate or remove heads by every criterion of ``config.compared``, and judge all choices.

    Raises:
        HeadscanError: A setting, a file or the model does not fit; choices and answers stored before stay.
    """
    evaluation, identity = config.evaluation, _identified(config.evaluation.model, options, here=True)
    tokens = config.texts.placed_tokens(identity)
    opener = _opener(evaluation.model, tokens, options, evaluation.batch_tokens, evaluates=True, here=True)
    with _run(opener, store, options, identity) as run:
        return judge(run.store, run_referee(replace(config, evaluation=opener.sized(evaluation)), run))


def plan(
    config: PlanConfig,
    store: str | Path | None,
    budget: BudgetRequest | LossLimit,
    **options: Unpack[JobOptions],
) -> HeadPlan:
    """Measure the damage of a window on each KV head, and make a plan.

    `headscan.analysis.plans.make_plan` makes plans from a scan or a probe instead.

    Args:
        store: DuckDB file that keeps the damages, so that the same call resumes; None keeps nothing.
        budget: Number of windows, bytes of the cache, or largest loss.

    Raises:
        PlanError: A budget out of reach, or ``resume_anyway`` without a store.
        SequenceError: Texts longer than the model's context.
    """
    if store is None and options.get("resume_anyway"):
        raise PlanError("`resume_anyway` has no effect without `store`: leave it out")
    identity = _identified(config.model, options)
    opener = _opener(config.model, config.tokens(identity), options, config.batch_tokens, evaluates=True)
    context = (
        ModelContext(config.model, opener, identity=identity, say=options.get("say", print))
        if store is None
        else _run(opener, store, options, identity)
    )
    with context:
        return run_plan(opener.sized(config), context, budget)


def prune(config: PruneConfig, store: str | Path, **options: Unpack[JobOptions]) -> PruneResult:
    """Build pruned models, save them, and judge them against the original.

    Raises:
        PruningError: The output folder is not empty, or the models cannot be built.
        HeadscanError: The evaluation fails; the models are saved.
    """
    evaluation, identity = config.evaluation, _identified(config.evaluation.model, options, here=True)
    tokens = config.texts.placed_tokens(identity)
    opener = _opener(evaluation.model, tokens, options, evaluation.batch_tokens, evaluates=True, here=True)
    with _run(opener, store, options, identity) as run:
        return run_prune(replace(config, evaluation=opener.sized(evaluation)), run)


def study(config: StudyConfig, **options: Unpack[JobOptions]) -> StudyAnswer:
    """Find the largest safe shares of heads and of KV cache, and write plan, models and report into ``config.out``.

    Raises:
        StudyError: A setting is out of range, or the folder holds a study with other settings.
        HeadscanError: A step fails; what was stored before stays.
    """
    store = Path(config.out) / "study.duckdb"
    opener = _opener(config.model, TASK_TOKENS, options, config.batch_tokens, evaluates=True, here=True)
    with _run(opener, store, options) as run:
        return run_study(opener.sized(config), run)


def export(config: ExportConfig, store: str | Path | None = None) -> Exported:
    """Write a model for a serving engine, a plan for a KV-cache tool, or a store as a Parquet data set.

    Args:
        store: DuckDB file of the format parquet; None for all other formats.

    Raises:
        ExportError: The format has no place for the model, or needs another package.
        PlanError: The format has no place for the plan, or the plan is of another model.
    """
    return run_export(config, None if store is None else Store(store))


def _run(opener: ModelOpener, store: str | Path, options: JobOptions, identity: ModelIdentity | None = None) -> Run:
    """Return the run of a job; ``identity`` None takes that of the options, or computes it."""
    chosen = _Options(**options)
    return Run(
        opener.model,
        store_at(store, lock_timeout=chosen.lock_timeout, on_wait=chosen.say),
        opener,
        identity=identity or chosen.identity,
        resume_anyway=chosen.resume_anyway,
        say=chosen.say,
    )


@contextmanager
def _on_examples(config: _L, store: str | Path, options: JobOptions) -> Iterator[tuple[_L, LabelledTexts, Run]]:
    """Yield settings with the batch size of the placement, the labelled examples, and the run of a job."""
    identity = _identified(config.model, options)
    texts = read_labelled(config.data, config.model, identity, config.max_tokens)
    opener = _opener(config.model, texts.longest, options, config.batch_tokens)
    with _run(opener, store, options, identity) as run:
        yield opener.sized(config), texts, run


def _opener(
    model: ModelSpec,
    tokens: int,
    options: JobOptions,
    batch_tokens: int,
    *,
    evaluates: bool = False,
    here: bool = False,
) -> ModelOpener:
    """Return the opener of a model; a job that runs ``here`` needs one replica, in this process."""
    chosen = _checked(options, here=here)
    devices = chosen.devices or PlacementRequest()
    return ModelOpener(
        model,
        tokens,
        devices.in_this_process() if here else devices,
        batch_tokens,
        evaluates=evaluates,
        ray_address=chosen.ray_address,
        timeouts=chosen.timeouts,
        say=chosen.say,
    )


@dataclass(frozen=True)
class _Options:
    """`JobOptions` with their defaults, checked."""

    devices: PlacementRequest | None = None
    ray_address: str | None = None
    timeouts: Timeouts | None = None
    resume_anyway: bool = False
    lock_timeout: Annotated[float, Limits(least=0, most=LONGEST_WAIT)] = LOCK_TIMEOUT
    identity: ModelIdentity | None = None
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        check_limits(self, PlacementError)
        if self.ray_address is not None:
            ray_address(self.ray_address)


def _checked(options: JobOptions, *, here: bool = False) -> _Options:
    """Check the options of a job, before it reads a file; a job that runs ``here`` needs one replica, in this process.

    Raises:
        TypeError: An option is unknown.
        PlacementError: An option is no value, or not one of this job.
    """
    if unknown := options.keys() - JobOptions.__annotations__.keys():
        raise TypeError(f"unknown option {min(unknown)!r}. Choose from {', '.join(JobOptions.__annotations__)}")
    chosen = _Options(**options)
    if here and chosen.ray_address is not None:
        raise PlacementError(
            f"`ray_address={chosen.ray_address}`: this job runs in one process. Leave out `ray_address`"
        )
    if here and chosen.devices is not None:
        chosen.devices.in_this_process()
    return chosen


def _identified(model: ModelSpec, options: JobOptions, *, here: bool = False) -> ModelIdentity:
    """Return the identity of a model, after the options are checked."""
    return _checked(options, here=here).identity or identify(model)
