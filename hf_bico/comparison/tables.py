"""Rows as tables: plain text, Markdown, and for a terminal; cells as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from io import StringIO
from itertools import groupby

from hf_bico.comparison.cells import LABELS, Cell, Refusal
from hf_bico.comparison.rows import Row, Spread
from hf_bico.utils.text import BEST, WORSE, Line, Markdown, Table, clean, format_table, markdown_table, plain

CSV_COLUMNS = ("data", "method", "n", "per_class", "seed", "control", "readout", "protocol", "value")
LESS_IS_BETTER = "Held-out loss (less is better)"
_LONGEST_NAME = 60


def text_table(rows: Sequence[Row], data_sets: Sequence[str]) -> str:
    """Accuracies in percent, losses as they are, with an empty line between groups."""
    lines = format_table([_header(rows, data_sets), *(_texts(row, data_sets) for row in rows)]).splitlines()
    grouped = groupby(zip(rows, lines[1:], strict=True), key=lambda pair: pair[0].group)
    return "\n\n".join([lines[0], *("\n".join(line for _, line in members) for _, members in grouped)])


def comparison_table(rows: Sequence[Row], data_sets: Sequence[str]) -> str:
    """The same in Markdown; the best average of each group of methods is bold, and its name."""
    best = {id(row) for row in _best(rows)}
    average = 2 + len(data_sets) if len(data_sets) > 1 else 2
    lines: list[Sequence[str]] = [_header(rows, data_sets)]
    for row in rows:
        name, *numbers = _texts(row, data_sets)
        line = [Markdown(name) if row.method in LABELS else plain(name), *(Markdown(number) for number in numbers)]
        for column in (0, average) if id(row) in best else ():
            line[column] = Markdown(f"**{line[column]}**")
        lines.append(line)
    return markdown_table(lines)


def refusal_line(refusal: Refusal) -> str:
    where = f" on {clean(refusal.data, _LONGEST_NAME)}" if refusal.data is not None else ""
    return f"{LABELS.get(refusal.method, refusal.method)}{where}: {clean(refusal.reason, 300)}"


def caption(rows: Sequence[Row]) -> str:
    """What the numbers of a table are."""
    seeds = sorted({spread.seeds for row in rows if row.size is not None for spread in row.values.values()})
    kinds = {row.is_loss for row in rows}
    text = LESS_IS_BETTER if kinds == {True} else "Accuracy in percent"
    text += f", and {LESS_IS_BETTER.lower()}" if len(kinds) > 1 else ""
    if seeds and seeds[-1] > 1:
        span = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        text += f", mean ± standard deviation over {span} draws of the calibration samples"
    if any(row.gain is not None for row in rows):
        gain = "change from" if kinds == {True} else "gain in points over"
        text += f"; {gain} the target without the task vector"
    return text + "."


def csv_text(cells: Iterable[Cell]) -> str:
    """One line a cell; what does not apply is empty."""
    stream = StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for cell in cells:
        values = (getattr(cell, column) for column in CSV_COLUMNS)
        writer.writerow([str(value).lower() if isinstance(value, bool) else value for value in values])
    return stream.getvalue()


def live_table(rows: Sequence[Row], data_sets: Sequence[str]) -> Table:
    """The table as far as it is measured, for a terminal: the best of each group, and what lost, are marked."""
    best = {id(row) for row in _best(rows)}
    lines = []
    for _, members in groupby(rows, key=lambda row: row.group):
        for number, row in enumerate(members):
            lost = not row.is_reference and _is_lost(row)
            mark = WORSE if lost else BEST if id(row) in best else ""
            lines.append(Line(_texts(row, data_sets), mark, begins=number == 0))
    return Table(_header(rows, data_sets), lines, leading=2)


def _header(rows: Sequence[Row], data_sets: Sequence[str]) -> list[str]:
    gain = "change" if rows and all(row.is_loss for row in rows) else "gain"
    # the average over a single data set would say the same twice
    ends = ["average", gain] if len(data_sets) > 1 else [gain]
    return ["model", "N", *(clean(data, _LONGEST_NAME) for data in data_sets), *ends]


def _texts(row: Row, data_sets: Sequence[str]) -> list[str]:
    size = str(row.n) if row.n is not None else f"{row.per_class} a class" if row.per_class is not None else "-"
    spreads = [row.values.get(data) for data in data_sets]
    values = [_value(row, spread) for spread in (spreads if len(data_sets) == 1 else [*spreads, row.average])]
    own = row.method == "target" and not row.readout
    gain = "-" if row.gain is None or own else f"{row.gain:+.3f}" if row.is_loss else f"{100 * row.gain:+.1f}"
    return [row.label, size, *values, gain]


def _value(row: Row, spread: Spread | None) -> str:
    if spread is None:
        return "-"
    if row.is_loss:
        return f"{spread.mean:.3f}" + ("" if spread.std is None else f" ± {spread.std:.3f}")
    return f"{100 * spread.mean:.1f}" + ("" if spread.std is None else f" ± {100 * spread.std:.1f}")


def _is_lost(row: Row) -> bool:
    """Whether a row is worse than the untouched target, as far as its numbers are shown."""
    return row.better is not None and round(row.better, 3) < 0


def _best(rows: Sequence[Row]) -> Iterable[Row]:
    """The best average of each group of methods, where there is a choice."""
    for _, members in groupby(rows, key=lambda row: row.group):
        rated = [
            (-row.average.mean if row.is_loss else row.average.mean, row)
            for row in members
            if row.average is not None and not row.is_reference
        ]
        top = max((mean for mean, _ in rated), default=0.0)
        yield from (row for mean, row in rated if mean == top and len(rated) > 1)
