"""Defines the result of a comparison, its tables and its files. Measures nothing.

The same numbers give the same bytes, in whatever order they were measured.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hf_bico.errors import RecordError, UsageError
from hf_bico.experiments.compare.cells import (
    REFERENCES,
    Cell,
    CellKey,
    MeanAndError,
    Order,
    Refusal,
    Row,
    aggregate,
    method_label,
    row_method,
)
from hf_bico.experiments.compare.picture import drawn, picture
from hf_bico.reports.pictures import rendered
from hf_bico.runtime.library_errors import translate_errors
from hf_bico.runtime.output import read_text, write_file, write_files
from hf_bico.utils.files import Within, from_plain, parse_json
from hf_bico.utils.html import html_page
from hf_bico.utils.text import BEST, WORSE, Line, Markdown, Table, clean, fenced, format_table, markdown_table, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

CSV_COLUMNS = ("data", "method", "n", "per_class", "seed", "control", "readout", "protocol", "value", "held_back")
_LONGEST_NAME = 60
JSON_FILE = "comparison.json"
RESULT_FILES = ("comparison.csv", JSON_FILE, "comparison.md", "comparison.png")
_SCHEMA = 1
_CELLS, _NAMES = Within(0, 1_000_000), Within(0, 1_000)
"""What is read of a file."""


@dataclass(frozen=True)
class Comparison:
    """Methods side by side, between one source and one target, on some data sets.

    `methods` and `data_sets` give the order of tables; unnamed ones follow in a fixed order, not that of measuring. An
    average covers all `data_sets`, measured or not yet. `about` is plain JSON: evaluation, settings, versions.
    """

    source: str
    target: str
    cells: tuple[Cell, ...]
    refusals: tuple[Refusal, ...] = ()
    about: dict[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    data_sets: tuple[str, ...] = ()
    title: str = ""

    def __post_init__(self) -> None:
        order = Order(self.methods, self.data_sets)
        unique: dict[CellKey, Cell] = {}
        for cell in self.cells:
            if unique.setdefault(cell.key, cell) != cell:
                raise UsageError(
                    f"{cell.method} on '{cell.data}' was measured as {unique[cell.key].value} and as {cell.value}",
                    "give each data set its own name",
                )
        data_sets = {*self.data_sets, *(cell.data for cell in self.cells)}
        normalized = {
            "title": self.title or f"{self.source} to {self.target}",
            "cells": tuple(sorted(unique.values(), key=lambda cell: order.of_cell(cell.key))),
            "refusals": tuple(
                sorted(set(self.refusals), key=lambda one: (order.of_method(one.method), one.data or "", one.reason))
            ),
            "data_sets": tuple(sorted(data_sets, key=order.of_data)),
            "methods": tuple(sorted({cell.method for cell in self.cells}, key=order.of_method)),
        }
        for name, value in normalized.items():
            object.__setattr__(self, name, value)

    @classmethod
    def merged(cls, comparisons: Sequence[Comparison], title: str = "") -> Comparison:
        """Merge comparisons; those that share a data set's name must agree on its numbers (see `prefixed`)."""
        if not comparisons:
            raise UsageError("there is no comparison to merge", "give at least one")
        abouts = [one.about for one in comparisons]
        parts = [{"source": one.source, "target": one.target, "about": one.about} for one in comparisons]
        return cls(
            source=", ".join(dict.fromkeys(one.source for one in comparisons)),
            target=", ".join(dict.fromkeys(one.target for one in comparisons)),
            cells=tuple(cell for one in comparisons for cell in one.cells),
            refusals=tuple(refusal for one in comparisons for refusal in one.refusals),
            about=abouts[0] if all(about == abouts[0] for about in abouts) else {"merged": parts},
            methods=tuple(dict.fromkeys(method for one in comparisons for method in one.methods)),
            data_sets=tuple(dict.fromkeys(data for one in comparisons for data in one.data_sets)),
            title=title,
        )

    def prefixed(self, prefix: str) -> Comparison:
        """Return a copy with `prefix` before the name of each data set."""
        evaluation = self.about.get("evaluation")
        named = {prefix + data: one for data, one in evaluation.items()} if isinstance(evaluation, dict) else None
        return replace(
            self,
            about=self.about if named is None else {**self.about, "evaluation": named},
            cells=tuple(replace(cell, data=prefix + cell.data) for cell in self.cells),
            refusals=tuple(one if one.data is None else replace(one, data=prefix + one.data) for one in self.refusals),
            data_sets=tuple(prefix + data for data in self.data_sets),
        )

    @property
    def held_out(self) -> dict[str, int]:
        """The number of held-out samples of each data set, as far as it is known."""
        merged = self.about.get("merged")
        parts = [part for part in merged if isinstance(part, dict)] if isinstance(merged, list) else None
        abouts = [self.about] if parts is None else [part.get("about") for part in parts]
        return {data: count for about in abouts for data, count in _held_out(about).items()}

    def rows(self) -> tuple[Row, ...]:
        """Return the means over seeds and data sets: references, methods without samples, then by number of samples."""
        return aggregate(self.cells, self.data_sets, Order(self.methods, self.data_sets))

    def table(self) -> str:
        """Return the table as plain text, with the refusals."""
        return "\n\n".join(filter(None, [text_table(self.rows(), self.data_sets), self.refused()]))

    def refused(self) -> str:
        """Return a line for each refusal."""
        return "\n".join(f"not measured: {refusal_line(refusal)}" for refusal in self.refusals)

    def __repr__(self) -> str:
        rows = self.rows()
        best = max((row for row in rows if row.gain is not None and not row.is_reference), key=_goodness, default=None)
        found = "" if best is None else f"; best {best.label}, {_line(best, self.data_sets)[-1]}"
        return f"Comparison of {len(self.methods)} models and methods, {self.title}: {len(self.cells)} numbers{found}"

    def _repr_html_(self) -> str:
        rows = self.rows()
        refused = [f"Not measured: {refusal_line(refusal)}" for refusal in self.refusals]
        return html_page(self.title, _texts(rows, self.data_sets), below=[caption(rows), *refused])

    def to_pandas(self) -> DataFrame:
        """Return a DataFrame with a row for each number, in full precision, as in `to_csv`.

        >>> comparison.to_pandas().groupby("method").value.mean()  # doctest: +SKIP
        """
        import pandas

        cells = [{column: getattr(cell, column) for column in CSV_COLUMNS} for cell in self.cells]
        return pandas.DataFrame(cells, columns=list(CSV_COLUMNS))

    def _repr_markdown_(self) -> str:
        return "\n\n".join(self._markdown_parts())

    def _markdown_parts(self) -> list[str]:
        rows = self.rows()
        parts = [comparison_table(rows, self.data_sets), caption(rows)]
        if self.refusals:
            parts += ["Not measured:", "\n".join(f"- {plain(refusal_line(refusal))}" for refusal in self.refusals)]
        return parts

    def to_markdown(self) -> str:
        parts = [f"# {plain(self.title)}", *self._markdown_parts()]
        if self.about:
            parts += ["## How it was measured", fenced(json.dumps(self.about, indent=2, sort_keys=True), "json")]
        return "\n\n".join(parts) + "\n"

    def to_csv(self) -> str:
        """Return one line per cell, in full precision; fields that do not apply are empty."""
        stream = StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        for cell in self.cells:
            values = (getattr(cell, column) for column in CSV_COLUMNS)
            writer.writerow([str(value).lower() if isinstance(value, bool) else value for value in values])
        return stream.getvalue()

    def to_json(self) -> str:
        content = {
            "schema": _SCHEMA,
            **{name: getattr(self, name) for name in ("title", "source", "target", "methods", "data_sets")},
            "rows": [row.as_dict() for row in self.rows()],
            "cells": [cell.as_dict() for cell in self.cells],
            "refusals": [asdict(refusal) for refusal in self.refusals],
            "about": json.loads(json.dumps(self.about, sort_keys=True)),
        }
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        try:
            content = parse_json(text)
            if content["schema"] != _SCHEMA:
                raise RecordError(f"the comparison's schema is {content['schema']}", "use a newer hf-bico")
            comparison = cls(
                cells=tuple(from_plain(Annotated[list[Cell], _CELLS], content["cells"])),
                refusals=tuple(from_plain(Annotated[list[Refusal], _NAMES], content["refusals"])),
                methods=tuple(from_plain(Annotated[list[str], _NAMES], content["methods"])),
                data_sets=tuple(from_plain(Annotated[list[str], _NAMES], content["data_sets"])),
                **{name: from_plain(str, content[name]) for name in ("title", "source", "target")},
                about=from_plain(dict, content["about"]),
            )
            rows = {replace(cell.key, data="", seed=None) for cell in comparison.cells}
            _CELLS.check(len(rows) * len(comparison.data_sets), "the size of its table")
            comparison.to_json()  # raises if a mean or a deviation overflows
            return comparison
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise RecordError(f"the comparison cannot be read: {error!r}", "compare again") from error

    @translate_errors()
    def draw(self, path: Path | str | None = None) -> Figure | None:
        """Draw accuracy against the number of samples, into a PNG if a path is given; None without numbers."""
        figure = drawn(self.rows(), self.data_sets, self.title, self.held_out)
        if path is not None and figure is None:
            Path(path).unlink(missing_ok=True)  # that of an earlier comparison would be taken for this one's
        elif path is not None and figure is not None:
            write_file(Path(path), rendered(figure))
        return figure

    @translate_errors()
    def save(self, folder: Path | str) -> tuple[Path, ...]:
        """Write comparison.csv, .json, .md and .png, each atomically, and return the files that were written."""
        image = picture(self.rows(), self.data_sets, self.title, self.held_out)
        content = (self.to_csv(), self.to_json(), self.to_markdown(), image)
        return write_files(Path(folder), dict(zip(RESULT_FILES, content, strict=True)))

    @classmethod
    @translate_errors()
    def load(cls, folder: Path | str) -> Comparison:
        """Read what `save` wrote."""
        return cls.from_json(read_text(Path(folder), JSON_FILE, "a comparison"))


