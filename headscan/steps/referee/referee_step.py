"""The step referee."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from headscan.errors import InterventionError, unknown_name
from headscan.options import Group, Option, short
from headscan.settings.corpus_settings import ExamplesSpec, Metric, longest_text
from headscan.settings.evaluation_settings import (
    DEFAULT_CRITERIA,
    DEFAULT_SITE_CRITERIA,
    SITE_CRITERIA,
    CriteriaComparison,
    RecallQuestions,
    TaskConfig,
)
from headscan.settings.saving_settings import PruneTexts
from headscan.steps.prune.prune_step import RepairChoice
from headscan.steps.question_step import RECALL_GROUP, QuestionStep
from headscan.steps.results import Result

if TYPE_CHECKING:
    from headscan.runs.model_identity import ModelIdentity
    from headscan.runs.run_context import Run
    from headscan.store.store import Store
    from headscan.verdicts.criterion_points import SitePoint
    from headscan.verdicts.judge import Verdict


@short
@dataclass(frozen=True)
class Referee(QuestionStep[Any]):
    """compare every published criterion of removing heads on one model

        headscan referee demo
        headscan referee MODEL --corpus texts/ --tasks mmlu --criteria all --shares 0.1,0.2,0.3
        headscan referee MODEL --corpus texts/ --repair o+down
        headscan referee TRANSLATOR --data dev.tsv --criteria importance,effect --shares 0.2,0.4,0.6,0.8,1

    All criteria choose heads on the same texts: scores of arXiv 2504.03889, gradient importance (1905.10650), gradient
    and entropy (2510.13832), single-head effects, gates (1905.09418), repaired damage, whole layers (2406.15786). Every
    choice answers the same questions, next to random heads. Classifiers and encoder-decoders have --data: each
    criterion removes the heads of each site. The same command again resumes.

    Attributes:
        text: The held-out text of ``texts`` is added to the questions; leave it out.
        compared: Shares are below 1, except on ``data``, where all heads of a site may go.
        repair: Repair of models whose heads are removed; ``none`` ablates heads in the original model.
        data: Labelled examples instead of tasks and texts.
        metric: Accuracy, loss or BLEU of ``data``; None uses accuracy for classes and BLEU for target texts.
        rank_data: Examples that order the heads; None uses one half of ``data`` and judges on the other.
    """

    common: ClassVar = (
        "MODEL --corpus --tasks --data --criteria --shares --controls --repair --sequences --max-tokens --store"
    )
    #: Some sixty models answer the demo's questions.
    demo_questions: ClassVar = (30, 20)
    error: ClassVar = InterventionError

    tasks: Annotated[TaskConfig, Group("tasks", needs="no --data")] = field(default_factory=TaskConfig)
    recall: Annotated[RecallQuestions | None, replace(RECALL_GROUP, needs="no --data")] = field(
        default_factory=RecallQuestions
    )
    texts: Annotated[PruneTexts, Group("calibration", needs="no --data", free="max_tokens")] = field(
        default_factory=PruneTexts
    )
    compared: Annotated[CriteriaComparison, Group("criteria")] = field(default_factory=CriteriaComparison)
    repair: Annotated[RepairChoice, Group("criteria", needs="no --data")] = field(
        default_factory=lambda: RepairChoice("none")
    )
    data: Annotated[ExamplesSpec | None, Group("labelled examples")] = None
    metric: Metric = None
    rank_data: Annotated[
        ExamplesSpec | None,
        Option(
            "labelled examples that order the heads (default: one half of --data, judged on the other)",
            metavar="FILE",
            parse=ExamplesSpec,
            needs="--data",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "model", self.model.in_full_precision())
        if self.text is not None:
            raise InterventionError("`text` has no effect on a referee: leave it out, or set `texts.held_out`")
        if self.data is not None:
            self.refuse(("tasks", "recall", "share_prefixes", "max_loss", "repair"), "with `data`")
            if self.texts != PruneTexts(max_tokens=self.texts.max_tokens):
                raise InterventionError("of `texts` only `max_tokens` has an effect with `data`: leave out the others")
            for name in self.criteria:
                if name not in SITE_CRITERIA:
                    raise unknown_name("criterion of labelled examples", name, SITE_CRITERIA)
            if self.rank_data is not None and not self.rank_data.names_columns:
                object.__setattr__(self, "rank_data", replace(self.data, path=self.rank_data.path, limit=None))
            return
        self.refuse(("metric", "rank_data"), "without `data`")
        object.__setattr__(self, "texts", self.texts.of_model(self.model, 96))
        if max(self.compared.shares) >= 1:
            raise InterventionError(f"`shares={max(self.compared.shares):g}` (limit below 1). Lower `shares`")

    @property
    def in_this_process(self) -> bool:
        return self.data is None

    @property
    def criteria(self) -> tuple[str, ...]:
        if self.compared.criteria is not None:
            return self.compared.criteria
        return DEFAULT_CRITERIA if self.data is None else DEFAULT_SITE_CRITERIA

    def longest(self, identity: ModelIdentity) -> int:
        if self.data is not None:
            return longest_text(identity, self.texts.max_tokens)
        return max(super().longest(identity), self.texts.longest(identity))

    def for_demo(self, scratch: Path) -> Self:
        return super().for_demo(scratch) if self.data is None else self

    def execute(self, run: Run) -> Any:
        """Return a `Verdict` on all choices, or on ``data`` a `LabelledRefereeResult`."""
        if self.data is not None:
            from headscan.steps.referee.run_labelled_referee import run_labelled_referee

            return run_labelled_referee(self, run)
        from headscan.steps.referee.run_referee import run_referee
        from headscan.verdicts.judge import judge

        return judge(run.store, run_referee(self, run))

    def shown(self, result: Any, store: Store) -> Result:
        if self.data is not None:
            return site_result(store, result.run_id, result.points)
        return referee_result(store, result)


def referee_result(store: Store, verdict: Verdict) -> Result:
    """Return the losses of a finished referee, and how far its criteria agree."""
    from headscan.steps.referee.referee_table import agreement_text, criterion_losses, referee_text
    from headscan.verdicts.criterion_points import agreements, criterion_points

    run_id = verdict.run_id
    points = criterion_points(store, verdict)
    losses = criterion_losses(points, [arm for arm in verdict.by_name.values() if arm.kind.is_random])
    heads = [(layer, head) for site, layer, head in _heads(store, run_id) if site == "self"]
    agreed = agreements(points, heads)
    return Result(
        losses,
        lambda: "\n\n".join([f"run {run_id} in {store.path}", referee_text(losses), agreement_text(agreed)]),
        {"run_id": run_id, "store": str(store.path), "agreements": agreed, "unfinished": verdict.unfinished},
    )


def site_result(store: Store, run_id: str, points: Sequence[SitePoint]) -> Result:
    from headscan.steps.referee.referee_table import (
        agreement_text,
        baseline_text,
        referee_text,
        site_agreements,
        site_losses,
    )

    losses, agreed = site_losses(points), site_agreements(points, _heads(store, run_id))
    parts = [f"run {run_id} in {store.path}", baseline_text(points), referee_text(losses)]
    parts += [agreement_text(agreed)] * bool(agreed)
    return Result(
        losses,
        lambda: "\n\n".join(parts),
        {"run_id": run_id, "store": str(store.path), "agreements": agreed, "baseline": points[0].effect.baseline},
    )


def _heads(store: Store, run_id: str) -> list[tuple[str, int, int]]:
    """Return ``(site, layer, head)`` of all heads of a run's model."""
    grid = next(run["grid"] for run in store.runs() if run["run_id"] == run_id)
    return [(site["site"], site["layer"], head) for site in grid for head in range(site["num_attention_heads"])]
