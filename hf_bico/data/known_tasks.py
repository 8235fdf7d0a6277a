"""Data sets that are known by name: their columns, classes and the split to measure on. Opens nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownTask:
    """A task of sentence pairs: `name` is the word that T5 was taught to know it by, `classes` its label words."""

    name: str
    columns: tuple[str, str]
    classes: tuple[str, ...]
    measured_on: str = "validation"
    label: str = "label"


_INFERENCE = ("entailment", "neutral", "contradiction")
_ENTAILMENT = ("entailment", "not_entailment")
_TASKS = {
    task.name: task
    for task in (
        KnownTask("mnli", ("premise", "hypothesis"), _INFERENCE, "validation_matched"),
        KnownTask("qnli", ("question", "sentence"), _ENTAILMENT),
        KnownTask("rte", ("sentence1", "sentence2"), _ENTAILMENT),
        KnownTask("qqp", ("question1", "question2"), ("not_duplicate", "duplicate")),
        KnownTask("snli", ("premise", "hypothesis"), _INFERENCE, "test"),
    )
}


def known_task(name: str, config: str | None, columns: Collection[str]) -> KnownTask | None:
    """The task of a data set, by its configuration (GLUE has one for each) or else its own name.

    A copy elsewhere is known in the same way, as long as it has the columns.

    >>> known_task("nyu-mll/glue", "rte", ("sentence1", "sentence2", "label")).measured_on
    'validation'
    """
    own_name = name.rstrip("/").rpartition("/")[2].lower()
    task = _TASKS.get((config or own_name).lower()) or _TASKS.get(own_name)
    return task if task is not None and {*task.columns, task.label} <= set(columns) else None
