"""Parts of a report's page: numbers, HTML elements, templates and provenance."""

from __future__ import annotations

import base64
import gzip
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape, unescape
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from headscan.store.provenance import provenance_changes
from headscan.store.store import Store
from headscan.text_tables import counted

#: What a row of a table shows.
Item = TypeVar("Item")


def number(value: float | None) -> str:
    """Return a number as text with three decimals, a large one with four digits; a dash for None."""
    return "–" if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:.4g}"


def byte_count(count: int) -> str:
    """Return a number of bytes in the largest unit that it fills."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} B"


_SECTION = re.compile(r'<section id="([^"]+)">\s*<h2>([^<]*)</h2>')

#: Tables with more columns are printed smaller.
_MANY_COLUMNS = 9


def section(title: str, parts: Iterable[str], identity: str) -> str:
    """Return a section that a link to ``identity`` finds."""
    return f'<section id="{escape(identity)}">\n<h2>{escape(title)}</h2>\n' + "\n".join(parts) + "\n</section>"


def contents(parts: Iterable[str]) -> list[tuple[str, str]]:
    """Return identity and title of every section."""
    return [(identity, unescape(title)) for part in parts for identity, title in _SECTION.findall(part)]


def heading(text: str) -> str:
    return f"<h3>{escape(text)}</h3>"


def paragraph(text: str, kind: str | None = None) -> str:
    """Return a paragraph; ``kind`` is ``lead``, ``note``, ``warning`` or None."""
    return f"<p{'' if kind is None else f' class={kind}'}>{escape(text)}</p>"


def bullets(texts: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def facts(pairs: Iterable[tuple[str, Any]]) -> str:
    """Return a list of names and values without None values."""
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(str(v))}</dd>" for name, v in pairs if v is not None)
    return f"<dl>{''.join(rows)}</dl>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Return a table. All columns after the first ``texts`` are numbers, aligned right."""

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = ("" if i < texts else ' class="n"' for i in range(len(cells)))
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    body = "\n".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    many = " many" if len(columns) > _MANY_COLUMNS else ""
    return (
        f'<div class="wide{many}"><table>\n<thead><tr>{line("th", columns)}</tr></thead>\n<tbody>\n{body}\n</tbody>'
        "</table></div>"
    )


def columns(items: Iterable[Item], cells: Mapping[str, Callable[[Item], str]], texts: int = 1) -> str:
    """Return a table with a row for each item; ``cells`` maps the title of each column to what makes its cell."""
    return table(list(cells), ([cell(item) for cell in cells.values()] for item in items), texts)


def folded(summary: str, content: str) -> str:
    """Return ``content`` (HTML) in a folded block."""
    return f"<details><summary>{escape(summary)}</summary>\n{content}\n</details>"


def figure(plot: go.Figure, identity: str) -> str:
    """Return a plotly figure, drawn by the script of the page; ``identity`` is unique on the page and names saved
    files.
    """
    # JSON may hold any text, and "</script>" would end its element.
    content = (plot.to_json() or "").replace("<", "\\u003c")
    return (
        f'<div class="wide"><div class="plot" id="{escape(identity)}">'
        f'<script type="application/json">{content}</script><div class="drawn"></div></div></div>'
    )


