"""A comparison as data, and its files: the same numbers give the same bytes, in whatever order they were measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_bico.comparison.cells import Cell, CellKey, Order, Refusal
from hf_bico.comparison.picture import picture
from hf_bico.comparison.rows import Row, aggregate
from hf_bico.comparison.tables import caption, comparison_table, csv_text, refusal_line, text_table
from hf_bico.errors import RecordError, UsageError
from hf_bico.runtime.library_errors import last_net
from hf_bico.runtime.output import read_text, write_file, write_files
from hf_bico.utils.files import from_plain, parse_json
from hf_bico.utils.text import fenced, plain

NAME = "comparison"
JSON_FILE, PICTURE_FILE = f"{NAME}.json", f"{NAME}.png"
RESULT_FILES = (f"{NAME}.csv", JSON_FILE, f"{NAME}.md", PICTURE_FILE)
_SCHEMA = 1


@dataclass(frozen=True)
class Comparison:
    """Methods side by side, between one source and one target, on some data sets.

    `methods` and `data_sets` give the order in which they are shown; those that are not named follow in an order of
    their own, never that of measuring. An average covers all of `data_sets`, measured or not yet. `about` is plain
    JSON: how it was evaluated, settings, versions.
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
        known = {*self.data_sets, *(cell.data for cell in self.cells)}
        settled = {
            "title": self.title or f"{self.source} to {self.target}",
            "cells": tuple(sorted(unique.values(), key=lambda cell: order.of_cell(cell.key))),
            "refusals": tuple(
                sorted(set(self.refusals), key=lambda one: (order.of_method(one.method), one.data or "", one.reason))
            ),
            "data_sets": tuple(sorted(known, key=order.of_data)),
            "methods": tuple(sorted({cell.method for cell in self.cells}, key=order.of_method)),
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)

    @classmethod
    def merged(cls, comparisons: Sequence[Comparison], title: str = "") -> Comparison:
        """Many comparisons as one; two that share a data set's name must agree on it (see `prefixed`)."""
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
        """With `prefix` before the name of each data set."""
        refusals = (one if one.data is None else replace(one, data=prefix + one.data) for one in self.refusals)
        return replace(
            self,
            cells=tuple(replace(cell, data=prefix + cell.data) for cell in self.cells),
            refusals=tuple(refusals),
            data_sets=tuple(prefix + data for data in self.data_sets),
        )

    def rows(self) -> tuple[Row, ...]:
        """Means over seeds and data sets: references, methods without samples, then by the number of samples."""
        return aggregate(self.cells, self.data_sets, Order(self.methods, self.data_sets))

    def table(self) -> str:
        """Plain text: accuracies in percent, and what was refused."""
        return "\n\n".join(filter(None, [text_table(self.rows(), self.data_sets), self.refused()]))

    def refused(self) -> str:
        """A line for everything that could not be measured."""
        return "\n".join(f"not measured: {refusal_line(refusal)}" for refusal in self.refusals)

    def __repr__(self) -> str:
        return f"Comparison of {len(self.methods)} models and methods, {self.title}: {len(self.cells)} numbers"

    def _repr_markdown_(self) -> str:
        """What a notebook shows."""
        return "\n\n".join(self._shown())

    def _shown(self) -> list[str]:
        """The table, what its numbers are, and what was refused, in Markdown."""
        rows = self.rows()
        parts = [comparison_table(rows, self.data_sets), caption(rows)]
        if self.refusals:
            parts += ["Not measured:", "\n".join(f"- {plain(refusal_line(refusal))}" for refusal in self.refusals)]
        return parts

    def to_markdown(self) -> str:
        parts = [f"# {plain(self.title)}", *self._shown()]
        if self.about:
            parts += ["## How it was measured", fenced(json.dumps(self.about, indent=2, sort_keys=True), "json")]
        return "\n\n".join(parts) + "\n"

    def to_csv(self) -> str:
        """One line a cell, in full precision."""
        return csv_text(self.cells)

    def to_json(self) -> str:
        content = {
            "schema": _SCHEMA,
            **{name: getattr(self, name) for name in ("title", "source", "target", "methods", "data_sets")},
            "rows": [row.as_dict() for row in self.rows()],
            "cells": [asdict(cell) for cell in self.cells],
            "refusals": [refusal.as_dict() for refusal in self.refusals],
            "about": json.loads(json.dumps(self.about, sort_keys=True)),
        }
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        try:
            content = parse_json(text)
            if content["schema"] != _SCHEMA:
                raise RecordError(f"the comparison's schema is {content['schema']}", "use a newer hf-bico")
            found = cls(
                cells=tuple(from_plain(Cell, cell) for cell in content["cells"]),
                refusals=tuple(from_plain(Refusal, refusal) for refusal in content["refusals"]),
                methods=tuple(from_plain(list[str], content["methods"])),
                data_sets=tuple(from_plain(list[str], content["data_sets"])),
                **{name: from_plain(str, content[name]) for name in ("title", "source", "target")},
                about=from_plain(dict, content["about"]),
            )
            found.to_json()  # of numbers whose mean or deviation is beyond all numbers there is no table
            return found
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise RecordError(f"the comparison cannot be read: {error!r}", "compare again") from error

    @last_net()
    def draw(self, path: Path | str) -> bool:
        """A PNG of accuracy against the number of samples; False, and no file, where there is nothing to draw."""
        drawn = picture(self.rows(), self.data_sets, self.title)
        if drawn is None:
            Path(path).unlink(missing_ok=True)  # that of an earlier comparison would be taken for this one's
            return False
        write_file(Path(path), drawn)
        return True

    @last_net()
    def save(self, folder: Path | str) -> tuple[Path, ...]:
        """Write comparison.csv, .json, .md and .png, each whole or not at all; the files that were written."""
        drawn = picture(self.rows(), self.data_sets, self.title)
        content = (self.to_csv(), self.to_json(), self.to_markdown(), drawn)
        return write_files(Path(folder), dict(zip(RESULT_FILES, content, strict=True)))

    @classmethod
    @last_net()
    def load(cls, folder: Path | str) -> Comparison:
        """Read what `save` wrote."""
        return cls.from_json(read_text(Path(folder), JSON_FILE, "a comparison"))
