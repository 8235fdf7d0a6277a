"""Tables for a terminal of any width: what does not fit stands below, and best and worse are words, not only colours.

Knows texts; not what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table as RichTable

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
