"""The verb referee."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from headscan.cli.option_parser import Given
from headscan.cli.results import Json, Result
from headscan.cli.task_options import (
    NO_DATA,
    CalibrationOptions,
    DemoSize,
    Metric,
    OptionalTaskOptions,
    RecallOptions,
    WholeModelVerb,
    evaluation_of,
    labelled_evaluation,
)
from headscan.cli.verb_base import quiet_libraries
from headscan.options import Group, Needs, Option
from headscan.settings.corpus_settings import ExamplesSpec
from headscan.settings.evaluation_settings import CriteriaComparison
from headscan.settings.saving_settings import REPAIRS

if TYPE_CHECKING:
    from headscan.store.store import Store
    from headscan.verdicts.criterion_points import SitePoint
    from headscan.verdicts.judge import Verdict

#: Some sixty models answer the demo's questions.
_DEMO = DemoSize(questions=30, recall=20, sequences=96)


@dataclass(frozen=True, kw_only=True)
class _Criteria:
    compared: Annotated[Given[CriteriaComparison], Group()]
    repair: Annotated[
        str,
        Option(
            "projections that are solved again after heads are removed; none ablates heads only", choices=tuple(REPAIRS)
        ),
    ] = "none"


@dataclass(frozen=True, kw_only=True)
class Referee(WholeModelVerb):
    """compare every published criterion of removing heads on one model

        headscan referee demo
        headscan referee MODEL --corpus texts/ --tasks mmlu --criteria all --shares 0.1,0.2,0.3
        headscan referee MODEL --corpus texts/ --repair o+down
        headscan referee TRANSLATOR --data dev.tsv --criteria importance,effect --shares 0.2,0.4,0.6,0.8,1

    All criteria choose heads on the same texts: scores of arXiv 2504.03889, gradient importance (1905.10650), gradient
    and entropy (2510.13832), single-head effects, gates (1905.09418), repaired damage, whole layers (2406.15786). Every
    choice answers the same questions, next to random heads. Classifiers and encoder-decoders have --data: each
    criterion removes the heads of each site. The same command again resumes.
    """

    common: ClassVar = (
        "MODEL --corpus --tasks --data --criteria --shares --controls --repair --sequences --max-tokens --store"
    )

    tasks: Annotated[OptionalTaskOptions, Group("tasks", needs=(NO_DATA,))]
    recall: Annotated[RecallOptions, Group("tasks", needs=(NO_DATA,))]
    calibration: Annotated[
        CalibrationOptions, Group("calibration", needs=(replace(NO_DATA, of=("name", "data_set", "sequences")),))
    ]
    json: Json = False
    criteria: Annotated[_Criteria, Group("criteria", needs=(replace(NO_DATA, of=("repair",)),))]
    data: Annotated[ExamplesSpec | None, Group("labelled examples")]
    metric: Metric = None
    rank_data: Annotated[
        str | None,
        Option(
            "labelled examples that order the heads (default: one half of --data, judged on the other)",
            metavar="FILE",
            needs=(Needs(key="data.path"),),
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.data is None:
            self.check_texts()

    def run(self) -> Result:
        if self.rank_data is not None:
            ExamplesSpec(self.rank_data).check_file()
        return self._on_tasks() if self.data is None else self._on_examples(self.data)

    def _on_examples(self, data: ExamplesSpec) -> Result:
        from headscan.jobs import job_functions
        from headscan.steps.referee.run_labelled_referee import LabelledRefereeConfig

        ranking = None if self.rank_data is None else replace(data, path=self.rank_data, limit=None)
        max_tokens = self.calibration.texts.values.get("max_tokens")
        judging = labelled_evaluation(self, data, self.metric, max_tokens)
        config = LabelledRefereeConfig(judging, self.criteria.compared.build(), ranking)
        result = job_functions.labelled_referee(config, self.store.path, **self.job_options())
        return site_result(self.store.open(), result.run_id, result.points)

    def _on_tasks(self) -> Result:
        from headscan.jobs import job_functions
        from headscan.steps.prune.prune_config import RepairChoice
        from headscan.steps.referee.run_referee import RefereeConfig

        options = self.whole_model_options()
        quiet_libraries()
        with tempfile.TemporaryDirectory() as scratch:
            config = RefereeConfig(
                evaluation=evaluation_of(self, self.full_precision(), Path(scratch), _DEMO),
                compared=self.criteria.compared.build(),
                texts=self.prune_texts(_DEMO),
                repair=RepairChoice(self.criteria.repair),
            )
            verdict = job_functions.referee(config, self.store.path, **options)
        return referee_result(self.store.open(), verdict)


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
