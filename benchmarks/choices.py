"""What decided the constants of bico-fisher, of altered copies and of the control, on the small world.

    python benchmarks/choices.py FOLDER [--worlds 2]

FOLDER is one that benchmarks/small_world.py was run on: its models are used. Narrow to wide, four tasks, two draws;
every line is the mean accuracy of one choice.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import torch
from small_world import TASKS
from torch import Tensor

from hf_bico.alignment.objectives.base import LikelyLabels
from hf_bico.alignment.statistics import Statistics
from hf_bico.data import augmentation
from hf_bico.experiments.compare.cells import Cell
from hf_bico.experiments.compare.run import compare
from hf_bico.experiments.demo.world import build

Labels = Callable[[Tensor], LikelyLabels]


def likeliest(count: int) -> Labels:
    def of(logits: Tensor) -> LikelyLabels:
        found = logits.double().softmax(-1).topk(count, dim=-1)
        return LikelyLabels(found.indices, found.values)

    return of


def drawn(count: int) -> Labels:
    """As many labels of each sample, drawn by their probability."""

    def of(logits: Tensor) -> LikelyLabels:
        generator = torch.Generator().manual_seed(0)
        labels = torch.multinomial(logits.double().softmax(-1), count, replacement=True, generator=generator)
        return LikelyLabels(labels, torch.full(labels.shape, 1 / count, dtype=torch.float64))

    return of


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def cells(folder: Path, worlds: int, **options: Any) -> list[Cell]:
    found: list[Cell] = []
    for seed in range(worlds):
        world = build(folder / "worlds" / f"seed-{seed}", seed=seed, shapes=(), tasks=())
        for task in TASKS:
            models = {"to": world.base("wide"), "base": world.base("narrow"), "data": world.data(task)}
            found += compare(
                world.fine_tuned("narrow", task), **models, seeds=2, device="cpu", alpha=1.0, **options
            ).cells
    return found


def report(name: str, found: list[Cell]) -> None:
    values = defaultdict(list)
    for cell in found:
        if cell.n is not None:
            values[f"{cell.method}{', mispaired' if cell.control else ''}, N = {cell.n}"].append(cell.value)
    click.echo(f"{name}: " + "; ".join(f"{what}: {100 * fmean(some):.1f}" for what, some in values.items()))


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--worlds", default=2, show_default=True, help="Pretrainings to use.")
def main(folder: Path, worlds: int) -> None:
    torch.set_num_threads(1)
    for kind, of in (("likeliest", likeliest), ("drawn", drawn)):
        for count in (1, 2, 3, 5, 10)[: None if kind == "likeliest" else 4]:
            with replaced(LikelyLabels, "of", staticmethod(of(count))):
                report(f"{count} labels, {kind}", cells(folder, worlds, methods=["bico-fisher"], n=[10, 100]))
    for shift in (None, 1 / 16, 1 / 8):
        copies = 0 if shift is None else 7
        with replaced(augmentation, "SHIFT", shift or 0.0):
            found = cells(folder, worlds, methods=["bico", "bico-path"], n=[10, 20], augment=copies)
        report("no copies" if shift is None else f"7 copies, shifted by up to {shift}", found)
    report("control", cells(folder, worlds, methods=["bico"], n=100, control=True))
    with replaced(Statistics, "less", lambda one, other: one):
        report("one wrong pairing", cells(folder, worlds, methods=["bico"], n=100, control=True))


if __name__ == "__main__":
    main()
