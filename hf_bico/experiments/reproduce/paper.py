"""Loads the paper's tables, cell by cell, and its tasks. Runs nothing.

Each table and each task is a TOML file beside this one, with the numbers as the paper prints them. Averages are
computed from the cells; printed ones that differ are noted.
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
"""Tolerated difference between a printed average and that of its printed cells."""


@dataclass(frozen=True)
class PaperTask:
    """One data set of the paper, with its splits, columns and prompts.

    `classes` are the names of the classes, in the order of the data set's labels; `rows` and `download` are the rows
    of its splits and its bytes, if known. A task of images has the column `image`, one of texts two columns
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
        """Return the settings to open it with; `data` may be another copy, which has no configurations in a folder."""
        config = None if data is not None and os.path.exists(os.path.expanduser(data)) else self.config
        shared = {"config": config, "split": self.split, "label_column": self.label}
        if self.image is None:  # T5 was trained with prompts of its own for these tasks
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
        """A note if the printed average is not that of the cells."""
        if abs(self.computed - self.average) <= ROUNDING:
            return None
        return f"The paper prints an average of {self.average:.2f}; its own cells have {self.computed:.2f}."


@dataclass(frozen=True)
class PaperTable:
    """One table: source, target, tasks and printed numbers.

    `protocol` is "zero-shot", or "probe": a linear classifier on the models' features.
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
        """True if samples are counted per class."""
        return any(row.per_class is not None for row in self.rows)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of samples of its rows, in all or of each class."""
        sizes = (row.per_class if self.is_per_class else row.n for row in self.rows)
        return tuple(dict.fromkeys(size for size in sizes if size is not None))

    @property
    def samplings(self) -> tuple[str, ...]:
        """Strategies by which samples are drawn."""
        return tuple(dict.fromkeys(row.sampling for row in self.rows if row.sampling is not None)) or ("random",)

    def has(self, method: str) -> bool:
        return any(row.method == method for row in self.rows)


@cache
def table(name: str) -> PaperTable:
    """Return the table of that number or letter.

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
    """Return the task of that name.

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
    return tomllib.loads((Path(__file__).parent / folder / f"{name}.toml").read_text(encoding="utf-8"))


def _frozen(content: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
