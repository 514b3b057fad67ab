"""Jobs that run a model: each function opens the store and the pool for its settings, and calls ``run_VERB``.

`headscan.jobs` exports them with all settings and results, and names the error that all raise. Each imports
its run when it is called, so that a verb loads its own alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict, TypeVar, Unpack

from headscan.cluster.placement_base import PlacementError, PlacementRequest, Timeouts, ray_address
from headscan.errors import StoreError
from headscan.options import BATCH_TOKENS, LOCK_TIMEOUT, LONGEST_WAIT, Limits, check_limits
from headscan.plans import PlanError
from headscan.runs.model_identity import ModelIdentity, identify
from headscan.runs.run_context import BatchedSettings, ModelContext, ModelOpener, Run
from headscan.settings.evaluation_settings import TASK_TOKENS, ChosenArms
from headscan.store.parquet_store import store_at
from headscan.store.store import Store
from headscan.text_tables import say

if TYPE_CHECKING:
    from headscan.engine.arms import Arm
    from headscan.export.formats import ExportConfig, Exported
    from headscan.model_spec import ModelSpec
    from headscan.plans import BudgetRequest, HeadPlan, LossLimit
    from headscan.settings.evaluation_settings import AblateConfig, EvaluateConfig, SweepConfig
    from headscan.settings.measure_settings import (
        GatesConfig,
        ImportanceConfig,
        LabelledImportanceConfig,
        ProbeConfig,
        ScanConfig,
    )
    from headscan.settings.saving_settings import GenerateConfig, PlanConfig
    from headscan.steps.prune.prune_config import PruneConfig
    from headscan.steps.prune.run_prune import PruneResult
    from headscan.steps.referee.run_labelled_referee import LabelledRefereeConfig, LabelledRefereeResult
    from headscan.steps.referee.run_referee import RefereeConfig
    from headscan.steps.run_ablate import AblateResult
    from headscan.steps.run_corpus import CorpusRunResult
    from headscan.steps.run_gates import GatesResult
    from headscan.steps.run_generate import GenerationComparison
    from headscan.steps.run_labelled_ablate import LabelledAblateConfig, LabelledEvaluateConfig
    from headscan.steps.run_probe import ProbeResult
    from headscan.steps.run_sweep import SweepResult
    from headscan.study.study_answer import StudyAnswer
    from headscan.study.study_config import StudyConfig
    from headscan.texts.labelled_texts import LabelledTexts
    from headscan.verdicts.judge import Verdict

#: Settings of jobs whose questions and model are those of an `EvaluateConfig`.
_E = TypeVar("_E", "AblateConfig", "SweepConfig", "RefereeConfig", "PruneConfig")
#: Settings of jobs on labelled examples.
_L = TypeVar("_L", "LabelledEvaluateConfig", "LabelledImportanceConfig")


class LocalJobOptions(TypedDict, total=False):
    """Options of `referee`, `prune` and `study`, which run in this process because they remove heads.

    Attributes:
        devices: Placement and devices; None, the default, chooses them. ``devices.batch_tokens``, if given, replaces
            the ``batch_tokens`` of the settings. If it is not given, ``devices.memory`` lowers those of the settings to
            what fits, and a line reports that.
        timeouts: Timeouts of workers on Ray; None uses their defaults.
        resume_anyway: Resume although software, device or the model's code changed; the store records both versions.
        lock_timeout: Seconds to wait while another process has the store open.
        identity: Names and hashes of the model, if they are known; None reads its files.
        say: Function that receives lines for the user; the default prints them to standard error.
    """

    devices: PlacementRequest | None
    timeouts: Timeouts | None
    resume_anyway: bool
    lock_timeout: float
    identity: ModelIdentity | None
    say: Callable[[str], None]


class JobOptions(LocalJobOptions, total=False):
    """Options of all other jobs but `export`, which takes none: those of `LocalJobOptions`, and a Ray cluster.

    Attributes:
        ray_address: Address of a running Ray cluster, such as ``first:6379``; None, the default, uses this machine, and
            a local Ray for several replicas. The process stays connected, so that all its jobs use one cluster.
    """

    ray_address: str | None


def scan(config: ScanConfig, store: str | Path, **options: Unpack[JobOptions]) -> CorpusRunResult:
    """Scan a corpus into a store; the same call again resumes.

    Args:
        store: DuckDB file; a missing one is created.
        options: See `JobOptions`.
    """
    from headscan.steps.run_scan import run_scan

    with _open_run(_checked(options), config.model, config.tokens.max_tokens, config, store) as (placed_config, run):
        return run_scan(placed_config, run)


def importance(config: ImportanceConfig, store: str | Path, **options: Unpack[JobOptions]) -> CorpusRunResult:
    """Measure the importance of every head on a corpus, and on recall prompts if ``config`` asks for some."""
    from headscan.steps.run_importance import run_importance

    with _open_run(_checked(options), config.model, config.tokens.max_tokens, config, store) as (placed_config, run):
        return run_importance(placed_config, run)


def probe(config: ProbeConfig, store: str | Path, **options: Unpack[JobOptions]) -> ProbeResult:
    """Score every head on each behaviour, and store the scores."""
    from headscan.steps.run_probe import run_probe

    with _open_run(_checked(options), config.model, max(config.probe.lengths), config, store) as (placed_config, run):
        return run_probe(placed_config, run)


def gates(config: GatesConfig, store: str | Path, **options: Unpack[JobOptions]) -> GatesResult:
    """Fit gates on the heads of a frozen model, and store them and the mask of the closed heads."""
    from headscan.steps.run_gates import run_gates

    with _open_run(_checked(options), config.model, config.max_tokens, config.fit, store) as (placed_config, run):
        return run_gates(replace(config, fit=placed_config), run)


def ablate(config: AblateConfig, store: str | Path, **options: Unpack[JobOptions]) -> AblateResult:
    """Measure the effect of every head, ablated alone, on tasks or on the loss of texts."""
    from headscan.steps.run_ablate import run_ablate

    with _open_evaluation(config, store, options) as (placed_config, run):
        return run_ablate(placed_config, run)


def labelled_importance(
    config: LabelledImportanceConfig, store: str | Path, **options: Unpack[JobOptions]
) -> CorpusRunResult:
    """Measure the importance of every head of a classifier or an encoder-decoder on labelled examples."""
    from headscan.steps.run_importance import run_labelled_importance

    with _open_labelled(config, store, options) as (placed_config, texts, run):
        return run_labelled_importance(placed_config, run, texts=texts)


def labelled_ablate(config: LabelledAblateConfig, store: str | Path, **options: Unpack[JobOptions]) -> AblateResult:
    """Measure the effect of every head, ablated alone, on labelled examples."""
    from headscan.steps.run_labelled_ablate import run_labelled_ablate

    with _open_labelled(config.judging, store, options) as (placed_config, texts, run):
        return run_labelled_ablate(replace(config, judging=placed_config), run, texts=texts)


def labelled_referee(
    config: LabelledRefereeConfig, store: str | Path, **options: Unpack[JobOptions]
) -> LabelledRefereeResult:
    """Ablate heads of every site by every criterion, and measure the metric of labelled examples."""
    from headscan.steps.referee.run_labelled_referee import run_labelled_referee

    with _open_labelled(config.judging, store, options) as (placed_config, texts, run):
        return run_labelled_referee(replace(config, judging=placed_config), run, texts=texts)


def evaluate(
    config: EvaluateConfig, store: str | Path, arms: Sequence[Arm] | ChosenArms, **options: Unpack[JobOptions]
) -> Verdict:
    """Ask the baseline and further arms the questions of tasks, and judge the arms.

    Args:
        arms: Arms next to the baseline, such as ``[mask_arm([(3, 5)])]``, or how to choose them, such as
            ``ChosenArms(criterion="output_norm_ln", rule=True, controls=19)`` by a scan in the store. Without any, only
            the baseline answers, and the verdict has no arms.
    """
    from headscan.engine.arms import BASELINE
    from headscan.steps.evaluate_chosen import evaluate_chosen
    from headscan.steps.run_evaluation import run_evaluation
    from headscan.verdicts.judge import judge

    config.check_max_loss()
    checked, identity = _identified(config.model, options)
    tokens = config.placed_tokens(identity)
    with _open_run(checked, config.model, tokens, config, store, evaluates=True) as (placed_config, run):
        if isinstance(arms, ChosenArms):
            run_id = evaluate_chosen(placed_config, run, arms)
        else:
            run_id = run_evaluation(placed_config, run, [BASELINE, *(arm for arm in arms if arm is not BASELINE)])
        return judge(run.store, run_id, max_loss=placed_config.max_loss, baseline_alone=True)


def sweep(config: SweepConfig, store: str | Path, **options: Unpack[JobOptions]) -> SweepResult:
    """Evaluate rules and masks of scores at every share.

    The best of many arms looks better than it is. So the result has the best rule and the best mask, judged on the
    questions that did not select them, in addition to the verdict on all arms and all questions.
    """
    from headscan.steps.run_sweep import run_sweep

    with _open_evaluation(config, store, options) as (placed_config, run):
        return run_sweep(placed_config, run)


def referee(config: RefereeConfig, store: str | Path, **options: Unpack[LocalJobOptions]) -> Verdict:
    """Ablate or remove heads by every criterion of ``config.compared``, and judge all choices."""
    from headscan.steps.referee.run_referee import run_referee
    from headscan.verdicts.judge import judge

    with _open_evaluation(config, store, options, in_this_process=True) as (placed_config, run):
        return judge(run.store, run_referee(placed_config, run), max_loss=placed_config.evaluation.max_loss)


def plan(
    config: PlanConfig, store: str | Path | None, budget: BudgetRequest | LossLimit, **options: Unpack[JobOptions]
) -> HeadPlan:
    """Measure the damage of a window on each KV head, and make a plan.

    `headscan.plans.make_plan` makes plans from a scan or a probe instead.

    Args:
        store: DuckDB file that keeps the damages, so that the same call resumes; None keeps nothing.
        budget: Number of windows, bytes of the cache, or largest loss.

    Raises:
        PlanError: A budget out of reach, or ``resume_anyway`` or ``lock_timeout`` without a store.
        SequenceError: Texts longer than the model's context.
    """
    from headscan.steps.run_plan import run_plan

    if store is None:
        _refuse_store_options(options, "without `store`")
    checked, identity = _identified(config.model, options)
    tokens = config.longest(identity)
    if store is not None:
        with _open_run(checked, config.model, tokens, config, store, evaluates=True) as (placed_config, run):
            return run_plan(placed_config, run, budget)
    opener = checked.opener(config.model, tokens, config.batch_tokens, evaluates=True)
    with ModelContext(config.model, opener, identity=identity, say=checked.say) as context:
        return run_plan(opener.with_batch_tokens(config), context, budget)


def generate(config: GenerateConfig, **options: Unpack[JobOptions]) -> GenerationComparison:
    """Generate text with the full KV cache and with a plan's.

    Raises:
        PlanError: The plan is of another model, or ``resume_anyway`` or ``lock_timeout`` is set, although nothing is
            stored.
        SequenceError: The prompt is empty, or longer than the model's context with the new tokens.
    """
    from headscan.steps.run_generate import run_generate

    _refuse_store_options(options, "on `generate`")
    checked, identity = _identified(config.model, options)
    opener = checked.opener(config.model, config.longest(identity), evaluates=True)
    with ModelContext(config.model, opener, identity=identity, say=checked.say) as context:
        return run_generate(config, context)


def prune(config: PruneConfig, store: str | Path, **options: Unpack[LocalJobOptions]) -> PruneResult:
    """Build pruned models, save them, and judge them against the original.

    Raises:
        PruningError: The output folder is not empty, or the models cannot be built.
        HeadscanError: The evaluation fails; the models are saved.
    """
    from headscan.steps.prune.run_prune import run_prune

    with _open_evaluation(config, store, options, in_this_process=True) as (placed_config, run):
        return run_prune(placed_config, run)


def study(config: StudyConfig, **options: Unpack[LocalJobOptions]) -> StudyAnswer:
    """Find the largest safe shares of heads and of KV cache, and write plan, models and report into ``config.out``.

    Raises:
        StudyError: A setting is out of range, or the folder holds a study with other settings.
    """
    from headscan.study.run_study import run_study

    store = Path(config.out) / "study.duckdb"
    checked = _checked(options, in_this_process=True)
    tokens = max(TASK_TOKENS, config.max_tokens or 0)
    with _open_run(checked, config.model, tokens, config, store, evaluates=True) as (placed_config, run):
        return run_study(placed_config, run)


def export(config: ExportConfig, store: str | Path | None = None) -> Exported:
    """Write a model for a serving engine, a plan for a KV-cache tool, or a store as a Parquet data set.

    Args:
        store: DuckDB file of the format parquet; None for all other formats.

    Raises:
        ExportError: The format has no place for the model, or needs another package.
        PlanError: The format has no place for the plan, or the plan is of another model.
    """
    from headscan.export.formats import run_export

    return run_export(config, None if store is None else Store(store))


@dataclass(frozen=True)
class _CheckedOptions:
    """`JobOptions` with their defaults, checked."""

    devices: PlacementRequest | None = None
    ray_address: str | None = None
    timeouts: Timeouts | None = None
    resume_anyway: bool = False
    lock_timeout: Annotated[float, Limits(least=0, most=LONGEST_WAIT)] = LOCK_TIMEOUT
    identity: ModelIdentity | None = None
    say: Callable[[str], None] = say

    def __post_init__(self) -> None:
        check_limits(self, StoreError)
        if self.ray_address is not None:
            ray_address(self.ray_address)

    def opener(
        self, model: ModelSpec, tokens: int, batch_tokens: int = BATCH_TOKENS, *, evaluates: bool = False
    ) -> ModelOpener:
        return ModelOpener(
            model,
            tokens,
            self.devices or PlacementRequest(),
            batch_tokens,
            evaluates=evaluates,
            ray_address=self.ray_address,
            timeouts=self.timeouts,
            say=self.say,
        )


def _refuse_store_options(options: JobOptions, where: str) -> None:
    """Raise PlanError if a job without a store gets options of one. ``resume_anyway=False`` is what such a job does."""
    for name, given in (("resume_anyway", options.get("resume_anyway")), ("lock_timeout", "lock_timeout" in options)):
        if given:
            raise PlanError(f"`{name}` has no effect {where}: leave it out")


def _checked(options: LocalJobOptions, *, in_this_process: bool = False) -> _CheckedOptions:
    """Check a job's options before it reads a file; a job that runs ``in_this_process`` needs one replica."""
    if unknown := options.keys() - JobOptions.__annotations__.keys():
        raise TypeError(f"unknown option {min(unknown)!r}. Choose from {', '.join(JobOptions.__annotations__)}")
    checked = _CheckedOptions(**options)
    if not in_this_process:
        return checked
    if checked.ray_address is not None:
        raise PlacementError(
            f"`ray_address={checked.ray_address}`: this job runs in one process. Leave out `ray_address`"
        )
    return replace(checked, devices=(checked.devices or PlacementRequest()).in_this_process())


