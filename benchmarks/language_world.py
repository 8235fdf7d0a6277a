"""What a port gives on tiny trained language models: a LoRA between two decoders, and an encoder between two T5s.

    python benchmarks/language_world.py [--worlds 3] [--part all]

Decoders: by how much the ported LoRA lowers the target's held-out loss, as a share of what it did for its own base.
T5: the accuracy of a linear probe that is fitted to the calibration samples. Means over the worlds, each with models of
its own; nothing is kept.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import click
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hf_bico.experiments.compare.comparison import Comparison
from hf_bico.experiments.compare.run import compare
from hf_bico.porting.port import port
from hf_bico.utils.text import format_table
from support.language_world import PLAIN, STYLES, DecoderWorld, build_decoders
from support.sequence_world import build_sequences

METHODS = ("naive", "theseus", "bico")
SIZES = (20, 100, 300)
ALPHAS = (0.5, 1.0, 1.5)
PROBE_SIZES = (50, 100, 200)
DRAWS = 2


def share(world: DecoderWorld, method: str, samples: int, alpha: float) -> float:
    """Of what the LoRA did for its own base."""
    before, tuned, target = (world.loss(world.load(name)) for name in ("source", "tuned", "target"))
    ported = port(
        world.adapter,
        to=world.target,
        base=world.source,
        data=world.calibration(samples),
        n=samples,
        method=method,
        alpha=alpha,
        evaluate=False,
    )
    return (target - world.loss(ported.model())) / (before - tuned)


def decoders(folder: Path, count: int) -> str:
    """One line for each style, method and number of samples, with a column for each alpha."""
    lines: list[tuple[str, ...]] = [("style", "method", "samples", *(f"alpha {alpha}" for alpha in ALPHAS))]
    for style in (style for style in STYLES if style != PLAIN):
        worlds = [build_decoders(folder / f"{style}-{seed}", seed, style) for seed in range(count)]
        for method in METHODS:
            for samples in SIZES:
                found = [fmean(share(world, method, samples, alpha) for world in worlds) for alpha in ALPHAS]
                lines.append((style, method, str(samples), *(f"{value:.0%}" for value in found)))
    return format_table(lines)


def sequences(folder: Path, count: int) -> str:
    found = []
    for seed in range(count):
        world = build_sequences(folder / f"sequences-{seed}", seed)
        compared = compare(
            world.tuned,
            to=world.target,
            base=world.source,
            data=world.data,
            methods=list(METHODS),
            alpha=1.0,
            n=PROBE_SIZES,
            seeds=DRAWS,
        )
        found.append(compared.prefixed(f"world {seed}, "))
    return Comparison.merged(found).table()


@click.command()
@click.option("--worlds", default=3, show_default=True, help="Pretrainings of each pair.")
@click.option("--part", type=click.Choice(["all", "decoders", "sequences"]), default="all", show_default=True)
def main(worlds: int, part: str) -> None:
    logging.disable_progress_bar()
    with TemporaryDirectory() as name:
        for title, make in (("decoders", decoders), ("sequences", sequences)):
            if part in ("all", title):
                click.echo(f"{title}\n{make(Path(name), worlds)}\n")


if __name__ == "__main__":
    main()
