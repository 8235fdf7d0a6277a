"""Port, polish or train, for language models: the standard comparison on small decoders and small classifiers.

    python benchmarks/training_language.py [--first 20] [--worlds 2] [--draws 1] [--docs docs/small-world]

Decoders: a LoRA between two small Llamas, by the fall of the held-out loss in percent of what the LoRA did for its own
base. Classifiers: a fine-tuned BERT between two small encoders, in points of accuracy of a linear probe on its
features. Every world has models of its own, and nothing was chosen on them.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from training import NAME, POINTS, Number, show, write_csv
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hf_bico.experiments.compare.comparison import Comparison
from hf_bico.experiments.compare.run import compare
from support.language_gallery import build_encoders
from support.language_world import build_decoders

SIZES = (10, 100)
FIRST = 20
SHARE = "percent of the fine-tune's own gain"


def decoders(folder: Path, seed: int, draws: int) -> Comparison:
    world = build_decoders(folder, seed)
    data = {"train": world.calibration(300, seed=seed), "test": world.held_out()}
    return compare(
        world.adapter,
        to=world.target,
        base=world.source,
        data=data,
        methods=["standard"],
        train_steps=[20],
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
        train_steps=[20],
        n=SIZES,
        seeds=draws,
    )


def numbers(part: str, world: int, found: Comparison) -> Iterator[Number]:
    """Yield accuracies in percent, and losses by how far they fall, in percent of what fine-tuning did for the base."""
    losses = {cell.method: cell.value for cell in found.cells if cell.is_loss and cell.is_reference}
    for cell in found.cells:
        if cell.method in ("base", "source"):  # of other models, or measured by a head of its own
            continue
        value = 100 * cell.value
        if cell.is_loss:
            value = 100 * (losses["target"] - cell.value) / (losses["base"] - losses["source"])
        yield Number(part, world, "", "", cell.method, cell.n, cell.seed, round(value, 3), cell.held_back)


@click.command(help=__doc__)
@click.option("--first", default=FIRST, show_default=True, help="Number of the first world.")
@click.option("--worlds", default=2, show_default=True, help="Pretrainings of each pair.")
@click.option("--draws", default=1, show_default=True, help="Draws of the samples.")
@click.option("--docs", type=click.Path(path_type=Path), help="Folder of the documentation's tables.")
def main(first: int, worlds: int, draws: int, docs: Path | None) -> None:
    logging.disable_progress_bar()
    found = list[Number]()
    with TemporaryDirectory() as name:
        for title, make, unit in (("decoders", decoders, SHARE), ("classifiers", classifiers, POINTS)):
            for seed in range(first, first + worlds):
                found += numbers(title, seed, make(Path(name) / f"{title}-{seed}", seed, draws))
                click.echo(f"{title}, world {seed}", err=True)
            show(found, title, SIZES, docs, unit)
    if docs is not None:
        write_csv(found, docs / f"{NAME}-language.csv")


if __name__ == "__main__":
    main()
