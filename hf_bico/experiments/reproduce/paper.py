"""The paper's experiments as data: its tables, cell by cell, and the tasks that they are about. Runs nothing.

Each table and each task is a TOML file beside this one. Printed numbers stand there as they are printed; averages are
computed from the cells, and where a printed one says something else that is told.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_bico.errors import UsageError
from hf_bico.utils.text import did_you_mean

TABLES = ("1", "2", "3", "4", "5", "A", "B", "C", "D", "E", "F", "G", "H")
VISION_TASKS = ("eurosat", "gtsrb", "svhn", "resisc45", "dtd", "cars", "mnist", "sun397")
LANGUAGE_TASKS = ("mnli", "qnli", "rte", "qqp", "snli")
ROUNDING = 0.02
"""A printed average may be so far from that of its printed cells."""
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class PaperTask:
    """One data set of the paper: where it is, how it is split, and how models are asked about it.

    `classes` are the words for the classes, in the order of the data set's numbers; `rows` and `download` are the rows
    of its splits and its bytes, where they are known. A task of images has the column `image`, one of texts two columns
    `text`.
    """

    name: str
    title: str
    data: str
    split: str
    measured_on: str
    label: str
    templates: tuple[str, ...]
    classes: tuple[str, ...]
    config: str | None = None
    image: str | None = None
    text: tuple[str, str] | None = None
    rows: dict[str, int] = field(default_factory=dict)
    download: int | None = None

    def options(self, data: str | None = None) -> dict[str, Any]:
        """The settings that it is opened and asked with; `data` may be another copy, which in a folder is alone."""
        config = None if data is not None and os.path.exists(os.path.expanduser(data)) else self.config
        shared = {"config": config, "split": self.split, "label_column": self.label}
        if self.image is None:  # how a T5 is asked about a known task of sentence pairs, it was taught
            return {**shared, "text_column": ",".join(self.text or ())}
        return {**shared, "image_column": self.image, "templates": self.templates, "class_names": self.classes}


@dataclass(frozen=True)
class PaperRow:
    """One line of a table: a method with its samples, and the accuracy, in percent, on each task.

    `average` is the printed one; `all_data` says that a probe was fitted to all training data.
    """

    method: str
    average: float
    cells: tuple[float, ...] = ()
    n: int | None = None
    per_class: int | None = None
    sampling: str | None = None
    deviations: tuple[float, ...] = ()
    average_deviation: float | None = None
    all_data: bool = False

    @property
    def computed(self) -> float:
        """The average of the cells; the printed one where these were not printed."""
        return fmean(self.cells) if self.cells else self.average

    @property
    def contradiction(self) -> str | None:
        """What to say of a printed average that is not that of its cells."""
        if abs(self.computed - self.average) <= ROUNDING:
            return None
        return f"The paper prints an average of {self.average:.2f}; its own cells have {self.computed:.2f}."


@dataclass(frozen=True)
class PaperTable:
    """One table: from which model to which, on which tasks, and what was found.

    `protocol` is "zero-shot", or "probe": a linear classifier on what the models make of the samples.
    """

    name: str
    title: str
    source: str
    target: str
    tasks: tuple[str, ...]
    protocol: str
    seeds: int
    rows: tuple[PaperRow, ...]

    @property
    def is_per_class(self) -> bool:
        """Whether samples are counted for each class."""
        return any(row.per_class is not None for row in self.rows)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many samples its rows take, in all or of each class."""
        found = (row.per_class if self.is_per_class else row.n for row in self.rows)
        return tuple(dict.fromkeys(size for size in found if size is not None))

    @property
    def samplings(self) -> tuple[str, ...]:
        """The ways in which samples are drawn."""
        return tuple(dict.fromkeys(row.sampling for row in self.rows if row.sampling is not None)) or ("random",)

    def has(self, method: str) -> bool:
        return any(row.method == method for row in self.rows)


@cache
def table(name: str) -> PaperTable:
    """The table of that number or letter.

    >>> table("1").target, table("1").sizes
    ('timm/vit_base_patch16_plus_clip_240.laion400m_e31', (10, 20, 50, 100))
    """
    if name.upper() not in TABLES:
        raise UsageError(f"the paper has no table '{name}'", f"use one of: {', '.join(TABLES)}")
    content = _read("tables", name.upper())
    rows = tuple(PaperRow(**_frozen(row)) for row in content.pop("rows"))
    return PaperTable(name.upper(), rows=rows, **_frozen(content))


@cache
def task(name: str) -> PaperTask:
    """The task of that name.

    >>> task("rte").data, task("rte").measured_on, len(task("sun397").classes)
    ('nyu-mll/glue', 'validation', 397)
    """
    known = (*VISION_TASKS, *LANGUAGE_TASKS)
    if name not in known:
        raise UsageError(
            f"the paper has no task '{name}'", did_you_mean(name, known, f"use some of: {', '.join(known)}")
        )
    return PaperTask(name, **_frozen(_read("tasks", name)))


def _read(folder: str, name: str) -> dict[str, Any]:
    return tomllib.loads((_HERE / folder / f"{name}.toml").read_text(encoding="utf-8"))


def _frozen(content: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
