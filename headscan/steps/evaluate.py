"""The step evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from headscan.options import Group, Option, short
from headscan.settings.corpus_settings import CorpusSpec
from headscan.settings.evaluation_settings import LOSS_LIMITS, ChosenArms, HarnessError, LossTexts
from headscan.steps.question_step import QuestionStep
from headscan.steps.results import Result, arm_row
from headscan.store.verdict_limits import MAX_LOSS

if TYPE_CHECKING:
    from headscan.runs.model_identity import ModelIdentity
    from headscan.runs.run_context import Run
    from headscan.store.store import Store
    from headscan.verdicts.judge import Verdict


@short
@dataclass(frozen=True)
class Evaluate(QuestionStep["Verdict"]):
    """ablate heads while lm-eval's tasks run, and compare with the baseline

        headscan evaluate MODEL --tasks mmlu --heads 3:5,7:0
        headscan evaluate MODEL --heads 3:5,7:0 --held-out texts/
        headscan evaluate MODEL --tasks mmlu --mask "gate 20% of texts 1a2b3c"
        headscan evaluate MODEL --tasks mmlu --score output_norm_ln --share 0.1 --rule --controls 19
        headscan evaluate MODEL --tasks mmlu --heads 3:5,7:0 --replace mean --corpus texts/
        headscan evaluate MODEL --tasks mmlu --plan head_plan.json --controls 19
        headscan evaluate MODEL --tasks mmlu --models pruned/,finetuned/

    An arm's heads are listed by hand, or chosen by a score or another criterion that a run in the store measured on
    the same model. A plan ablates no heads and shortens the KV cache. Other models, such as pruned ones, can answer the
    same questions. Without any of these only the baseline runs. The same command again resumes.

    Attributes:
        arms: Arms next to the baseline, such as ``[mask_arm([(3, 5)])]``, or how to choose them, such as
            ``ChosenArms(criterion="output_norm_ln", rule=True, controls=19)`` by a scan in the store.
        held_out: Text whose loss is judged, too; None uses ``text``.
        corpus: Texts of a replacement by means or by other outputs.
    """

    common: ClassVar = "MODEL --tasks --limit --heads --score --share --rule --plan --models --held-out --store --json"
    demo_questions: ClassVar = (400, 200)

    arms: Annotated[ChosenArms | Sequence[Any], Group("arms")] = field(default_factory=ChosenArms)
    corpus: Annotated[CorpusSpec | None, Group("texts", needs="--replace mean,resample")] = None
    held_out: Annotated[LossTexts | None, Group("held-out text")] = None
    max_loss: Annotated[
        float,
        Option(
            "largest increase of that loss of a safe arm, in nats per token",
            above=LOSS_LIMITS.above,
            most=LOSS_LIMITS.most,
            needs="--held-out",
        ),
    ] = MAX_LOSS

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.arms, ChosenArms):
            replacement = self.arms.replacement.with_corpus(self.corpus, self.model)
            object.__setattr__(self, "arms", replace(self.arms, replacement=replacement))
        if not isinstance(self.arms, ChosenArms) or self.arms.replacement.kind == "zero":
            self.refuse(("corpus",), "without a replacement by texts")
        if self.held_out is None:
            self.check_max_loss()
        elif self.text is not None:
            raise HarnessError("`text` and `held_out` are two texts (limit 1). Leave one of them out")

    def longest(self, identity: ModelIdentity) -> int:
        held_out = 0 if self.held_out is None else self.held_out.longest(identity)
        return max(super().longest(identity), held_out)

    def execute(self, run: Run) -> Verdict:
        from headscan.engine.arms import BASELINE
        from headscan.steps.evaluate_chosen import evaluate_chosen
        from headscan.steps.run_evaluation import run_evaluation
        from headscan.verdicts.judge import judge

        step = self
        if self.held_out is not None:
            from headscan.texts.held_out_text import HeldOutText

            texts = self.held_out
            text = HeldOutText.of_corpus(
                texts.corpus, run.model, sequences=texts.sequences, max_tokens=texts.max_tokens, identity=run.identity
            )
            step = replace(self, text=text, held_out=None)
        if isinstance(self.arms, ChosenArms):
            run_id = evaluate_chosen(step, run, self.arms)
        else:
            run_id = run_evaluation(step, run, [BASELINE, *(arm for arm in self.arms if arm is not BASELINE)])
        return judge(run.store, run_id, baseline_alone=True)

    def check_inputs(self, store: Store) -> None:
        if isinstance(self.arms, ChosenArms):
            self.arms.head_plans  # noqa: B018  # reads the files
            if self.arms.mask or self.arms.criterion:
                store.runs()  # raises if there is none
            if self.arms.heads:
                from headscan.models.model_facts import check_bounds

                check_bounds(self.model.config(), self.arms.heads)

    def shown(self, result: Verdict, store: Store) -> Result:
        facts = {"run_id": result.run_id, "store": str(store.path), "unfinished": result.unfinished}
        rows = [arm_row(arm) for arm in result.by_name.values()]
        return Result(rows, lambda: f"run {result.run_id} in {store.path}\n\n{result}", facts)
