"""What can be expected of a LoRA: LoRAs that peft trains on the small world, ported beside full fine-tunes.

    python benchmarks/loras.py FOLDER [--worlds 3]

FOLDER is one that benchmarks/small_world.py was run on, or a new one: models that are not there yet are trained. Narrow
to wide, two tasks, 100 samples, two draws. One line is the mean over worlds and tasks of one source: its own accuracy,
|change| / |base| over the layers that it changes, the share of the change that lay where calibration saw nothing, and
the accuracy of its ports, with how many of them measured below the target.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hf_bico.experiments.compare.run import compare
from hf_bico.experiments.demo.world import World, build
from hf_bico.models.checkpoints import is_adapter
from hf_bico.models.low_rank import energy
from hf_bico.porting.port import port
from hf_bico.porting.task_arithmetic import extract
from hf_bico.porting.task_vector import TaskVector
from hf_bico.utils.text import format_table
from support.transformers_world import LoraRecipe, as_transformers, train_lora

TASKS = ("inverted", "rotated-90")
METHODS = ("bico", "bico-path")
ALPHAS = (0.5, 1.0)
DRAWS, SAMPLES = 2, 100
STRETCH = 3
"""By which a full fine-tune's change is as large as that of a LoRA that was trained for long."""
ATTENTION = ("q_proj", "v_proj")
RECIPES = {
    f"LoRA of {layers}, rank {rank}, {steps} steps": LoraRecipe(modules, rank, steps)
    for layers, modules in (("q, v", ATTENTION), ("q, v, fc1, fc2", (*ATTENTION, "fc1", "fc2")))
    for steps in (60, 300)
    for rank in (4, 8)
}


@dataclass(frozen=True)
class Source:
    """What is ported: a fine-tuned model or an adapter, over its base, perhaps stretched."""

    name: str
    folder: Path
    base: Path
    stretch: float = 1.0

    def relative_norm(self) -> float:
        """|change| / |base| over the tensors of sites that it changes."""
        read = TaskVector.from_adapter if is_adapter(os.listdir(self.folder)) else TaskVector.from_models
        vector = read(self.folder, self.base)
        model = vector.base_model(self.base)
        names = model.layout.tensors & set(vector)
        start = sum(energy(model.checkpoint.tensor(name)) for name in names)
        return self.stretch * sqrt(sum(vector.energy(name) for name in names) / start)


@dataclass
class Line:
    """All that was measured of one kind of source."""

    norms: list[float] = field(default_factory=list)
    unseen: list[float] = field(default_factory=list)
    targets: list[float] = field(default_factory=list)
    sources: list[float] = field(default_factory=list)
    """Their own accuracies; none where what is ported is no longer the source's own change."""
    gains: dict[tuple[str, float], list[float]] = field(default_factory=dict)
    """Of every port over its target, by method and alpha."""

    def add(self, source: Source, world: World, task: str) -> None:
        where: dict[str, Any] = {
            "to": world.base("wide"),
            "base": source.base,
            "data": world.data(task),
            "device": "cpu",
        }
        self.norms.append(source.relative_norm())
        self.unseen.append(port(source.folder, **where, n=SAMPLES, evaluate=False).report.unseen_energy or 0.0)
        for alpha in ALPHAS:
            scaled = alpha * source.stretch
            cells = compare(source.folder, **where, methods=METHODS, n=SAMPLES, seeds=DRAWS, alpha=scaled).cells
            (target,) = (cell.value for cell in cells if cell.method == "target")
            for cell in cells:
                if cell.method in METHODS:
                    self.gains.setdefault((cell.method, alpha), []).append(cell.value - target)
        self.targets.append(target)
        if source.stretch == 1:
            self.sources += [cell.value for cell in cells if cell.method == "source"]

    def row(self) -> list[str]:
        start = fmean(self.targets)
        ports = [self.gains[method, alpha] for method in METHODS for alpha in ALPHAS]
        shown = [f"{100 * (start + fmean(gains)):.1f} ({sum(gain < 0 for gain in gains)})" for gains in ports]
        own = f"{100 * fmean(self.sources):.1f}" if self.sources else "-"
        return [own, f"{fmean(self.norms):.2f}", f"{fmean(self.unseen):.1%}", *shown]


def sources(world: World, task: str, seed: int, scratch: Path) -> Iterator[Source]:
    """The world's own fine-tune, also at rank 8 and stretched, then the LoRAs."""
    full, base = world.fine_tuned("narrow", task), world.base("narrow")
    yield Source("full fine-tune", full, base)
    yield Source("full fine-tune, extract --rank 8", extract(full, base, rank=8).save(scratch / "extracted"), base)
    yield Source(f"full fine-tune, times {STRETCH}", full, base, STRETCH)
    copy = as_transformers(base, scratch / "narrow-hf")
    for name, recipe in RECIPES.items():
        yield Source(name, train_lora(copy, scratch / name, task, recipe, seed=seed), copy)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--worlds", default=3, show_default=True, help="Pretrainings to use.")
def main(folder: Path, worlds: int) -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    lines: dict[str, Line] = {}
    for seed in range(worlds):
        place = folder / "worlds" / f"seed-{seed}"
        world = build(place, seed=seed, shapes=("narrow", "wide"), tasks=TASKS)
        for task in TASKS:
            with TemporaryDirectory() as scratch:
                for source in sources(world, task, seed, Path(scratch)):
                    click.echo(f"world {seed}, {task}: {source.name}", err=True)
                    lines.setdefault(source.name, Line()).add(source, world, task)
    (start,) = {fmean(line.targets) for line in lines.values()}
    ports = f"{worlds * len(TASKS) * DRAWS} ports a cell, in brackets how many of them below the target"
    click.echo(f"target, zero-shot: {100 * start:.1f}; {ports}")
    head = ["source", "accuracy", "|change| / |base|", "unseen"]
    head += [f"{method}, alpha {alpha:g}" for method in METHODS for alpha in ALPHAS]
    click.echo(format_table([head, *([name, *line.row()] for name, line in lines.items())]))


if __name__ == "__main__":
    main()
