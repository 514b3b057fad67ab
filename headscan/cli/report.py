"""The verb report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from headscan.catalog import ORDERS
from headscan.cli.verb_base import StoreVerb, say_run
from headscan.options import Option
from headscan.settings.evaluation_settings import LOSS_LIMITS, POINT_LIMITS
from headscan.steps.sweep import Confirm


@dataclass(frozen=True, kw_only=True)
class Report(StoreVerb):
    """write one self-contained HTML page: the answers, then a map of every head, and the evidence

        headscan report --store s.duckdb --out report.html
        headscan report --run 3f9a --compare 77c0 --plan head_plan.json

    The page opens with how many heads are inactive, how many can go at what cost, and how much KV cache can go. It
    names missing answers with the commands that give them. It is one file and needs no network.
    """

    run_id: Annotated[
        str | None, Option("first characters of a scan's id (default: the newest finished scan)", flag="--run")
    ] = None
    evaluation: Annotated[
        str | None,
        Option("first characters of an evaluation's id (default: the newest of the same model with a finished arm)"),
    ] = None
    plan: Annotated[str | None, Option("head_plan.json to include (default: none)")] = None
    scores: Annotated[
        tuple[str, ...],
        Option(
            "comma-separated measures as for `headscan rank --by`; the map begins with the first one that was measured "
            "(default: output_norm_ln)",
            kind="score",
            names=ORDERS,
        ),
    ] = ()
    compare: Annotated[
        str | None,
        Option("first characters of another scan's id, or `none` (default: the newest other scan with the same heads)"),
    ] = None
    confirm: Confirm = True
    max_loss: Annotated[
        float | None,
        Option(
            "largest increase of the held-out loss of a safe arm, in nats per token (default: that of the evaluation)",
            above=LOSS_LIMITS.above,
            most=LOSS_LIMITS.most,
        ),
    ] = None
    max_points: Annotated[
        float | None,
        Option(
            "largest loss of accuracy of a safe arm, in percentage points (default: that of the evaluation)",
            metavar="POINTS",
            above=POINT_LIMITS.above,
            below=POINT_LIMITS.below,
        ),
    ] = None
    out: Annotated[str, Option("output file")] = "report.html"

    def run(self) -> None:
        from headscan.plans import load_plan
        from headscan.ranking.comparisons import comparable_scan
        from headscan.report.write_report import write_report
        from headscan.runs.progress import at_work
        from headscan.store.provenance import same_model
        from headscan.verdicts.answer_sheets import can_be_judged

        store = self.store.open()
        scan_run = store.resolve_run(self.run_id, "scan")
        say_run(scan_run)
        if self.evaluation:
            evaluation = store.resolve_run(self.evaluation, "evaluate")["run_id"]
        else:
            ours = [run["run_id"] for run in store.runs("evaluate") if same_model(run, scan_run)]
            evaluation = next((run_id for run_id in ours if can_be_judged(store, run_id)), None)
        if self.compare:
            compared = None if self.compare == "none" else self.compare
        else:
            compared = comparable_scan(store, scan_run)
        with at_work("report"):
            path = write_report(
                store,
                self.out,
                scan_run=scan_run["run_id"],
                evaluate_run=evaluation,
                compare_run=compared,
                plan=load_plan(self.plan) if self.plan else None,
                plan_file=self.plan,
                scores=self.scores,
                confirm=self.confirm,
                max_loss=self.max_loss,
                max_points=self.max_points,
            )
        print(path)
