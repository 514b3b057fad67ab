"""Bad values on the command line: one line and exit code 2, before anything is loaded."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from headscan.catalog import SCORES
from headscan.cli import main
from headscan.errors import HeadscanError
from headscan.options import Option
from headscan.settings.option_values import UsageError, options_of
from tests.jobs.conftest import make_tokenizer
from tests.small_models import make_model

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


def first_example(verb: str) -> list[str]:
    """Return the words of the first command of a verb's help page."""
    [line, *_] = re.findall(r"^ +headscan (.*)", main.verb_class(verb).__doc__ or "", re.MULTILINE)
    return list(takewhile(lambda word: word != ">", shlex.split(line)))


def options() -> Iterator[tuple[str, Option]]:
    for verb in main.VERBS:
        for option in options_of(main.verb_class(verb)).values():
            yield verb, option


def typed_options() -> Iterator[Any]:
    """Yield verbs with each option that has a type; an option that another verb has, too, is slow there."""
    seen: set[str] = set()
    for verb, option in options():
        flag = option.flags[0]
        narrows = option.parse or option.names or option.field.kind in (int, float) or option.field.many
        if flag.startswith("--") and narrows and not option.repeated:
            marks = [pytest.mark.slow] if flag in seen else []
            seen.add(flag)
            yield pytest.param(verb, flag, marks=marks, id=f"{verb}{flag}")


def test_no_option_takes_numbers_without_a_range() -> None:
    for verb, each in options():
        if each.field.kind in (int, float):
            low = each.least if each.above is None else each.above
            assert low is not None or each.parse, f"{verb} {each.flags[0]}"


