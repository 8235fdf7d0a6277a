"""The memory budget of a port: how what it needs is done within a limit, and in which batches.

Knows bytes and numbers of samples; not models, sites or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from hf_bico.needs import FLOAT32, Needs

LEAST_ACTIVATIONS = 250_000_000
"""What the activations of one batch may take in any case."""
ACTIVATIONS = 0.3
"""What they may take where nothing else decides, as a share of models and sums: so batches do not shrink with depth,
and those of ViT-B/16 take what the solver takes later."""
BATCH = 8.0
"""What starting a batch costs, in samples: about that of ten images where ViT-B/16 was timed on an H200."""
BATCH_ON_CPU = 0.03
"""The same where no GPU does the work: measured with two blocks of ViT-B/16 and -plus on two cores."""
MOST_SAMPLES = 32
"""Batches are not larger than this unless it is asked for."""
SPARE = 0.05
"""The share of a limit that is left to the allocator and the libraries' own work space."""


@dataclass(frozen=True)
class Limits:
    """What is asked for: the most memory, the batch size, the tokens of a text, and the bytes of a number."""

    memory: int | None = None
    batch_size: int | None = None
    tokens: int | None = None
    itemsize: int = FLOAT32


class Way(NamedTuple):
    """What is kept of a batch: what enters each block, or its MLP, or all; and of one model at a time, or of both."""

    checkpointing: bool = False
    lean: bool = False
    at_once: bool = False


WAYS = (Way(), Way(lean=True), Way(checkpointing=True), Way(checkpointing=True, at_once=True))


@dataclass(frozen=True)
class Fit:
    """How a port is done within a limit, and what it is expected to take at its peak."""

    batch_size: int
    groups: tuple[int, ...]
    """How many groups of pairs each pass over the samples adds up."""
    alternating: bool
    """Whether the models are on the device in turn."""
    checkpointing: bool
    bytes: int
    fits: bool = True
    lean: bool = False
    """Whether MLPs run once more in the backward pass: larger batches are worth it."""
    at_once: bool = False
    """Whether both models' graphs are there at once, which takes less where they are small."""
    batch_cost: float = BATCH
    """What starting a batch costs there, in samples."""

    @property
    def passes(self) -> int:
        return len(self.groups)

    @property
    def limit(self) -> int:
        """The least limit that allows it."""
        return ceil(self.bytes / (1 - SPARE))

    @property
    def work(self) -> float:
        """What the passes cost, in forward passes of one sample: backward counts twice, and each batch has its own."""
        forward_and_back = 4.0 if self.checkpointing else 3.6 if self.lean else 3.0
        return self.passes * forward_and_back * (1 + self.batch_cost / self.batch_size)


def fit(
    needs: Needs,
    limit: int | None = None,
    batch_size: int | None = None,
    turns: Sequence[bool] = (False, True),
    batch_cost: float = BATCH,
) -> Fit:
    """The quickest way to do it within the limit, or the leanest where none fits.

    The choice is between smaller batches, several passes over the samples and activation checkpointing; a batch size
    that is asked for is kept while it fits in any way. `turns` says whether both models stay on the device, or are
    there in turn: in the order in which that is tried.
    """
    room = None if limit is None else int(limit * (1 - SPARE))
    ways: list[Fit] = []
    for alternating in [False] if needs.both_graphs else turns:
        found = [
            replace(_fit(needs, room, size, alternating, way), batch_cost=batch_cost)
            for way in WAYS
            if (not way.lean or needs.can_be_lean) and not (way.at_once and (alternating or needs.both_graphs))
            for size in _sizes(needs, batch_size, way, halved=room is not None)
        ]
        fitting = [one for one in found if one.fits]
        if batch_size is not None:
            largest = max((one.batch_size for one in fitting), default=0)
            fitting = [one for one in fitting if one.batch_size == largest]
        if fitting:
            return min(fitting, key=lambda one: one.work)
        ways += found
    return min(ways, key=lambda one: one.bytes)


def _sizes(needs: Needs, asked: int | None, way: Way, halved: bool) -> list[int]:
    """The batch sizes that come into question, the largest first."""
    room = max(LEAST_ACTIVATIONS, int(ACTIVATIONS * (sum(needs.weights) + sum(needs.sums))))
    size = asked or max(1, min(MOST_SAMPLES, room // needs.of_sample(*way)))
    return [size >> step for step in range(size.bit_length())] if halved else [size]


def _fit(needs: Needs, room: int | None, size: int, alternating: bool, way: Way) -> Fit:
    models, activations = needs.of_models(alternating), size * needs.of_sample(*way)
    sums, waiting = sum(needs.sums), 0
    groups: tuple[int, ...] = (len(needs.sums),)

    def peak() -> int:
        halved = needs.descents // 2 * sums // max(1, sum(needs.sums))
        solved = max(sums - halved, needs.carried - waiting)
        return models + waiting + max(sums + activations, solved + needs.solver)

    if room is not None and peak() > room:
        waiting = needs.carried  # what earlier passes have found
        groups = _groups(needs.sums, room - models - waiting - max(activations, needs.solver))
        sums = max(_in_groups(needs.sums, groups), default=0)
    fits = room is None or peak() <= room
    return Fit(size, groups, alternating, way.checkpointing, peak(), fits, way.lean, way.at_once)


def _groups(sums: Sequence[int], room: int) -> tuple[int, ...]:
    """How many groups each pass takes: as many as there is room for, at least one."""
    counts, used = [0], 0
    for size in sums:
        if counts[-1] and used + size > room:
            counts.append(0)
            used = 0
        counts[-1] += 1
        used += size
    return tuple(counts)


def _in_groups(sizes: Sequence[int], counts: Sequence[int]) -> list[int]:
    found, start = [], 0
    for count in counts:
        found.append(sum(sizes[start : start + count]))
        start += count
    return found
