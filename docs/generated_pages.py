"""What is generated from the declarations: the catalogue, the tables of Python names, the schema of the store, the
options of all verbs, and the reference of Python names. The site also shows files of other folders to which pages link.

The catalogue and the tables are in files, because pages are read on GitHub, too: ``make schema`` writes them. The
others are made when the site is built.
"""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING
from importlib import import_module
from pathlib import Path
from typing import Any

from headscan.catalog import BEHAVIOURS, CRITERIA, IMPORTANCES, PROFILES, SCORES, STATISTICS
from headscan.cli.main import VERBS, verb_class
from headscan.cli.option_parser import options_of
from headscan.options import Option
from headscan.store.store import Store
from headscan.store.tables import TABLES
from headscan.store.views import ALL_RUNS, VIEW_COMMENTS, VIEWS

DOCS = Path(__file__).parent
CATALOGUE = DOCS / "catalogue.md"
API = DOCS / "api.md"
#: A row of a table of Python names: the name, behind `headscan.` or with its module.
_API_ROW = re.compile(r"^\| `(headscan\.[\w.]+)` \|.*\|$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the schema to the site; mkdocs calls this hook."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "schema.md", content=schema_page()))
    files.append(File.generated(config, "reference.md", content=reference_page()))
    files.append(File.generated(config, "options.md", content=options_page()))
    for path in DOCS.parent.glob("analysis/*.ipynb"):
        files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links that lead out of the site; mkdocs calls this hook."""
    return site_page(page.file.src_uri, markdown)


def site_page(name: str, text: str) -> str:
    """Return a page as the site has it: a line with nothing but a link to a launch file or a query becomes that file,
    and a link to a notebook leads to its copy.
    """

    def shown(link: re.Match[str]) -> str:
        path = (DOCS / name).parent / link[1]
        return f'```{path.suffix[1:]} title="{path.name}"\n{path.read_text(encoding="utf-8")}```'

    text = re.sub(r"^\[[^\]]+\]\(((?:\.\./)+(?:analysis|cluster)/[^)]+)\)$", shown, text, flags=re.MULTILINE)
    return re.sub(r"\]\(((?:\.\./)*)\.\./analysis/(\w+\.ipynb)\)", r"](\1notebooks/\2)", text)


def catalogue_page() -> str:
    """Return the Markdown text of the catalogue."""
    return "\n".join(_catalogue())


def schema_page() -> str:
    """Return the Markdown text of the page on the store's schema."""
    return "\n".join(_schema())


def api_page() -> str:
    """Return the page on Python with tables that follow the docstrings; its rows name what they list."""
    return _API_ROW.sub(lambda row: f"| `{row[1]}` | {_first_sentence(row[1])} |", API.read_text(encoding="utf-8"))


def api_names() -> list[str]:
    """Return the names in the tables of the page on Python."""
    return _API_ROW.findall(API.read_text(encoding="utf-8"))


