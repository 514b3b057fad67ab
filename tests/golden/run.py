"""Small commands of every verb, and the numbers that they print and store, held against a file.

    OMP_NUM_THREADS=1 python -m tests.golden.run            # compare with golden.json
    OMP_NUM_THREADS=1 python -m tests.golden.run --write    # replace golden.json

A change of structure must leave all numbers as they are; this run shows that it does. Floats may differ by 1e-6. Ids,
times, versions and paths are left out. The last bits of a float depend on the processor, so write the file at the
commit before the change and compare on the same machine.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import torch

from headscan.cli.main import main as headscan_main
from tests.jobs.steps.labelled_models import LABELLED, TRANSLATED, save_classifier, save_translator, write_lines

GOLDEN = Path(__file__).with_name("golden.json")
TOLERANCE = 1e-6

#: A command by name. ``S`` is the store of the demo model, ``L`` that of models of labelled examples.
COMMANDS: dict[str, str] = {
    "models": "models --json",
    "models of demo": "models demo --json",
    "place": "place demo --json --max-tokens 128 --tokens 1000000 --flops 1T --nodes 2 --gpus 4 --gpu-memory 80GiB",
    "scan": "scan demo --corpus texts --max-tokens 64 --limit-sequences 3 --store S",
    "scan, full panel in chunks": (
        "scan demo --corpus texts --mode chunk --panel full --max-tokens 48 --limit-sequences 2 --store S"
    ),
    "scan of two sites": "scan translator --corpus texts --max-tokens 32 --limit-sequences 2 --store L",
    "probe": "probe demo --lengths 192 --depths 0.5 --json --store S",
    "importance": "importance demo --corpus texts --max-tokens 96 --limit-sequences 4 --recall-prompts 4 --store S",
    "importance of labelled examples": "importance translator --data pairs.tsv --store L",
    "gates": "gates demo --corpus texts --share 0.2 --sequences 4 --max-tokens 32 --steps 4 --store S",
    "ablate": "ablate demo --each --corpus texts --sequences 2 --max-tokens 32 --json --store S",
    "ablate on labelled examples": "ablate classifier --each --data classes.tsv --metric loss --json --store L",
    "rank by a score": "rank --by output_norm_ln --limit 5 --json --store S",
    "rank by importance": "rank --by importance --limit 5 --json --store S",
    "rank by gates": "rank --by gate --limit 5 --json --store S",
    "roles": "roles --json --store S",
    "evaluate heads": "evaluate demo --limit 6 --heads 1:2,3:4 --recall-questions 4 --json --store S",
    "evaluate a rule": (
        "evaluate demo --limit 6 --score output_norm_ln --share 0.1 --rule --controls 2 --no-recall --json --store S"
    ),
    "evaluate held-out text": (
        "evaluate demo --limit 4 --heads 0:0 --replace mean --corpus texts --held-out texts --sequences 2 "
        "--max-tokens 48 --no-recall --json --store S"
    ),
    "sweep": (
        "sweep demo --limit 4 --scores output_norm_ln,first_token_weight --shares 0.1,0.2 --controls 1 --no-recall "
        "--json --store S"
    ),
    "referee": (
        "referee demo --corpus texts --criteria output_norm_ln,importance --shares 0.1 --controls 1 --sequences 4 "
        "--max-tokens 48 --json --store S"
    ),
    "plan": "plan --method retrieval_score --window-share 0.25 --recent 16 --out plan.json --json --store S",
    "plan by damage": (
        "plan demo --method measured --corpus texts --sequences 4 --recall-prompts 8 --max-tokens 128 --recent 16 "
        "--window-share 0.25 --no-search --out measured.json --json --store S"
    ),
    "plan by layer": (
        "plan --method random --unit layer --sink 0 --recent 16 --window-share 0.25 --out layers.json --json --store S"
    ),
    "evaluate a plan": "evaluate demo --limit 4 --plan plan.json --recall-questions 4 --json --store S",
    "generate": "generate demo --plan plan.json --prompt-file prompt.txt --max-new-tokens 8 --json",
    "prune": (
        "prune demo --share 0.1 --corpus texts --sequences 16 --max-tokens 128 --controls 0 "
        "--recall-lengths 192 --recall-questions 8 --limit 4 --out smaller --json --store S"
    ),
    "evaluate a pruned model": "evaluate demo --limit 4 --models smaller --no-recall --json --store S",
    "export decilm": "export decilm smaller --out decilm --json",
    "export gguf": "export gguf smaller --out smaller.gguf --json",
    "export duoattention": "export duoattention --plan plan.json --out pattern --json",
    "export parquet": "export parquet --store S --out tables --json",
    "compare": "compare RUN --quantile 0.1 --json --store S",
    "status": "status --json --store S",
    "sql": "sql 'from head_summary order by output_norm_ln, layer, head limit 5' --json --store S",
    "merge": "merge S L --into all.duckdb --json",
    "report": "report --store S --out report.html",
    "study": (
        "study demo --corpus texts --hours 1 --max-tokens 128 --sequences 8 --judged-texts 20 --questions 4 "
        "--recall-questions 4 --criteria output_norm_ln,importance --shares 0.05 --window-shares 0.25 "
        "--prune-shares none --recent 16 --no-search --out study --json"
    ),
}

#: Tables whose rows are compared, with the columns that are left out in addition to ids, times and hashes.
TABLES = {
    "sequences": {"source", "shard"},
    "head_statistics": set(),
    "head_behaviours": set(),
    "head_importance": set(),
    "head_gates": set(),
    "mask_heads": set(),
    "arms": {"config", "selection"},
    "answers": set(),
    "arm_results": set(),
    "arm_verdicts": set(),
}
#: Names of columns and JSON keys that differ from run to run.
_VARYING = re.compile(
    r"(^|_)(id|ids|at|hash|hashes|seconds|path|paths|out|store|folder|file|files|run|runs|a|b|worker|version|packages"
    r"|code_version|provenance|writer|source|model|corpus|command|report|since|written|eta|size|bytes_of_file)$"
)
_ID = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{4,64}\b|(?<=\bscan )[0-9]{4}\b")


def make_inputs() -> None:
    """Write models of labelled examples, their data, a corpus of six modules and a prompt into the current folder."""
    save_translator(Path("translator"))
    save_classifier(Path("classifier"))
    write_lines(Path("pairs.tsv"), TRANSLATED)
    write_lines(Path("classes.tsv"), LABELLED)
    Path("texts").mkdir()
    for number in range(24):
        words = (f"value_{number * step % 89} = {step} + {number}" for step in range(1, 61))
        (Path("texts") / f"{number:02}.py").write_text("\n".join(words) + "\n")
    Path("prompt.txt").write_text("import os\n\n\ndef total(values):\n    return sum(value for value in values)\n" * 3)


def run_commands(chosen: str) -> dict[str, Any]:
    """Run the commands whose names contain a text, and return exit code and JSON of each, without ids and times."""
    results = {}
    for name, line in COMMANDS.items():
        if chosen not in name:
            continue
        words = [{"S": "s.duckdb", "L": "labelled.duckdb"}.get(word, word) for word in shlex.split(line)]
        if "RUN" in words:
            words[words.index("RUN")] = _first_scan()
        began, out = time.monotonic(), io.StringIO()
        with contextlib.redirect_stdout(out):
            code = headscan_main(words)
        printed = out.getvalue()
        found = json.loads(printed) if "--json" in words and code == 0 else None
        results[name] = {"exit": code, "json": _lasting(found)}
        print(f"{name}: exit {code}, {time.monotonic() - began:.1f} s", file=sys.stderr)
    return results


def _first_scan() -> str:
    with duckdb.connect("s.duckdb", read_only=True) as connection:
        found = connection.execute("select run_id from runs where kind = 'scan' order by started_at").fetchone()
    assert found is not None
    return str(found[0])


def stored_rows(store: Path) -> dict[str, Any]:
    """Return columns and sorted rows of the tables of a store; a run is named by its kind, an arm by its name."""
    tables = {}
    with duckdb.connect(store, read_only=True) as connection:
        for table, left_out in TABLES.items():
            names = [row[0] for row in connection.execute(f"describe {table}").fetchall()]
            kept = [name for name in names if name not in left_out and not _VARYING.search(name)]
            joins = ["runs.kind as run_kind"] if "run_id" in names else []
            source = f"{table} join runs on {table}.run_id = runs.run_id" if joins else table
            if table == "head_statistics":  # the prompts that a sweep records are many, and are measured as texts are
                source += " and runs.kind = 'scan'"
            if "arm_id" in names and table != "arms":
                joins, source = ["arms.name as arm"], f"{table} join arms using (arm_id)"
            if "mask_id" in names and table == "mask_heads":
                joins, source = ["masks.name as mask"], f"{table} join masks using (mask_id)"
            columns = ", ".join([*joins, *(f"{table}.{name}" for name in kept)])
            rows = [_lasting(list(row)) for row in connection.execute(f"select {columns} from {source}").fetchall()]
            # Rows that are equal but for a rounding must meet, so texts and integers decide the order.
            rows.sort(key=lambda row: json.dumps([cell for cell in row if not isinstance(cell, float | list)]))
            tables[table] = {"columns": [word.split()[-1].split(".")[-1] for word in columns.split(", ")], "rows": rows}
    return tables


def _lasting(value: Any) -> Any:
    """Return a JSON value without what differs from run to run; floats have nine digits."""
    if isinstance(value, dict):
        return {key: _lasting(item) for key, item in value.items() if not _VARYING.search(key)}
    if isinstance(value, list | tuple):
        return [_lasting(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return _ID.sub("ID", value.replace(str(Path.cwd()), "."))
    return value if value is None or isinstance(value, bool | int) else str(value)


def differences(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """Yield a line for each place in which two JSON values differ; floats may differ by `TOLERANCE`."""
    numbers = [each for each in (old, new) if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(numbers) == 2:
        if not math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            yield f"{place}: {old} is now {new}"
    elif isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            if key not in old or key not in new:
                yield f"{place}/{key}: {'added' if key in new else 'gone'}"
            else:
                yield from differences(old[key], new[key], f"{place}/{key}")
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{place}: {len(old)} items are now {len(new)}"
        for index, (before, after) in enumerate(zip(old, new, strict=False)):
            yield from differences(before, after, f"{place}[{index}]")
    elif old != new:
        yield f"{place}: {old!r} is now {new!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace golden.json instead of comparing")
    parser.add_argument("--only", default="", help="run commands whose names contain this text; compares no tables")
    parser.add_argument("--most", type=int, default=40, help="number of differences to print (default: 40)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ["HEADSCAN_CACHE"] = str(Path(folder) / "cache")
        make_inputs()
        found: dict[str, Any] = {"commands": run_commands(options.only)}
        if not options.only:
            found["tables"] = {name: stored_rows(Path(f"{name}.duckdb")) for name in ("s", "labelled")}
    if options.write:
        GOLDEN.write_text(_one_row_a_line(found) + "\n")
        return 0
    golden = json.loads(GOLDEN.read_text())
    if options.only:
        golden = {"commands": {name: golden["commands"].get(name) for name in found["commands"]}}
    lines = list(differences(golden, found))
    print("\n".join([*lines[: options.most], f"{len(lines)} differences"]))
    return 1 if lines else 0


def _one_row_a_line(value: Any, depth: int = 0) -> str:
    """Return JSON with a line for each row of a table, so that a change of a row is a change of a line."""
    if depth > 3 or not isinstance(value, dict | list) or not value:
        return json.dumps(value, ensure_ascii=False)
    margin = " " * (depth + 1)
    if isinstance(value, list):
        items = [json.dumps(item, ensure_ascii=False) for item in value]
        ends = "[]"
    else:
        items = [f"{json.dumps(key)}: {_one_row_a_line(item, depth + 1)}" for key, item in value.items()]
        ends = "{}"
    return ends[0] + "\n" + ",\n".join(margin + item for item in items) + "\n" + " " * depth + ends[1]


if __name__ == "__main__":
    sys.exit(main())
