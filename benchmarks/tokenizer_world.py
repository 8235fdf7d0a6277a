"""What a port is worth between trained decoders of different tokenizers, beside ports between those of one.

    python benchmarks/tokenizer_world.py [--worlds 3]

Three tokenizers, and for each a pair of tiny decoders and a LoRA: of nine ports, three are between models of one
tokenizer. Numbers are how much of what the LoRA did for its own base the port does for its target, in nats per byte of
held-out text; means over the worlds.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import click
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hf_bico.utils.text import markdown_table
from support.tokenizer_world import build_tokenizer_world, one_and_other

WAYS: dict[str, dict[str, Any]] = {
    "naive": {"method": "naive", "alpha": 1.0},
    "THESEUS": {"method": "theseus", "alpha": 1.0},
    "BiCo, alpha 1": {"method": "bico", "alpha": 1.0},
    "as `port` runs it": {"method": "auto"},
}


@click.command(help=__doc__)
@click.option("--worlds", default=3, show_default=True)
@click.option("--samples", default=100, show_default=True)
def main(worlds: int, samples: int) -> None:
    logging.set_verbosity_error()
    rows = [("style", "method", "one tokenizer", "different ones")]
    for style in ("capitals", "digits"):
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
        for seed in range(worlds):
            with TemporaryDirectory() as scratch:
                world = build_tokenizer_world(Path(scratch), seed, style)
                for name, options in WAYS.items():
                    found[name].append(one_and_other(world.shares(samples=samples, **options)))
        for name, shares in found.items():
            rows.append((style, name, *(f"{fmean(column):.0%}" for column in zip(*shares, strict=True))))
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
