"""export a plan for a KV-cache tool, or the whole store as Parquet files

    headscan export duoattention --plan head_plan.json --out pattern/
    headscan export parquet --store s.duckdb --out tables/

duoattention, rlkv and prulong are tables of layers x KV heads. `headscan plan` reads them back with `--method
imported`; examples/read_with_kvpress.py reads the first one with kvpress.
"""

from __future__ import annotations

import argparse

from headscan.pipelines.cli.shared import options as shared

#: Formats of a plan; those of `headscan.analysis.plans.TABLE_FILES`, which is too heavy to import for a help page.
PLAN_FORMATS = ("duoattention", "rlkv", "prulong")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("format", choices=(*PLAN_FORMATS, "parquet"), help="output format")
    parser.add_argument("--plan", default="head_plan.json", help="plan to export (default: head_plan.json)")
    shared.add_store(parser)
    parser.add_argument("--out", required=True, help="output folder")


def run(options: argparse.Namespace) -> None:
    if options.format == "parquet":
        paths = shared.open_store(options).export_parquet(options.out)
    else:
        from headscan.analysis.plans import load_plan, write_pattern

        paths = write_pattern(load_plan(options.plan), options.out, options.format)
    for path in paths:
        print(path)
