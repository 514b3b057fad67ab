"""Help pages: an example first, one screen before the options, the verbs in the order of use."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from headscan.pipelines.cli import main

VERBS = list(main.VERBS)
_SCREEN = 24


def page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main.main([*words, "--help"])
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


@pytest.mark.parametrize("values", [["1:2,0:3"], ["1:2", "0:3"], ["1:2, 0:3"]])
def test_lists_are_separated_by_commas(values: list[str]) -> None:
    verb = main.read_command(["evaluate", "demo", "--tasks", "a,b", "--heads", *values])
    assert (verb.tasks.names, verb.arms.heads) == (("a", "b"), ((1, 2), (0, 3)))


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
