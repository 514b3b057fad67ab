"""The verb evaluate."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from headscan.options import Group, Option
from headscan.pipelines.cli.option_parser import Given
from headscan.pipelines.cli.results import Result, arm_row
from headscan.pipelines.cli.task_options import DemoSize, TaskVerb, evaluation_of, replacement_config
from headscan.pipelines.cli.verb_base import quiet_libraries
from headscan.pipelines.settings.evaluation_settings import COMMON_SCORE, ChosenArms, ReplacementOption

_DEMO = DemoSize(questions=400, recall=200, sequences=0)


@dataclass(frozen=True, kw_only=True)
class _ArmOptions:
    settings: Annotated[Given[ChosenArms], Group()]
    plans: Annotated[
        tuple[str, ...],
        Option(
            "comma-separated files of KV-cache plans, from `headscan plan` (default: none)",
            flag="--plan",
            metavar="FILE",
            spaces=True,
        ),
    ] = ()
    value: ReplacementOption = "zero"

    def chosen(self, **others: Any) -> ChosenArms:
        """Return the arms; ``others`` are settings without an option."""
        given = self.settings.values
        if "share" in given or given.get("rule") or given.get("run_id"):
            others = {"score": COMMON_SCORE} | given | others
        return self.settings.build(**others)


@dataclass(frozen=True, kw_only=True)
class Evaluate(TaskVerb):
    """ablate heads while lm-eval's tasks run, and compare with the baseline

        headscan evaluate MODEL --tasks mmlu --heads 3:5,7:0
        headscan evaluate MODEL --tasks mmlu --mask "gate 20% of texts 1a2b3c"
        headscan evaluate MODEL --tasks mmlu --score output_norm_ln --share 0.1 --rule --controls 19
        headscan evaluate MODEL --tasks mmlu --heads 3:5,7:0 --replace mean --corpus texts/
        headscan evaluate MODEL --tasks mmlu --plan head_plan.json --controls 19
        headscan evaluate MODEL --tasks mmlu --models pruned/,finetuned/

    An arm's heads are listed by hand, or chosen by a score or another criterion that a run in the store measured on
    the same model. A plan ablates no heads and shortens the KV cache. Other models, such as pruned ones, can answer the
    same questions. Without any of these only the baseline runs. The same command again resumes.
    """

    common: ClassVar = "MODEL --tasks --limit --heads --score --share --rule --plan --models --controls --store --json"

    arms: Annotated[_ArmOptions, Group("arms")]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.arms.plans:
            # With plans, the options are checked when their files are read.
            self.arms.chosen()

    def run(self) -> Result:
        from headscan.analysis.plans import load_plan

        plans = tuple(load_plan(path) for path in self.arms.plans)
        replacement = replacement_config(self.arms.value, self.texts, self)
        chosen = self.arms.chosen(plans=plans, replacement=replacement)
        if chosen.mask or chosen.score:
            self.store.check_exists()
        # The imports below load torch, which takes seconds.
        from headscan.models.model_facts import check_bounds
        from headscan.pipelines import job_functions

        quiet_libraries()
        spec = self.spec()
        if chosen.heads:
            check_bounds(spec.config(), chosen.heads)
        options = self.job_options()
        with tempfile.TemporaryDirectory() as scratch:
            config = evaluation_of(self, self.tasks, self.recall, spec, Path(scratch), _DEMO)
            verdict = job_functions.evaluate(config, self.store.path, chosen, **options)
        facts = {"run_id": verdict.run_id, "store": self.store.path, "unfinished": verdict.unfinished}
        rows = [arm_row(arm) for arm in verdict.by_name.values()]
        return Result(rows, lambda: f"run {verdict.run_id} in {self.store.path}\n\n{verdict}", facts)
