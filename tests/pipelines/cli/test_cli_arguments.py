"""Bad values on the command line: one line and exit code 2, before anything is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headscan.pipelines.cli import main
from headscan.pipelines.cli.option_parser import BoundOption, options_of
from tests.pipelines.conftest import make_tokenizer
from tests.small_models import make_model

#: What each verb cannot do without.
NEEDED = {
    "place": ["demo"],
    "scan": ["demo", "--corpus", "python-stdlib"],
    "status": [],
    "sql": ["select 1"],
    "merge": ["a.duckdb", "b.duckdb", "--into", "c.duckdb"],
    "rank": [],
    "roles": [],
    "compare": ["a"],
    "probe": ["demo"],
    "importance": ["demo", "--corpus", "texts"],
    "evaluate": ["demo", "--tasks", "mmlu"],
    "sweep": ["demo", "--tasks", "mmlu"],
    "referee": ["demo"],
    "ablate": ["demo"],
    "gates": ["demo", "--corpus", "texts"],
    "prune": ["demo", "--share", "0.4", "--out", "x"],
    "plan": [],
    "generate": ["demo", "--prompt-file", "x"],
    "export": ["parquet", "--out", "x"],
    "report": [],
    "models": ["demo"],
    "completion": ["bash"],
    "demo": [],
    "study": ["demo"],
}
#: No number, share, size, name or device reads like these.
NEVER = ["", "x", "nan", "-1", "inf", "-inf", "1e400", "9" * 40, "0x10", "1;2"]


class ReachedError(Exception):
    """A verb ran."""


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every verb fail when it runs, so that refusals happen before."""

    def run(verb: object) -> None:
        raise ReachedError

    for verb in main.VERBS:
        monkeypatch.setattr(main.verb_class(verb), "run", run)


