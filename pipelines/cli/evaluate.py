"""The verb evaluate."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from headscan.catalog import RANKED_CRITERIA, SCORES
from headscan.options import Group, Option
from headscan.pipelines.cli.option_parser import UsageError, head, model_source
from headscan.pipelines.cli.results import Result, arm_row, verdict_text
from headscan.pipelines.cli.task_options import DemoSize, TaskVerb, evaluation_of, replacement_config
from headscan.pipelines.cli.verb_base import quiet_libraries
from headscan.pipelines.settings.evaluation_settings import (
    CHOSEN_SHARE,
    PLAN_MODES,
    TASK_TOKENS,
    MaskOrderOption,
    PlanMode,
    ReplacementOption,
)

if TYPE_CHECKING:
    from headscan.analysis.plans import HeadPlan
    from headscan.pipelines.evaluate.chosen_arms import ChosenArms
    from headscan.pipelines.settings.evaluation_settings import ReplacementConfig

_DEMO = DemoSize(questions=400, recall=200, sequences=0)


#: Criterion of the arms that options of scores ask for, if it is not named.
_SCORE = "output_norm_ln"


@dataclass(frozen=True, kw_only=True)
class _ArmOptions:
    heads: Annotated[
        tuple[tuple[int, int], ...],
        Option("comma-separated heads of a mask (default: none)", metavar="LAYER:HEAD", parse=head, spaces=True),
    ] = ()
    mask: Annotated[
        str | None, Option("name or id of a mask in the store whose heads are ablated (default: none)", metavar="NAME")
    ] = None
    score: Annotated[
        str | None,
        Option(
            "score or other criterion that chooses the heads, from a scan, importance, ablate or gates run in the "
            f"store (default: {_SCORE})",
            kind="score",
            names=RANKED_CRITERIA,
        ),
    ] = None
    share: Annotated[
        float | None,
        Option(f"share of heads to ablate, chosen by the score (default: {CHOSEN_SHARE})", above=0, below=1),
    ] = None
    mask_order: MaskOrderOption = "mean"
    run_id: Annotated[
        str | None, Option("first characters of the id of that run (default: the newest of this model)", flag="--run")
    ] = None
    rule: Annotated[bool, Option("also evaluate the rule, which ablates per input the heads beyond the quantile")] = (
        False
    )
    plan: Annotated[
        tuple[str, ...],
        Option(
            "comma-separated files of KV-cache plans, from `headscan plan` (default: none)", metavar="FILE", spaces=True
        ),
    ] = ()
    plan_mode: Annotated[
        tuple[PlanMode, ...],
        Option(
            "forward: all tokens see what the plan keeps; decode: keys are evicted after the context; or both, with a "
            "comma",
            metavar="MODE",
            kind="plan mode",
            names=PLAN_MODES,
            spaces=True,
        ),
    ] = ("forward",)
    models: Annotated[
        tuple[str, ...],
        Option(
            "comma-separated folders or names of models with the same tokenizer, to compare with MODEL; one is loaded "
            "at a time (default: none)",
            metavar="MODEL",
            parse=model_source,
            spaces=True,
        ),
    ] = ()
    controls: Annotated[
        int,
        Option(
            "number of random controls per mask (as many heads), per rule (heads drawn for each input) and per plan "
            "(as many bytes); at least 19 can show that a choice is better than chance",
            metavar="N",
            least=0,
        ),
    ] = 0
    replace: ReplacementOption = "zero"

    @property
    def chosen_by(self) -> str:
        """Criterion of the masks and rules."""
        return self.score or _SCORE

    @property
    def uses_score(self) -> bool:
        return bool(self.score or self.share is not None or self.rule or self.run_id)

    def check(self) -> None:
        """Raise UsageError if an option changes no arm."""
        ablates = bool(self.heads or self.mask or self.uses_score)
        for flag, is_given, needed, is_used in (
            ("--mask-order", self.mask_order != "mean", "--score", self.uses_score),
            ("--plan-mode", self.plan_mode != ("forward",), "--plan", bool(self.plan)),
            ("--controls", bool(self.controls), "--heads, --mask, --score or --plan", ablates or bool(self.plan)),
        ):
            if is_given and not is_used:
                raise UsageError(f"{flag} has no effect without {needed}: leave it out")
        if self.chosen_by not in SCORES and (self.rule or self.mask_order != "mean"):
            flag = "--rule" if self.rule else "--mask-order"
            raise UsageError(f"{flag} needs a score of each input, which {self.chosen_by} is not: name a score")

    def chosen(self, plans: Sequence[HeadPlan], replacement: ReplacementConfig) -> ChosenArms:
        """Return the arms; ``plans`` are those that the command line names."""
        from headscan.pipelines.evaluate.chosen_arms import ChosenArms

        return ChosenArms(
            heads=self.heads,
            mask=self.mask or None,
            score=self.chosen_by if self.uses_score else None,
            share=CHOSEN_SHARE if self.share is None else self.share,
            order=self.mask_order,
            run_id=self.run_id,
            rule=self.rule,
            plans=tuple(plans),
            plan_modes=self.plan_mode,
            models=self.models,
            controls=self.controls,
            replacement=replacement,
        )


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
        if self.arms.replace != "zero" and not (self.arms.heads or self.arms.mask or self.arms.uses_score):
            raise UsageError(f"--replace {self.arms.replace} needs ablated heads: give --heads, --mask or --score")
        self.arms.check()

    def run(self) -> Result:
        from headscan.analysis.plans import load_plan

        # The imports below load torch, which takes seconds.
        plans = [load_plan(path) for path in self.arms.plan]
        if self.arms.mask or self.arms.uses_score:
            self.store.check_exists()
        from headscan.analysis.verdicts.judge import judge
        from headscan.models.model_facts import check_bounds
        from headscan.pipelines.evaluate.chosen_arms import evaluate_chosen

        chosen = self.arms.chosen(plans, replacement_config(self.arms.replace, self.texts, self))
        quiet_libraries()
        spec = self.spec()
        if self.arms.heads:
            check_bounds(spec.config(), self.arms.heads)
        with (
            tempfile.TemporaryDirectory() as scratch,
            self.opened(spec, None, tokens=TASK_TOKENS, evaluates=True) as (run, opener),
        ):
            config = evaluation_of(self, self.tasks, self.recall, spec, Path(scratch), _DEMO)
            run_id, arms = evaluate_chosen(opener.sized(config), chosen, run)
        title = f"run {run_id} in {self.store.path}"
        facts: dict[str, Any] = {"run_id": run_id, "store": self.store.path}
        if arms == 1:
            return Result([], lambda: title, facts)
        verdict = judge(run.store, run_id)
        parts = [title, verdict.progress, verdict_text(verdict.outcomes.values())]
        return Result(
            [arm_row(arm) for arm in verdict.outcomes.values()],
            lambda: "\n\n".join(filter(None, parts)),
            {**facts, "unfinished": verdict.unfinished},
        )