def _identified(
    model: ModelSpec, options: LocalJobOptions, *, in_this_process: bool = False
) -> tuple[_CheckedOptions, ModelIdentity]:
    """Check the options of a job, and return them with the identity of its model, which is read if they lack it."""
    checked = _checked(options, in_this_process=in_this_process)
    identity = checked.identity or identify(model)
    return replace(checked, identity=identity), identity


@contextmanager
def _open_run(
    options: _CheckedOptions,
    model: ModelSpec,
    tokens: int,
    settings: BatchedSettings,
    store: str | Path,
    *,
    evaluates: bool = False,
) -> Iterator[tuple[BatchedSettings, Run]]:
    """Yield settings with the batch size of the placement, and the run of a job whose longest text has ``tokens``."""
    opener = options.opener(model, tokens, settings.batch_tokens, evaluates=evaluates)
    run = Run(
        model,
        store_at(store, lock_timeout=options.lock_timeout, on_wait=options.say),
        opener,
        identity=options.identity,
        resume_anyway=options.resume_anyway,
        say=options.say,
    )
    with run:
        yield opener.with_batch_tokens(settings), run


@contextmanager
def _open_evaluation(
    config: _E, store: str | Path, options: LocalJobOptions, *, in_this_process: bool = False
) -> Iterator[tuple[_E, Run]]:
    """Yield settings with an evaluation as `_open_run` yields them, and the run."""
    evaluation = config.evaluation
    checked, identity = _identified(evaluation.model, options, in_this_process=in_this_process)
    tokens = config.placed_tokens(identity)
    with _open_run(checked, evaluation.model, tokens, evaluation, store, evaluates=True) as (placed_config, run):
        yield replace(config, evaluation=placed_config), run


@contextmanager
def _open_labelled(config: _L, store: str | Path, options: JobOptions) -> Iterator[tuple[_L, LabelledTexts, Run]]:
    """Read labelled examples, and yield what `_open_run` yields and, between, the examples."""
    from headscan.texts.labelled_texts import read_labelled

    checked, identity = _identified(config.model, options)
    texts = read_labelled(config.data, config.model, identity, config.max_tokens)
    with _open_run(checked, config.model, texts.longest, config, store) as (placed_config, run):
        yield placed_config, texts, run
