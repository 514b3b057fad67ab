"""Self-contained HTML page with styles, plotly.js and figures.

All text is escaped here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.io import to_html
from plotly.offline import get_plotlyjs

_STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #f6f7f9; color: #222; line-height: 1.5;
  font: 15px/1.5 system-ui, 'Segoe UI', 'Liberation Sans', sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 27px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 0 0 12px; }
h3 { font-size: 15px; margin: 20px 0 6px; }
p { margin: 6px 0 10px; max-width: 92ch; }
section { background: #fff; border: 1px solid #e2e5ea; border-radius: 8px; padding: 20px 24px; margin-top: 20px; }
.lead { color: #555; margin-bottom: 20px; }
.note { color: #555; font-size: 14px; }
.warning { background: #fff4dd; border-left: 4px solid #d99a1b; padding: 8px 12px; max-width: none; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0; }
dt { color: #666; }
dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; margin: 8px 0 14px; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 12px 4px 0; text-align: left; border-bottom: 1px solid #eceef1; vertical-align: top; }
th { color: #555; font-weight: 600; border-bottom-color: #c9ced6; vertical-align: bottom; }
th.n, td.n { text-align: right; padding-left: 8px; }
td.n { white-space: nowrap; }
td:first-child:not(.n) { overflow-wrap: break-word; }
li { margin: 4px 0; overflow-wrap: anywhere; }
summary { cursor: pointer; color: #1f5fa8; }
code { font: 13px 'DejaVu Sans Mono', Consolas, monospace; overflow-wrap: anywhere; }
"""

# With this policy a browser loads nothing, even if a script on the page requests it.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)

# By default plotly.js has a button that uploads the chart to a server.
_FIGURE_OPTIONS = {
    "showSendToCloud": False,
    "displaylogo": False,
    "modeBarButtonsToRemove": ["lasso2d", "select2d", "autoScale2d"],
}


def page(title: str, parts: Iterable[str]) -> str:
    """Return the HTML document around ``parts`` (HTML)."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n<script>{get_plotlyjs()}</script>\n</head>\n<body>\n"
        "<main>\n" + "\n".join(parts) + "\n</main>\n</body>\n</html>\n"
    )


def section(title: str, parts: Iterable[str]) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


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
    return (
        f'<div class="wide"><table>\n<thead><tr>{line("th", columns)}</tr></thead>\n<tbody>\n{body}\n</tbody>'
        "</table></div>"
    )


def folded(summary: str, content: str) -> str:
    """Return ``content`` (HTML) in a folded block."""
    return f"<details><summary>{escape(summary)}</summary>\n{content}\n</details>"


def figure(plot: go.Figure, identity: str) -> str:
    """Return a plotly figure of fixed size.

    ``identity`` is unique on the page.
    """
    content = to_html(plot, full_html=False, include_plotlyjs=False, div_id=identity, config=dict(_FIGURE_OPTIONS))
    return f'<div class="wide">{content}</div>'


def one_line(value: Any) -> str:
    """Return a decoded JSON value as unescaped text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {v if isinstance(v, str | int | float) else json.dumps(v)}" for k, v in value.items())
    return value if isinstance(value, str) else json.dumps(value)
