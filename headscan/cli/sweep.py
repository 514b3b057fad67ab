"""The verb sweep."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from headscan.cli.option_parser import Given
from headscan.cli.results import Result, arm_row, curve_row
from headscan.cli.task_options import DemoSize, TaskVerb, evaluation_of, replacement_of
from headscan.cli.verb_base import quiet_libraries
from headscan.options import Group
from headscan.settings.evaluation_settings import SweepConfig

if TYPE_CHECKING:
    from headscan.verdicts.curves import Curve

_DEMO = DemoSize(questions=80, recall=40, sequences=0)


@dataclass(frozen=True, kw_only=True)
class Sweep(TaskVerb):
    """evaluate every score at every share on a task, with masks and random controls

        headscan sweep MODEL --tasks mmlu --num-fewshot 5
        headscan sweep MODEL --tasks mmlu --scores output_norm_ln,first_token_weight --shares 0.1,0.2 --controls 5
        headscan sweep MODEL --tasks mmlu --replace mean --corpus texts/

    The prompts are recorded once; thresholds are quantiles of the recorded scores. Then every arm answers every
    question. Half of the questions select the best rule and the best mask, the other half judges them. The same command
    again resumes. `headscan report` draws the curves.
    """

    common: ClassVar = "MODEL --tasks --limit --scores --shares --masks --confirm --recall --store --json"

    arms: Annotated[Given[SweepConfig], Group("arms")]

    def run(self) -> Result:
        from headscan.jobs import job_functions
        from headscan.verdicts.curves import read_curves

        quiet_libraries()
        spec = self.spec()
        replacement = replacement_of(self.texts.kind, self.texts, self)
        with tempfile.TemporaryDirectory() as scratch:
            evaluation = evaluation_of(self, spec, Path(scratch), _DEMO)
            config = self.arms.build(evaluation=evaluation, replacement=replacement)
            result = job_functions.sweep(config, self.store.path, **self.job_options())
        verdict, choices = result.verdict, result.choices
        curves = read_curves(self.store.open(), verdict.run_id)

        def text() -> str:
            parts = [
                f"scan {result.scan_run} and sweep {verdict.run_id} in {self.store.path}",
                curves_text(curves),
                verdict.progress if verdict.unfinished else "",
                str(result),
            ]
            return "\n\n".join(filter(None, parts))

        facts = {
            "run_id": verdict.run_id,
            "scan_run_id": result.scan_run,
            "store": self.store.path,
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
                f"{100 * share:g}%": f"{100 * points[share].accuracy:.1f} ({100 * points[share].ablated_share:.1f})"
                if share in points
                else ""
                for share in shares
            }
            | {
                "within point %": round(100 * curve.share_within_point, 2),
                "safe %": None if curve.safe_share is None else round(100 * curve.safe_share, 2),
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
