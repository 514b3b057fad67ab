"""How long questions to a large store take, the summary at the end of its scan, and verdicts on many arms.

    python -m tests.benchmarks.bench_queries [--sequences 20480] [--layers 80 --heads 64] [--arms 100] [--folder /tmp]

SQL makes a scan of the fast panel (20,480 sequences of 80 x 64 heads: 105 million rows, 7 GB; ``--sequences 0`` omits
it), and an evaluation with the tasks of MMLU (14,042 questions in 57 tasks and 4 groups) and recall. Each question runs
in a process of its own, as a user asks it, and its time includes the start of Python. Memory is the peak of that
process (Linux only).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from headscan.catalog import STATISTICS, panel_names
from headscan.store.records import ArmKind, RunRecord
from headscan.store.store import Store
from tests.benchmarks.measuring import Table, show
from tests.numbers.plan_fixtures import site
from tests.stores import begin_arm

_GROUP, _TOKENS = 8, 1024
#: Sequences of a shard.
_AT_ONCE = 256
#: Seconds between two looks at the memory of a process.
_POLL = 0.01


class Bar(NamedTuple):
    """The most seconds and GB that something may take."""

    seconds: float
    gigabytes: float


SUMMARY, QUESTION, REPORT, VERDICTS = Bar(60, 2), Bar(1, 1.5), Bar(20, 1.5), Bar(15, 1.5)
#: The most percent by which the summary may enlarge the file.
GROWTH = 5.0


def made_up_scan(store: Store, sequences: int, layers: int, heads: int) -> str:
    """Write an unfinished scan, in which heads differ most, then sequences."""
    record = RunRecord(
        "scan",
        f"made up {sequences}",
        "imagined",
        layers,
        heads,
        model_config_hash="c0ffee",
        weights_hash="beef",
        bos_policy="auto",
        corpus="imagined texts",
        dtype="bfloat16",
        attention_path="interface",
        grid=[site(layer, heads, heads // _GROUP) for layer in range(layers)],
        config={"sink": 4, "recent": 256, "panel": "fast"},
        packages={"torch": "2.13"},
        code_version="0.1.0",
    )
    run_id = store.begin_run(record).run_id
    numbers = ", ".join(f"{_made_up(name)} AS {name}" for name in panel_names("fast"))
    grid = layers * heads
    for shard, first in enumerate(range(0, sequences, _AT_ONCE)):
        last = min(sequences, first + _AT_ONCE)
        with store.connect(create=True) as connection:
            connection.execute("BEGIN TRANSACTION")
            connection.execute("SELECT setseed(?)", [shard / sequences]).fetchall()
            connection.execute(
                f"INSERT INTO head_statistics BY NAME SELECT $1 AS run_id, i // {grid} AS sequence, 'self' AS site,"
                f" layer, head, head // {_GROUP} AS kv_head, {numbers} FROM (SELECT i,"
                f" i // {heads} % {layers} AS layer, i % {heads} AS head, hash(i % {grid}) / 2.0 ** 64 AS strength"
                f" FROM range({first * grid}, {last * grid}) r(i))",
                [run_id],
            )
            connection.execute(
                "INSERT INTO sequences BY NAME SELECT $1 AS run_id, range AS sequence, $2 AS shard, range AS document,"
                " 'text' AS source, $3 AS tokens, false AS truncated, 'h' || range AS content_hash FROM range($4, $5)",
                [run_id, shard, _TOKENS, first, last],
            )
            connection.execute(
                "INSERT INTO shards BY NAME SELECT $1 AS run_id, $2 AS shard, 'c' AS content_hash, $3 AS sequences,"
                " $4 AS head_rows, 0 AS nonfinite_rows, $5 AS tokens, 1.0 AS seconds, 'worker' AS worker,"
                " now() AS finished_at",
                [run_id, shard, last - first, (last - first) * grid, (last - first) * _TOKENS],
            )
            connection.execute("COMMIT")
    return run_id


def _made_up(name: str) -> str:
    """Return SQL for a number: norms grow with the layer, and shares and entropies follow the strength of the head."""
    noise = "(1 + 0.15 * (random() + random() + random() + random() - 2))"
    if "norm" in name:
        return f"((0.5 + strength) * (1 + layer) * {noise})::REAL"
    if STATISTICS[name].unit == "nats":
        return f"(6 * (1 - strength) * {noise})::REAL"
    return f"least(1, strength * {noise})::REAL"


#: Questions of MMLU, its tasks, its groups, and questions of each family of recall tasks.
_QUESTIONS, _TASKS, _GROUPS, _RECALL = 14_042, 57, 4, 512


def made_up_answers(store: Store, arms: int) -> str:
    """Write a finished evaluation of a baseline and of arms that change a few answers; return its run."""
    names = [f"mmlu_{task:02}" for task in range(_TASKS)]
    groups = {f"group_{at}": names[at::_GROUPS] for at in range(_GROUPS)}
    record = RunRecord("evaluate", f"made up {arms}", "imagined", 80, 64, config={"groups": groups})
    run_id = store.begin_run(record).run_id
    arm_ids = []
    with store.one_transaction():
        for arm in range(arms + 1):
            kind = ArmKind.MASK if arm else ArmKind.BASELINE
            name = f"mask {arm}" if arm else "baseline"
            arm_ids.append(begin_arm(store, run_id, name, kind, share=arm / 1000))
    # Some tasks have many questions, others few.
    task = f"format('mmlu_{{:02d}}', floor({_TASKS} * (i / {_QUESTIONS}) ** 1.5)::INTEGER)"
    with store.connect() as connection:
        connection.execute("BEGIN TRANSACTION")
        for arm, arm_id in enumerate(arm_ids):
            changes = f"{arm} > 0 AND hash(i, {arm}) % 1000 < {10 + arm}"
            connection.execute(
                f"INSERT INTO answers BY NAME SELECT $1 AS arm_id, CASE WHEN i < $2 THEN {task} WHEN i % 2 = 0 THEN"
                " 'needle@1024' ELSE 'copying@1024' END AS task, i >= $2 AS recall,"
                " row_number() OVER (PARTITION BY 2 ORDER BY i) - 1 AS question, 'hash ' || i AS doc_hash,"
                f" 'A' AS target, 'B' AS response, ((hash(i) % 100 < 65) <> ({changes}))::DOUBLE AS correct,"
                " CASE WHEN i < $2 OR i % 2 = 0 THEN [-1.0, -2.0, -3.0, -4.0] END AS log_likelihoods,"
                " NULL AS metrics FROM range($3) r(i)",
                [arm_id, _QUESTIONS, _QUESTIONS + 2 * _RECALL],
            )
        connection.execute("UPDATE arms SET status = 'finished', finished_at = now() WHERE run_id = ?", [run_id])
        connection.execute("COMMIT")
    store.finish_run(run_id)
    return run_id


class Cost(NamedTuple):
    """Seconds and peak memory of a process, in GB of 10^9 bytes."""

    seconds: float
    gigabytes: float


def cost_of(command: Sequence[str]) -> Cost:
    """Run Python with these arguments and return its cost; its output is dropped."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak = 0
    # Not ru_maxrss, which starts from the memory of this process.
    while process.poll() is None:
        with suppress(OSError):
            found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
            peak = int(found[1]) if found else peak
        time.sleep(_POLL)
    seconds = time.perf_counter() - began
    if process.returncode:
        assert process.stderr is not None
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {process.stderr.read().decode()}")
    return Cost(seconds, peak * 1024 / 1e9)


