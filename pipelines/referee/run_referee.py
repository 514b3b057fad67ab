"""A referee: all criteria choose heads on the same texts, and an evaluation judges every choice.

Random heads of each size are controls. Heads are ablated, or removed and the projections that remain repaired. The
same command again resumes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headscan.ablation.masks import HeadMask
from headscan.analysis.store.records import ArmKind
from headscan.analysis.store.store import Store
from headscan.errors import InterventionError
from headscan.grid import Head
from headscan.pipelines.evaluate.evaluation_checks import check_predicts
from headscan.pipelines.evaluate.evaluation_requests import Questions
from headscan.pipelines.evaluate.run_evaluation import evaluate
from headscan.pipelines.pruning.build_models import BuildJob, WantedModel, build_models
from headscan.pipelines.pruning.calibration_texts import CalibrationTexts, read_texts
from headscan.pipelines.pruning.pruned_arms import pruned_arm
from headscan.pipelines.pruning.repairs import Repair
from headscan.pipelines.pruning.work_folder import owned_folder
from headscan.pipelines.referee.choose_heads import ChoiceJob, Choices, choose_heads, families, possible_counts
from headscan.pipelines.referee.comparison import head_count
from headscan.pipelines.runs.identity import fingerprint
from headscan.pipelines.runs.run_records import Run
from headscan.pipelines.scoring.arms import BASELINE, Arm, random_masks
from headscan.pipelines.settings.evaluation_settings import Comparison, EvaluateConfig
from headscan.pipelines.settings.saving_settings import TextConfig


@dataclass(frozen=True)
class StoredChoices:
    """The choices on one model and its texts.

    Attributes:
        mark: Hash of everything that choices depend on, apart from criterion and number.
    """

    store: Store
    mark: str

    def read(self, criterion: str, counts: Sequence[int]) -> Choices | None:
        """Return the stored heads of a criterion; None if one of the numbers is missing."""
        if not self.store.path.exists():
            return None
        rows = self.store.query(
            "SELECT name, layer, head FROM masks JOIN mask_heads USING (mask_id) WHERE list_contains(?, name)"
            " ORDER BY name, layer, head",
            [[self._name(criterion, count) for count in counts]],
        ).to_pylist()
        found = {
            count: tuple(Head(row["layer"], row["head"]) for row in rows if row["name"] == self._name(criterion, count))
            for count in counts
        }
        return found if all(found.values()) else None

    def write(self, criterion: str, choices: Choices) -> None:
        """Store the heads of a criterion, of all counts or none."""
        with self.store.one_transaction():
            for count, heads in choices.items():
                self.store.add_mask(self._name(criterion, count), heads, score=criterion)

    def _name(self, criterion: str, count: int) -> str:
        return f"{criterion}, {count} heads, texts {self.mark}"


@dataclass(frozen=True)
class RefereeConfig:
    """Settings of a referee.

    Attributes:
        evaluation: Questions that judge; the held-out text is added.
        compared: Criteria, shares and random controls.
        texts: Texts on which heads are chosen, and held-out text.
        repair: Projections that are solved again; ``none`` ablates heads in the original model.
    """

    evaluation: EvaluateConfig
    compared: Comparison = field(default_factory=Comparison)
    texts: TextConfig = field(default_factory=TextConfig)
    repair: Repair = field(default_factory=lambda: Repair("none"))


def referee(config: RefereeConfig, run: Run) -> str:
    """Choose heads by every criterion and evaluate all choices; return the run's id. The model is held whole in this
    process.
    """
    check_predicts(run)
    texts, held_out = read_texts(config.texts, run.identity, run.say)
    evaluation = replace(config.evaluation, text=held_out)
    questions = Questions(evaluation.tasks, evaluation.recall, run.identity, held_out)
    sizes = _sizes(config.compared.shares, run.facts.grid.total_heads)
    mark = _mark(config, run, texts)
    chosen = _choices(config, StoredChoices(run.store, mark), run, texts, tuple(sizes.values()))

    def judge(arms: Sequence[Arm]) -> str:
        return evaluate(evaluation, run, [BASELINE, *arms], questions=questions)

    if config.repair.is_none:
        return judge(_mask_arms(config, run, chosen, sizes, mark))
    run_id = ""
    for number, criterion in enumerate(config.compared.criteria):
        # The models of one criterion are on disk at a time.
        with owned_folder(run.store.path.parent, ".headscan-referee-") as folder:
            wanted = list(_wanted(folder, criterion, chosen[criterion], 0 if number else config.compared.seeds))
            job = BuildJob(texts, tuple(wanted), repair=config.repair, timing=None, say=run.say)
            built = run.pool.one(build_models, job)
            run_id = judge([pruned_arm(each, evaluation.model, run.identity) for each in built])
    return run_id


def _sizes(shares: Sequence[float], total: int) -> dict[float, int]:
    """Return the number of heads of each share."""
    sizes = {share: head_count(share, total) for share in sorted(set(shares))}
    if max(sizes.values()) >= total:
        raise InterventionError(
            f"a share of {max(shares):g} is all {total} heads of the model (limit {total - 1}). Lower `shares`"
        )
    return sizes


def _mark(config: RefereeConfig, run: Run, texts: CalibrationTexts) -> str:
    settings = {
        "model": run.identity.fingerprint(),
        "dtype": config.evaluation.model.dtype,
        "texts": texts.content_hash,
        "iterative": config.compared.iterative,
        "shares": sorted(
            config.compared.shares
        ),  # stages of the damage, the share of gates, and iterations depend on them
    }
    return fingerprint(settings)[:6]


def _choices(
    config: RefereeConfig,
    stored: StoredChoices,
    run: Run,
    texts: CalibrationTexts,
    counts: tuple[int, ...],
) -> dict[str, Choices]:
    """Return the heads of every criterion; those that the store has are not chosen again."""
    grid = run.facts.grid
    found: dict[str, Choices] = {}
    for criterion in config.compared.criteria:
        if (known := stored.read(criterion, possible_counts(criterion, grid, counts))) is not None:
            found[criterion] = known
    missing = [name for name in config.compared.criteria if name not in found]
    for family in families(missing):
        job = ChoiceJob(texts, family, counts, config.compared.iterative, config.evaluation.batch_tokens, run.say)
        for criterion, choices in run.pool.one(choose_heads, job).items():
            stored.write(criterion, choices)
            found[criterion] = choices
    return found


def _mask_arms(
    config: RefereeConfig,
    run: Run,
    chosen: Mapping[str, Choices],
    sizes: Mapping[float, int],
    mark: str,
) -> list[Arm]:
    """Return the arms share by share, so that all curves grow together."""
    selection = f"{'iterative, ' if config.compared.iterative else ''}texts {mark}"
    arms: list[Arm] = []
    for share, count in sizes.items():
        for criterion in config.compared.criteria:
            if heads := chosen[criterion].get(count):
                name = f"{criterion} {100 * share:g}% of {selection}"
                details = (("criterion", criterion),)
                arms.append(
                    Arm(name, ArmKind.MASK, HeadMask(heads), criterion, share, selection=selection, details=details)
                )
        arms += random_masks(run.facts.grid, share, count, config.compared.seeds)
    return arms


def _wanted(folder: Path, criterion: str, chosen: Choices, seeds: int) -> Iterator[WantedModel]:
    """Yield the pruned models of a criterion, each with random controls."""
    for count, heads in chosen.items():
        controls = tuple(folder / f"{count}-random-{seed}" for seed in range(seeds))
        yield WantedModel(folder / str(count), criterion, None, heads, controls)
