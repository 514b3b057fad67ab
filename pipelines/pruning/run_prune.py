"""Pruning: heads are chosen, projections repaired, models saved and judged against the original.

The models are arms of an evaluation like all others. Controls of the same size have the same repair: random units, and
whole attention layers dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from headscan.analysis.store.output_files import write_text
from headscan.analysis.verdicts.judge import Verdict, judge
from headscan.cluster.pool import refuse_staged
from headscan.long_work import hash_of
from headscan.pipelines.evaluate.held_out_text import HeldOutText
from headscan.pipelines.evaluate.run_evaluation import run_evaluation
from headscan.pipelines.evaluate.tasks import Questions
from headscan.pipelines.export.servable_model import obstacle
from headscan.pipelines.pruning.build_models import BuildJob, build_models, kept_damages
from headscan.pipelines.pruning.calibration_texts import CalibrationTexts, read_recall, read_texts
from headscan.pipelines.pruning.model_card import model_card
from headscan.pipelines.pruning.model_costs import columns_to_solve
from headscan.pipelines.pruning.prune_config import PruneConfig
from headscan.pipelines.pruning.pruned_arms import BuiltModel, pruned_arm
from headscan.pipelines.pruning.work_folder import check_place, work_folder
from headscan.pipelines.runs.code_version import code_version
from headscan.pipelines.runs.head_orders import stored_orders
from headscan.pipelines.runs.model_identity import fingerprint
from headscan.pipelines.runs.run_context import Run
from headscan.pipelines.scoring.arms import BASELINE
from headscan.pipelines.scoring.prompt_losses import Prompts


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


def run_prune(config: PruneConfig, run: Run) -> PruneResult:
    """Build pruned models, save and judge them; the same call resumes after an interruption. The original is held whole
    in this process, and closed before pruned models are opened.
    """
    out = Path(config.out)
    check_place(out)
    if config.budgets:
        # A missing run fails before the model is loaded.
        missing = [method for method in config.methods if method not in config.orders]
        stored = stored_orders(run.store, run.identity, missing, config.run_id)
        config = replace(config, orders={**config.orders, **stored})
    refuse_staged(run.pool, "the removal of heads")
    identity, say = run.identity, run.say
    columns = run.pool.one(columns_to_solve, config.repair.targets)
    texts, held_out = read_texts(config.texts, identity, columns, say)
    evaluation = replace(config.evaluation, text=held_out)
    questions = None
    if not config.skip_verdict:
        # Questions that cannot be made fail before any model is built.
        questions = Questions(evaluation.tasks, evaluation.recall, identity, held_out)
    prompts, held_out_prompts = read_recall(config.recall_prompts, run, evaluation.batch_tokens)
    calibration = f"texts of {texts.corpus}"
    if prompts:
        calibration += f", and {', '.join(each.name for each in prompts)} with weight {config.recall_prompts.weight:g}"

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

    settings_hash = _settings_hash(config, run, texts, held_out, held_out_prompts)
    with work_folder(out, config.folders, settings_hash, say) as work:
        with kept_damages(
            run, texts, config.selection, evaluation.batch_tokens, prompts, config.recall_prompts.weight
        ) as known:
            job = BuildJob(
                config,
                texts,
                config.wanted(work.path),
                prompts,
                held_out,
                held_out_prompts,
                known=known,
                say=say,
            )
            models = run.pool.one(build_models, job)
        built = work.deliver(models, card, say)
        result = PruneResult(built, is_servable=is_servable, has_code=config.remote_code)
        if not config.skip_verdict:
            with _report_saved(built, identity.name, say):
                arms = [pruned_arm(each, evaluation.model, identity) for each in built]
                run_id = run_evaluation(evaluation, run, [BASELINE, *arms], questions=questions)
                names = tuple(arm.name for arm in arms)
                result = replace(result, names=names, verdict=judge(run.store, run_id))
            _write_verdicts(result, card)
    return result


def _settings_hash(
    config: PruneConfig, run: Run, texts: CalibrationTexts, held_out: HeldOutText, held_out_prompts: Sequence[Prompts]
) -> str:
    """Return a hash of the settings, texts and prompts on which the models and their records depend, but for rounding:
    a run that ran out of memory resumes with smaller batches.
    """
    settings = {
        "model": run.identity.fingerprint(),
        "dtype": config.evaluation.model.dtype,
        "texts": texts.content_hash,
        "held_out": [held_out.corpus, hash_of(tuple(chunk.request for chunk in held_out.chunks))],
        "held_out_prompts": [(each.name, hash_of(each.requests)) for each in held_out_prompts],
        "version": code_version(),
        "sizes": [config.budgets, config.methods, *config.heads.items()],
        "orders": [(name, *map(tuple, order)) for name, order in config.orders.items()],
        "how": [
            config.unit,
            config.kv_counts,
            config.selection,
            config.repair,
            config.recall_prompts,
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