@pytest.mark.parametrize("verb", main.VERBS)
def test_the_first_example_of_a_page_runs(
    verb: str, unreachable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in (Path("texts/a.txt"), Path("smaller/config.json")):
        file.parent.mkdir()
        file.write_text("{}")
    with pytest.raises(ReachedError):
        main.main(first_example(verb))


@pytest.mark.parametrize(("verb", "option"), list(typed_options()))
def test_values_that_no_option_takes(
    verb: str, option: str, unreachable: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in NEVER:
        if option in ("--tasks", "--plan", "--models", "--judge", "--held-out", "--rank-data") and value.strip():
            continue  # lm-eval alone knows the names of tasks, and any name may be a file or a corpus
        line = refusal(capsys, [*first_example(verb), f"{option}={value}"])
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
        (
            ["scan", "demo", "--corpus", "x", "--dtype", "float8"],
            "--dtype: 'float8' is unknown; did you mean float64, float32, float16?",
        ),
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
        (["evaluate", "demo", "--tasks", " , "], "has an empty member: give at least one value"),
        (["evaluate", "demo", "--tasks", "mmlu", "--recall-lengths", "512,0"], "0 (limit 1). Raise it"),
        (["sweep", "demo", "--tasks", "mmlu", "--quantiles", "0.1,1"], "1 (limit below 1)"),
        (["sweep", "demo", "--tasks", "mmlu", "--scores", "all,entropy"], "unknown score 'all'"),
        (["compare", "a", "--quantile", "0"], "--quantile"),
        (["compare", "a", "b", "--scores", "entropi"], "did you mean"),
        (["plan", "--window-share", "1.1"], "--window-share: 1.1 (limit 1). Lower it"),
        (["demo", "--questions", "0"], "--questions: 0 (limit 1)"),
        (["report", "--scores", "nonsense"], "unknown score 'nonsense'"),
        (["models", "demo", "--device", "gpu"], "unknown device 'gpu'"),
        (["export", "csv", "--out", "x"], "format: 'csv' is unknown. Choose gguf or "),
        (["status", "--store"], "expected one argument"),
        (["status", "--stor", "s.duckdb"], "unrecognized arguments: --stor s.duckdb; did you mean --store?"),
        (["scan", "demo", "--config", "x"], "--config is now --config-file for a file of options, and --corpus-config"),
        (["prune", "demo", "--out", "x"], "one of the arguments --share --shares --kv-bytes --max-divergence"),
        (
            ["prune", "demo", "--out", "x", "--share", "1e-9", "--mask", "m"],
            "--mask: not allowed with argument --share",
        ),
        (["evalute"], "unknown verb 'evalute'; did you mean evaluate"),
    ],
)
def test_bad_values_are_refused_before_a_verb_runs(
    command: list[str], words: str, unreachable: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(capsys, command)


#: Commands of which at least one refuses, and at least one takes, each option that has an effect only with some others.
STATES = {
    "study": ["demo", "demo --corpus c", "demo --tasks mmlu"],
    "models": ["", "m"],
    "place": ["demo", "demo --nodes 2", "demo --tokens 9 --measured 1a"],
    "scan": ["demo", "demo --corpus c"],
    "gates": ["demo", "demo --corpus c"],
    "probe": ["demo", "demo --corpus c", "demo --behaviours induction_score", "demo --behaviours retrieval_score"],
    "importance": ["demo", "demo --corpus c", "m --data d"],
    "sql": ["x", "x --format csv", "x --json"],
    "roles": ["", "--mask m"],
    "evaluate": [
        "demo",
        "m --tasks mmlu",
        "demo --heads 0:0 --replace mean",
        "demo --heads 0:0 --replace mean --corpus c",
        "demo --no-recall",
        "demo --held-out c",
    ],
    "sweep": ["demo", "m --tasks mmlu", "demo --replace mean", "demo --replace mean --corpus c", "demo --no-recall"],
    "ablate": [
        "demo",
        "m --corpus c",
        "m --tasks mmlu",
        "m --tasks mmlu --apply-chat-template",
        "m --tasks mmlu --replace mean",
        "m --data d",
    ],
    "referee": [
        "demo",
        "m --corpus c --repair o",
        "m --corpus c --tasks mmlu --apply-chat-template",
        "demo --no-recall",
        "m --data d",
    ],
    "prune": [
        f"{words} --out x"
        for words in (
            "demo --share 0.1",
            "m --share 0.1 --corpus c",
            "m --share 0.1 --corpus c --tasks mmlu --apply-chat-template",
            "demo --share 0.1 --no-recall",
            "demo --share 0.1 --skip-verdict",
            "demo --share 0.1 --method entropy",
            "demo --share 0.1 --unit group",
            "demo --heads 0:1",
            "demo --mask m",
            "demo --import-heads f",
        )
    ],
    "plan": ["", "demo", "demo --corpus c", "--corpus=c", "--method=random", "--method=imported --pattern=p"],
    "export": [
        "gguf demo --out x",
        "layer-types demo --plan p --out x",
        "layer-types --plan p --out x",
        "vllm demo --plan p --out x",
        "tensorrt-llm --plan p --out x",
        "parquet --out x",
    ],
}
#: Values of options that are neither numbers nor one of some choices.
VALUES = {
    "--memory": "2GiB",
    "--gpu-memory": "2GiB",
    "--cpu-memory": "2GiB",
    "--max-loss": "0.1",
    "--method": "entropy",
    "--min-tokens": "3",
    "--include-path": ".",
    "--device": "cpu",
    "--ray-address": "auto",
}


def conditional_options() -> Iterator[Any]:
    for verb, option in options():
        if option.needs:
            yield pytest.param(verb, option, id=f"{verb}-{option.flags[0]}")


def given(option: Option) -> list[str]:
    """The words that give an option a value other than its default."""
    flag = option.flags[0]
    if option.field.kind is bool:
        return [f"--no-{flag[2:]}" if option.default is True and not option.negated else flag]
    if not flag.startswith("--"):
        return ["m"]
    value = VALUES.get(flag, "x")
    if names := option.field.choices or option.names:
        held = option.default if isinstance(option.default, tuple) else (option.default,)
        value = next(name for name in names if name not in held)
    elif option.field.kind in (int, float) and flag not in VALUES:
        step = option.multiple or 1
        least = max(step, int(option.least or 0))
        value = str(least + step * (option.default == least))
    return [flag, value]


@pytest.mark.parametrize("verb", main.VERBS)
def test_a_refusal_names_options_that_the_verb_has(verb: str) -> None:
    """Numbers below their range, at its lower end and far above, which conflict with those of other options."""
    every = options_of(main.verb_class(verb)).values()
    has = {flag for option in every for flag in option.flags}
    has |= {f"--no-{flag[2:]}" for flag in has} | {"--help", "--config-file"}
    states = [shlex.split(words) for words in STATES.get(verb, ())][:2] or [first_example(verb)[1:]]
    numbers = [each for each in every if each.field.kind in (int, float) and each.flags[0].startswith("--")]
    lines = []
    for option in numbers:
        kind = option.field.kind
        low = next((limit for limit in (option.least, option.above) if limit is not None), 0)
        for value in (kind(low - 1), kind(low), kind(10**9)):
            for words in states:
                try:
                    main.read_command([verb, *words, f"{option.flags[0]}={value}"])
                except HeadscanError as problem:
                    lines.append(str(problem).replace(f"`headscan {verb} --help`", ""))
    assert lines or not numbers
    for line in lines:
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", line)) <= has, line
        assert not re.search("`[a-z_]+(=[^`]*)?`", line), line


@pytest.mark.parametrize(("verb", "option"), list(conditional_options()))
def test_an_option_is_refused_where_it_has_no_effect(verb: str, option: Option) -> None:
    """Each condition of an option refuses it in one of the verb's commands, and one command takes it."""
    taken, refusals = [], []
    flag, *value = given(option)
    for state in STATES[verb]:
        words = state.split()
        # A positional argument follows the verb's own, which stands first.
        place = len(words) if flag.startswith("--") else 1
        added = [] if flag in words else [flag, *value]
        try:
            taken.append(main.read_command([verb, *words[:place], *added, *words[place:]]))
        except UsageError as problem:
            refusals.append(str(problem))
    assert taken, refusals
    for condition in option.needs.split("; "):
        name = condition.removeprefix("no ").split()[0].lstrip("-")
        # Methods and formats that need an option refuse its absence in the same words.
        words_of = ("has no effect", "go together", "goes with")
        named = [line for line in refusals if (flag if flag.startswith("--") else option.flags[0]) in line]
        assert any(name in line or "has no effect on" in line for line in named if any(w in line for w in words_of)), (
            refusals
        )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("place demo --gpu-memory 10GiB --cpus 3", "--gpu-memory has no effect without --nodes: add --nodes, or leave"),
        ("ablate M --each --corpus f --limit 500 --num-fewshot 5", "--num-fewshot has no effect without --tasks"),
        ("ablate demo --each --limit 500", "--limit has no effect without --tasks: add --tasks, or leave it out"),
        ("ablate M --data d.tsv --num-fewshot 5 --bos always", "--num-fewshot has no effect with --data: leave one"),
        ("ablate M --data d.tsv --bos always", "--bos has no effect with --data: leave one of them out"),
        ("referee M --data d.tsv --recall-questions 8", "--recall-questions has no effect with --data"),
        ("referee M --data d.tsv --no-recall", "--no-recall has no effect with --data: leave one of them out"),
        ("referee M --corpus f --limit 5", "--limit has no effect without --tasks"),
        ("prune M --corpus f --share 0.1 --mmlu-cloze --out x", "--mmlu-cloze has no effect without --tasks"),
        ("prune M --corpus f --share 0.1 --include-path /tmp --out x", "--include-path has no effect without --tasks"),
        ("prune demo --share 0.1 --skip-verdict --limit 5 --out x", "--limit has no effect with --skip-verdict"),
        ("prune demo --share 0.1 --no-recall --recall-weight 2 --out x", "--recall-weight has no effect with --no-"),
        ("prune demo --heads 1:2 --tries 5 --controls 0 --out x", "--tries has no effect on named heads without c"),
        (
            "prune demo --share 0.1 --method random --tries 5 --out x",
            "--tries has no effect on --method random (only on d",
        ),
        ("evaluate M --tasks mmlu --column text", "--column has no effect on --replace zero (only on mean,"),
        ("evaluate M --tasks mmlu --heads 0:0 --replace mean --column text", "--column has no effect without --corpus"),
        (
            "probe demo --behaviours induction_score --depths 0.5",
            "on --behaviours induction_score (only on retrieval_sc",
        ),
        ("roles --mask m --all-heads", "--all-heads has no effect with --mask: leave one of them out"),
    ],
)
def test_a_refusal_names_the_other_option(command: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        main.read_command(command.split())


@pytest.mark.parametrize(
    "command",
    [
        "evaluate demo --limit 5 --num-fewshot 1",
        "referee demo --limit 5",
        "prune demo --share 0.1 --limit 5 --out x",
        "prune demo --share 0.1 --skip-verdict --no-recall --out x",
        "prune demo --heads 1:2 --tries 5 --out x",
        "prune M --corpus f --share 0.1 --bos always --out x",
        "ablate M --data d.tsv --max-tokens 64",
        "referee M --data d.tsv --max-tokens 64",
        "importance M --data d.tsv --max-tokens 64",
        "probe demo --behaviours induction_score --seed 1",
        "export gguf --out x demo",
        "compare 3f9a --json 77c0",
    ],
)
def test_options_with_an_effect_are_taken(command: str) -> None:
    main.read_command(command.split())


def test_good_values_are_read() -> None:
    read = main.read_command
    scan = read(["scan", "demo", "--corpus", "x", "--memory", "1.5GiB", "--statistics", "entropy, entropy"])
    assert (scan.devices.request.memory, scan.devices.timeouts.heartbeat) == (3 << 29, 300.0)
    assert scan.step.statistics == ("entropy",)
    sweep = read(["sweep", "demo", "--tasks", "a, b", "--quantiles", "0,0.1", "--masks", "none"]).step
    assert (sweep.tasks.names, sweep.shares, sweep.mask_criteria) == (("a", "b"), (0.0, 0.1), ())
    assert sweep.scores == tuple(SCORES)
    evaluate = read(["evaluate", "demo", "--tasks", "a", "--heads", "3:5", "0:0", "--num-fewshot", "0"]).step
    assert (evaluate.arms.heads, evaluate.tasks.num_fewshot) == (((3, 5), (0, 0)), 0)
    assert scan.store.path == "headscan.duckdb" and read(["study", "demo"]).store is None
    assert read(["place", "demo"]).machines.gpu_memory == 80 << 30
    assert read(["rank", "--limit", "0"]).limit == 0


@pytest.fixture
def nothing_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither weights nor tasks can be loaded."""

    def reached(*_: object, **__: object) -> None:
        raise ReachedError

    monkeypatch.setattr("headscan.runs.run_context.open_pool", reached)
    monkeypatch.setattr("headscan.steps.run_evaluation.Questions", reached)
    monkeypatch.setattr("headscan.steps.run_corpus.sequences", reached)


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        (["evaluate", "--tasks", "mmlu", "--heads", "99:0"], "no head 99:0 in the model: layer 99 (limit 2)"),
        (["evaluate", "--tasks", "mmlu", "--heads", "0:0", "2:6"], "no head 2:6 in the model: head 6 (limit 5)"),
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