def refusal(capsys: pytest.CaptureFixture[str], command: list[str]) -> str:
    """The one line with which a command is refused."""
    capsys.readouterr()
    assert main.main(command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headscan: ")
    assert len(err.splitlines()) == 1, err
    return err


def options() -> Iterator[tuple[str, BoundOption]]:
    for verb in main.VERBS:
        for option in options_of(main.verb_class(verb)):
            yield verb, option


def typed_options() -> Iterator[Any]:
    """Yield verbs with each option that has a type; an option that another verb has, too, is slow there."""
    seen: set[str] = set()
    for verb, option in options():
        narrows = option.option.parse or option.option.names or option.kind in (int, float) or option.many
        if option.flag.startswith("--") and narrows and not option.option.repeated:
            marks = [pytest.mark.slow] if option.flag in seen else []
            seen.add(option.flag)
            yield pytest.param(verb, option.flag, marks=marks, id=f"{verb}{option.flag}")


def test_every_verb_is_in_the_table() -> None:
    assert set(main.VERBS) == set(NEEDED)


def test_no_option_takes_numbers_without_a_range() -> None:
    for verb, each in options():
        if each.kind in (int, float):
            low = each.option.least if each.option.above is None else each.option.above
            assert low is not None or each.option.parse, f"{verb} {each.flag}"


@pytest.mark.parametrize("verb", NEEDED)
def test_required_arguments_suffice(verb: str, unreachable: None) -> None:
    with pytest.raises(ReachedError):
        main.main([verb, *NEEDED[verb]])


@pytest.mark.parametrize(("verb", "option"), list(typed_options()))
def test_values_that_no_option_takes(
    verb: str, option: str, unreachable: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in NEVER:
        if option in ("--tasks", "--plan", "--models") and value.strip():
            continue  # lm-eval alone knows the names of tasks, and any name may be a file
        line = refusal(capsys, [verb, *NEEDED[verb], f"{option}={value}"])
        assert option in line, line


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["probe", "demo", "--lengths", "0"], "--lengths: 0 (limit 1). Raise it"),
        (["probe", "demo", "--depths", "0", "1.5"], "--depths: 1.5 (limit 1). Lower it"),
        (["probe", "demo", "--seed", str(1 << 63)], "--seed"),
        (["probe", "demo", "--behaviours", "inductoin_score"], "did you mean induction_score"),
        (["rank", "--limit", "-1"], "--limit: -1 (limit 0). Raise it"),
        (["rank", "--lock-timeout", "-1"], "--lock-timeout: -1 (limit 0)"),
        (["rank", "--by", "entrpy"], "did you mean entropy"),
        (["sql", "select 1", "--rows", "1" * 30], "--rows"),
        (["scan", "demo", "--corpus", "x", "--silence-limit", "0"], "--silence-limit: 0 (limit 1)"),
        (["scan", "demo", "--corpus", "x", "--silence-limit", "nan"], "--silence-limit: nan (limit finite numbers)"),
        (["scan", "demo", "--corpus", "x", "--shard-size", "1" * 30], "(limit 2147483647). Lower it"),
        (["scan", "demo", "--corpus", "x", "--dtype", "float8"], "invalid choice: 'float8'"),
        (["scan", "demo", "--corpus", "x", "--device", "cuda:x"], "choose auto, cpu, cuda or cuda:N"),
        (["scan", "demo", "--corpus", "x", "--memory", "2"], "'2' has no unit: write 2GiB"),
        (["scan", "demo", "--corpus", "x", "--statistics", "entropie"], "did you mean entropy"),
        (["generate", "demo"], "the following arguments are required: --prompt-file"),
        (["place", "demo", "--nodes", "1", "--gpu-memory", "80"], "'80' has no unit: write 80GiB"),
        (["place", "demo", "--gpu-memory", "9" * 400 + "GiB"], "is out of range: write a size from 1B"),
        (["evaluate", "demo", "--tasks", "mmlu", "--share", "10"], "--share: 10 (limit below 1)"),
        (["evaluate", "demo", "--tasks", "mmlu", "--share", "0"], "--share: 0 (limit above 0). Raise it"),
        (["evaluate", "demo", "--tasks", "mmlu", "--heads", "3.5"], "write LAYER:HEAD, for example 3:5"),
        (["evaluate", "demo", "--tasks", "mmlu", "--heads", "3:5", "-1:0"], "-1:0"),
        (["evaluate", "demo", "--tasks", " , "], "names nothing: give at least one name"),
        (["evaluate", "demo", "--tasks", "mmlu", "--recall-lengths", "512,0"], "0 (limit 1). Raise it"),
        (["sweep", "demo", "--tasks", "mmlu", "--quantiles", "0.1,1"], "1 (limit below 1)"),
        (["sweep", "demo", "--tasks", "mmlu", "--scores", "all,entropy"], "unknown score 'all'"),
        (["compare", "a", "--quantile", "0"], "--quantile"),
        (["compare", "a", "b", "--scores", "entropi"], "did you mean"),
        (["plan", "--window-share", "1.1"], "--window-share: 1.1 (limit 1). Lower it"),
        (["demo", "--questions", "0"], "--questions: 0 (limit 1)"),
        (["report", "--scores", "nonsense"], "unknown score 'nonsense'"),
        (["models", "demo", "--device", "gpu"], "unknown device 'gpu'"),
        (["export", "csv", "--out", "x"], "invalid choice: 'csv'"),
        (["status", "--store"], "expected one argument"),
        (["status", "--stor", "s.duckdb"], "unrecognized arguments: --stor"),
        (["evalute"], "invalid choice: 'evalute'"),
    ],
)
def test_bad_values_are_refused_before_a_verb_runs(
    command: list[str], words: str, unreachable: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(capsys, command)


def test_good_values_are_read() -> None:
    read = main.read_command
    scan = read(["scan", "demo", "--corpus", "x", "--memory", "1.5GiB", "--statistics", "entropy, entropy"])
    assert (scan.devices.request.memory, scan.devices.timeouts.heartbeat) == (3 << 29, 300.0)
    assert scan.settings.keywords["statistics"] == ("entropy",)
    sweep = read(["sweep", "demo", "--tasks", "a, b", "--quantiles", "0,0.1", "--masks", "none"])
    settings = sweep.arms.sweep.keywords
    assert sweep.tasks.names == ("a", "b") and settings["quantiles"] == (0.0, 0.1)
    assert settings["masks"] == () and "scores" not in settings
    evaluate = read(["evaluate", "demo", "--tasks", "a", "--heads", "3:5", "0:0", "--num-fewshot", "0"])
    assert evaluate.arms.chosen().heads == ((3, 5), (0, 0))
    assert evaluate.tasks.prompts.keywords["num_fewshot"] == 0
    assert read(["place", "demo"]).machines.gpu_memory == 80 << 30
    assert read(["rank", "--limit", "0"]).limit == 0


@pytest.fixture
def nothing_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither weights nor tasks can be loaded."""

    def reached(*_: object, **__: object) -> None:
        raise ReachedError

    monkeypatch.setattr("headscan.pipelines.runs.run_context.open_pool", reached)
    monkeypatch.setattr("headscan.pipelines.evaluate.run_evaluation.Questions", reached)
    monkeypatch.setattr("headscan.pipelines.measure.run_corpus.sequences", reached)


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        (["evaluate", "--tasks", "mmlu", "--heads", "99:0"], "no head 99:0 in the model: layer 99 (limit 2)"),
        (
            ["evaluate", "--tasks", "mmlu", "--heads", "0:0", "2:6"],
            "no head 2:6 in the model: head 6 (limit 5)",
        ),
        (["evaluate", "--tasks", "mmlu", "--include-path", "/absent"], "--include-path /absent is no folder"),
        (["evaluate", "--tasks", "mmlu", "--recall-questions", "7"], "7 (limit a multiple of 4)"),
        (
            ["evaluate", "--tasks", "mmlu", "--stages", "2", "--memory", "1GiB"],
            "--memory is only for --placement streamed",
        ),
        (["evaluate", "--tasks", "mmlu", "--store", "/dev/null/s.duckdb"], "(/dev/null)"),
        (["sweep", "--tasks", "mmlu", "--quantiles", "0"], "nothing to sweep"),
        (["sweep", "--tasks", "mmlu", "--fewshot-as-multiturn"], "Set --apply-chat-template, too"),
        (["scan", "--corpus", "python-stdlib", "--max-tokens", "1"], "--max-tokens 1 is below --min-tokens 2. Raise"),
        (["scan", "--corpus", " "], "corpus name is ' '"),
        (["scan", "--corpus", "/absent/x.txt"], "/absent/x.txt"),
        (["scan", "--corpus", "python-stdlib", "--store", "/dev/null/s.duckdb"], "(/dev/null)"),
        (["probe", "--lengths", "100000"], "100000"),
    ],
)
def test_options_are_checked_before_weights_and_tasks_are_loaded(
    verb: list[str],
    words: str,
    nothing_opens: None,
    model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    store = [] if "--store" in verb else ["--store", str(tmp_path / "s.duckdb")]
    assert main.main([verb[0], str(model_folder), *verb[1:], *store, "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not (tmp_path / "s.duckdb").exists()


def test_weights_of_another_configuration_name_the_tensor_and_both_shapes(
    model_folder: Path, tmp_path: Path, corpus_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    other = make_model("llama", vocabulary=320)
    other.config.save_pretrained(folder)
    make_tokenizer(300).save_pretrained(folder)
    capsys.readouterr()
    scan = [
        "scan",
        str(folder),
        "--corpus",
        str(corpus_folder),
        "--store",
        str(tmp_path / "s.duckdb"),
        "--device",
        "cpu",
    ]
    assert main.main(scan) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "ignore_mismatched_sizes" not in line
    assert "model.embed_tokens.weight has shape (300, " in line or "lm_head.weight has shape (300, " in line
    assert "the model (320, " in line
