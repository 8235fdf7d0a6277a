"""Port, polish or train? The standard comparison on small worlds: full fine-tunes, gentle and hard LoRAs.

    python benchmarks/training.py FOLDER [--first 30] [--workers 2] [--device cpu] [--docs docs/small-world]

Every row is measured on the same held-out images. Between narrow and wide models four pretrainings, two tasks with
room, 10 and 100 samples and three draws; from wide to narrow, to a deeper model, with 50 samples and with more training
steps two pretrainings and one draw. `unlabelled` has the rows that read 1,000 more images without labels, one draw.
Nothing was chosen on these pretrainings. Every number is kept in FOLDER as it comes, and an interrupted run goes on.
"""

from __future__ import annotations

import csv
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import click
import ports
from ports import KINDS, markdown, train, train_loras, world_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hf_bico.experiments.compare.cells import method_label
from hf_bico.reports.pictures import png
from hf_bico.utils.text import format_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_bico.experiments.compare.comparison import Comparison

TASKS = ("inverted", "rotated-90")
STANDARD: dict[str, Any] = {"methods": ["standard"], "train_steps": [20], "polish_steps": [20]}
LONGER = {"methods": ["bico-path+polish@60", "train@60", "distill@60"]}
LONG = {"methods": ["bico-path+polish@200", "train@200", "distill@200"]}
UNLABELLED = {"methods": ["bico-path+polish@20", "readout", "distill@20"]}
MAPS = {"methods": ["bico-path"]}
FIRST = 30
"""Worlds from this one on were not looked at when anything was chosen."""
NAME, POINTS = "training", "points of accuracy"


def file_name(title: str) -> str:
    return title.replace(" ", "-").replace(",", "")


@dataclass(frozen=True)
class Part:
    """One table: between which models, with how many samples."""

    title: str
    source: str
    target: str
    worlds: int
    sizes: tuple[int, ...]
    draws: int
    rows: dict[str, Any]
    tasks: tuple[str, ...] = TASKS
    unlabelled: bool = False

    @property
    def name(self) -> str:
        return file_name(self.title)


PARTS = (
    Part("narrow to wide, unlabelled", "narrow", "wide", 4, (10, 100), 1, UNLABELLED, unlabelled=True),
    Part("narrow to wide", "narrow", "wide", 4, (10, 100), 3, STANDARD),
    Part("narrow to wide, 60 steps", "narrow", "wide", 2, (100,), 1, LONGER),
    Part("wide to narrow", "wide", "narrow", 2, (10, 100), 1, STANDARD, TASKS[:1]),
    Part("shallow to deep", "narrow", "deep", 2, (10, 100), 1, STANDARD, TASKS[:1]),
    Part("narrow to wide, 50 samples", "narrow", "wide", 2, (50,), 1, STANDARD, TASKS[:1]),
    Part("narrow to wide, more samples", "narrow", "wide", 2, (10, 100, 1000), 1, MAPS, TASKS[:1]),
    Part("narrow to wide, 200 steps", "narrow", "wide", 2, (100,), 1, LONG, TASKS[:1]),
)


@dataclass(frozen=True)
class Job:
    """One comparison: a part's models of one pretraining, on one task."""

    part: Part
    world: int
    task: str
    kind: str

    def run(self, folder: Path, device: str = "cpu") -> Comparison:
        import torch

        from hf_bico.experiments.compare.run import compare
        from hf_bico.experiments.demo.world import build

        torch.set_num_threads(1)
        torch.backends.mkldnn.enabled = False  # slower with layers this small
        made = build(world_folder(folder, self.world), seed=self.world, shapes=(), tasks=())
        job = ports.Job(self.world, self.part.source, self.part.target, self.task, self.kind)
        source, base = ports.source_of(made, folder, job)
        out = folder / "compared" / self.part.name / f"{self.world}-{self.task}-{self.kind.replace(' ', '-')}"
        more = {"unlabelled": made.data(self.task)} if self.part.unlabelled else {}
        return compare(
            source,
            to=made.base(self.part.target),
            base=base,
            data=made.data(self.task),
            fine_tuned=None if self.part.target == "deep" else made.fine_tuned(self.part.target, self.task),
            n=self.part.sizes,
            seeds=self.part.draws,
            folder=out,
            device=device,
            batch_size=256,
            **self.part.rows,
            **more,
        )


