"""Pruning: heads are chosen, projections repaired, models saved and judged against the original.

The models are arms of an evaluation like all others. Controls of the same size have the same repair: random units, and
whole attention layers dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from headscan.analysis.store.output_files import write_text
from headscan.analysis.verdicts.judge import Verdict, judge
from headscan.catalog import LAYER_DROP
from headscan.cluster.tasks.pool import refuse_staged
from headscan.errors import PruningError
from headscan.grid import Unit
from headscan.long_work import hash_of
from headscan.options import Limits, check_limits
from headscan.pipelines.evaluate.held_out_text import HeldOutText
from headscan.pipelines.evaluate.run_evaluation import evaluate
from headscan.pipelines.evaluate.tasks import Questions
from headscan.pipelines.export.servable_model import obstacle
from headscan.pipelines.kv.damage_measurement import Prompts
from headscan.pipelines.pruning.build_models import BuildJob, RepairChoice, WantedModel, build_models, kept_damages
from headscan.pipelines.pruning.calibration_texts import CalibrationTexts, read_recall, read_texts
from headscan.pipelines.pruning.model_card import model_card
from headscan.pipelines.pruning.model_costs import Timing, columns_to_solve
from headscan.pipelines.pruning.pruned_arms import RANDOM, BuiltModel, pruned_arm
from headscan.pipelines.pruning.pruning_units import PruneBudget
from headscan.pipelines.pruning.work_folder import check_place, work_folder
from headscan.pipelines.runs.code_version import code_version
from headscan.pipelines.runs.model_identity import fingerprint
from headscan.pipelines.runs.run_context import Run
from headscan.pipelines.scoring.arms import BASELINE
from headscan.pipelines.settings.evaluation_settings import EvaluateConfig
from headscan.pipelines.settings.saving_settings import KvCounts, RecallConfig, TextConfig
from headscan.pruning.head_selection import SelectionConfig


@dataclass(frozen=True)
class PruneConfig:
    """Settings of a pruning.

    Attributes:
        evaluation: Questions that judge the models; the held-out text is added.
        out: Folder of the model; with several models, of their folders.
        budgets: Sizes; empty if ``heads`` names the heads.
        methods: Methods that choose heads.
        heads: Heads of a mask or list, by its name; empty lets the methods choose.
        orders: Heads by method, the most removable first, of methods from outside.
        texts: Texts that choose, repair and judge.
        recall: Recall prompts that do so, too.
        unit: Unit of removal.
        kv_counts: ``divisors`` leaves each layer a number of KV heads that a DeciLM folder holds without KV heads of
            zeros: a divisor of the query heads, or 0 except in the first layer. The share that is reached may fall
            short by less than one step of a layer.
        selection: Effort of the methods ``damage`` and ``layer-drop``.
        repair: Projections that are solved again.
        controls: Number of random controls of each model; with 0 there is no model without whole layers either.
        remote_code: Copy the code of pruned models into the folders.
        timing: How prefill and decoding are timed; None skips it.
        skip_verdict: Judge nothing, and build no controls.

    Raises:
        PruningError: There is nothing to build, or ``controls`` is negative.
    """

    evaluation: EvaluateConfig
    out: Path
    budgets: tuple[PruneBudget, ...] = ()
    methods: tuple[str, ...] = ("damage",)
    heads: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    orders: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    texts: TextConfig = field(default_factory=TextConfig)
    recall: RecallConfig = field(default_factory=RecallConfig)
    unit: Unit = "head"
    kv_counts: KvCounts = "any"
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    repair: RepairChoice = field(default_factory=RepairChoice)
    controls: Annotated[int, Limits(least=0)] = 1
    remote_code: bool = False
    timing: Timing | None = field(default_factory=Timing)
    skip_verdict: bool = False

    def __post_init__(self) -> None:
        if not (self.budgets and self.methods) and not self.heads:
            raise PruningError("nothing to prune: 0 sizes (limit 1). Set `share`, or name heads")
        if self.kv_counts != "any" and (self.unit != "group" or self.heads):
            raise PruningError(
                f"`kv_counts={self.kv_counts}` with `unit={self.unit}` or named heads (limit: `unit=group`). Choose"
                " `unit=group`, or leave it out"
            )
        check_limits(self, PruningError)

    @property
    def targets(self) -> tuple[Path, ...]:
        names = [_folder_name(method, budget) for method, budget, _ in self._sizes]
        return (self.out,) if len(names) == 1 else tuple(self.out / name for name in names)

    @property
    def _sizes(self) -> list[tuple[str, PruneBudget | None, tuple[tuple[int, int], ...]]]:
        sizes: list[tuple[str, PruneBudget | None, tuple[tuple[int, int], ...]]] = [
            (method, budget, ()) for budget in self.budgets for method in self.methods
        ]
        return sizes + [(name, None, heads) for name, heads in self.heads.items()]

    def wanted(self, scratch: Path) -> tuple[WantedModel, ...]:
        """Return the models to build in the folder ``scratch``, in the order of `targets`."""
        wanted = []
        for number, (method, budget, heads) in enumerate(self._sizes):
            seeds, layers = self._controls(method, budget)
            wanted.append(
                WantedModel(
                    scratch / str(number),
                    method,
                    budget,
                    heads,
                    tuple(scratch / f"{number}-random-{seed}" for seed in range(seeds)),
                    scratch / f"{number}-layers" if layers else None,
                )
            )
        return tuple(wanted)

    def _controls(self, method: str, budget: PruneBudget | None) -> tuple[int, bool]:
        """Return the number of random controls of a model, and True if it has a control without whole layers."""
        if self.skip_verdict or not self.controls:
            return 0, False
        if budget is None:
            return self.controls, True
        # Methods that remove as many units have common controls, built with the first of them that needs each.
        methods = self.methods if budget.same_for_all_methods else (method,)
        first_chosen = next((each for each in methods if each != RANDOM), None)
        first_of_heads = next((each for each in methods if each != LAYER_DROP), None)
        # Whole layers chosen by damage would be their own control.
        is_control = self.unit == "layer" and "damage" in methods
        return self.controls if method == first_chosen else 0, method == first_of_heads and not is_control


@dataclass(frozen=True)
class PruneResult:
    """Pruned models and their verdict; if nothing was judged, the verdict is None and arms have no names. The folders
    of controls are gone.

    Attributes:
        is_servable: `headscan export` has formats of serving engines for this kind of model.
        has_code: The folders have the code of pruned models.
    """

    models: tuple[BuiltModel, ...]
    names: tuple[str, ...] = ()
    verdict: Verdict | None = None
    is_servable: bool = False
    has_code: bool = False


def prune(config: PruneConfig, run: Run) -> PruneResult:
    """Build pruned models, save and judge them; the same call resumes after an interruption. The original is held whole
    in this process, and closed before pruned models are opened.
    """
    check_place(config.out)
    refuse_staged(run.pool, "the removal of heads")
    identity, say = run.identity, run.say
    columns = run.pool.one(columns_to_solve, config.repair.targets)
    texts, held_out = read_texts(config.texts, identity, columns, say)
    evaluation = replace(config.evaluation, text=held_out)
    questions = None
    if not config.skip_verdict:
        # Questions that cannot be made fail before any model is built.
        questions = Questions(evaluation.tasks, evaluation.recall, identity, held_out)
    prompts, held_out_prompts = read_recall(config.recall, run, evaluation.batch_tokens)
    calibration = f"texts of {texts.corpus}"
    if prompts:
        calibration += f", and {', '.join(each.name for each in prompts)} with weight {config.recall.weight:g}"

    spec = evaluation.model
    original = spec.config()
    is_servable = obstacle(original, identity.name) is None

    def card(model: BuiltModel, *sentences: str) -> str:
        return model_card(
            model,
            model=identity.name,
            revision=identity.revision,
            calibration=calibration,
            version=code_version(),
            remote_code=config.remote_code,
            is_servable=is_servable,
            verdict=sentences,
        )

    settings = _settings(config, run, texts, held_out, (*prompts, *held_out_prompts))
    with work_folder(config.out, config.targets, settings, say) as work:
        job = BuildJob(
            texts=texts,
            wanted=config.wanted(work.path),
            unit=config.unit,
            kv_counts=config.kv_counts,
            selection=config.selection,
            repair=config.repair,
            orders=config.orders,
            remote_code=config.remote_code,
            timing=config.timing,
            prompts=prompts,
            recall_weight=config.recall.weight,
            held_out=held_out,
            held_out_prompts=held_out_prompts,
            batch_tokens=evaluation.batch_tokens,
            say=say,
        )
        with kept_damages(run, job) as known:
            models = run.pool.one(build_models, replace(job, known=known))
        built = work.deliver(models, card, say)
        result = PruneResult(built, is_servable=is_servable, has_code=config.remote_code)
        if not config.skip_verdict:
            with _report_saved(built, identity.name, say):
                arms = [pruned_arm(each, evaluation.model, identity) for each in built]
                run_id = evaluate(evaluation, run, [BASELINE, *arms], questions=questions)
                names = tuple(arm.name for arm in arms)
                result = replace(result, names=names, verdict=judge(run.store, run_id))
            _write_verdicts(result, card)
    return result


def _settings(
    config: PruneConfig, run: Run, texts: CalibrationTexts, held_out: HeldOutText, prompts: Sequence[Prompts]
) -> str:
    """Return a hash of the settings, texts and prompts on which the models and their records depend."""
    settings = {
        "model": run.identity.fingerprint(),
        "dtype": config.evaluation.model.dtype,
        "texts": texts.content_hash,
        "held_out": [held_out.corpus, hash_of(tuple(chunk.request for chunk in held_out.chunks))],
        "prompts": [(each.name, hash_of(each.requests)) for each in prompts],
        "version": code_version(),
        "sizes": [config.budgets, config.methods, *config.heads.items()],
        "orders": [(name, *map(tuple, order)) for name, order in config.orders.items()],
        "how": [
            config.unit,
            config.kv_counts,
            config.selection,
            config.repair,
            config.recall,
            config.controls,
            config.remote_code,
            config.timing,
            config.skip_verdict,
        ],
    }
    return fingerprint({name: repr(each) for name, each in settings.items()})


@contextmanager
def _report_saved(built: Sequence[BuiltModel], model: str, say: Callable[[str], None]) -> Iterator[None]:
    """Report the saved models if the block fails or is interrupted."""
    try:
        yield
    except BaseException:
        folders = ", ".join(str(each.folder) for each in built if not each.is_control)
        say(
            f"The evaluation did not finish, but the pruned models are saved: {folders}. Judge them with `headscan"
            f" evaluate` of {model} and these folders as its models, or resume"
        )
        raise


def _write_verdicts(result: PruneResult, card: Callable[..., str]) -> None:
    """Write the verdict into the cards of all models that are no controls."""
    verdict = result.verdict
    outcomes = {} if verdict is None else verdict.outcomes
    for built, name in zip(result.models, result.names, strict=True):
        if not built.is_control and name in outcomes:
            write_text(built.folder / "README.md", card(built, outcomes[name].sentence()))


def _folder_name(method: str, budget: PruneBudget | None) -> str:
    if budget is None:
        return method
    share = getattr(budget, "share", None)
    return f"{method}-{budget.label.replace(' ', '-') if share is None else f'{share:g}'}"
