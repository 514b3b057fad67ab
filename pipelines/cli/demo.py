"""the whole pipeline on the bundled model: scan, rank, silence, evaluate, judge, plan, report"""

from __future__ import annotations

import argparse

from pipelines.cli import options as shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="headscan-demo", help="folder to write into (default: headscan-demo)")
    parser.add_argument("--share", type=float, default=0.1, help="share of heads to silence (default: 0.1)")
    parser.add_argument("--questions", type=int, default=500, help="questions of the task (default: 500)")
    parser.add_argument("--controls", type=int, default=3, help="random controls (default: 3)")
    parser.add_argument(
        "--window-share", type=float, default=0.5, help="share of KV heads with a window (default: 0.5)"
    )
    parser.add_argument("--replicas", type=int, help="replicas on the CPU (default: 2)")


def run(options: argparse.Namespace) -> None:
    from pipelines.demo.run import DemoConfig, run_demo

    shared.quiet_libraries()
    run_demo(
        DemoConfig(
            out=options.out,
            share=options.share,
            questions=options.questions,
            controls=options.controls,
            window_share=options.window_share,
            replicas=options.replicas,
        ),
        say=shared.say,
    )
