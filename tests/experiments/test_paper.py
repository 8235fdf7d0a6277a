"""The paper's tables and tasks as data: complete, well-formed, and true to their own averages."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean

import pytest

from hf_bico.data.columns import known_task
from hf_bico.errors import UsageError
from hf_bico.experiments.reproduce import paper
from hf_bico.models.tokenization import text_to_text
from hf_bico.settings import METHODS, SAMPLINGS, Settings
from hf_bico.utils.samples import Text

pytestmark = pytest.mark.quick

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
CLASSES = {"eurosat": 10, "gtsrb": 43, "svhn": 10, "resisc45": 45, "dtd": 47, "cars": 196, "mnist": 10, "sun397": 397}
ALL_TASKS = (*paper.VISION_TASKS, *paper.LANGUAGE_TASKS)
REFERENCES = ("target", "source", "base", "target fine-tuned")
CONTRADICTIONS = {("4", "target", None): 70.29, ("H", "target", None): 70.29, ("H", "theseus", 100): 73.88}
"""The averages that the paper prints and that are not those of its own cells."""
CHECKSUMS = {
    **{"1": 6566.61, "2": 4879.76, "3": 7381.59, "4": 3939.18, "5": 1339.04, "A": 2730.64, "B": 3961.34},
    **{"C": 7215.86, "D": 6833.06, "E": 6459.26, "F": 7646.70, "G": 3763.89, "H": 3911.65},
}
"""The sums of all printed cells, or of the averages where there are no others, added up from the paper's own text."""


@pytest.mark.parametrize("name", paper.TABLES)
def test_printed_averages_are_those_of_the_cells_but_for_the_known_ones(name: str) -> None:
    for row in paper.table(name).rows:
        expected = CONTRADICTIONS.get((name, row.method, row.n))
        if expected is None:
            assert row.contradiction is None, (row.method, row.n, row.per_class)
            assert row.computed == pytest.approx(row.average, abs=paper.ROUNDING)
        else:
            assert row.average == expected
            assert row.computed == fmean(row.cells)
            assert f"{row.average:.2f}" in str(row.contradiction)
            assert f"{fmean(row.cells):.2f}" in str(row.contradiction)


@pytest.mark.parametrize("name", paper.TABLES)
def test_every_cell_is_there(name: str) -> None:
    table = paper.table(name)
    assert table.tasks == (paper.LANGUAGE_TASKS if name == "2" else paper.VISION_TASKS)
    for row in table.rows:
        assert len(row.cells) == (0 if name == "5" else len(table.tasks))
        assert all(0 < cell < 100 for cell in row.cells)
        assert len(row.deviations) == (len(table.tasks) if name == "A" and row.method == "bico" else 0)
    numbers = [number for row in table.rows for number in (row.cells or (row.average,))]
    assert sum(numbers) == pytest.approx(CHECKSUMS[name], abs=0.005)


@pytest.mark.parametrize("name", paper.TABLES)
def test_rows_are_of_methods_that_there_are(name: str) -> None:
    table = paper.table(name)
    keys = [(row.method, row.n, row.per_class, row.sampling) for row in table.rows]
    assert len(set(keys)) == len(keys)
    for row in table.rows:
        assert row.method in METHODS or row.method in REFERENCES
        assert row.n is None or row.per_class is None
        assert row.sampling is None or row.sampling in SAMPLINGS
        takes = row.method in METHODS and METHODS[row.method].uses_samples
        assert takes == (row.n is not None or row.per_class is not None) or name == "2"
    assert table.seeds == (5 if name == "A" else 1)
    assert table.protocol == ("probe" if name == "2" else "zero-shot")


def test_models_and_data_sets_are_hub_ids() -> None:
    names = {name for one in map(paper.table, paper.TABLES) for name in (one.source, one.target)}
    assert len(names) == 6
    for name in (*names, *(paper.task(one).data for one in ALL_TASKS)):
        assert HUB_ID.fullmatch(name), name


@pytest.mark.parametrize("name", ALL_TASKS)
def test_tasks_are_complete(name: str) -> None:
    task = paper.task(name)
    assert len(set(task.classes)) == len(task.classes) == CLASSES.get(name, len(task.classes))
    assert all(word == word.strip() and word for word in task.classes)
    assert len(set(task.templates)) == len(task.templates) >= 1
    assert (task.image is None) == (name in paper.LANGUAGE_TASKS) == (task.text is not None)
    assert task.split == "train"
    assert task.measured_on != task.split
    assert {task.split, task.measured_on} <= set(task.rows)
    Settings(**task.options())
    if task.image is not None:
        assert all(template.count("{}") == 1 for template in task.templates)


@pytest.mark.parametrize("name", paper.LANGUAGE_TASKS)
def test_tasks_of_texts_are_asked_as_t5_was_taught(name: str) -> None:
    task = paper.task(name)
    assert task.text is not None
    known = known_task(task.data, task.config, (*task.text, task.label))
    assert known is not None
    assert (known.columns, known.classes, known.measured_on) == (task.text, task.classes, task.measured_on)
    said = text_to_text(Text("first text", "second text", known.columns, known.name))
    columns = dict(zip(task.text, ("first text", "second text"), strict=True))
    assert said == task.templates[0].format(**columns)


def test_every_file_is_read() -> None:
    folder = Path(paper.__file__).parent
    assert {file.stem for file in (folder / "tables").iterdir()} == set(paper.TABLES)
    assert {file.stem for file in (folder / "tasks").iterdir()} == set(ALL_TASKS)


def test_what_there_is_not() -> None:
    with pytest.raises(UsageError, match="no table '6'"):
        paper.table("6")
    with pytest.raises(UsageError, match="did you mean 'eurosat'"):
        paper.task("eurosta")
    assert paper.table("h") is not None