@dataclass(frozen=True)
class Number:
    """One measured accuracy."""

    part: str
    world: int
    task: str
    kind: str
    row: str
    n: int | None
    draw: int | None
    value: float
    held_back: bool

    @property
    def cell(self) -> tuple[int, str, str]:
        return self.world, self.task, self.kind


def numbers(job: Job, comparison: Comparison) -> Iterator[Number]:
    for cell in comparison.cells:
        place = (job.part.title, job.world, job.task, job.kind)
        yield Number(*place, cell.method, cell.n, cell.seed, round(100 * cell.value, 3), cell.held_back)


def run(folder: Path, job: Job, device: str) -> list[Number]:
    return list(numbers(job, job.run(folder, device)))


def train_worlds(folder: Path, worlds: Sequence[int], shapes: Sequence[str], workers: int) -> None:
    """Train the models that are not there yet: data, bases with their fine-tunes, and LoRAs."""
    ports.TASKS = TASKS
    stages: tuple[tuple[Callable[[Path, int, str], None], Sequence[str]], ...] = (
        (train, ("",)),
        (train, shapes),
        (train_loras, [shape for shape in shapes if shape != "deep"]),
    )
    with ProcessPoolExecutor(workers, get_context("fork")) as pool:
        for make, some in stages:
            running = [pool.submit(make, folder, world, shape) for world in worlds for shape in some]
            for one in running:
                one.result()


def jobs(parts: Sequence[Part], first: int, kinds: Sequence[str] = KINDS) -> list[Job]:
    found = [
        Job(part, world, task, kind)
        for part in parts
        for world in range(first, first + part.worlds)
        for task in part.tasks
        for kind in kinds
    ]
    return found


def gains(found: Sequence[Number], part: str, row: str, n: int) -> dict[tuple[int, str, str], list[float]]:
    """Return the gains over the target, by pretraining, task and kind of source, one for each draw.

    The target itself is measured once, or, by a probe, with every draw.
    """
    here = [one for one in found if one.part == part]
    target = {(one.cell, one.n, one.draw): one.value for one in here if one.row == "target"}
    result: dict[tuple[int, str, str], list[float]] = {}
    for one in here:
        if one.row == row and one.n in (n, None):
            before = target.get((one.cell, one.n, one.draw), target.get((one.cell, None, None)))
            if before is not None:
                result.setdefault(one.cell, []).append(one.value - before)
    return result


def mean_and_error(by_cell: dict[tuple[int, str, str], list[float]]) -> tuple[float, float]:
    """Return the mean over cells, and its standard error; the draws of a cell are averaged first."""
    means = [fmean(values) for values in by_cell.values()]
    return fmean(means), stdev(means) / sqrt(len(means)) if len(means) > 1 else 0.0


def rows_of(found: Sequence[Number], part: str) -> list[str]:
    """Return the rows that gain or lose, in the order of measuring."""
    return [row for row in dict.fromkeys(one.row for one in found if one.part == part) if row not in ("target", "base")]


def table(found: Sequence[Number], part: str, sizes: Sequence[int]) -> list[list[str]]:
    """Return one line a row: the gain with its standard error, and harmful ports, for each number of samples."""
    present = {one.kind for one in found if one.part == part}
    kinds = [kind for kind in KINDS if kind in present] if len(present) > 1 else []
    head = ["row"]
    for n in sizes:
        head += [f"N = {n}: gain", "harmful", *(f"{kind}s" for kind in kinds)]
    lines = [head]
    for row in rows_of(found, part):
        line = [f"`{row}`"]
        for n in sizes:
            by_cell = gains(found, part, row, n)
            every = [value for values in by_cell.values() for value in values]
            if not every:
                line += [""] * (2 + len(kinds))
                continue
            mean, error = mean_and_error(by_cell)
            line += [f"{mean:+.1f} ± {error:.1f}", f"{sum(value < -1 for value in every)} of {len(every)}"]
            for kind in kinds:
                some = {cell: values for cell, values in by_cell.items() if cell[2] == kind}
                line.append(f"{mean_and_error(some)[0]:+.1f}" if some else "")
        lines.append(line)
    return lines


