"""Compares maps of whole attention projections with maps of matched heads, between decoders of other head counts.

    python benchmarks/heads.py [--worlds 3]

Target head t is matched with source head floor(t H_A / H_B). Ways: "free" is BiCo as it is, one map of the whole
projection; "one each" has a rotation of its own for every target head; "pooled" has the polar factor of the covariance
without its unmatched blocks, so that heads that meet share their directions; "by evidence" matches a target head with
the source head whose block has the largest nuclear norm. Numbers are how much of what a LoRA did for its own base the
port does for the target; means over the worlds and two styles, at alpha 1.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import click
import torch
from torch import Tensor
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from language_world import share

from hf_bico import register_method
from hf_bico.alignment.methods.aligned import Bico
from hf_bico.alignment.methods.base import MethodInputs
from hf_bico.alignment.procrustes import PairedRows, polar
from hf_bico.alignment.statistics import Kind
from hf_bico.models.layout import SitePair
from hf_bico.utils.text import markdown_table
from support.language_world import SHAPES, build_decoders, llama

Heads = tuple[int, int]
Solve = Callable[[Tensor, Heads], Tensor]

WIDTHS = tuple(SHAPES[name][0] for name in ("source", "target"))
CASES: dict[str, tuple[str, Heads, Heads]] = {
    "4/1 to 8/4": ("Llama", (4, 1), (8, 4)),
    "4/4 to 4/1": ("Llama", (4, 4), (4, 1)),
    "6/2 to 4/2": ("Llama", (6, 2), (4, 2)),
    "4/2 to 8/2, q/k norms": ("Qwen3", (4, 2), (8, 2)),
}
"""The kind of decoder; heads and key-value heads of the source, and of the target."""
STYLES = ("capitals", "digits")
SIZES = (20, 100)


def _blocks(covariance: Tensor, heads: Heads) -> Tensor:
    """Return the blocks of two heads, [source head, target head, row, column], as a view."""
    size = (heads[0], covariance.shape[0] // heads[0], heads[1], covariance.shape[1] // heads[1])
    return covariance.view(size).permute(0, 2, 1, 3)


def _one_each(covariance: Tensor, heads: Heads) -> Tensor:
    return _rotations(covariance, heads, [head * heads[0] // heads[1] for head in range(heads[1])])


def _by_evidence(covariance: Tensor, heads: Heads) -> Tensor:
    norms = torch.linalg.matrix_norm(_blocks(covariance, heads), "nuc")
    return _rotations(covariance, heads, norms.argmax(0).tolist())


def _rotations(covariance: Tensor, heads: Heads, origins: Sequence[int]) -> Tensor:
    result = torch.zeros_like(covariance)
    blocks, rotations = _blocks(covariance, heads), _blocks(result, heads)
    for head, origin in enumerate(origins):
        rotations[origin, head] = _polar(blocks[origin, head])
    return result


def _pooled(covariance: Tensor, heads: Heads) -> Tensor:
    source, target = torch.arange(heads[0])[:, None], torch.arange(heads[1])
    matched = (target * heads[0] // heads[1] == source) | (source * heads[1] // heads[0] == target)
    masked = covariance.clone()
    _blocks(masked, heads)[~matched] = 0.0
    return _polar(masked)


def _polar(covariance: Tensor) -> Tensor:
    return polar([covariance.contiguous()], [1.0])[0].matrix


class _HeadBico(Bico):
    """BiCo with other maps where a projection is cut into heads."""

    solve: ClassVar[Solve]
    heads: ClassVar[Mapping[str, Heads]]
    """Heads of source and target, by the role of a projection."""

    def prepare(self, pairs: Sequence[SitePair], inputs: MethodInputs) -> None:
        super().prepare(pairs, inputs)
        for pair in pairs:
            if pair.target.role not in self.heads:
                continue
            side = int(pair.target.role != "attn.out")
            evidence = inputs.statistics.of((Kind.INPUTS, Kind.GRADIENTS)[side], pair).evidence
            covariance = evidence.covariance if isinstance(evidence, PairedRows) else evidence.double()
            solved = type(self).solve(covariance, self.heads[pair.target.role])
            maps = self.maps[pair.target.name]
            free = maps[side]
            assert free is not None
            own = replace(free, matrix=solved, seen=solved)
            self.maps[pair.target.name] = (maps[0], own) if side else (own, maps[1])


WAYS: dict[str, Solve | None] = {"free": None, "one each": _one_each, "pooled": _pooled, "by evidence": _by_evidence}


def _method(way: str, case: str) -> str:
    """Return the name of a method, registered here unless it is BiCo itself."""
    solve = WAYS[way]
    if solve is None:
        return "bico"
    _, source, target = CASES[case]
    queries, keys = ((source[index], target[index]) for index in (0, 1))
    heads = {"attn.q": queries, "attn.k": keys, "attn.v": keys, "attn.out": queries}
    name = f"bico-{way.replace(' ', '-')}"
    made = type("HeadBico", (_HeadBico,), {"solve": staticmethod(solve), "heads": heads})
    register_method(name, made, uses_samples=True, uses_loss=True)
    return name


def _make(case: str) -> Callable[[int, int], Any]:
    kind, *heads = CASES[case]

    def make(width: int, blocks: int) -> Any:
        count, shared = heads[WIDTHS.index(width)]
        own = {"num_attention_heads": count, "num_key_value_heads": shared, "head_dim": width // count}
        return llama(width, blocks, kind, **own)

    return make


def _shares(case: str, worlds: int) -> Iterator[tuple[tuple[str, int], float]]:
    methods = {way: _method(way, case) for way in WAYS}
    for style in STYLES:
        for seed in range(worlds):
            with TemporaryDirectory() as scratch:
                world = build_decoders(Path(scratch), seed, style, make=_make(case))
                for way, method in methods.items():
                    for size in SIZES:
                        yield (way, size), share(world, method, size, alpha=1.0)


@click.command(help=__doc__)
@click.option("--worlds", default=3, show_default=True, help="Pretrainings of each pair and style.")
def main(worlds: int) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = [("heads", "samples", *WAYS)]
    for case in CASES:
        found: dict[tuple[str, int], list[float]] = defaultdict(list)
        click.echo(case, err=True)
        for key, value in _shares(case, worlds):
            found[key].append(value)
        rows += [(case, str(size), *(f"{fmean(found[way, size]):.1%}" for way in WAYS)) for size in SIZES]
    click.echo(markdown_table(rows))


if __name__ == "__main__":
    main()
