"""The templates, styles and scripts of the page."""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Iterable
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

_FOLDER = Path(__file__).parent.parent / "templates"

#: Names come from checkpoints, plans and tasks; a control character is no text of a page.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

#: In the order of the page; later ones use earlier ones.
_STYLES = ("style.css", "heads.css", "print.css")
_SCRIPTS = (
    "core.js",
    "canvas.js",
    "downloads.js",
    "head_data.js",
    "head_map.js",
    "head_table.js",
    "drawer.js",
    "distribution.js",
    "scatter.js",
    "heads_page.js",
    "plots.js",
)

# With this policy a browser loads nothing, even if a script on the page requests it.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)


def rendered(name: str, **values: object) -> str:
    """Return a template with escaped values; parts that are HTML already are ``Markup``."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template(name).render(**values)


def html_page(title: str, parts: Iterable[str], data: str | None) -> str:
    """Return the whole document.

    Args:
        parts: HTML of the sections, in order.
        data: Packed numbers of the heads; None without a map.
    """
    html = [Markup(_shown(part)) for part in parts]
    plotted = any('class="plot"' in part for part in html)
    return rendered(
        "page.html.j2",
        title=_shown(title),
        policy=Markup(_POLICY),
        styles=[Markup(_text(name)) for name in _STYLES],
        scripts=[Markup(_text(name)) for name in _SCRIPTS],
        parts=html,
        data=None if data is None else Markup(data),
        plotly=Markup(compressed(get_plotlyjs().encode())) if plotted else None,
    )


def compressed(content: bytes) -> str:
    """Return base64 of gzip; equal contents give equal text, and none of it is markup."""
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _shown(text: str) -> str:
    """Return text with a replacement character for each control character; line breaks and tabs stay."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
