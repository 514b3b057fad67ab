"""The command line: its output, and one line with exit code 2 for errors."""

from __future__ import annotations

import csv
import inspect
import json
import math
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from headscan.catalog import PROFILES
from headscan.cli import main as main_module
from headscan.cli.main import main
from headscan.cli.option_parser import options_of
from headscan.steps.results import Json, Result
from headscan.store.records import ArmKind, RunRecord
from headscan.store.store import Store
from tests.jobs.conftest import make_tokenizer
from tests.small_models import make_model
from tests.stores import begin_arm, copy_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, corpus_folder: Path) -> Path:
    path = tmp_path_factory.mktemp("cli") / "s.duckdb"
    arguments = ["scan", str(model_folder), "--corpus", str(corpus_folder), "--store", str(path), "--device", "cpu"]
    assert main([*arguments, "--max-tokens", "64", "--sink", "2", "--recent", "8", "--mode", "chunk"]) == 0
    return path


def fails(capsys: pytest.CaptureFixture[str], arguments: list[object], *words: str) -> None:
    """The command ends with 2 and one line on standard error that has these words, and prints no result."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    last = err.strip().splitlines()[-1]
    assert last.startswith("headscan: ")
    assert "Traceback" not in err
    for word in words:
        assert word in last, last
    assert out == ""


def test_sql_rank_and_status(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sql", "from head_summary order by output_norm_ln limit 4", "--store", str(store)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2 + 4 + 1
    assert "output_norm_ln" in shown[0]
    assert main(["sql", "select count(*) as heads from head_summary", "--format", "csv", "--store", str(store)]) == 0
    assert capsys.readouterr().out.split() == ['"heads"', "18"]
    assert (
        main(["sql", "select max(layer) as top from head_statistics", "--format", "json", "--store", str(store)]) == 0
    )
    assert json.loads(capsys.readouterr().out) == {"top": 2}
    assert main(["rank", "--by", "entropy", "--limit", "3", "--store", str(store)]) == 0
    ranked = capsys.readouterr().out.splitlines()
    values = [float(line.split()[4]) for line in ranked[2:]]
    assert len(values) == 3
    assert values == sorted(values)
    assert main(["status", "--store", str(store)]) == 0
    assert "finished" in capsys.readouterr().out


def printed_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """The only document on standard output."""
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_json_holds_the_numbers_of_the_store(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_store = Store(store)
    [run] = of_store.runs("scan")
    ranked = printed_json(capsys, "rank", "--store", store, "--limit", 3)
    assert ranked["run_id"] == run["run_id"] and ranked["heads"] == run["num_layers"] * run["num_heads"]
    least = of_store.query("from head_summary order by output_norm_ln, layer, head limit 3").to_pylist()
    assert [(row["layer"], row["head"]) for row in ranked["rows"]] == [(row["layer"], row["head"]) for row in least]
    values = [row["value"] for row in ranked["rows"]]
    assert values == pytest.approx([row["output_norm_ln"] for row in least])
    query = "select run_id, started_at, 0.1::decimal(3, 1) as tenth, 'nan'::float as nan, [1, 2] as list from runs"
    found = printed_json(capsys, "sql", query, "--store", store)
    assert found["columns"] == ["run_id", "started_at", "tenth", "nan", "list"]
    began = run["started_at"].isoformat()
    expected = {"run_id": run["run_id"], "started_at": began, "tenth": 0.1, "nan": None, "list": [1, 2]}
    assert found["rows"] == [expected]
    [row] = printed_json(capsys, "status", "--store", store)["rows"]
    assert (row["run_id"], row["finished_shards"]) == (run["run_id"], run["total_shards"])
    assert row["started_at"] == began and row["arms"] is None
    fails(capsys, ["sql", query, "--json", "--format", "csv", "--store", store], "--json and --format csv exclude")
    fails(capsys, ["sql", " ", "--store", store], "the query is empty: give one SQL statement")


def test_verbs_that_print_tables_have_json() -> None:
    for verb in main_module.VERBS:
        kind = main_module.verb_class(verb)
        prints = "Result" in inspect.signature(kind.run).return_annotation
        assert prints == ("--json" in [each.flags[0] for each in options_of(kind).values()]), verb


def test_json_alone_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass(frozen=True)
    class Verb:
        json: Json = True

        def run(self) -> Result:
            print("a library prints")
            row = {"value": math.inf, "kind": ArmKind.MASK, "heads": frozenset({2, 1})}
            return Result([row], str, {"path": Path("a")})

    main_module._run(Verb())
    out, err = capsys.readouterr()
    assert json.loads(out) == {"path": "a", "rows": [{"value": None, "kind": "mask", "heads": [1, 2]}]}
    assert err == "a library prints\n"


def test_a_full_panel_has_profiles_to_read_and_to_look_at(
    model_folder: Path, corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ["--store", str(tmp_path / "s.duckdb")]
    scan = ["scan", str(model_folder), "--corpus", str(corpus_folder), "--device", "cpu", "--max-tokens", "40", *store]
    assert main([*scan, "--panel", "full"]) == 0
    capsys.readouterr()
    assert main(["sql", "select layer, mass_by_distance from head_statistics", "--format", "csv", *store]) == 0
    names, *rows = csv.reader(capsys.readouterr().out.splitlines())
    assert names == ["layer", "mass_by_distance"]
    assert all(sum(json.loads(row[1])) == pytest.approx(1, abs=1e-4) for row in rows)
    whole = "select profile, sum(share) / count(distinct (layer, head)) as whole from head_profiles group by profile"
    assert main(["sql", whole, "--format", "json", *store]) == 0
    wholes = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["profile"]: row["whole"] for row in wholes} == pytest.approx(dict.fromkeys(PROFILES, 1), abs=1e-4)
    assert main(["rank", "--by", "confidence", "--limit", "1", *store]) == 0
    assert main(["report", "--scores", "confidence", "--out", str(tmp_path / "r.html"), *store]) == 0
    assert "Where heads look" in (tmp_path / "r.html").read_text()
    fails(capsys, ["rank", "--by", "entropy", "--site", "cross", *store], "cross", "self")
    fails(capsys, [*scan, "--panel", "full", "--statistics", "entropy"], "not allowed with argument --panel")


def test_packed_documents_are_reported_to_attend_to_each_other(
    model_folder: Path, corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "s.duckdb"
    scan = ["scan", str(model_folder), "--corpus", str(corpus_folder), "--device", "cpu", "--store", str(store)]
    for mode, across in (("pack", True), ("chunk", False)):
        assert main([*scan, "--max-tokens", "40", "--mode", mode]) == 0
        assert ("queries attended across documents" in capsys.readouterr().err) == across
        [run] = [run for run in Store(store).runs("scan") if run["config"]["tokens"]["mode"] == mode]
        assert run["config"]["attention_across_documents"] is across
    with pytest.raises(SystemExit):
        main(["scan", "--help"])
    assert "where queries also attend to earlier documents" in " ".join(capsys.readouterr().out.split())


def test_numbers_that_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that overflows on one token: the document that has it is named, or its rows are counted."""
    folder, texts, store = tmp_path / "model", tmp_path / "texts", tmp_path / "s.duckdb"
    tokenizer = make_tokenizer(300)
    model = make_model("llama", vocabulary=300)
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer("Q", add_special_tokens=False)["input_ids"]] = float("inf")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    texts.mkdir()
    for name, text in (("a", "ada counts"), ("b", "bo counts to Q"), ("c", "cy counts to nine")):
        (texts / f"{name}.txt").write_text(text)
    scan = ["scan", folder, "--corpus", texts, "--device", "cpu", "--store", store]
    fails(capsys, scan, "not finite in layer 0", "sequence 1 (document 1, ", "b.txt)", "--keep-nonfinite")
    for _ in range(2):  # a complete scan says it again
        assert main([*map(str, scan), "--keep-nonfinite"]) == 0
        assert "with NaN or infinite values, which are NULL there: 18" in capsys.readouterr().err
    counts = Store(store).query(
        "select sequence, count(entropy) as n from head_statistics join runs using (run_id)"
        " where status = 'finished' group by all order by all"
    )
    assert counts["n"].to_pylist() == [18, 0, 18]


