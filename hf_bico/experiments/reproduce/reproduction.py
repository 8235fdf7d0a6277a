"""A table of the paper beside the same numbers measured here, as data, text and Markdown. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_bico.experiments.compare.cells import MeanAndError, Row, method_label
from hf_bico.experiments.compare.comparison import Comparison
from hf_bico.experiments.reproduce.paper import PaperRow, PaperTable, task
from hf_bico.runtime.output import write_files
from hf_bico.settings import PROBE
from hf_bico.utils.text import Markdown, format_table, markdown_table, plain

JSON_FILE, MARKDOWN_FILE = "reproduction.json", "reproduction.md"
SCHEMA = 1
_LABELS = {"naive": "naive"}
_PROBED = {**_LABELS, "target": "target, pretrained", "base": "source, pretrained"}
"""Where a classifier is fitted to what a model makes of samples, none is zero-shot."""
_ALL_DATA = "N is all of the training data in the paper; here a probe on the largest number of samples of the table."


@dataclass(frozen=True)
class Measured:
    """What was measured here of one line of a table, in percent, by task."""

    values: Mapping[str, MeanAndError] = field(default_factory=dict)

    def average(self, tasks: Sequence[str]) -> float | None:
        """Of all tasks; None while one is missing."""
        found = [self.values[one].mean for one in tasks if one in self.values]
        return fmean(found) if found and len(found) == len(tasks) else None


@dataclass(frozen=True)
class Reproduction:
    """One table: every line as the paper has it and as it came out here, on some or all of its tasks.

    `comparisons` are by task and way of drawing samples; `asked` the tasks that were asked for, in the table's order.
    """

    table: PaperTable
    asked: tuple[str, ...]
    comparisons: Mapping[tuple[str, str], Comparison] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"Table {self.table.name}: {self.table.title}"

    def measured(self, row: PaperRow) -> Measured:
        """What was measured here for a line of the table."""
        found: dict[str, MeanAndError] = {}
        for name in self.asked:
            comparison = self.comparisons.get((name, row.sampling or self.table.samplings[0]))
            value = None if comparison is None else _found(comparison, row, self.table)
            if value is not None:
                found[name] = value
        return Measured(found)

    def printed(self, row: PaperRow) -> dict[str, float]:
        """The paper's cells for the tasks that were asked for."""
        return {name: cell for name, cell in zip(self.table.tasks, row.cells, strict=False) if name in self.asked}

    def paper_average(self, row: PaperRow) -> float | None:
        """Of the asked tasks' cells; of a table that prints averages alone, those are of all tasks."""
        cells = self.printed(row)
        if cells:
            return fmean(cells.values())
        return row.average if self.asked == self.table.tasks else None

    def rows(self) -> list[list[str]]:
        """A head, then two lines for each of the table's: here, and in the paper."""
        size = "K" if self.table.is_per_class else "N"
        head = ["", size, "", *(task(name).title for name in self.asked), "average"]
        lines, labels = [head], _PROBED if self.table.protocol == PROBE else _LABELS
        for row in self.table.rows:
            here = self.measured(row)
            marks = self.marks(row)
            label = (
                (labels.get(row.method) or method_label(row.method))
                + (f", {row.sampling}" if row.sampling else "")
                + marks
            )
            sizes = "all" if row.all_data else str(row.n or row.per_class or "")
            average, printed = here.average(self.asked), self.paper_average(row)
            lines.append(
                [label, sizes, "here", *(_spread(here.values.get(name)) for name in self.asked), _number(average)]
            )
            deviations = dict(zip(self.table.tasks, row.deviations, strict=False))
            cells = self.printed(row)
            shown = [_number(cells.get(name), deviations.get(name)) for name in self.asked]
            lines.append(["", "", "paper", *shown, _number(printed)])
        return lines

    def notes(self) -> list[str]:
        """What is to be said below the table, each with its mark."""
        found = [
            f"{mark} {text}" for row in self.table.rows for mark, text in zip(self.marks(row), _told(row), strict=True)
        ]
        return list(dict.fromkeys(found))

    def marks(self, row: PaperRow) -> str:
        """The mark of each note of a line: * for the first kind, and so on."""
        kinds = list(dict.fromkeys(text for one in self.table.rows for text in _told(one)))
        return "".join("*†‡§"[kinds.index(text) % 4] for text in _told(row))

    def refusals(self) -> list[str]:
        found = (
            f"{name}: {refusal.method}: {refusal.reason}"
            for (name, _), comparison in self.comparisons.items()
            for refusal in comparison.refusals
        )
        return list(dict.fromkeys(found))

    def samples(self) -> dict[str, int]:
        """How many held-out samples each task was measured on."""
        found: dict[str, int] = {}
        for (name, _), comparison in self.comparisons.items():
            for about in comparison.about.get("evaluation", {}).values():
                found[name] = about["samples"]
        return found

    def text(self) -> str:
        """The table as plain text, with its notes."""
        return "\n".join([self.title, "", format_table(self.rows()), *self._below()])

    def _below(self) -> list[str]:
        lines = ["", *self.notes()] if self.notes() else []
        measured = self.samples()
        if measured:
            counts = ", ".join(f"{task(name).title} {count:,}" for name, count in measured.items())
            lines += ["", f"Accuracy in percent; here on so many held-out samples: {counts}."]
        lines += [f"not measured: {refusal}" for refusal in self.refusals()]
        return lines

    def __repr__(self) -> str:
        return f"Reproduction of table {self.table.name} on {', '.join(self.asked)}"

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    def to_markdown(self) -> str:
        table = markdown_table([[Markdown(cell.replace("*", "\\*")) for cell in line] for line in self.rows()])
        about = f"From `{self.table.source}` to `{self.table.target}`."
        return "\n\n".join([f"# {self.title}", about, table, *(plain(line) for line in self._below() if line)]) + "\n"

    def to_json(self) -> str:
        rows = []
        for row in self.table.rows:
            here = self.measured(row)
            rows.append(
                {
                    **{key: value for key, value in asdict(row).items() if value not in (None, (), False)},
                    "computed_average": round(row.computed, 4),
                    "here": {name: asdict(value) for name, value in here.values.items()},
                    "here_average": here.average(self.asked),
                }
            )
        comparisons = [
            {"task": name, "sampling": sampling, "comparison": json.loads(found.to_json())}
            for (name, sampling), found in self.comparisons.items()
        ]
        content: dict[str, Any] = {
            "schema": SCHEMA,
            **{name: getattr(self.table, name) for name in ("name", "title", "source", "target", "protocol")},
            "tasks": self.asked,
            "rows": rows,
            "notes": self.notes(),
            "comparisons": comparisons,
        }
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    def save(self, folder: Path) -> None:
        """Write reproduction.json and .md, each whole or not at all."""
        write_files(folder, {JSON_FILE: self.to_json(), MARKDOWN_FILE: self.to_markdown()})


def _told(row: PaperRow) -> list[str]:
    """What is to be said of a line."""
    found = [] if row.contradiction is None else [row.contradiction]
    return [*found, _ALL_DATA] if row.all_data else found


def _found(comparison: Comparison, row: PaperRow, table: PaperTable) -> MeanAndError | None:
    """The measured number of a line, in percent."""
    n, per_class = row.n, row.per_class
    protocol = PROBE if table.protocol == PROBE else None
    if row.all_data:
        n = max(table.sizes)
    for one in comparison.rows():
        if _is_of(one, row.method, n, per_class, protocol):
            [value] = one.values.values()
            return MeanAndError(100 * value.mean, None if value.std is None else 100 * value.std, value.seeds)
    return None


def _is_of(one: Row, method: str, n: int | None, per_class: int | None, protocol: str | None) -> bool:
    if one.method != method or one.control or one.readout or one.protocol != protocol:
        return False
    return (one.n, one.per_class) in ((n, per_class), (None, None))


def _spread(value: MeanAndError | None) -> str:
    return _number(None if value is None else value.mean, None if value is None else value.std)


def _number(value: float | None, deviation: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")
