"""What a port is worth between trained models of different tokenizers, beside ports between those of one.

    python benchmarks/tokenizer_world.py [--worlds 3] [--part encoders]

Decoders: three tokenizers, and for each a pair of tiny models and a LoRA: of nine ports, three are between models of
one tokenizer. Numbers are how much of what the LoRA did for its own base the port does for its target, in nats per byte
of held-out text. Sequences: a fine-tuned encoder between T5s, the same of the answers. Encoders: classifiers between
BERTs, in points of accuracy. Of these two the source has one tokenizer, and three targets have its own and two others;
the share is of the tokens whose inputs pair. Means over the worlds.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import click
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from language_ports import gain_of_record

from hf_bico.porting.port import port
from hf_bico.porting.result import Ported
from hf_bico.utils.text import markdown_table
from support import language_toys as toys
from support.language_gallery import build_encoders
from support.sequence_world import Corpus, build_sequences, build_word_tokenizer
from support.tokenizer_world import build_tokenizer_world, learnt_tokenizer, one_and_other

WAYS: dict[str, dict[str, Any]] = {
    "naive": {"method": "naive", "alpha": 1.0},
    "THESEUS": {"method": "theseus", "alpha": 1.0},
    "BiCo, alpha 1": {"method": "bico", "alpha": 1.0},
    "as `port` runs it": {"method": "auto"},
}
PARTS = ("decoders", "sequences", "encoders")
ENCODERS = (("wordpieces", 60), ("wordpieces", 50), ("words", 40))
SEQUENCES = (("bytes", 120), ("bytes", 200), None)
"""Kinds and pieces of tokenizers, the source's first; None is one of whole words."""


def decoders(scratch: Path, worlds: int, samples: int) -> str:
    rows: list[Sequence[str]] = [("style", "method", "one tokenizer", "different ones")]
    for style in ("capitals", "digits"):
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
        for seed in range(worlds):
            world = build_tokenizer_world(scratch / f"{style}-{seed}", seed, style)
            for name, options in WAYS.items():
                found[name].append(one_and_other(world.shares(samples=samples, **options)))
        for name, shares in found.items():
            rows.append((style, name, *(f"{fmean(column):.0%}" for column in zip(*shares, strict=True))))
    return markdown_table(rows)


def sequences(scratch: Path, worlds: int, samples: int) -> str:
    texts = [" ".join(pair) for pair in Corpus(0, build_word_tokenizer()).texts(500)]
    frame = toys.FRAMES["sequence"]
    cuts = [kind and learnt_tokenizer(*kind, texts, toys.SPECIAL, frame) for kind in SEQUENCES]
    tokenizers = [cut or build_word_tokenizer() for cut in cuts]

    def ports(seed: int, number: int) -> Iterator[Ported]:
        world = build_sequences(scratch / f"{seed}-{number}", seed, (tokenizers[0], tokenizers[number]))
        models = {"to": world.target, "base": world.source, "data": world.data}
        for options in WAYS.values():
            yield port(world.tuned, **models, n=samples, evaluation="zero-shot", **options)

    return _table(ports, worlds, "{:.0%}")


def encoders(scratch: Path, worlds: int, samples: int) -> str:
    texts = toys.sentences(300, seed=5)
    tokenizers = [learnt_tokenizer(*kind, texts, toys.SPECIAL, toys.FRAMES["encoder"]) for kind in ENCODERS]

    def ports(seed: int, number: int) -> Iterator[Ported]:
        world = build_encoders(scratch / f"{seed}-{number}", seed, (tokenizers[0], tokenizers[number]))
        models = {"to": world.target, "base": world.base, "data": world.data}
        for options in WAYS.values():
            yield port(world.source, **models, n=samples, **options)

    return _table(ports, worlds, "{:+.1f}")


def _table(ports: Callable[[int, int], Iterator[Ported]], worlds: int, form: str) -> str:
    """A line for each of three targets, with a column for each way."""
    rows = [("tokenizers", "inputs that pair", *WAYS)]
    for number, name in enumerate(("one", "alike", "unlike")):
        found = [list(ports(seed, number)) for seed in range(worlds)]
        gains = [fmean(_gain(ported) for ported in column) for column in zip(*found, strict=True)]
        data = found[0][-1].record.data
        share = "all" if data is None or data.pairing is None else f"{data.pairing.tokens:.0%}"
        rows.append((name, share, *(form.format(gain) for gain in gains)))
    return markdown_table(rows)


def _gain(ported: Ported) -> float:
    return 0.0 if ported.held_back else gain_of_record(ported.record)


@click.command(help=__doc__)
@click.option("--worlds", default=3, show_default=True)
@click.option("--samples", default=100, show_default=True)
@click.option("--part", type=click.Choice(PARTS), multiple=True, default=PARTS, help="All if left out.")
def main(worlds: int, samples: int, part: tuple[str, ...]) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for make in (decoders, sequences, encoders):
        if make.__name__ in part:
            with TemporaryDirectory() as scratch:
                click.echo(f"{make.__name__}\n\n{make(Path(scratch), worlds, samples)}\n")


if __name__ == "__main__":
    main()
