"""Help pages: an example first, one screen before the options, the verbs in the order of use."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headscan.cli import main
from headscan.cli.option_parser import UsageError, options_of
from headscan.steps.run_corpus import _PART_SHARD_SEQUENCES

VERBS = list(main.VERBS)
_SCREEN = 24


def page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main.main([*words] if "--help" in words else [*words, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


def test_the_first_page_lists_every_verb_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    lines = page(capsys).splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in VERBS] == VERBS
    for group in ("start:", "measure:", "query:", "intervene:", "deliver:"):
        assert group in lines
    assert max(map(len, lines)) <= 120
    assert len(lines) <= 40


@pytest.mark.parametrize("verb", VERBS)
def test_a_page_begins_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    before, _, _ = page(capsys, verb).partition("\npositional arguments:\n")
    before, _, _ = before.partition("\noptions:\n")
    lines = before.splitlines()
    assert lines[0].startswith(f"usage: headscan {verb} ")
    assert lines[2][0].islower() and not lines[2].endswith(".")
    assert lines[4].startswith(f"    headscan {verb}")
    assert len(lines) <= _SCREEN


@pytest.mark.parametrize("verb", VERBS)
def test_a_page_shows_the_usual_options_and_another_all(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    short, full = page(capsys, verb), page(capsys, verb, "--help", "all")
    options = options_of(main.verb_class(verb)).values()
    assert len(options) <= 12 or len(short.splitlines()) <= 75
    assert all(re.search(rf"^  .*{bound.flags[0]}\b", full, re.MULTILINE) for bound in options)
    common = getattr(main.verb_class(verb), "common", "").split()
    if common:
        assert set(common) <= {"--config-file", *(flag for bound in options for flag in bound.flags)}
        assert {flag for flag in common if not re.search(rf"^  .*{flag}\b", short, re.MULTILINE)} == set()
        assert f"{len(options) + 1 - len(common)} more options" in short or "study" in verb


@pytest.mark.parametrize(
    ("verb", "text"),
    [
        ("scan", f"and {_PART_SHARD_SEQUENCES} for a part of a corpus"),
        ("sweep", "on half of the task questions and a quarter of the recall texts"),
    ],
)
def test_options_say_what_the_program_does(verb: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert text in " ".join(page(capsys, verb, "--help", "all").split())


def test_options_stand_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options of the command line replace those of the file, and so does another one that excludes them."""
    file = tmp_path / "run.yaml"
    file.write_text("model: demo\nshare: 0.4\nmethod: [damage, random]\nrecall: false\ncontrols: 3\nout: smaller\n")

    def read(*words: str) -> Any:
        return main.read_command(["prune", *words]).step

    found = read("--config-file", str(file), "--controls", "5")
    words = ["demo", "--share", "0.4", "--method", "damage,random", "--no-recall", "--out", "smaller"]
    assert found == read(*words, "--controls", "5") and found.recall is None
    for encoding in ("utf-8-sig", "utf-16"):
        (tmp_path / "marked.yaml").write_text(file.read_text("utf-8"), encoding=encoding)
        assert read("--config-file", str(tmp_path / "marked.yaml")) == read(*words, "--controls", "3")
    assert read("--config-file", str(file), "--shares", "0.1,0.2").shares == (0.1, 0.2)
    (tmp_path / "devices.yaml").write_text("model: [demo]\ndevices: {ray_address: auto}\ntokens: {mode: chunk}\n")
    scan = main.read_command(["scan", "--config-file", str(tmp_path / "devices.yaml")])
    assert (scan.devices.ray_address, scan.step.tokens.mode) == ("auto", "chunk")
    for text, problem in (
        ("shar: 1", "unknown option 'shar'; did you mean share, shares?"),
        ("share: 2", "share: 2 (limit below 1). Lower it"),
        ("share: [0.1, 0.2]", "share: [0.1, 0.2] is a list; give one value"),
        ("shares: []", "shares: [] is empty or has an empty member: give at least one value"),
        ("shares: ['0.1,0.2']", "shares: '0.1,0.2' is not a number"),
        ("unit: heads", "unit: 'heads' is unknown; did you mean head?"),
        ("recall: 3", "recall: 3 is not True or False. Change it"),
        ("- 3", "holds no settings. Write lines such as `model: demo`"),
    ):
        file.write_text(text)
        assert main.main(["prune", "demo", "--config-file", str(file), "--out", "x"]) == 2
        assert problem in capsys.readouterr().err


def test_the_members_of_a_list_in_a_file_may_contain_commas(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text('models: ["a,b", c]\n')
    words = ["evaluate", "demo", "--config-file", str(file)]
    assert main.read_command(words).step.arms.models == ("a,b", "c")
    file.write_text("models: a,c\n")
    assert main.read_command(words).step.arms.models == ("a", "c")
    file.write_text('models: ["", c]\n')
    with pytest.raises(UsageError, match="has an empty member"):
        main.read_command(words)
    file.write_text("criteria: [all, damage]\n")  # a word for several criteria stands alone
    with pytest.raises(UsageError, match="unknown criterion 'all'"):
        main.read_command(["referee", *words[1:]])
    file.write_text("criteria: [all]\n")
    assert len(main.read_command(["referee", *words[1:]]).step.criteria) > 3


@pytest.mark.parametrize("values", [["1:2,0:3"], ["1:2", "0:3"], ["1:2, 0:3"]])
def test_lists_are_separated_by_commas(values: list[str]) -> None:
    step = main.read_command(["evaluate", "demo", "--tasks", "a,b", "--heads", *values]).step
    assert (step.tasks.names, step.arms.heads) == (("a", "b"), ((1, 2), (0, 3)))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_holds_every_verb_and_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for verb in VERBS:
        assert re.search(rf"\b{verb}\b", script), verb
    assert "limit-sequences" in script and "window-share" in script


def test_bash_completes_verbs_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["completion", "bash"]) == 0
    script = tmp_path / "headscan"
    script.write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        line = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}"
        ask = f'source "{script}"; {line}; _shtab_headscan headscan {words[-1]} {words[-2]}; echo "${{COMPREPLY[@]}}"'
        return subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout.split()

    assert completed("headscan", "ra") == ["rank"]
    assert completed("headscan", "place", "--fl") == ["--flops"]
    assert completed("headscan", "evaluate", "--mask-order", "in") == ["inactive"]
