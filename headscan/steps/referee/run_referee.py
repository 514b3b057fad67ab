"""A referee: all criteria choose heads on the same texts, and an evaluation judges every choice.

Random heads of each size are controls. Heads are ablated, or removed and the projections that remain repaired. The same
command again resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headscan.ablation.masks import HeadMask
from headscan.catalog import CRITERIA, GATE, LAYER_DROP, CriterionFamily, head_count
from headscan.cluster.pool import refuse_staged
from headscan.engine.arms import BASELINE, Arm, random_masks
from headscan.errors import InterventionError
from headscan.gates.fit_gates import fit_gates
from headscan.gates.gate_settings import GateFitConfig
from headscan.grid import Head, HeadGrid
from headscan.long_work import KnownNumbers, LongWork
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import pad
from headscan.options import BATCH_TOKENS
from headscan.pruning.calibration import Calibration
from headscan.pruning.head_selection import HeadSelection
from headscan.pruning.head_values import head_values, ranked
from headscan.pruning.selection_settings import SelectionConfig
from headscan.runs.model_identity import ModelIdentity
from headscan.runs.progress import at_work, shown_steps
from headscan.runs.run_context import Run
from headscan.settings.corpus_settings import TokenConfig
from headscan.settings.evaluation_settings import RECALL_PROMPTS
from headscan.steps.checks import check_next_token_head
from headscan.steps.prune.build_models import BuildJob, build_models, kept_damages
from headscan.steps.prune.calibration_texts import CalibrationTexts, read_texts
from headscan.steps.prune.model_costs import columns_to_solve
from headscan.steps.prune.prune_step import Prune, WantedModel
from headscan.steps.prune.pruned_arms import pruned_arm
from headscan.steps.prune.work_folder import owned_folder
from headscan.steps.referee.referee_step import Referee
from headscan.steps.run_evaluation import run_evaluation
from headscan.steps.run_importance import recall_texts
from headscan.store.records import ArmKind
from headscan.text_tables import counted
from headscan.texts.recall_tasks import fixed_by
from headscan.texts.tasks import Questions

#: Heads by their number.
Choices = Mapping[int, tuple[Head, ...]]


@dataclass(frozen=True)
class ChoiceJob:
    """Criteria of one family to apply. With ``iterative``, those with a value for every head are measured again after
    each number of heads. ``prompts`` are recall prompts; None if no criterion needs them. ``known`` has damages
    of earlier calls.
    """

    texts: CalibrationTexts
    criteria: tuple[str, ...]
    counts: tuple[int, ...]
    iterative: bool = False
    batch_tokens: int = BATCH_TOKENS
    prompts: CalibrationTexts | None = None
    say: Callable[[str], None] = lambda line: None
    known: KnownNumbers = field(default_factory=KnownNumbers)
    name: str = "choice of heads"


def families(criteria: Sequence[str]) -> list[tuple[str, ...]]:
    """Return criteria in groups that share their measurements."""
    by_family: dict[CriterionFamily, tuple[str, ...]] = {}
    for name, declared in CRITERIA.items():
        if name in criteria:
            by_family[declared.family] = (*by_family.get(declared.family, ()), name)
    return list(by_family.values())


def possible_counts(criterion: str, grid: HeadGrid, counts: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of heads for which a criterion has a choice: whole layers cannot be few heads."""
    if criterion != LAYER_DROP:
        return tuple(counts)
    return tuple(count for count in counts if 0 < layer_count(grid, count) < len(grid.sites))


def layer_count(grid: HeadGrid, heads: int) -> int:
    """Return the number of layers that have about as many heads."""
    return round(heads * len(grid.sites) / grid.total_heads)


def choose_heads(lm: LoadedModel, job: ChoiceJob) -> Mapping[str, Choices]:
    """Pool task: return the heads that each criterion removes, by their number."""
    return FAMILY_CHOICES[CRITERIA[job.criteria[0]].family](lm, job.texts.as_calibration(job.batch_tokens), job)


