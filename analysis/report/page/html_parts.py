"""Parts of a report as HTML. All text is escaped here or by the templates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape, unescape
from typing import Any

import plotly.graph_objects as go

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
    """Return a table.

    All columns after the first ``texts`` are numbers, aligned right.
    """

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = ("" if i < texts else ' class="n"' for i in range(len(cells)))
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    body = "\n".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    many = " many" if len(columns) > _MANY_COLUMNS else ""
    return (
        f'<div class="wide{many}"><table>\n<thead><tr>{line("th", columns)}</tr></thead>\n<tbody>\n{body}\n</tbody>'
        "</table></div>"
    )


def folded(summary: str, content: str) -> str:
    """Return ``content`` (HTML) in a folded block."""
    return f"<details><summary>{escape(summary)}</summary>\n{content}\n</details>"


def figure(plot: go.Figure, identity: str) -> str:
    """Return a plotly figure; the script of the page draws it.

    Args:
        identity: Unique on the page; the name of saved files.
    """
    # JSON may hold any text, and "</script>" would end its element.
    content = (plot.to_json() or "").replace("<", "\\u003c")
    return (
        f'<div class="wide"><div class="plot" id="{escape(identity)}">'
        f'<script type="application/json">{content}</script><div class="drawn"></div></div></div>'
    )


def one_line(value: Any) -> str:
    """Return a decoded JSON value as unescaped text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {v if isinstance(v, str | int | float) else json.dumps(v)}" for k, v in value.items())
    return value if isinstance(value, str) else json.dumps(value)
