"""Text of unknown origin as Markdown: in a line, a code span, a code block or a Python literal, and nowhere else.

Knows nothing of records or cards.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$^=@]|:(?=\S)|(?<=[Ww]{3})\.)")
_RIGHT_TO_LEFT = frozenset(("R", "AL", "AN"))


class Markdown(str):
    """Text that is Markdown already; all other text that the template prints is escaped."""


def clean(text: Any, limit: int) -> str:
    """One line of at most `limit` characters, without any that control how text is shown."""
    line = " ".join("".join(_visible(letter) for letter in str(text)[: 4 * limit]).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def _visible(letter: str) -> str:
    kind = unicodedata.category(letter)
    if kind in ("Cc", "Zl", "Zp"):
        return " "
    if kind == "Cs" or ord(letter) & 0xFFFE == 0xFFFE:  # no text: surrogates, and what is never a character
        return "\N{REPLACEMENT CHARACTER}"
    return "" if kind in ("Cf", "Co") else letter  # bidirectional and zero-width controls, private letters


def plain(text: Any, limit: int = 400) -> Markdown:
    """Text as one line in which no character means anything to Markdown or HTML.

    >>> print(plain("a|b <c>"))
    a\\|b \\<c\\>
    """
    return Markdown(_SPECIAL.sub(r"\\\1", clean(text, limit)))


def code(text: Any, limit: int = 80) -> Markdown:
    """Text as a code span; not for table cells, where a pipe would end it.

    >>> print(code("test"), code("a`b"))
    `test` ``a`b``
    """
    shown = clean(text, limit) or '""'
    ticks = "`" * (_longest_run(shown) + 1)
    space = " " if "`" in (shown[0], shown[-1]) else ""
    return Markdown(f"{ticks}{space}{shown}{space}{ticks}")


def fenced(text: str, language: str = "") -> Markdown:
    """Lines as a code block that nothing in them can end."""
    ticks = "`" * max(3, _longest_run(text) + 1)
    return Markdown(f"{ticks}{language}\n{text.strip()}\n{ticks}")


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def literal(value: str | list[str]) -> Markdown:
    """Python for a text or a list of texts, in which nothing controls how it is shown.

    >>> print(literal(["a", 'b"', "c\\n"]))
    ["a", 'b"', "c\\n"]
    """
    if not isinstance(value, str):
        return Markdown(f"[{', '.join(literal(text) for text in value)}]")
    turned = any(unicodedata.bidirectional(letter) in _RIGHT_TO_LEFT for letter in value)
    text = ascii(value) if turned else repr(value)
    return Markdown(text if '"' in text else f'"{text[1:-1]}"')


def markdown_table(rows: Sequence[Sequence[str]], align: str = "---:") -> str:
    """A head and its rows, whatever is in the cells but what is Markdown already; columns after the first align so.

    >>> print(markdown_table([["layer", "rank"], ["a|b", "8"]]))
    | layer | rank |
    | --- | ---: |
    | a\\|b | 8 |
    """
    lines = [[str(cell if isinstance(cell, Markdown) else plain(cell, 1000)) for cell in row] for row in rows]
    rule = ["---", *(align for _ in rows[0][1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))