def _held_out(about: Any) -> dict[str, int]:
    """Return the numbers of samples that a comparison's `about`, perhaps of a file, has for its data sets."""
    evaluation = about.get("evaluation") if isinstance(about, dict) else None
    counts = {
        data: one.get("samples") if isinstance(one, dict) else None
        for data, one in (evaluation.items() if isinstance(evaluation, dict) else ())
    }
    return {data: count for data, count in counts.items() if isinstance(count, int) and count > 0}


def text_table(rows: Sequence[Row], data_sets: Sequence[str]) -> str:
    """Return a plain table: accuracies in percent, losses as they are, an empty line between groups."""
    head, *lines = format_table(_texts(rows, data_sets)).splitlines()
    grouped = groupby(zip(rows, lines, strict=True), key=lambda pair: pair[0].group)
    return "\n\n".join([head, *("\n".join(line for _, line in members) for _, members in grouped)])


def comparison_table(rows: Sequence[Row], data_sets: Sequence[str]) -> str:
    """Return the same in Markdown, with the best average of each group of methods in bold."""
    best = {id(row) for row in _best(rows)}
    average = 2 + len(data_sets) if len(data_sets) > 1 else 2
    head, *texts = _texts(rows, data_sets)
    lines: list[Sequence[str]] = [head]
    for row, (name, *numbers) in zip(rows, texts, strict=True):
        known = row.method in REFERENCES or row_method(row.method) is not None
        line = [Markdown(name) if known else plain(name), *(Markdown(number) for number in numbers)]
        for column in (0, average) if id(row) in best else ():
            line[column] = Markdown(f"**{line[column]}**")
        lines.append(line)
    return markdown_table(lines)


