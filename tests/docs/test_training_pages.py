"""What the pages say of training beside porting is what its benchmarks wrote."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import fmean

import pytest

from support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import training
import training_language
from ports import KINDS, markdown

pytestmark = pytest.mark.quick

DOCS = ROOT / "docs"
KEPT = DOCS / "small-world"
LANGUAGE = f"{training.NAME}-language"
MAIN, MORE = "narrow to wide", "narrow to wide, unlabelled"
STEPS = (("", 20), (", 60 steps", 60), (", 200 steps", 200))


def text_of(file: str) -> str:
    return " ".join((ROOT / file).read_text(encoding="utf-8").split())


def kept(name: str = training.NAME) -> list[training.Number]:
    return training.read_csv(KEPT / f"{name}.csv")


def gain(part: str, row: str, n: int, found: list[training.Number] | None = None) -> str:
    """A mean gain with one decimal, as the pages write it."""
    return f"{training.mean_and_error(training.gains(found or kept(), part, row, n))[0]:+.1f}"


TABLES = [(training.NAME, part.title, part.sizes) for part in training.PARTS]
TABLES += [(LANGUAGE, title, training_language.SIZES) for title in ("decoders", "classifiers")]


@pytest.mark.parametrize(("name", "part", "sizes"), TABLES, ids=[part for _, part, _ in TABLES])
def test_the_tables_come_from_their_numbers(name: str, part: str, sizes: tuple[int, ...]) -> None:
    table = markdown(training.table(kept(name), part, sizes))
    assert table == (KEPT / f"{training.NAME}-{training.file_name(part)}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("part", training.PARTS, ids=lambda part: part.title)
def test_nothing_was_chosen_on_these_worlds_and_none_is_missing(part: training.Part) -> None:
    found = [one for one in kept() if one.part == part.title]
    assert {one.world for one in found} == set(range(training.FIRST, training.FIRST + part.worlds))
    assert {one.kind for one in found} == set(KINDS)
    assert {one.task for one in found} == set(part.tasks)
    drawn = {(one.n, one.draw) for one in found if one.n is not None}
    assert drawn == {(n, draw) for n in part.sizes for draw in range(part.draws)}


def difference(part: str, row: str, other: str, n: int) -> str:
    """The mean difference of two rows, paired by source, with its standard error."""
    ours, theirs = (training.gains(kept(), part, name, n) for name in (row, other))
    by_cell = {cell: [fmean(ours[cell]) - fmean(theirs[cell])] for cell in ours}
    mean, error = training.mean_and_error(by_cell)
    return f"{mean:+.1f} ± {error:.1f}"


def harm(row: str, parts: Sequence[str], n: int | None = None) -> tuple[int, int]:
    """How many ports of a row left the target more than a point worse, and how many there are."""
    sizes = {part.title: part.sizes for part in training.PARTS}
    cells = (training.gains(kept(), part, row, size) for part in parts for size in sizes[part] if n in (None, size))
    every = [value for by_cell in cells for values in by_cell.values() for value in values]
    return sum(value < -1 for value in every), len(every)


@pytest.mark.parametrize("file", ["README.md", "docs/when-to-port.md"])
def test_the_answer_in_short_is_what_was_measured(file: str) -> None:
    lines = {line.split("|")[2].strip(): line for line in (ROOT / file).read_text().splitlines() if line.count("|") > 5}
    polish = "bico-path+polish@20"
    for command, row in (("`hf-bico port`", "bico-path"), ("`--method train`", "train@20")):
        assert f"| {gain(MAIN, row, 100)} | {gain(MAIN, row, 10)} | |" in lines[command]
    for command, row in (("`--method readout`", "readout"), ("`port --polish`", polish)):
        assert f"| {gain(MAIN, row, 100)} | {gain(MAIN, row, 10)} | {gain(MORE, row, 10)} |" in lines[command]
    fine_tuned = next(line for name, line in lines.items() if name.startswith("fine-tune"))
    assert f"| {gain(MAIN, 'target fine-tuned', 100)} |" in fine_tuned


def test_the_sentences_follow_from_the_tables() -> None:
    page = text_of("docs/when-to-port.md")
    polish, plain = "bico-path+polish@20", float(gain(MAIN, "bico-path", 100))
    assert plain < float(gain(MAIN, "train@20", 100)) < float(gain(MAIN, polish, 100)), "as README says"
    assert max(float(gain(MAIN, row, 10)) for row in (polish, "readout", "train@20", "distill@20")) < 5
    steps = [difference(f"{MAIN}{part}", f"bico-path+polish@{n}", f"distill@{n}", 100) for part, n in STEPS]
    said = f"a polish gains {steps[0]} points in 20 steps, {steps[1]} in 60, and {steps[2]} in 200"
    assert said in page
    sizes = [gain("narrow to wide, more samples", "bico-path", n) for n in (10, 100, 1000)]
    assert f"{sizes[0]} points with 10, {sizes[1]} with 100, {sizes[2]} with 1,000" in page


def test_what_the_page_says_about_harm() -> None:
    page, parts = text_of("docs/when-to-port.md"), [one.title for one in training.PARTS if "more" not in one.title]
    ported, polished = (harm(row, parts) for row in ("bico-path", "bico-path+polish@20"))
    assert (ported[0], polished[0]) == (0, 0)
    assert f"Of {ported[1]} default ports in these tables of images, none left" in page
    assert f"and none of the {polished[1]} ports with a polish of 20 steps did" in page
    few = {row: harm(row, [MAIN], 10) for row in ("readout", "distill@20", "train@20")}
    assert f"the readout alone did so {few['readout'][0]} times of {few['readout'][1]}, distilling" in page
    assert f"distilling {few['distill@20'][0]} times, and 20 steps on the labels {few['train@20'][0]} times" in page


def test_what_the_page_says_about_decoders() -> None:
    page, found = text_of("docs/when-to-port.md"), kept(LANGUAGE)

    def share(row: str, n: int) -> str:
        return f"{training.mean_and_error(training.gains(found, 'decoders', row, n))[0]:.0f}%"

    assert f"{share('bico', 100)} with 100 texts, and {share('bico+polish@20', 100)} with a polish" in page
    assert f"give {share('train@20', 100)}, and on 10 texts {share('train@20', 10)}" in page
