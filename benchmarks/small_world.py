"""Every method on the small world: pairs of models, pretrainings, tasks and numbers of samples, as tables and pictures.

    python benchmarks/small_world.py FOLDER [--worlds 3] [--draws 3] [--workers 2] [--docs docs/small-world]

Trains the models that are not in FOLDER yet, compares, and prints the tables; an interrupted run goes on. With --docs,
the tables and pictures of the documentation are written.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click

from hf_bico.experiments.compare.cells import Row
from hf_bico.experiments.compare.comparison import Comparison
from hf_bico.utils.text import format_table

PAIRS = {
    "narrow to wide": ("narrow", "wide"),
    "shallow to deep": ("narrow", "deep"),
    "one architecture": ("narrow", "twin"),
}
TASKS = ("inverted", "rotated-90", "inverted-rotated-180", "rotated-270")
SIZES = (10, 20, 50, 100, 200)
RECIPE: dict[str, Any] = {"learning_rate": 1e-3, "train_steps": 60, "train_batch": 64, "warmup": 6}
"""Of fewshot and finetune: what the small world's own fine-tunes are made by; the paper's rate is for large models."""
PARTS: dict[str, dict[str, Any]] = {
    "methods": {"methods": ["all"], "n": SIZES, **RECIPE},
    "control": {"methods": ["theseus", "bico", "bico-fisher", "bico-path"], "n": [100], "control": True},
    "readout": {"methods": ["bico", "bico-fisher", "bico-path"], "n": [10, 100], "readout": True},
}


@dataclass(frozen=True)
class Job:
    """One pair of models of one pretraining, on one task."""

    folder: Path
    world: int
    pair: str
    task: str
    part: str
    draws: int

    def run(self) -> Comparison:
        from hf_bico.experiments.compare.run import compare
        from hf_bico.experiments.demo.world import build

        source, target = PAIRS[self.pair]
        made = build(self.folder / "worlds" / f"seed-{self.world}", seed=self.world, shapes=(), tasks=())
        out = self.folder / "compared" / self.part / self.pair.replace(" ", "-") / f"{self.world}-{self.task}"
        return compare(
            made.fine_tuned(source, self.task),
            to=made.base(target),
            base=made.base(source),
            data=made.data(self.task),
            fine_tuned=made.fine_tuned(target, self.task),
            seeds=self.draws,
            folder=out,
            device="cpu",
            alpha=1.0,  # the paper's tables; loras.py has what the samples choose
            **PARTS[self.part],
        ).prefixed(f"world {self.world}, ")


def train(folder: Path, world: int, shape: str) -> None:
    from hf_bico.experiments.demo.world import build

    build(folder / "worlds" / f"seed-{world}", seed=world, shapes=(shape,), tasks=TASKS)


def run(job: Job) -> Comparison:
    return job.run()


def jobs(folder: Path, worlds: int, draws: int) -> Iterator[Job]:
    for part in PARTS:
        for pair in PAIRS if part == "methods" else [next(iter(PAIRS))]:
            for world in range(worlds):
                for task in TASKS:
                    yield Job(folder, world, pair, task, part, draws)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--worlds", default=3, show_default=True, help="Pretrainings of every model.")
@click.option("--draws", default=3, show_default=True, help="Draws of the calibration samples.")
@click.option("--workers", default=2, show_default=True, help="Processes, one thread each.")
@click.option("--docs", type=click.Path(path_type=Path), help="Folder of the documentation's tables and pictures.")
def main(folder: Path, worlds: int, draws: int, workers: int, docs: Path | None) -> None:
    shapes = sorted({shape for pair in PAIRS.values() for shape in pair})
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        from hf_bico.experiments.demo.world import build

        for world in range(worlds):
            build(folder / "worlds" / f"seed-{world}", seed=world, shapes=(), tasks=TASKS)
        made = [pool.submit(train, folder, world, shape) for world in range(worlds) for shape in shapes]
        for one in made:
            one.result()
        asked = list(jobs(folder, worlds, draws))
        found = list(pool.map(run, asked))
    for part, pair in dict.fromkeys((job.part, job.pair) for job in asked):
        some = [one for job, one in zip(asked, found, strict=True) if (job.part, job.pair) == (part, pair)]
        merged = Comparison.merged(some, title=f"{pair}: {worlds} pretrainings, {len(TASKS)} tasks, {draws} draws each")
        click.echo(f"\n{part}, {pair}\n{format_table(table(merged))}")
        if docs is not None:
            write(merged, docs, f"{part}-{pair}".replace(" ", "-"))


def table(merged: Comparison) -> list[list[str]]:
    """The averages over worlds and tasks, a method a row and a number of samples a column."""
    rows = [row for row in merged.rows() if row.average is not None]
    sizes = sorted({row.size for row in rows if row.size is not None})
    lines = {row.label: {one.size: cell(one) for one in rows if one.label == row.label} for row in rows}
    found = [["model", "no samples", *(f"N = {size}" for size in sizes)]]
    return found + [[label, *(values.get(size, "") for size in (None, *sizes))] for label, values in lines.items()]


def cell(row: Row) -> str:
    """Mean, with the deviation over draws."""
    average = row.average
    if average is None:
        return ""
    return f"{100 * average.mean:.1f}" + ("" if average.std is None else f" ± {100 * average.std:.1f}")


def write(merged: Comparison, docs: Path, name: str) -> None:
    docs.mkdir(parents=True, exist_ok=True)
    (docs / f"{name}.csv").write_text(merged.to_csv(), encoding="utf-8")
    head, *rest = table(merged)
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rest]
    (docs / f"{name}.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines), encoding="utf-8")
    merged.draw(docs / f"{name}.png")


if __name__ == "__main__":
    main()
