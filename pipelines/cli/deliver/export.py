"""export a plan for a KV-cache tool, or the whole store as Parquet files

    headscan export duoattention --plan head_plan.json --out pattern/
    headscan export parquet --store s.duckdb --out tables/

The DuoAttention folder is also read by kvpress.
"""

from __future__ import annotations

import argparse

from headscan.pipelines.cli.shared import options as shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("format", choices=("duoattention", "parquet"), help="output format")
    parser.add_argument("--plan", default="head_plan.json", help="plan to export (default: head_plan.json)")
    shared.add_store(parser)
    parser.add_argument("--out", required=True, help="output folder")


def run(options: argparse.Namespace) -> None:
    if options.format == "parquet":
        paths = shared.open_store(options).export_parquet(options.out)
    else:
        from headscan.analysis.plans.duoattention import export_duoattention
        from headscan.analysis.plans.make_plan import load_plan

        paths = export_duoattention(load_plan(options.plan), options.out)
    for path in paths:
        print(path)
