"""run the whole pipeline on the bundled model: scan, rank, plan, ablate, evaluate, judge, generate, report

    headscan demo
    headscan demo --share 0.2 --controls 19

It needs no GPU and no download, and takes about four minutes on two CPU cores. The folder headscan-demo holds the
store, the plan and the report. The same command again resumes.
"""

from __future__ import annotations

import argparse

from headscan.pipelines.cli.shared import arguments
from headscan.pipelines.cli.shared import options as shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="headscan-demo", help="output folder (default: headscan-demo)")
    parser.add_argument("--share", type=arguments.share, default=0.1, help="share of heads to ablate (default: 0.1)")
    parser.add_argument("--questions", type=arguments.count, default=400, help="number of questions (default: 400)")
    parser.add_argument("--controls", type=arguments.whole(0), default=1, help="number of random controls (default: 1)")
    parser.add_argument(
        "--window-share",
        type=arguments.number(0, 1, above=True),
        default=0.75,
        help="share of KV heads that keep only a window (default: 0.75)",
    )
    parser.add_argument(
        "--replicas", type=arguments.count, help="number of model copies on the CPU (default: 2, at most one a core)"
    )
    shared.add_resume(parser)


def run(options: argparse.Namespace) -> None:
    from headscan.pipelines.demo.run_demo import DemoConfig, run_demo

    shared.quiet_libraries()
    run_demo(
        DemoConfig(
            out=options.out,
            share=options.share,
            questions=options.questions,
            controls=options.controls,
            window_share=options.window_share,
            replicas=options.replicas,
            resume_anyway=options.resume_anyway,
        ),
        say=shared.say,
    )