def test_plan_export_and_report(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    assert (
        main(
            [
                "plan",
                "--method",
                "distant_mass",
                "--store",
                str(store),
                "--sink",
                "2",
                "--recent",
                "8",
                "--out",
                str(plan),
            ]
        )
        == 0
    )
    assert "3 of 6 KV heads" in capsys.readouterr().out
    assert main(["export", "duoattention", "--plan", str(plan), "--out", str(tmp_path / "duo")]) == 0
    rows = [line.split("\t") for line in (tmp_path / "duo" / "full_attention_heads.tsv").read_text().splitlines()]
    assert [len(row) for row in rows] == [2, 2, 2]
    assert sum(float(value) for row in rows for value in row) == 3
    assert main(["export", "parquet", "--store", str(store), "--out", str(tmp_path / "pq")]) == 0
    capsys.readouterr()
    query = "select count(*) as n, count(distinct layer) as layers from head_statistics"
    assert main(["sql", query, "--parquet", str(tmp_path / "pq"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == Store(store).query(query).to_pylist()
    fails(capsys, ["sql", query, "--parquet", str(tmp_path)], "no schema.json")
    fails(capsys, ["sql", query, "--parquet", str(tmp_path / "pq"), "--store", "s.duckdb"], "exclude each other")
    assert main(["rank", "--store", str(tmp_path / "pq")]) == 0
    fails(capsys, ["scan", "demo", "--store", str(tmp_path / "pq")], "cannot be written")
    report = tmp_path / "report.html"
    assert main(["report", "--store", str(store), "--plan", str(plan), "--out", str(report)]) == 0
    assert "tiny-llama" in report.read_text()


def test_a_report_leaves_out_an_evaluation_that_compares_nothing(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Store(copy_store(store, tmp_path / "s.duckdb"))
    scanned = own.runs("scan")[0]
    same = {name: scanned[name] for name in ("model_config_hash", "weights_hash", "tokenizer_hash")}
    record = RunRecord("evaluate", "alone", scanned["model"], scanned["num_layers"], scanned["num_heads"], **same)
    begin_arm(own, own.begin_run(record).run_id, "baseline", "baseline")
    report = ["report", "--store", str(own.path), "--out", str(tmp_path / "r.html")]
    assert main(report) == 0
    assert "What ablating heads costs" not in (tmp_path / "r.html").read_text()
    fails(capsys, [*report, "--evaluation", own.runs("evaluate")[0]["run_id"]], "0 finished baselines")


@pytest.mark.usefixtures("own_tasks_alone")
def test_mistakes_are_one_line(
    store: Path, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new.duckdb"
    scan = ["scan", model_folder, "--store", new, "--device", "cpu", "--corpus"]
    fails(capsys, ["scan", tmp_path / "absent", "--corpus", "python-stdlib", "--store", new], "no such folder")
    fails(capsys, [*scan, tmp_path / "absent.txt"], "absent.txt")
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "a.txt").write_text(" \n ")
    fails(capsys, [*scan, tmp_path / "blank"], "gave no sequence")
    fails(capsys, [*scan, "python-stdlib", "--max-tokens", "4096"], "4096", "1024")
    fails(capsys, [*scan, "python-stdlib", "--statistics", "entropie"], "entropie", "entropy")
    fails(capsys, [*scan, "python-stdlib", "--replicas", "4000"], "4000")
    fails(capsys, [*scan, "python-stdlib", "--device", "toaster"], "toaster")
    fails(capsys, [*scan, "python-stdlib", "--sink", "0"], "sink")
    assert not new.exists()
    fails(capsys, ["rank", "--by", "output_nrom", "--store", store], "output_nrom", "output_norm")
    fails(capsys, ["sql", "select nonsense from runs", "--store", store], "nonsense")
    fails(capsys, ["sql", "delete from runs", "--store", store], "read-only")
    fails(capsys, ["sql", "select 1", "--store", new], "new.duckdb")
    evaluate = ["evaluate", model_folder, "--store", store, "--device", "cpu", "--tasks"]
    fails(capsys, [*evaluate, "no_such_task"], "no_such_task")
    fails(capsys, [*evaluate, "mmlu", "--heads", "one"], "LAYER:HEAD")
    fails(capsys, [*evaluate, "mmlu", "--score", "output_norm_ln", "--share", "1.5"], "1.5")
    fails(capsys, [*evaluate, "mmlu", "--score", "nonsense"], "nonsense")
    fails(capsys, ["export", "duoattention", "--plan", tmp_path / "none.json", "--out", tmp_path / "x"], "none.json")
    fails(
        capsys,
        ["plan", "--method", "distant_mass", "--store", store, "--recent", "4", "--out", tmp_path / "p.json"],
        "recent",
    )


def test_a_store_that_is_none_or_newer_stays_as_it_was(
    store: Path, model_folder: Path, corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "notes.duckdb"
    text.write_text("not a database, but dear to its owner" * 100)
    newer = tmp_path / "newer.duckdb"
    newer.write_bytes(store.read_bytes())
    with Store(newer).connect() as connection:
        connection.execute("update meta set value = '99' where key = 'schema_version'")
    for path, word in ((text, "store"), (newer, "99")):
        before = path.read_bytes()
        scan = ["scan", model_folder, "--corpus", corpus_folder, "--store", path, "--device", "cpu"]
        fails(capsys, scan, str(path), word)
        fails(capsys, ["sql", "select 1", "--store", path], word)
        assert path.read_bytes() == before


def test_a_locked_store_names_its_holder(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hold = f"import duckdb, time; c = duckdb.connect({str(store)!r}); print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        fails(capsys, ["sql", "select 1", "--store", store, "--lock-timeout", "0.5"], str(holder.pid))
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/proc/mounts").exists(), reason="needs leave to mount a small disk")
def test_a_full_disk_leaves_the_finished_shards(
    model_folder: Path, corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        scan = ["scan", model_folder, "--corpus", "python-stdlib", "--limit-documents", "400", "--max-tokens", "16"]
        scan += ["--mode", "chunk", "--limit-sequences", "6000", "--shard-size", "500"]
        fails(capsys, [*scan, "--device", "cpu", "--store", disk / "s.duckdb"], "s.duckdb")
        with Store(disk / "s.duckdb").connect(read_only=True) as connection:
            counted = connection.execute("select coalesce(sum(head_rows), 0) from shards").fetchone()
            rows = connection.execute("select count(*) from head_statistics").fetchone()
        assert counted is not None
        assert rows is not None
        assert counted[0] == rows[0]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_without_a_verb_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "headscan demo" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("headscan 1")
    assert main(["--version", "--verbose"]) == 0
    said = capsys.readouterr().out
    assert f"\ntorch {metadata.version('torch')}\n" in said and " torch threads, " in said and "GPU" in said


def test_a_reader_that_leaves_early_is_no_error(store: Path) -> None:
    code = textwrap.dedent(f"""
        from headscan.cli.main import main
        raise SystemExit(main(["sql", "from head_statistics", "--rows", "100000", "--store", {str(store)!r}]))
    """)
    reader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stderr is not None
    reader.stdout.readline()
    reader.stdout.close()
    assert "Traceback" not in reader.stderr.read()
    reader.wait()