def verdict(cost: Cost, bar: Bar) -> str:
    return "met" if cost.seconds <= bar.seconds and cost.gigabytes < bar.gigabytes else "not met"


_FINISH = (
    "import sys; from headscan.store.store import Store; Store(sys.argv[1]).finish_run(sys.argv[2],"
    " total_shards=int(sys.argv[3]), corpus_hash='c0de')"
)


_JUDGE = (
    "import sys; from headscan.store.store import Store; from headscan.verdicts.judge import judge;"
    " assert len(judge(Store(sys.argv[1]), sys.argv[2]).arms) == int(sys.argv[3])"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=20_480)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--arms", type=int, default=100, help="arms next to the baseline")
    parser.add_argument("--folder", help="folder for the store (default: that of temporary files)")
    options = parser.parse_args()
    table = Table("Questions to a store", ("what", "seconds", "GB", "most", "bar"))

    def row(name: str, command: Sequence[str], bar: Bar) -> None:
        cost = cost_of(command)
        limit = f"{bar.seconds:g} s, {bar.gigabytes:g} GB"
        table.row(name, f"{cost.seconds:.2f}", f"{cost.gigabytes:.2f}", limit, verdict(cost, bar))

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "answers.duckdb"
        run_id = made_up_answers(Store(path), options.arms)
        row(f"verdicts on {options.arms} arms", ["-c", _JUDGE, str(path), run_id, str(options.arms)], VERDICTS)
        if options.sequences:
            ask_scan(Path(folder), options.sequences, options.layers, options.heads, row)


def ask_scan(
    folder: Path, sequences: int, layers: int, heads: int, row: Callable[[str, Sequence[str], Bar], None]
) -> None:
    """Make a scan in a folder, and write a row for each question to it."""
    path = folder / "s.duckdb"
    began = time.perf_counter()
    run_id = made_up_scan(Store(path), sequences, layers, heads)
    before = path.stat().st_size
    rows = sequences * layers * heads
    show(f"{rows:,} rows, {before / 1e9:.2f} GB, made in {time.perf_counter() - began:.0f} s")
    shards = -(-sequences // _AT_ONCE)
    with Store(f"{folder}/empty.duckdb").connect(create=True):
        pass
    row("status of an empty store", ["-m", "headscan", "status", "--store", f"{folder}/empty.duckdb"], QUESTION)
    row("summary at the end", ["-c", _FINISH, str(path), run_id, str(shards)], SUMMARY)
    asked = {
        "rank": ["rank"],
        "status": ["status"],
        "roles": ["roles"],
        "plan": ["plan", "--method", "distant_mass", "--out", f"{folder}/plan.json"],
        "from head_summary": ["sql", "from head_summary"],
        "report": ["report", "--out", f"{folder}/report.html"],
    }
    for name, words in asked.items():
        row(name, ["-m", "headscan", *words, "--store", str(path)], REPORT if name == "report" else QUESTION)
    growth = 100 * (path.stat().st_size / before - 1)
    show(f"\nThe summary enlarges the file by {growth:.1f} % (most {GROWTH:g} %).")


if __name__ == "__main__":
    main()
