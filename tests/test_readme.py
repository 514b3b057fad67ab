"""README and docs: commands that parse, links that lead somewhere, and a README of readable length."""

from __future__ import annotations

import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest

from headscan.cli.main import VERBS, read_command, verb_class
from headscan.cli.option_parser import UsageError, VerbParser, options_of
from headscan.cli.sql import Sql
from headscan.store.views import ALL_RUNS, VIEWS
from tests.sources import ROOT, modules

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
#: Page that exists on the site alone, generated from the declarations.
GENERATED = ("schema.md", "options.md")
STORE = PAGES["store.md"]


def test_every_view_is_named_here_and_in_the_help() -> None:
    for view in VIEWS:
        assert f"`{view.removeprefix(ALL_RUNS)}`" in STORE
        assert view.removeprefix(ALL_RUNS) in (Sql.__doc__ or "")
    assert ALL_RUNS in (Sql.__doc__ or "")


def test_it_starts_with_the_installation() -> None:
    first_block = README.partition("```bash\n")[2].partition("```")[0]
    assert [line.split("#")[0].strip() for line in first_block.splitlines()] == [
        "pip install .",
        "make demo",
        "make test",
        "make docs",
    ]


def test_the_readme_is_short() -> None:
    assert len(README.split()) < 1800


def test_every_link_leads_to_a_file() -> None:
    for name, text in {"README.md": README, **PAGES}.items():
        folder = ROOT if name == "README.md" else (DOCS / name).parent
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            generated = (folder / target).resolve() in [DOCS / page for page in GENERATED]
            there = target.startswith("https://") or generated or (folder / target).exists()
            assert there, f"{name}: {target}"


def test_every_file_that_is_named_exists() -> None:
    folders = "|".join(("headscan", "pipelines", "cluster", "analysis", "tests", "docs"))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
    for page in pages:
        for path in re.findall(rf"`((?:{folders})/[\w/.-]*)`", page.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
    for source in modules().values():
        for path in re.findall(rf"\b((?:{folders})/[\w/.-]*\.(?:py|md))\b", source.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{source.relative_to(ROOT)}: {path}"


def test_the_verbs_without_json_are_named() -> None:
    [verbs] = re.findall(r"Every verb takes `--json`, except ([^.]*)\.", PAGES["howto/use_in_scripts.md"])
    without = [
        verb for verb in VERBS if "--json" not in [each.flags[0] for each in options_of(verb_class(verb)).values()]
    ]
    assert sorted(re.findall(r"`([a-z]+)`", verbs)) == sorted(without)


#: What the folders that users run and edit hold.
TOP_READMES = tuple(f"{folder}/README.md" for folder in ("pipelines", "cluster", "analysis"))
#: Pages with commands. Words in capitals, and `$NAMES`, stand for what a reader has.
WITH_COMMANDS = {
    "README.md": README,
    **{name: (ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", *TOP_READMES)},
    **PAGES,
}
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def fenced_commands(text: str) -> list[list[str]]:
    """Return the words after `headscan` of each command in a block of shell, wherever in its line it begins."""
    found = []
    for language, block in _FENCE.findall(text):
        if language not in ("bash", "sh", "console", ""):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            for inside in re.findall(r"(?:^|[$\"(&|;]|srun|time) *headscan ([a-z].*)", line):
                # A command in the quotes of another one ends with its quote.
                whole = inside.rpartition('"')[0] if inside.count('"') % 2 else inside
                words = shlex.split(re.sub(r"\$\w+", "1", whole), comments=True)
                found.append(list(takewhile(lambda word: word not in ("|", ">", ">>", "&", "&&", ";"), words)))
    return found


def inline_commands(text: str) -> list[list[str]]:
    """Return the words after `headscan` of each command inside a sentence."""
    plain = _FENCE.sub("", text)
    return [shlex.split(command) for command in re.findall(r"`headscan ([a-z][^`]*)`", plain)]


def test_every_command_they_show_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line builds the settings, so that a missing option, or two that exclude each other, fails, too."""
    monkeypatch.chdir(tmp_path)
    count = 0
    for name, text in WITH_COMMANDS.items():
        files = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
        for words in fenced_commands(text):
            if "--config-file" in words:  # the page shows the file
                (tmp_path / words[words.index("--config-file") + 1]).write_text(files[0])
            try:
                read_command(words)
            except UsageError as problem:
                raise AssertionError(f"{name}: headscan {' '.join(words)}: {problem}") from problem
            count += 1
    assert count >= 60


def test_commands_inside_sentences_name_verbs_and_options_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sentence may name a verb with one option alone, or write `...`; other commands are whole."""
    monkeypatch.chdir(tmp_path)
    count = 0
    for name, text in WITH_COMMANDS.items():
        for verb, *words in inline_commands(text):
            shown = f"{name}: headscan {' '.join([verb, *words])}"
            assert verb in VERBS, shown
            known = VerbParser(verb_class(verb))._option_string_actions
            assert all(word in known for word in words if word.startswith("--")), shown
            if words and not words[0].startswith("--") and "..." not in words:
                read_command([verb, *words])
            count += 1
    assert count >= 60