def shown_settings(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return name and value of decoded JSON data in words, without empty values."""
    for name, value in values.items():
        if text := _in_words(value):
            yield name.replace("_", " "), text


def _in_words(value: Any) -> str:
    """Return a decoded JSON value in words; empty for null and for collections without values."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        others = ", ".join(f"{name} {text}" for name, text in shown_settings(value) if name != "name")
        return " ".join(filter(None, [value["name"], f"({others})" * bool(others)])) if value.get("name") else others
    if isinstance(value, list | tuple):
        nested = any(isinstance(each, Mapping | list | tuple) for each in value)
        return ("; " if nested else ", ").join(filter(None, map(_in_words, value)))
    return " ".join(str(value).split())


_FOLDER = Path(__file__).parent / "templates"

#: Names come from checkpoints, plans and tasks; a control character is no text of a page.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

#: In the order of the page; later ones use earlier ones.
_SCRIPTS = ("core.js", "heads.js", "heads_page.js", "plots.js")

# With this policy a browser loads nothing, even if a script on the page requests it.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)


def rendered(name: str, **values: object) -> str:
    """Return a template with escaped values; parts that are HTML already are ``Markup``."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["options"] = command_parts
    return environment.get_template(name).render(**values)


def command_parts(command: str) -> list[str]:
    """Return the command and its positional words, then each option with its values; a line breaks between these."""
    parts: list[list[str]] = [[]]
    for word in shlex.split(command):
        if word.startswith("--"):
            parts.append([])
        parts[-1].append(word)
    return [shlex.join(part) for part in parts]


def html_page(title: str, parts: Iterable[str], data: str | None) -> str:
    """Return the whole document; ``data`` are the packed numbers of the heads, None without a map."""
    html = [Markup(_shown(part)) for part in parts]
    plotted = any('class="plot"' in part for part in html)
    return rendered(
        "page.html.j2",
        title=_shown(title),
        policy=Markup(_POLICY),
        style=Markup(_file_text("style.css")),
        scripts=[Markup(_file_text(name)) for name in _SCRIPTS],
        parts=html,
        data=None if data is None else Markup(data),
        plotly=Markup(compressed(get_plotlyjs().encode())) if plotted else None,
    )


def compressed(content: bytes) -> str:
    """Return base64 of gzip; equal contents give equal text, and none of it is markup."""
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()


def _file_text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _shown(text: str) -> str:
    """Return text with a replacement character for each control character; line breaks and tabs stay."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def stored_sequences(store: Store, run_id: str) -> dict[str, Any]:
    """Return number, tokens, shortest and longest of a run's sequences."""
    return store.query(
        "SELECT count(*) AS sequences, coalesce(sum(tokens), 0)::BIGINT AS tokens, min(tokens) AS shortest,"
        " max(tokens) AS longest FROM sequences WHERE run_id = ?",
        [run_id],
    ).to_pylist()[0]


def measured_section(run: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Return the facts of a scan; ``row``: of `stored_sequences`."""
    packages = run["packages"] or {}
    versions = [f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages]
    if run["code_version"]:
        versions.insert(0, f"headscan {run['code_version']}")
    measured = facts(
        [
            ("Model", run["model"] + (f" at {run['model_revision']}" if run["model_revision"] else "")),
            ("Heads", _grid_text(run)),
            ("Corpus", run["corpus"]),
            ("Sequences", f"{row['sequences']:,} of {_span(row['shortest'] or 0, row['longest'] or 0)}"),
            ("Tokens", f"{row['tokens']:,}"),
            ("Data type", run["dtype"]),
            ("Attention path", run["attention_path"]),
            ("BOS token", run["bos_policy"]),
            ("Date", date_text(run["started_at"])),
            ("Versions", ", ".join(versions) or None),
        ]
    )
    return section("What was measured", [measured], "measured")


def _span(least: int, most: int) -> str:
    return counted(most, "token") if least == most else f"{least:,} to {most:,} tokens"


def _grid_text(run: Mapping[str, Any]) -> str:
    grid = [site for site in run["grid"] or () if site["site"] == "self"]
    heads = sorted({site["num_attention_heads"] for site in grid}) or [run["num_heads"]]
    text = f"{counted(run['num_layers'], 'layer')}, each with {_either(heads, 'query head')}"
    kv_heads = sorted({site["num_key_value_heads"] for site in grid})
    if kv_heads:
        text += f" and {_either(kv_heads, 'KV head')}"
    if bounded := sum(site["sliding_window"] is not None for site in grid):
        text += f"; {counted(bounded, 'layer')} with a sliding window"
    if 0 < len(grid) < run["num_layers"]:
        text += f"; {counted(len(grid), 'layer')} with attention"
    if others := dict.fromkeys(site["site"] for site in run["grid"] or () if site["site"] != "self"):
        text += f"; also {' and '.join(others)} attention"
    return text


def _either(counts: Sequence[int], noun: str) -> str:
    *others, last = counts
    return " or ".join([*map(str, others), counted(last, noun)])


def provenance_section(runs: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the facts of each named run."""
    parts = []
    for name, run in runs:
        parts += [heading(name), _run_facts(run)]
    return section("Provenance", parts, "provenance")


def _run_facts(run: Mapping[str, Any]) -> str:
    resumed = [
        f"{new['since']}: {', '.join(changes)}"
        for old, new in pairwise(run["provenance"])
        if (changes := provenance_changes(old, new))
    ]
    packages = ", ".join(f"{name} {version}" for name, version in (run["packages"] or {}).items())
    return facts(
        [
            ("Run", run["run_id"]),
            ("Status", run["status"]),
            ("Fingerprint", run["fingerprint"]),
            ("Model", run["model"]),
            ("Revision", run["model_revision"]),
            ("Configuration hash", run["model_config_hash"]),
            ("Weights hash", run["weights_hash"]),
            ("Tokenizer hash", run["tokenizer_hash"]),
            ("Corpus hash", run["corpus_hash"]),
            ("Started", date_text(run["started_at"])),
            ("Ended", date_text(run["finished_at"])),
            ("Options", _listed(run["config"])),
            ("Corpus report", _listed(run["report"])),
            ("headscan", run["code_version"]),
            ("Packages", packages or None),
            ("Device", run["provenance"][0].get("device")),
            ("Resumed with changes", "; ".join(resumed) or None),
        ]
    )


def _listed(values: Mapping[str, Any] | None) -> str | None:
    """Return stored values in words; None without any."""
    return "; ".join(f"{name}: {text}" for name, text in shown_settings(values or {})) or None


def date_text(moment: datetime | None) -> str | None:
    """Return a time in UTC to the minute; None for None."""
    return None if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
