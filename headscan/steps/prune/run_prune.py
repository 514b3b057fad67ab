"""Pruning: heads are chosen, projections repaired, models saved and judged against the original.

The models are arms of an evaluation like all others. Controls of the same size have the same repair: random units, and
whole attention layers dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headscan.cluster.pool import refuse_staged
from headscan.engine.arms import BASELINE
from headscan.engine.prompt_losses import Prompts
from headscan.export.servable_model import obstacle
from headscan.long_work import hash_of
from headscan.models.model_facts import check_bounds
from headscan.ranking.head_roles import find_mask
from headscan.runs.code_version import code_version
from headscan.runs.head_orders import imported_heads, stored_orders
from headscan.runs.model_identity import fingerprint
from headscan.runs.progress import at_work
from headscan.runs.run_context import Run
from headscan.steps.prune.build_models import BuildJob, build_models, kept_damages
from headscan.steps.prune.calibration_texts import CalibrationPrompts, CalibrationTexts, read_recall, read_texts
from headscan.steps.prune.model_card import model_card
from headscan.steps.prune.model_costs import columns_to_solve
from headscan.steps.prune.prune_step import Prune
from headscan.steps.prune.pruned_arms import BuiltModel, pruned_arm
from headscan.steps.prune.work_folder import check_place, work_folder
from headscan.steps.run_evaluation import run_evaluation
from headscan.store.output_files import write_text
from headscan.texts.held_out_text import HeldOutText
from headscan.texts.tasks import Questions
from headscan.verdicts.judge import Verdict, judge


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


@dataclass(frozen=True)
class _Inputs:
    """What a pruning reads before it builds a model. ``questions`` is None if nothing is judged."""

    texts: CalibrationTexts
    held_out: HeldOutText
    prompts: tuple[CalibrationPrompts, ...]
    held_out_prompts: tuple[Prompts, ...]
    questions: Questions | None


def run_prune(config: Prune, run: Run) -> PruneResult:
    """Build pruned models, save and judge them; the same call resumes after an interruption. The original is held whole
    in this process, and closed before pruned models are opened.
    """
    check_place(Path(config.out))
    config = _with_orders(config, run)
    refuse_staged(run.pool, "the removal of heads")
    inputs = _read_inputs(config, run)
    is_servable = obstacle(config.model.config(), run.identity.name) is None
    card = partial(
        model_card,
        model=run.identity.name,
        revision=run.identity.revision,
        calibration=_calibration(config, inputs),
        version=code_version(),
        remote_code=config.remote_code,
        is_servable=is_servable,
    )
    with work_folder(Path(config.out), config.folders, _settings_hash(config, run, inputs), run.say) as work:
        models = _built(config, run, inputs, work.path)
        if inputs.questions is None:
            run.close()  # the check loads a model of this size in another process
        built = work.deliver(models, card, run.say)
        result = PruneResult(built, is_servable=is_servable, has_code=config.remote_code)
        if inputs.questions is not None:
            result = _judged(result, config, run, inputs, inputs.questions)
            _write_verdicts(result, card)
    return result


def _with_orders(config: Prune, run: Run) -> Prune:
    """Return settings with the orders, the mask and the list of heads that they name; what is missing fails before the
    model is loaded.
    """
    if config.mask is not None:
        heads = find_mask(run.store, config.mask, run.identity.columns()).heads
        config = replace(config, mask=None, masks={"mask": heads})
    if config.import_heads is not None:
        config = replace(config, import_heads=None, masks={"imported": tuple(imported_heads(config.import_heads))})
    for heads in config.head_sets.values():
        check_bounds(run.model.config(), heads)
    if config.names_heads:
        return config
    missing = [method for method in config.methods if method not in config.orders]
    stored = stored_orders(run.store, run.identity, missing, config.run_id)
    return replace(config, orders={**config.orders, **stored})


def _read_inputs(config: Prune, run: Run) -> _Inputs:
    """Return texts, prompts and questions; questions that cannot be made fail before any model is built."""
    columns = run.pool.one(columns_to_solve, config.repair.targets)
    texts, held_out = read_texts(config.texts, run.identity, columns, run.say)
    questions = None
    if not config.skip_verdict:
        questions = Questions(config.tasks, config.recall, run.identity, held_out)
        if config.tasks.names:
            with at_work("text that tasks share"):
                shared = questions.tasks.overlap(
                    texts.decoded(run.identity.tokenizer), "the texts that choose and repair"
                )
            run.say(shared)
    prompts, held_out_prompts = read_recall(config.recall_prompts, run, run.batch_tokens)
    return _Inputs(texts, held_out, prompts, held_out_prompts, questions)


def _built(config: Prune, run: Run, inputs: _Inputs, folder: Path) -> list[BuiltModel]:
    """Build the models that a folder lacks, and return all."""
    weight = config.recall_prompts.weight
    with kept_damages(run, inputs.texts, config.selection, run.batch_tokens, inputs.prompts, weight) as known:
        job = BuildJob(
            config,
            inputs.texts,
            config.wanted(folder),
            run.batch_tokens,
            inputs.prompts,
            inputs.held_out,
            inputs.held_out_prompts,
            known=known,
            say=run.say,
        )
        return run.pool.one(build_models, job)


def _judged(result: PruneResult, config: Prune, run: Run, inputs: _Inputs, questions: Questions) -> PruneResult:
    """Return a result with the verdict on its models; if that fails, report where they are saved."""
    with _report_saved(result.models, run.identity.name, run.say):
        arms = [pruned_arm(each, config.model, run.identity) for each in result.models]
        run_id = run_evaluation(config, run, [BASELINE, *arms], questions=questions)
        verdict = judge(run.store, run_id)
        return replace(result, names=tuple(arm.name for arm in arms), verdict=verdict)


def _calibration(config: Prune, inputs: _Inputs) -> str:
    """Return in words what chose the heads and repaired the projections."""
    words = f"texts of {inputs.texts.corpus}"
    if inputs.prompts:
        names = ", ".join(each.name for each in inputs.prompts)
        words += f", and {names} with weight {config.recall_prompts.weight:g}"
    return words


def _settings_hash(config: Prune, run: Run, inputs: _Inputs) -> str:
    """Return a hash of the settings, texts and prompts on which the models and their records depend, but for rounding:
    a run that ran out of memory resumes with smaller batches.
    """
    settings = {
        "model": run.identity.fingerprint(),
        "dtype": config.model.dtype,
        "texts": inputs.texts.content_hash,
        "held_out": [inputs.held_out.corpus, hash_of(tuple(chunk.request for chunk in inputs.held_out.chunks))],
        "held_out_prompts": [(each.name, hash_of(each.requests)) for each in inputs.held_out_prompts],
        "version": code_version(),
        "sizes": [config.budgets, config.methods, *config.head_sets.items()],
        "orders": [(name, *map(tuple, order)) for name, order in config.orders.items()],
        "how": [
            config.removed_unit,
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
    outcomes = {} if verdict is None else verdict.by_name
    for built, name in zip(result.models, result.names, strict=True):
        if not built.is_control and name in outcomes:
            write_text(built.folder / "README.md", card(built, verdict=[outcomes[name].sentence()]))