def _by_value(lm: LoadedModel, calibration: Calibration, job: ChoiceJob) -> Mapping[str, Choices]:
    prompts = None if job.prompts is None else job.prompts.as_calibration(job.batch_tokens)
    if not job.iterative:
        job.say(f"measuring {', '.join(job.criteria)}")
        with at_work(f"measuring {', '.join(job.criteria)}"):
            values = head_values(lm, calibration, job.criteria, prompts=prompts)
        orders = {name: ranked(of_one) for name, of_one in values.items()}
        return {name: {count: tuple(sorted(order[:count])) for count in job.counts} for name, order in orders.items()}
    chosen: dict[str, dict[int, tuple[Head, ...]]] = {name: {} for name in job.criteria}
    for name in job.criteria:
        removed: tuple[Head, ...] = ()
        for count in sorted(job.counts):
            job.say(f"measuring {name} without {counted(len(removed), 'head')}")
            with at_work(f"measuring {name}"):
                order = ranked(head_values(lm, calibration, [name], removed, prompts=prompts)[name], removed)
            removed = tuple(sorted([*removed, *order[: count - len(removed)]]))
            chosen[name][count] = removed
    return chosen


def _by_gate(lm: LoadedModel, calibration: Calibration, job: ChoiceJob) -> Mapping[str, Choices]:
    job.say("fitting gates")
    share = job.counts[len(job.counts) // 2] / lm.grid.total_heads
    with at_work("fitting gates"):
        gates = fit_gates(lm, calibration, GateFitConfig(share=share))
    return {GATE: {count: gates.closed(count) for count in job.counts}}


def _by_set(lm: LoadedModel, calibration: Calibration, job: ChoiceJob) -> Mapping[str, Choices]:
    # Every criterion is one measurement: none compares its own choices with others nearby.
    selection = HeadSelection(lm, calibration, work=LongWork(job.known, shown_steps, job.say))

    def chosen(method: str, count: int) -> tuple[Head, ...]:
        return selection.choose(method=method, count=layer_count(lm.grid, count) if method == LAYER_DROP else count)

    return {
        name: {count: chosen(name, count) for count in possible_counts(name, lm.grid, job.counts)}
        for name in job.criteria
    }


#: How each family of criteria chooses heads.
FAMILY_CHOICES: dict[CriterionFamily, Callable[[LoadedModel, Calibration, ChoiceJob], Mapping[str, Choices]]] = {
    "score": _by_value,
    "importance": _by_value,
    "effect": _by_value,
    "gate": _by_gate,
    "set": _by_set,
}


def run_referee(config: Referee, run: Run) -> str:
    """Choose heads by every criterion and evaluate all choices; return the run's id. The model is held whole in this
    process.
    """
    refuse_staged(run.pool, "the removal of heads")
    check_next_token_head(run)
    columns = run.pool.one(columns_to_solve, config.repair.targets)
    texts, held_out = read_texts(config.texts, run.identity, columns, run.say)
    questions = Questions(config.tasks, config.recall, run.identity, held_out)
    sizes = _sizes(config.compared.shares, run.facts.grid.total_heads)
    chosen = _choices(config, run, texts, tuple(sizes.values()))

    def evaluate_choices(arms: Sequence[Arm]) -> str:
        return run_evaluation(config, run, [BASELINE, *arms], questions=questions)

    if config.repair.is_none:
        return evaluate_choices(_mask_arms(config, run, chosen, sizes, _texts_hash(config, run, texts)))
    run_id = ""
    # Whole layers are other numbers of heads, or none; the other criteria share the numbers of the controls.
    controlled = next((name for name in config.criteria if name != LAYER_DROP), config.criteria[0])
    for criterion in config.criteria:
        # The models of one criterion are on disk at a time.
        with owned_folder(run.store.path.parent, ".headscan-referee-") as folder:
            seeds = config.compared.controls if criterion == controlled else 0
            wanted = list(_wanted(folder, criterion, chosen[criterion], seeds))
            # Another number of tokens in a pass changes the rounding of weights, and so the models that the store knows
            # by them: a larger batch size is left to the questions, and only a smaller one, for less memory, counts.
            tokens = min(BATCH_TOKENS, run.batch_tokens)
            how = Prune(
                run.model,
                out=folder,
                shares=config.compared.shares,
                methods=(criterion,),
                texts=config.texts,
                repair=config.repair,
                timing=None,
            )
            job = BuildJob(how, texts, tuple(wanted), tokens, say=run.say)
            built = run.pool.one(build_models, job)
            run_id = evaluate_choices([pruned_arm(model, run.model, run.identity) for model in built])
    return run_id


def _sizes(shares: Sequence[float], total: int) -> dict[float, int]:
    sizes = {share: head_count(share, total) for share in sorted(set(shares))}
    if max(sizes.values()) >= total:
        raise InterventionError(
            f"a share of {max(shares):g} is all {total} heads of the model (limit {total - 1}). Lower `shares`"
        )
    return sizes


def _texts_hash(config: Referee, run: Run, texts: CalibrationTexts) -> str:
    settings = {
        "texts": texts.content_hash,
        "iterative": config.compared.iterative,
        # Stages of the damage, the share of gates, and iterations depend on the shares.
        "shares": sorted(config.compared.shares),
    }
    return run.fingerprint(settings)[:6]


def _choices(config: Referee, run: Run, texts: CalibrationTexts, counts: tuple[int, ...]) -> dict[str, Choices]:
    """Return the heads of every criterion; those that the store has are not chosen again."""
    by_criterion: dict[str, Choices] = {}
    # Stages of the damage, the share of gates, and iterations depend on the other shares.
    of_all = (config.compared.iterative, sorted(counts))
    with kept_damages(run, texts, SelectionConfig(), run.batch_tokens) as known:
        for criterion in config.criteria:
            stored = {
                count: known.get(("heads of a criterion", criterion, count, *of_all))
                for count in possible_counts(criterion, run.facts.grid, counts)
            }
            found = {count: each for count, each in stored.items() if each is not None}
            if len(found) == len(stored):
                by_criterion[criterion] = {
                    count: tuple(Head(int(layer), int(head)) for layer, head in each.reshape(-1, 2))
                    for count, each in found.items()
                }
        for family in families([name for name in config.criteria if name not in by_criterion]):
            on_recall = any(CRITERIA[name].on_recall for name in family)
            with fixed_by("Leave out importance_recall, or raise `max_tokens` if the length is too small"):
                prompts = _recall_prompts(run.identity, config.texts.longest(run.identity)) if on_recall else None
            job = ChoiceJob(texts, family, counts, config.compared.iterative, run.batch_tokens, prompts, run.say, known)
            for criterion, choices in run.pool.one(choose_heads, job).items():
                for count, heads in choices.items():
                    known.add(("heads of a criterion", criterion, count, *of_all), heads)
                by_criterion[criterion] = choices
    return by_criterion


def _recall_prompts(identity: ModelIdentity, tokens: int) -> CalibrationTexts:
    ids, lengths = pad([text.ids for text in recall_texts(identity, TokenConfig(tokens), RECALL_PROMPTS)])
    return CalibrationTexts("recall prompts", ids.numpy(), lengths.numpy())


def _mask_arms(
    config: Referee, run: Run, chosen: Mapping[str, Choices], sizes: Mapping[float, int], texts_hash: str
) -> list[Arm]:
    """Return the arms share by share, so that all curves grow together."""
    selection = f"{'iterative, ' if config.compared.iterative else ''}texts {texts_hash}"
    arms: list[Arm] = []
    for share, count in sizes.items():
        for criterion in config.criteria:
            if heads := chosen[criterion].get(count):
                name = f"{criterion} {100 * share:g}% of {selection}"
                details = (("criterion", criterion),)
                arms.append(
                    Arm(name, ArmKind.MASK, HeadMask(heads), criterion, share, selection=selection, details=details)
                )
        arms += random_masks(run.facts.grid, share, count, config.compared.controls)
    return arms


def _wanted(folder: Path, criterion: str, chosen: Choices, seeds: int) -> Iterator[WantedModel]:
    """Yield the pruned models of a criterion, each with random controls."""
    for count, heads in chosen.items():
        controls = tuple(folder / f"{count}-random-{seed}" for seed in range(seeds))
        yield WantedModel(folder / str(count), criterion, None, heads, controls)
