"""The verb evaluate."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from headscan.catalog import RANKED_CRITERIA, SCORES
from headscan.options import Group, Option
from headscan.pipelines.cli.option_parser import UsageError, head, model_source
from headscan.pipelines.cli.results import Result, arm_row, verdict_text
from headscan.pipelines.cli.task_options import DemoSize, TaskVerb, evaluation_of, replacement_config
from headscan.pipelines.cli.verb_base import quiet_libraries
from headscan.pipelines.settings.evaluation_settings import (
    PLAN_MODES,
    TASK_TOKENS,
    MaskOrderOption,
    PlanMode,
    ReplacementOption,
)

if TYPE_CHECKING:
    from headscan.analysis.store.store import Store
    from headscan.pipelines.scoring.arms import Arm
    from headscan.pipelines.scoring.replacements import ArmReplacement

_DEMO = DemoSize(questions=400, recall=200, sequences=0)


#: Criterion and share of the arms that options of scores ask for, if they are not named.
_SCORE, _SHARE = "output_norm_ln", 0.1


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
        float | None, Option(f"share of heads to ablate, chosen by the score (default: {_SHARE})", above=0, below=1)
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

    def of_heads(
        self, masks: Sequence[Sequence[tuple[int, int]]], store: Store, run_id: str | None, replacement: ArmReplacement
    ) -> list[Arm]:
        """Return the masks and rules; ``run_id`` is the run that orders the heads, None without one."""
        from headscan.pipelines.scoring.arms import mask_arm, scored_masks, scored_rules

        arms = [mask_arm(heads, replacement) for heads in masks]
        if run_id is not None:
            score, share = self.chosen_by, _SHARE if self.share is None else self.share
            arms += scored_masks(store, run_id, score, [share], self.mask_order, replacement)
            if self.rule:
                arms += scored_rules(store, run_id, score, [share], replacement)
        return arms


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
        from headscan.analysis.heads.head_roles import find_mask
        from headscan.analysis.verdicts.judge import judge
        from headscan.models.model_facts import check_bounds
        from headscan.pipelines.evaluate.run_evaluation import evaluate
        from headscan.pipelines.evaluate.tasks import Questions
        from headscan.pipelines.kv.plan_arms import check_plan, plan_arms
        from headscan.pipelines.runs.head_orders import find_run
        from headscan.pipelines.runs.model_identity import identify
        from headscan.pipelines.scoring.arms import BASELINE, controls, model_arm
        from headscan.pipelines.scoring.replacements import collect_replacement

        replaced = replacement_config(self.arms.replace, self.texts, self)
        quiet_libraries()
        spec = self.spec()
        if self.arms.heads:
            check_bounds(spec.config(), self.arms.heads)
        with (
            tempfile.TemporaryDirectory() as scratch,
            self.opened(spec, None, tokens=TASK_TOKENS, evaluates=True) as (run, placed),
        ):
            config = evaluation_of(self, self.tasks, self.recall, spec, Path(scratch), _DEMO)
            config, store, identity = replace(config, batch_tokens=placed.batch_tokens), run.store, run.identity
            named = (self.arms.heads, self.arms.mask and find_mask(store, self.arms.mask, identity.columns()).heads)
            masks = [heads for heads in named if heads]
            chosen_by = self.arms.chosen_by if self.arms.uses_score else None
            ordering = chosen_by and find_run(store, identity, chosen_by, self.arms.run_id)
            others = [replace(spec, source=source, revision=None) for source in dict.fromkeys(self.arms.models)]
            compared = [model_arm(other, identify(other), identity) for other in others]
            questions = Questions(config.tasks, config.recall, identity) if self.arms.replace != "zero" else None
            replacement = collect_replacement(replaced, run, 0 if questions is None else questions.longest_input)
            arms = [BASELINE, *self.arms.of_heads(masks, store, ordering, replacement)]
            if self.arms.controls:
                arms += controls(run.facts.grid, arms, self.arms.controls, replacement)
            for head_plan in plans:
                check_plan(head_plan, run)
                arms += plan_arms(head_plan, self.arms.plan_mode, self.arms.controls)
            run_id = evaluate(config, run, arms + compared, questions=questions)
        title = f"run {run_id} in {self.store.path}"
        facts: dict[str, Any] = {"run_id": run_id, "store": self.store.path}
        if len(arms + compared) == 1:
            return Result([], lambda: title, facts)
        verdict = judge(store, run_id)
        parts = [title, verdict.progress, verdict_text(verdict.outcomes.values())]
        return Result(
            [arm_row(arm) for arm in verdict.outcomes.values()],
            lambda: "\n\n".join(filter(None, parts)),
            {**facts, "unfinished": verdict.unfinished},
        )
