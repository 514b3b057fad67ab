"""The step sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from headscan.catalog import RANKED_CRITERIA, SCORES
from headscan.errors import InterventionError
from headscan.options import Group, Option, short
from headscan.settings.corpus_settings import CorpusSpec
from headscan.settings.evaluation_settings import SCORE_SETS, MaskOrderOption, ReplacementConfig
from headscan.steps.question_step import QuestionStep
from headscan.steps.results import Result, arm_row, curve_row
from headscan.text_tables import percent

if TYPE_CHECKING:
    from headscan.runs.run_context import Run
    from headscan.steps.run_sweep import SweepResult
    from headscan.store.store import Store
    from headscan.verdicts.curves import Curve

#: Option that splits the questions of a sweep.
Confirm = Annotated[
    bool,
    Option(
        "select the best arm of a sweep on half of the task questions and a quarter of the recall texts, and judge it "
        "on the others; --no-confirm uses all questions for both, and the interval is then too narrow"
    ),
]
#: The paper's shares of heads.
SWEPT_SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)


@short
@dataclass(frozen=True)
class Sweep(QuestionStep["SweepResult"]):
    """evaluate every score at every share on a task, with masks and random controls

        headscan sweep MODEL --tasks mmlu --num-fewshot 5
        headscan sweep MODEL --tasks mmlu --scores output_norm_ln,first_token_weight --shares 0.1,0.2 --controls 5
        headscan sweep MODEL --tasks mmlu --replace mean --corpus texts/

    The prompts are recorded once; thresholds are quantiles of the recorded scores. Then every arm answers every
    question. Half of the questions select the best rule and the best mask, the other half judges them. The same command
    again resumes. `headscan report` draws the curves.

    The best of many arms looks better than it is. So the result has the best rule and the best mask, judged on the
    questions that did not select them, in addition to the verdict on all arms and all questions.

    Attributes:
        shares: Nominal shares of heads to ablate; 0 ablates nothing and is left to the baseline.
        mask_criteria: Scores, or other names in `RANKED_CRITERIA`, with a fixed mask at every share.
        confirm: Judge the best arm on the questions that did not select it. The arms and their answers are the same; if
            a half has too few questions, the sweep reports that before it starts.
    """

    common: ClassVar = "MODEL --tasks --limit --scores --shares --masks --confirm --recall --store --json"
    demo_questions: ClassVar = (80, 40)
    error: ClassVar = InterventionError

    scores: Annotated[
        tuple[str, ...],
        Option(
            "comma-separated scores of the rules, `all` or `none` (default: all)",
            kind="score",
            names=SCORES,
            sets=SCORE_SETS,
        ),
    ] = tuple(SCORES)
    shares: Annotated[
        tuple[float, ...],
        Option("comma-separated shares of heads to ablate", flag="--shares --quantiles", least=0, below=1),
    ] = SWEPT_SHARES
    mask_criteria: Annotated[
        tuple[str, ...],
        Option(
            "comma-separated scores of the masks, `all` or `none`; other criteria use the newest importance, ablate or "
            "gates run of the model in the store",
            flag="--masks",
            kind="criterion",
            names=RANKED_CRITERIA,
            sets=SCORE_SETS,
        ),
    ] = ("output_norm_ln",)
    mask_order: MaskOrderOption = "mean"
    controls: Annotated[
        int,
        Option(
            "number of random controls per share, for rules and for masks; 20 x the number of scores - 1 can show that "
            "the choice among them is better than chance",
            flag="--controls --seeds",
            least=0,
        ),
    ] = 3
    confirm: Confirm = True
    replacement: Annotated[ReplacementConfig, Group("texts")] = field(default_factory=ReplacementConfig)
    corpus: Annotated[CorpusSpec | None, Group("texts", needs="--replace mean,resample")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.tasks.names or self.model.is_demo):
            raise InterventionError("`tasks` is required: name lm-eval tasks, groups or tags, such as arc_easy")
        if not any(self.shares) or not (self.scores or self.mask_criteria):
            raise InterventionError(
                "nothing to sweep: no score, or no share above 0. Set `shares`, and `scores` or `mask_criteria`"
            )
        self.check_max_loss()
        if self.replacement.kind == "zero":
            self.refuse(("corpus",), "without a replacement by texts")
        object.__setattr__(self, "replacement", self.replacement.with_corpus(self.corpus, self.model))

    @property
    def distinct_shares(self) -> tuple[float, ...]:
        """The distinct shares above 0, ascending."""
        return tuple(sorted({share for share in self.shares if share}))

    def execute(self, run: Run) -> SweepResult:
        from headscan.steps.run_sweep import run_sweep

        return run_sweep(self, run)

    def shown(self, result: SweepResult, store: Store) -> Result:
        from headscan.verdicts.curves import read_curves

        verdict, choices = result.verdict, result.choices
        curves = read_curves(store, verdict.run_id)

        def text() -> str:
            parts = [
                f"scan {result.scan_run} and sweep {verdict.run_id} in {store.path}",
                curves_text(curves),
                verdict.progress if verdict.unfinished else "",
                str(result),
            ]
            return "\n\n".join(filter(None, parts))

        facts = {
            "run_id": verdict.run_id,
            "scan_run_id": result.scan_run,
            "store": str(store.path),
            "unfinished": verdict.unfinished,
            "choices": [{**asdict(choice), "verdict": arm_row(choice.verdict)} for choice in choices],
        }
        return Result([curve_row(curve) for curve in curves], text, facts)


def curves_text(curves: Sequence[Curve]) -> str:
    from headscan.store.verdict_limits import MIN_ABOVE_CHANCE, MIN_SAFE_TEXTS
    from headscan.text_tables import text_table

    rows = []
    shares = sorted({point.share for curve in curves for point in curve.points})
    for curve in curves:
        points = {point.share: point for point in curve.points}
        rows.append(
            {"score": curve.name, "kind": curve.kind}
            | {
                percent(share): f"{100 * points[share].accuracy:.1f} ({100 * points[share].ablated_share:.1f})"
                if share in points
                else ""
                for share in shares
            }
            | {
                "within point, %": round(100 * curve.share_within_point, 2),
                "safe, %": None if curve.safe_share is None else round(100 * curve.safe_share, 2),
            }
        )
    if not rows:
        return "no curves: the tasks have no right answers to count"
    questions = max(point.questions for curve in curves for point in curve.points)
    return (
        "Accuracy in percent at each nominal share of heads (in brackets: the share really ablated).\n"
        "within point: the largest share of heads at which the curve, straight between the tested shares, is within\n"
        "one point of the baseline. safe: the largest tested share such that it and all smaller ones are safe: the\n"
        "lower end of the interval is above -1 point and no recall is lost. safe is empty with fewer than"
        f" {MIN_SAFE_TEXTS} questions,\n"
        f"or if the model is right on less than {MIN_ABOVE_CHANCE:g} % of them. Both use all {questions:,} questions"
        " and are not corrected\n"
        f"for comparing {len(curves)} curves.\n\n" + text_table(rows)
    )
