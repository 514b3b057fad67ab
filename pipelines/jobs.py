"""The command line's jobs as functions.

Each takes the settings object of its verb, chooses a placement, runs with a progress bar and resumes as the verb does.
Their settings have their names here, too:

    from headscan.pipelines import jobs

    config = jobs.ScanConfig(jobs.ModelSpec("demo"), jobs.CorpusSpec("texts/"), jobs.TokenPlan(512))
    found = jobs.scan(config, "s.duckdb")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from headscan.analysis.plans import BudgetRequest, HeadPlan, KVBytes, WindowHeads, WindowShare
from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.judge import Verdict, judge
from headscan.cluster.placement.placement_base import PlacementRequest
from headscan.gates.gate_settings import GateFitConfig
from headscan.measure.probe_settings import BehaviourProbe
from headscan.model_spec import ModelSpec
from headscan.options import BATCH_TOKENS
from headscan.pipelines.ablate.single_heads import AblateResult, single_head_effects
from headscan.pipelines.evaluate.chosen_arms import ChosenArms, evaluate_chosen
from headscan.pipelines.evaluate.run_evaluation import evaluate as run_evaluation
from headscan.pipelines.evaluate.run_sweep import sweep as run_sweep
from headscan.pipelines.kv.measured_plan import measured_plan
from headscan.pipelines.measure.run_corpus import CorpusRunResult
from headscan.pipelines.measure.run_gates import GatesResult, run_gates
from headscan.pipelines.measure.run_importance import run_importance
from headscan.pipelines.measure.run_probe import ProbeResult
from headscan.pipelines.measure.run_probe import probe as run_probe
from headscan.pipelines.measure.run_scan import scan as run_scan
from headscan.pipelines.pruning.prune_config import PruneConfig, RepairChoice
from headscan.pipelines.pruning.pruning_units import BytesBudget, LossBudget, ShareBudget
from headscan.pipelines.pruning.run_prune import PruneResult
from headscan.pipelines.pruning.run_prune import prune as run_prune
from headscan.pipelines.referee.run_referee import RefereeConfig
from headscan.pipelines.referee.run_referee import referee as run_referee
from headscan.pipelines.runs.model_identity import ModelIdentity, identify
from headscan.pipelines.runs.run_context import ModelContext, ModelOpener, Run
from headscan.pipelines.scoring.arms import BASELINE, Arm, mask_arm
from headscan.pipelines.settings.corpus_settings import CorpusSpec, DataSpec, TokenPlan
from headscan.pipelines.settings.evaluation_settings import (
    TASK_TOKENS,
    AblateConfig,
    Comparison,
    EvaluateConfig,
    LossTexts,
    RecallPlan,
    ReplacementConfig,
    SweepConfig,
    TaskConfig,
)
from headscan.pipelines.settings.measure_settings import GatesConfig, ImportanceConfig, Part, ProbeConfig, ScanConfig
from headscan.pipelines.settings.saving_settings import LossLimit, MeasureConfig, RecallConfig, TextConfig
from headscan.pipelines.study.run_study import study as run_study
from headscan.pipelines.study.study_answer import StudyAnswer
from headscan.pipelines.study.study_config import StudyConfig
from headscan.pruning.head_selection import SelectionConfig

__all__ = [
    "BASELINE",
    "AblateConfig",
    "Arm",
    "BehaviourProbe",
    "BytesBudget",
    "ChosenArms",
    "Comparison",
    "CorpusSpec",
    "DataSpec",
    "EvaluateConfig",
    "GateFitConfig",
    "GatesConfig",
    "ImportanceConfig",
    "JobOptions",
    "KVBytes",
    "LossBudget",
    "LossLimit",
    "LossTexts",
    "MeasureConfig",
    "ModelSpec",
    "Part",
    "PlacementRequest",
    "ProbeConfig",
    "PruneConfig",
    "RecallConfig",
    "RecallPlan",
    "RefereeConfig",
    "RepairChoice",
    "ReplacementConfig",
    "ScanConfig",
    "SelectionConfig",
    "ShareBudget",
    "StudyConfig",
    "SweepConfig",
    "TaskConfig",
    "TextConfig",
    "TokenPlan",
    "WindowHeads",
    "WindowShare",
    "ablate",
    "evaluate",
    "gates",
    "importance",
    "mask_arm",
    "plan",
    "probe",
    "prune",
    "referee",
    "scan",
    "study",
    "sweep",
]


C = TypeVar("C")


class JobOptions(TypedDict, total=False):
    """Options of every job.

    Attributes:
        devices: Placement and devices; None, the default, chooses them. Its ``batch_tokens`` replaces that of the
            settings, if given.
        resume_anyway: Resume although software, device or the model's code changed; the store records both.
        say: Called with lines for the user; the default prints them.
    """

    devices: PlacementRequest | None
    resume_anyway: bool
    say: Callable[[str], None]


def scan(config: ScanConfig, store: str | Path, **options: Unpack[JobOptions]) -> CorpusRunResult:
    """Scan a corpus into a store; the same call again resumes.

    Args:
        store: DuckDB file; a missing one is created.
        options: See `JobOptions`. Batches have ``config.batch_tokens``; with ``devices.memory`` its default is lowered
            to what fits.

    Raises:
        HeadscanError: An error of the user; shards stored before stay.
    """
    with _opened(config, config.tokens.max_tokens, store, options) as (run, sized):
        return run_scan(sized, run)


def importance(config: ImportanceConfig, store: str | Path, **options: Unpack[JobOptions]) -> CorpusRunResult:
    """Measure the importance of every head on a corpus, and on recall prompts if ``config`` asks for some.

    Raises:
        HeadscanError: An error of the user; shards stored before stay.
    """
    with _opened(config, config.tokens.max_tokens, store, options) as (run, sized):
        return run_importance(sized, run)


def probe(config: ProbeConfig, store: str | Path, **options: Unpack[JobOptions]) -> ProbeResult:
    """Score the behaviours of every head into a store.

    Raises:
        HeadscanError: An error of the user, such as lengths beyond the model's context.
    """
    with _opened(config, max(config.settings.lengths), store, options) as (run, sized):
        return run_probe(sized, run)


def gates(config: GatesConfig, store: str | Path, **options: Unpack[JobOptions]) -> GatesResult:
    """Fit gates on the heads of a frozen model, and store them and the mask of the closed heads.

    Raises:
        HeadscanError: An error of the user; the same call again continues the fit.
    """
    with _opened(config, config.max_tokens, store, options) as (run, sized):
        return run_gates(sized, run)


def ablate(config: AblateConfig, store: str | Path, **options: Unpack[JobOptions]) -> AblateResult:
    """Measure the effect of every head, ablated alone, on tasks or on the loss of texts.

    Raises:
        HeadscanError: An error of the user; answers stored before stay.
    """
    with _opened(config, TASK_TOKENS, store, options, evaluates=True) as (run, sized):
        return single_head_effects(sized, run)


def evaluate(
    config: EvaluateConfig, store: str | Path, arms: Sequence[Arm] | ChosenArms, **options: Unpack[JobOptions]
) -> Verdict:
    """Run a baseline and further arms over the questions of tasks, and judge the arms.

    Args:
        arms: Arms next to the baseline, such as ``[mask_arm([(3, 5)])]``, or how to choose them, such as
            ``ChosenArms(score="output_norm_ln", rule=True, controls=19)`` by a scan in the store.

    Raises:
        HeadscanError: An error of the user; answers stored before stay.
    """
    with _opened(config, TASK_TOKENS, store, options, evaluates=True) as (run, sized):
        if isinstance(arms, ChosenArms):
            run_id, _ = evaluate_chosen(sized, arms, run)
        else:
            run_id = run_evaluation(sized, run, [BASELINE, *(arm for arm in arms if arm is not BASELINE)])
        return judge(run.store, run_id)


def sweep(config: SweepConfig, store: str | Path, **options: Unpack[JobOptions]) -> Verdict:
    """Evaluate rules and masks of scores at every share, and judge the arms on all questions.
    `headscan.analysis.verdicts.confirmation.judge_sweep` returns the best arms, judged on the questions that did not
    select them.

    Raises:
        HeadscanError: An error of the user; answers stored before stay.
    """
    with _opened(config, TASK_TOKENS, store, options, evaluates=True) as (run, sized):
        return judge(run.store, run_sweep(sized, run).evaluate_run)


def referee(config: RefereeConfig, store: str | Path, **options: Unpack[JobOptions]) -> Verdict:
    """Remove heads by every criterion of ``config.compared``, and judge all choices.

    Raises:
        HeadscanError: An error of the user; choices and answers stored before stay.
    """
    identity = identify(config.evaluation.model)
    tokens = config.texts.placed_tokens(identity)
    with _opened(config, tokens, store, options, identity=identity, evaluates=True, here=True) as (run, sized):
        return judge(run.store, run_referee(sized, run))


def plan(
    model: ModelSpec,
    config: MeasureConfig,
    budget: BudgetRequest | LossLimit,
    store: str | Path | None = None,
    **options: Unpack[JobOptions],
) -> HeadPlan:
    """Measure the damage of a window on each KV head, and make a plan; ``make_plan`` makes plans from a store.

    Args:
        store: DuckDB file that keeps what is measured, so that the same call resumes; None keeps nothing.

    Raises:
        PlanError: A budget out of reach, or texts longer than the model's context.
    """
    identity = identify(model)
    opener = _opener(config, model, config.tokens(identity), options, evaluates=True)
    anyway, say = options.get("resume_anyway", False), options.get("say", print)
    context = (
        ModelContext(model, opener, identity=identity, say=say)
        if store is None
        else Run(model, Store(store), opener, identity=identity, resume_anyway=anyway, say=say)
    )
    with context:
        return measured_plan(opener.sized(config), context, budget)


def prune(config: PruneConfig, store: str | Path, **options: Unpack[JobOptions]) -> PruneResult:
    """Build pruned models, save them, and judge them against the original.

    Raises:
        PruningError: The output folder is not empty, or the models cannot be built.
        HeadscanError: The evaluation fails; the models are saved.
    """
    identity = identify(config.evaluation.model)
    tokens = config.texts.placed_tokens(identity)
    with _opened(config, tokens, store, options, identity=identity, evaluates=True, here=True) as (run, sized):
        return run_prune(sized, run)


def study(config: StudyConfig, **options: Unpack[JobOptions]) -> StudyAnswer:
    """Find the largest safe shares of heads and of KV cache, and write plan, models and report into ``config.out``.

    Raises:
        StudyError: Settings out of range, or of another study in the same folder.
        HeadscanError: A step fails; what was stored before stays.
    """
    store = Path(config.out) / "study.duckdb"
    with _opened(config, TASK_TOKENS, store, options, evaluates=True, here=True) as (run, sized):
        return run_study(sized, run)


@contextmanager
def _opened(
    config: C,
    tokens: int,
    store: str | Path,
    options: JobOptions,
    *,
    identity: ModelIdentity | None = None,
    evaluates: bool = False,
    here: bool = False,
) -> Iterator[tuple[Run, C]]:
    """Yield the run of a job, and its settings with the batch size of the placement; see `_opener`. ``identity`` None
    computes it.
    """
    settings: Any = getattr(config, "evaluation", config)
    opener = _opener(settings, settings.model, tokens, options, evaluates=evaluates, here=here)
    anyway, say = options.get("resume_anyway", False), options.get("say", print)
    with Run(settings.model, Store(store), opener, identity=identity, resume_anyway=anyway, say=say) as run:
        yield run, opener.sized(config)


def _opener(
    settings: object,
    model: ModelSpec,
    tokens: int,
    options: JobOptions,
    *,
    evaluates: bool = False,
    here: bool = False,
) -> ModelOpener:
    """Return the opener of a model; a job that runs ``here`` needs one replica, in this process."""
    if unknown := options.keys() - JobOptions.__annotations__.keys():
        raise TypeError(f"unknown option {min(unknown)!r}. Choose from {', '.join(JobOptions.__annotations__)}")
    devices = options.get("devices") or PlacementRequest()
    return ModelOpener(
        model,
        tokens,
        replace(devices.in_this_process() if here else devices, evaluates=evaluates),
        getattr(settings, "batch_tokens", BATCH_TOKENS),
        say=options.get("say", print),
    )