def _first_sentence(name: str) -> str:
    """Return the first sentence of a docstring, as the text of a table's cell."""
    words = " ".join((inspect.getdoc(_named(name)) or "").partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.;:]) |$", words.replace("``", "`"), maxsplit=1)[0].rstrip(".;:")
    return f"{sentence[:1].upper()}{sentence[1:]}".replace("|", "\\|")


def _named(name: str) -> Any:
    """Return what a name stands for; the package loads its own names when they are asked for."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def reference_page() -> str:
    """Return the Markdown text of the reference: the tables' names with their whole docstrings."""
    lines = ["# Python reference\n", "The names of [Python](api.md), with arguments, fields and errors.\n"]
    for line in API.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            lines.append(f"{line}\n")
        elif row := _API_ROW.match(line):
            found = _named(row[1])
            lines.append(f"::: {found.__module__}.{found.__qualname__}\n")
    return "\n".join(lines)


def options_page() -> str:
    """Return the Markdown text of the page on the options of all verbs."""
    rows = []
    for flag, uses in sorted(option_uses().items()):
        by_meaning: dict[tuple[str, str], list[str]] = {}
        for verb, option in uses.items():
            default = "" if option.default in (MISSING, None, False, ()) else option.default
            by_meaning.setdefault((option.help, _text(default)), []).append(f"`{verb}`")
        rows += [[f"`{flag}`", _text(help), default, ", ".join(v)] for (help, default), v in by_meaning.items()]
    head = "# Options\n\nGenerated from the verbs. A name that they explain in several ways has a row for each.\n"
    return "\n".join([head, *_table(["option", "meaning", "default", "verbs"], rows)])


def option_uses() -> dict[str, dict[str, Option]]:
    """Return the options of every flag, by verb."""
    uses: dict[str, dict[str, Option]] = {}
    for verb in VERBS:
        for option in options_of(verb_class(verb)).values():
            uses.setdefault(option.flags[0], {})[verb] = option
    return uses


#: The kinds of declarations, the sentence under the heading of each, and the columns of its table.
_SECTIONS: dict[str, tuple[str, Mapping[str, Any], tuple[str, ...]]] = {
    "Statistics": (
        "Measured by a scan, and stored ([notation](measuring.md#statistics)).",
        STATISTICS,
        ("name", "formula", "unit", "panel", "source"),
    ),
    "Profiles": (
        "Histograms that a scan with the panel `full` stores.",
        PROFILES,
        ("name", "formula", "bins", "source"),
    ),
    "Scores": (
        "Derived from statistics ([scores](measuring.md#scores)). Heads at the `inactive` end contribute little; `paper"
        " name` is that of arXiv 2504.03889.",
        SCORES,
        ("name", "formula", "inactive", "paper_name"),
    ),
    "Behaviours": (
        "Measured by a probe on sequences made for them ([behaviours](measuring.md#behaviours)).",
        BEHAVIOURS,
        ("name", "formula", "threshold", "source"),
    ),
    "Importances": (
        "From derivatives of the loss `L` by gates `g` on heads ([importance](importance.md)).",
        IMPORTANCES,
        ("name", "formula", "source"),
    ),
    "Criteria": (
        "What can choose heads ([referee](referee.md#criteria)): all scores, from their inactive end; all importances,"
        " from the lowest; and these. `run` is the kind of run in a store that orders heads by it.",
        {name: each for name, each in CRITERIA.items() if name not in {**SCORES, **IMPORTANCES}},
        ("name", "removed_first", "run", "source"),
    ),
}


def _catalogue() -> Iterator[str]:
    yield "# Catalogue\n\nGenerated from `headscan/catalog.py` by `make schema`.\n"
    for title, (sentence, declared, columns) in _SECTIONS.items():
        yield f"## {title}\n\n{sentence}\n"
        rows = [[f"`{each.name}`", *(_text(getattr(each, c)) for c in columns[1:])] for each in declared.values()]
        yield from _table([column.replace("_", " ") for column in columns], rows)


def _schema() -> Iterator[str]:
    yield "# Schema\n\nGenerated from `headscan/store/`. [Store](store.md) explains how the tables are used.\n"
    columns = _columns()
    yield "## Tables\n"
    for table in TABLES.values():
        yield f"### {table.name}\n\n{_sentence(table.comment)}\n"
        if table.keys:
            yield f"Key: {', '.join(f'`{name}`' for name in table.keys[0])}.\n"
        yield from _table(["column", "type", "meaning"], columns[table.name])
    yield f"## Views\n\nThe same views with the prefix `{ALL_RUNS}` cover all runs, not only finished ones.\n"
    for view in VIEWS:
        if not view.startswith(ALL_RUNS):
            yield f"### {view}\n\n{_sentence(VIEW_COMMENTS[view])}\n"
            yield from _table(["column", "type", "meaning"], columns[view])


def _columns() -> dict[str, list[list[str]]]:
    """Return name, type and meaning of the columns of each table and view, read from an empty store."""
    found: dict[str, list[list[str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "empty.duckdb")
        with store.connect(create=True):
            pass
        rows = store.query(
            "SELECT table_name, column_name, data_type, comment FROM duckdb_columns() ORDER BY table_name, column_index"
        ).to_pylist()
    for row in rows:
        cells = [f"`{row['column_name']}`", _text(row["data_type"]), _text(row["comment"])]
        found.setdefault(row["table_name"], []).append(cells)
    return found


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    titles = list(titles)
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _text(value: Any) -> str:
    """Return a value as the text of a table's cell; of a long tuple its ends."""
    if isinstance(value, tuple):
        value = ", ".join(map(str, value if len(value) <= 6 else (*value[:4], "...", value[-1])))
    shown = "" if value is None else str(value)
    return shown.replace("|", "\\|").replace("[", "\\[").replace("<", "&lt;").replace("*", "\\*")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


if __name__ == "__main__":
    CATALOGUE.write_text(catalogue_page(), encoding="utf-8")
    API.write_text(api_page(), encoding="utf-8")
