"""Near spellings, sizes, Markdown, tables.

Text of unknown origin as Markdown: in a line, a code span, a code block or a Python literal, and nowhere else.

Knows nothing of records or cards.

Tables for a terminal of any width: what does not fit stands below, and best and worse are words, not only colours.

Knows texts; not what they mean.

Sizes in bytes, as people write and read them, and that of this machine.

What somebody may have meant by a word: the known one that is most like it. Knows no words itself.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table as RichTable


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned first column, right-aligned others, two spaces between."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


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


BETTER, BEST, WORSE = "better", "best", "worse"
_COLOURS = {BETTER: "green", BEST: "green", WORSE: "red"}
_GAP = 2


@dataclass(frozen=True)
class Line:
    """One line of a table; `mark` is a word on how good it is, `begins` whether a group begins with it."""

    cells: Sequence[str]
    mark: str = ""
    begins: bool = False


@dataclass(frozen=True)
class Table:
    """A table that rich can print, in as many pieces as it takes; all have the leading columns, which name a line."""

    header: Sequence[str]
    lines: Sequence[Line]
    leading: int = 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RichTable | str]:
        rows = [self.header, *(line.cells for line in self.lines)]
        if any(line.mark for line in self.lines):
            rows = [(*self.header, ""), *((*line.cells, line.mark) for line in self.lines)]
        tall = sum(_widths(rows)) + _GAP * (len(self.header) - 1) > options.max_width
        if tall:
            rows[0] = [name.replace(" ", "\n") for name in rows[0]]
        for number, columns in enumerate(_pieces(_widths(rows), options.max_width, self.leading)):
            if number:
                yield ""
            yield self._piece([[row[column] for column in columns] for row in rows])

    def _piece(self, rows: Sequence[Sequence[str]]) -> RichTable:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, 0, 0, _GAP - 1))
        for number, name in enumerate(rows[0]):
            table.add_column(Text(name), justify="right" if number else "left", vertical="bottom", no_wrap=True)
        for line, cells in zip(self.lines, rows[1:], strict=True):
            if line.begins:
                table.add_section()
            colour = _COLOURS.get(line.mark, "")
            texts = [Text(cell, style=colour if cell == line.mark else "") for cell in cells]
            table.add_row(*texts, style="bold" if line.mark == BEST else "")
        return table


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    from rich.cells import cell_len

    return [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in zip(*rows, strict=True)]


def _pieces(widths: Sequence[int], room: int, leading: int) -> list[list[int]]:
    """The columns of each piece: the leading ones, and as many of the others as there is room for, but at least one.

    >>> _pieces([10, 5, 5, 5], room=24, leading=1)
    [[0, 1, 2], [0, 3]]
    """
    first = list(range(leading))
    free = room - sum(widths[:leading]) - _GAP * (leading - 1)
    pieces, left = [[*first]], free
    for column, width in enumerate(widths[leading:], start=leading):
        if width + _GAP > left and len(pieces[-1]) > leading:
            pieces.append([*first])
            left = free
        pieces[-1].append(column)
        left -= width + _GAP
    return pieces


_UNITS = ("B", "kB", "MB", "GB", "TB")


def size_text(count: float) -> str:
    """A number of bytes in three digits.

    >>> size_text(1_234_567)
    '1.23 MB'
    """
    for unit in _UNITS:
        if count < 999.5 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def machine_memory() -> int:
    """Bytes of main memory."""
    import psutil

    return int(psutil.virtual_memory().total)


def near(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that is most like this one, whatever the case of its letters.

    >>> near("Thesus", ["naive", "theseus"])
    'theseus'
    """
    by_lower = {one.lower(): one for one in known}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """The question as a remedy, or another remedy where no word is like this one.

    >>> did_you_mean("biko", ["bico", "naive"], "use a method")
    "did you mean 'bico'?"
    """
    found = near(word, known)
    return otherwise if found is None else f"did you mean '{found}'?"