def write_csv(found: Sequence[Number], file: Path) -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(Number.__annotations__)
        for one in found:
            writer.writerow([f"{value:.3f}" if isinstance(value, float) else value for value in vars(one).values()])


def read_csv(file: Path) -> list[Number]:
    with file.open(encoding="utf-8", newline="") as stream:
        return [_read(row) for row in csv.DictReader(stream)]


def _read(row: dict[str, str]) -> Number:
    counts = [int(row[name]) if row[name] else None for name in ("n", "draw")]
    place = (row["part"], int(row["world"]), row["task"], row["kind"], row["row"])
    return Number(*place, *counts, float(row["value"]), row["held_back"] == "True")


def draw(found: Sequence[Number], part: str, sizes: Sequence[int], unit: str = POINTS) -> Figure:
    """Draw the gain of every row with its standard error, a colour for each number of samples."""
    from matplotlib.figure import Figure

    from hf_bico.reports.pictures import BLUE, INK, RED, frame

    rows = rows_of(found, part)
    figure = Figure(figsize=(7.2, 0.3 * len(rows) + 1.2))
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    frame(axes)
    shift = 0.2 / max(1, len(sizes) - 1)
    for number, (n, colour, marker) in enumerate(zip(sizes, (BLUE, RED, INK), "os^", strict=False)):
        known = {place: gains(found, part, row, n) for place, row in enumerate(rows)}
        means = {place: mean_and_error(by_cell) for place, by_cell in known.items() if by_cell}
        style = {"color": colour, "marker": marker, "linestyle": "none", "capsize": 2, "label": f"{n} samples"}
        heights = [place + shift * (number - (len(sizes) - 1) / 2) * 2 for place in means]
        axes.errorbar([mean for mean, _ in means.values()], heights, xerr=[one for _, one in means.values()], **style)
    axes.set_yticks(range(len(rows)), [method_label(row) for row in rows])
    axes.invert_yaxis()
    axes.axvline(0, color=INK, linewidth=0.9)
    axes.set_xlabel(f"{unit} over the untouched target, with standard errors")
    axes.legend(fontsize=8.5)
    return figure


def show(found: Sequence[Number], part: str, sizes: Sequence[int], docs: Path | None, unit: str = POINTS) -> None:
    """Print a table, and write it with its picture."""
    lines = table(found, part, sizes)
    click.echo(f"\n{part}\n{format_table(lines)}")
    if docs is not None:
        place = docs / f"{NAME}-{file_name(part)}"
        place.with_suffix(".md").write_text(markdown(lines), encoding="utf-8")
        place.with_suffix(".png").write_bytes(png(partial(draw, found, part, sizes, unit)))


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--first", default=FIRST, show_default=True, help="Number of the first pretraining.")
@click.option("--workers", default=2, show_default=True, help="Processes, one thread each.")
@click.option("--part", "only", default="all", show_default=True, help="Some of the tables, separated by ';'.")
@click.option("--draws", type=int, help="Fewer draws of the samples; more can be added later.")
@click.option("--device", default="cpu", show_default=True, help="What every comparison runs on.")
@click.option("--docs", type=click.Path(path_type=Path), help="Folder of the documentation's tables and pictures.")
def main(folder: Path, first: int, workers: int, only: str, draws: int | None, device: str, docs: Path | None) -> None:
    parts = [part for part in PARTS if only == "all" or part.title in only.split(";")]
    parts = [replace(part, draws=min(part.draws, draws or part.draws)) for part in parts]
    shapes = sorted({shape for part in parts for shape in (part.source, part.target)})
    train_worlds(folder, range(first, first + max(part.worlds for part in parts)), shapes, workers)
    found = list[Number]()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        asked = jobs(parts, first)
        running = [pool.submit(run, folder, job, device) for job in asked]
        for number, one in enumerate(as_completed(running), start=1):
            found += one.result()
            click.echo(f"{number} of {len(asked)}", err=True)
    found.sort(key=lambda one: (one.part, one.world, one.task, one.kind, one.n or 0, one.draw or 0))
    for part in parts:
        show(found, part.title, part.sizes, docs)
    if docs is not None:
        write_csv(found, docs / f"{NAME}.csv")


if __name__ == "__main__":
    main()