def refusal_line(refusal: Refusal) -> str:
    where = f" on {clean(refusal.data, _LONGEST_NAME)}" if refusal.data is not None else ""
    return f"{method_label(refusal.method)}{where}: {clean(refusal.reason, 300)}"


def less_is_better(rows: Iterable[Row]) -> str | None:
    """Return what the losses of a table are; None if there are none."""
    named = {row.protocol for row in rows if row.is_loss}
    return f"Held-out {' and '.join(sorted(filter(None, named)))} (less is better)" if named else None


def caption(rows: Sequence[Row]) -> str:
    """Return the sentence that explains the numbers of a table."""
    seeds = sorted({value.seeds for row in rows if row.size is not None for value in row.values.values()})
    kinds, losses = {row.is_loss for row in rows}, less_is_better(rows)
    text = losses if losses and kinds == {True} else "Accuracy in percent"
    text += f", and {losses.lower()}" if losses and len(kinds) > 1 else ""
    if seeds and seeds[-1] > 1:
        span = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        text += f", mean ± standard deviation over {span} draws of the calibration samples"
    if any(row.gain is not None for row in rows):
        gain = "change from" if kinds == {True} else "gain in points over"
        text += f"; {gain} the target without the task vector"
    if any(row.held_back for row in rows):
        text += "; held back are draws whose samples speak against the change: they count as the target"
    return text + "."


