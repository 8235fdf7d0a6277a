"""Port, polish or train, for language models: the standard comparison on small decoders and small classifiers.

    python benchmarks/training_language.py [--first 20] [--worlds 3] [--draws 2] [--docs docs/small-world]

Decoders: a LoRA between two small Llamas, by the loss on held-out texts (less is better). Classifiers: a fine-tuned
BERT between two small encoders, by the accuracy of a linear probe on its features. Every world has models of its own,
and nothing was chosen on them.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import click
from ports import markdown
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hf_bico.experiments.compare.comparison import Comparison
from hf_bico.experiments.compare.run import compare
from hf_bico.utils.text import format_table
from support.language_gallery import build_encoders
from support.language_world import build_decoders

SIZES = (10, 100)
FIRST = 20
NAME = "training"


def decoders(folder: Path, seed: int, draws: int) -> Comparison:
    world = build_decoders(folder, seed)
    data = {"train": world.calibration(300, seed=seed), "test": world.held_out()}
    return compare(
        world.adapter,
        to=world.target,
        base=world.source,
        data=data,
        methods=["standard"],
        train_steps=[20, 60],
        n=SIZES,
        seeds=draws,
    )


def classifiers(folder: Path, seed: int, draws: int) -> Comparison:
    made = build_encoders(folder, seed)
    return compare(
        made.source,
        to=made.target,
        base=made.base,
        data=made.data,
        methods=["standard"],
        train_steps=[20, 60],
        n=SIZES,
        seeds=draws,
    )


def lines(found: list[Comparison]) -> list[list[str]]:
    """Return one line a row, with its mean over worlds and draws for each number of samples."""
    values: dict[str, dict[int | None, list[float]]] = {}
    held_back: dict[str, int] = {}
    is_loss = any(cell.is_loss for one in found for cell in one.cells)
    for one in found:
        for cell in one.cells:
            scale = 1.0 if cell.is_loss else 100.0
            values.setdefault(cell.method, {}).setdefault(cell.n, []).append(scale * cell.value)
            held_back[cell.method] = held_back.get(cell.method, 0) + cell.held_back
    table = [["row", *(f"N = {n}" for n in SIZES), "held back"]]
    for row, by_size in values.items():
        means = [by_size.get(n) or by_size.get(None) or [] for n in SIZES]
        texts = ["" if not some else f"{fmean(some):.3f}" if is_loss else f"{fmean(some):.1f}" for some in means]
        table.append([f"`{row}`", *texts, str(held_back[row] or "")])
    return table


@click.command(help=__doc__)
@click.option("--first", default=FIRST, show_default=True, help="Number of the first world.")
@click.option("--worlds", default=3, show_default=True, help="Pretrainings of each pair.")
@click.option("--draws", default=2, show_default=True, help="Draws of the samples.")
@click.option("--docs", type=click.Path(path_type=Path), help="Folder of the documentation's tables.")
def main(first: int, worlds: int, draws: int, docs: Path | None) -> None:
    logging.disable_progress_bar()
    with TemporaryDirectory() as name:
        for title, make in (("decoders", decoders), ("classifiers", classifiers)):
            found = [make(Path(name) / f"{title}-{seed}", seed, draws) for seed in range(first, first + worlds)]
            table = lines(found)
            click.echo(f"{title}\n{format_table(table)}\n")
            if docs is not None:
                (docs / f"{NAME}-{title}.md").write_text(markdown(table), encoding="utf-8")


if __name__ == "__main__":
    main()
