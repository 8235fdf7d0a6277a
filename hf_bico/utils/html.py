"""Write small tables as HTML for notebooks. Every text is escaped: names are strangers' input."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hf_bico.utils.text import clean

_MOST_LETTERS, _MOST_ROWS = 300, 200
_LEFT, _RIGHT = ' style="text-align:left"', ' style="text-align:right"'


def html_page(title: str, *tables: Sequence[Sequence[str]], below: Sequence[str] = (), align: str = _RIGHT) -> str:
    """Return a title in bold, tables whose first row is their header, and sentences below.

    >>> html_page("a<b", below=["1 & 2"])
    '<p><b>a&lt;b</b></p><p>1 &amp; 2</p>'
    """
    parts = [f"<p><b>{_text(title)}</b></p>", *(_table(rows, align) for rows in tables if rows)]
    return "".join([*parts, *(f"<p>{_text(sentence)}</p>" for sentence in below if sentence)])


def html_list(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a title in bold, and lines of a subject and what is said of it."""
    return html_page(title, [("", ""), *rows], align=_LEFT)


def _table(rows: Sequence[Sequence[str]], align: str) -> str:
    header, *lines = rows
    head = "".join(f"<th{_LEFT if number == 0 else align}>{_text(cell)}</th>" for number, cell in enumerate(header))
    head = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
    body = "".join(
        "<tr>" + "".join(f"<td{_LEFT if n == 0 else align}>{_text(cell)}</td>" for n, cell in enumerate(line)) + "</tr>"
        for line in lines[:_MOST_ROWS]
    )
    more = f"<p>... and {len(lines) - _MOST_ROWS} more rows</p>" if len(lines) > _MOST_ROWS else ""
    return f"<table>{head}<tbody>{body}</tbody></table>{more}"


def _text(text: str) -> str:
    return escape(clean(text, _MOST_LETTERS))