def live_table(rows: Sequence[Row], data_sets: Sequence[str]) -> Table:
    """Return the table for a terminal, with the best of each group and the worse than the target marked."""
    best = {id(row) for row in _best(rows)}
    head, *texts = _texts(rows, data_sets)
    lines = []
    for _, members in groupby(zip(rows, texts, strict=True), key=lambda pair: pair[0].group):
        for number, (row, cells) in enumerate(members):
            sign = -1 if row.is_loss else 1
            worse = row.gain is not None and round(sign * row.gain, 3) < 0 and not row.is_reference  # as printed
            mark = WORSE if worse else BEST if id(row) in best else ""
            lines.append(Line(cells, mark, begins=number == 0))
    return Table(head, lines, leading=2)


def _texts(rows: Sequence[Row], data_sets: Sequence[str]) -> list[list[str]]:
    """Return the cells of a table, the header first; the last column is there if something was held back."""
    gain = "change" if rows and all(row.is_loss for row in rows) else "gain"
    # of a single data set, the average would repeat the column
    ends = ["average", gain] if len(data_sets) > 1 else [gain]
    texts = [["model", "N", *(clean(data, _LONGEST_NAME) for data in data_sets), *ends]]
    texts += [_line(row, data_sets) for row in rows]
    if any(row.held_back for row in rows):
        texts[0].append("held back")
        for row, line in zip(rows, texts[1:], strict=True):
            line.append(f"{row.held_back} of {row.draws}" if row.held_back else "-")
    return texts


def _line(row: Row, data_sets: Sequence[str]) -> list[str]:
    size = str(row.n) if row.n is not None else f"{row.per_class} a class" if row.per_class is not None else "-"
    means = [row.values.get(data) for data in data_sets]
    values = [_value(row, mean) for mean in (means if len(data_sets) == 1 else [*means, row.average])]
    own = row.method == "target" and not row.readout
    gain = "-" if row.gain is None or own else f"{row.gain:+.3f}" if row.is_loss else f"{100 * row.gain:+.1f}"
    return [row.label, size, *values, gain]


def _value(row: Row, value: MeanAndError | None) -> str:
    if value is None:
        return "-"
    scale, digits = (1, 3) if row.is_loss else (100, 1)
    numbers = [value.mean] if value.std is None else [value.mean, value.std]
    return " ± ".join(f"{scale * number:.{digits}f}" for number in numbers)


def _goodness(row: Row) -> float:
    return (row.gain or 0.0) * (-1 if row.is_loss else 1)


def _best(rows: Sequence[Row]) -> Iterable[Row]:
    """Yield the best average of each group with several methods."""
    for _, members in groupby(rows, key=lambda row: row.group):
        rated = [
            (-row.average.mean if row.is_loss else row.average.mean, row)
            for row in members
            if row.average is not None and not row.is_reference
        ]
        top = max((mean for mean, _ in rated), default=0.0)
        yield from (row for mean, row in rated if mean == top and len(rated) > 1)
