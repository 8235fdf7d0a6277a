"""Defines the result of a reproduction: a table of the paper beside the measured numbers. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_bico.experiments.compare.cells import MeanAndError, method_label
from hf_bico.experiments.compare.comparison import Comparison
from hf_bico.experiments.reproduce.paper import PaperRow, PaperTable, task
from hf_bico.runtime.output import write_files
from hf_bico.settings import PROBE
from hf_bico.utils.text import Markdown, format_table, markdown_table, plain

JSON_FILE, MARKDOWN_FILE = "reproduction.json", "reproduction.md"
REPRODUCTION_SCHEMA = 1
_LABELS = {"naive": "naive"}
_PROBED = {**_LABELS, "target": "target, pretrained", "base": "source, pretrained"}
"""Labels where models are measured by a probe, so that none is zero-shot."""
_ALL_DATA = "N is all of the training data in the paper; here a probe on the largest number of samples of the table."


@dataclass(frozen=True)
class Reproduction:
    """One table: every line as printed in the paper and as measured here, on `tasks`, some or all of the table's.

    `comparisons` are by task and sampling.
    """

    table: PaperTable
    tasks: tuple[str, ...]
    comparisons: Mapping[tuple[str, str], Comparison] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"Table {self.table.name}: {self.table.title}"

    def measured(self, row: PaperRow) -> dict[str, MeanAndError]:
        """Return the measured numbers of a line by task, in percent."""
        sampling = row.sampling or self.table.samplings[0]
        made = {name: one for (name, drawn_by), one in self.comparisons.items() if drawn_by == sampling}
        values = {name: _value(made[name], row, self.table) for name in self.tasks if name in made}
        return {name: value for name, value in values.items() if value is not None}

    def average(self, values: Mapping[str, MeanAndError]) -> float | None:
        """Return the average of a line over all tasks; None while one is missing."""
        return fmean(value.mean for value in values.values()) if len(values) == len(self.tasks) else None

    def printed(self, row: PaperRow) -> dict[str, float]:
        """Return the paper's cells for these tasks."""
        return {name: cell for name, cell in zip(self.table.tasks, row.cells, strict=False) if name in self.tasks}

    def printed_average(self, row: PaperRow) -> float | None:
        """Return the average of these tasks' cells; tables without cells print averages of all tasks."""
        if cells := self.printed(row):
            return fmean(cells.values())
        return row.average if self.tasks == self.table.tasks else None

    def rows(self) -> list[list[str]]:
        """Return a header, then two lines for each line of the table: here, and in the paper."""
        size = "K" if self.table.is_per_class else "N"
        head = ["", size, "", *(task(name).title for name in self.tasks), "average"]
        lines, labels = [head], _PROBED if self.table.protocol == PROBE else _LABELS
        for row in self.table.rows:
            label = labels.get(row.method) or method_label(row.method)
            label += (f", {row.sampling}" if row.sampling else "") + self.marks(row)
            sizes = "all" if row.all_data else str(row.n or row.per_class or "")
            values = self.measured(row)
            here = [_number(value.mean, value.std) if (value := values.get(name)) else "-" for name in self.tasks]
            lines.append([label, sizes, "here", *here, _number(self.average(values))])
            cells, deviations = self.printed(row), dict(zip(self.table.tasks, row.deviations, strict=False))
            printed = [_number(cells.get(name), deviations.get(name)) for name in self.tasks]
            lines.append(["", "", "paper", *printed, _number(self.printed_average(row))])
        return lines

    def notes(self) -> list[str]:
        """Return the notes below the table, each with its mark."""
        rows = self.table.rows
        notes = [f"{mark} {text}" for row in rows for mark, text in zip(self.marks(row), _notes(row), strict=True)]
        return list(dict.fromkeys(notes))

    def marks(self, row: PaperRow) -> str:
        """Return the marks of a line's notes: * for the first kind, and so on."""
        kinds = list(dict.fromkeys(text for one in self.table.rows for text in _notes(one)))
        return "".join("*†‡§"[kinds.index(text) % 4] for text in _notes(row))

    def refusals(self) -> list[str]:
        refusals = (
            f"{name}: {refusal.method}: {refusal.reason}"
            for (name, _), comparison in self.comparisons.items()
            for refusal in comparison.refusals
        )
        return list(dict.fromkeys(refusals))

    def samples(self) -> dict[str, int]:
        """Return the number of held-out samples of each task."""
        return {
            name: about["samples"]
            for (name, _), comparison in self.comparisons.items()
            for about in comparison.about.get("evaluation", {}).values()
        }

    def text(self) -> str:
        """Return the table as plain text, with its notes."""
        return "\n".join([self.title, "", format_table(self.rows()), *self._below()])

    def _below(self) -> list[str]:
        lines = ["", *self.notes()] if self.notes() else []
        if measured := self.samples():
            counts = ", ".join(f"{task(name).title} {count:,}" for name, count in measured.items())
            lines += ["", f"Accuracy in percent; here on so many held-out samples: {counts}."]
        return lines + [f"not measured: {refusal}" for refusal in self.refusals()]

    def __repr__(self) -> str:
        return f"Reproduction of table {self.table.name} on {', '.join(self.tasks)}"

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    def to_markdown(self) -> str:
        table = markdown_table([[Markdown(cell.replace("*", "\\*")) for cell in line] for line in self.rows()])
        about = f"From `{self.table.source}` to `{self.table.target}`."
        return "\n\n".join([f"# {self.title}", about, table, *(plain(line) for line in self._below() if line)]) + "\n"

    def to_json(self) -> str:
        rows = [
            {
                **{key: value for key, value in asdict(row).items() if value not in (None, (), False)},
                "computed_average": round(row.computed, 4),
                "here": {name: asdict(value) for name, value in values.items()},
                "here_average": self.average(values),
            }
            for row in self.table.rows
            for values in [self.measured(row)]
        ]
        comparisons = [
            {"task": name, "sampling": sampling, "comparison": json.loads(comparison.to_json())}
            for (name, sampling), comparison in self.comparisons.items()
        ]
        content: dict[str, Any] = {
            "schema": REPRODUCTION_SCHEMA,
            **{name: getattr(self.table, name) for name in ("name", "title", "source", "target", "protocol")},
            "tasks": self.tasks,
            "rows": rows,
            "notes": self.notes(),
            "comparisons": comparisons,
        }
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    def save(self, folder: Path) -> None:
        """Write reproduction.json and .md, each atomically."""
        write_files(folder, {JSON_FILE: self.to_json(), MARKDOWN_FILE: self.to_markdown()})


def _notes(row: PaperRow) -> list[str]:
    notes = [row.contradiction, _ALL_DATA if row.all_data else None]
    return [note for note in notes if note is not None]


def _value(comparison: Comparison, row: PaperRow, table: PaperTable) -> MeanAndError | None:
    """Return the measured number of a line, in percent."""
    sizes = ((max(table.sizes) if row.all_data else row.n, row.per_class), (None, None))
    wanted = (row.method, False, False, PROBE if table.protocol == PROBE else None)
    for one in comparison.rows():
        if (one.method, one.control, one.readout, one.protocol) == wanted and (one.n, one.per_class) in sizes:
            [value] = one.values.values()
            return MeanAndError(100 * value.mean, None if value.std is None else 100 * value.std, value.seeds)
    return None


def _number(value: float | None, deviation: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")
