"""Checks that fine-tuning can have made a task vector: how far each weight moved, and if it is still at its site.

Knows task vectors, sites and a base's weights; not models, samples or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, sqrt
from statistics import median

from torch import Tensor

from hf_bico.alignment.transport import changed_part
from hf_bico.errors import EmptyTaskVectorError, ImplausibleTaskVectorError
from hf_bico.models.checkpoints import Checkpoint
from hf_bico.models.deltas import Deltas
from hf_bico.models.layout import Site
from hf_bico.models.low_rank import Factors, energy

IMPLAUSIBLE = 0.9
"""A median |tau| / |W| of all sites that fine-tuning does not reach; two unrelated models lie above 1."""
FURTHEST = 1.0
"""A |tau| / |W| of a single site that fine-tuning does not reach: an unrelated weight lies further away, since both
norms add up. On the small worlds of three seeds the furthest site of 36 fine-tunes went 0.15, of 12 LoRAs 0.20, of
LoRAs trained ten times as long 0.50, and of three decoders' LoRAs 0.22; transposed, swapped with another site or of
another model, none went less than 1.20."""
SUSPECT = 0.55
"""A site that moved further is looked for elsewhere in the base; none of the honest ones above did."""
SOME_ROWS = 64
"""Rows of a weight that tell its size where the change is low-rank: that of a model of billions is not read in full."""
CORNER = 64
"""Number of rows and columns that identify a weight: unrelated ones agree by about 1 / 64 there."""


def require_plausible(vector: Deltas, sites: Sequence[Site], base: Checkpoint, force: bool) -> None:
    """Refuse a vector that changes none of the `sites` to carry or, without `force`, an implausible one."""
    if not sites:
        where = "only in tensors that are not carried" if len(vector) else "nowhere"
        raise EmptyTaskVectorError(
            f"the fine-tuned model differs from its base {where}",
            "check that --base is not the fine-tuned model itself",
        )
    if not force and (problem := implausible(vector, sites, base)) is not None:
        raise problem


def implausible(vector: Deltas, sites: Sequence[Site], base: Checkpoint) -> ImplausibleTaskVectorError | None:
    """Return the error if no fine-tuning of this base would give the vector, else None."""
    if not sites:
        return None
    moves = [_move(vector, site, base) for site in sites]
    # low-rank changes were trained at their sites: how far they went only says how hard
    whole = [move for move in moves if not move.low_rank]
    swapped = _find_swapped(vector, [move.site for move in whole if move.ratio > SUSPECT], sites, base)
    if swapped is not None:
        return ImplausibleTaskVectorError(
            f"the fine-tuned model has at {swapped[0]} what its base has {swapped[1]}",
            "save the fine-tuned model again in the layout of its base, or continue with --force",
        )
    usual = median(move.ratio for move in moves)
    if usual > IMPLAUSIBLE:
        return ImplausibleTaskVectorError(
            f"the fine-tuned model differs from its base by {usual:.0%} of the weights' own norm, "
            "which fine-tuning does not do",
            "name the model that was really fine-tuned with --base, or continue with --force",
        )
    strays = [move for move in whole if FURTHEST < move.ratio < inf]  # what was zero may become anything
    if strays:
        more = f" and {len(strays) - 3} more sites" if len(strays) > 3 else ""
        names = ", ".join(move.site.name for move in strays[:3]) + more
        return ImplausibleTaskVectorError(
            f"the fine-tuned model's weights at {names} have nothing in common "
            f"with its base's: they differ by up to {max(move.ratio for move in strays):.0%} of their norm",
            "check how these layers were saved; where they were made anew on purpose, continue with --force",
        )
    return None


@dataclass(frozen=True)
class _Move:
    """The relative change of a site's weight, |tau| / |W|."""

    site: Site
    ratio: float
    low_rank: bool = False


def _move(vector: Deltas, site: Site, base: Checkpoint) -> _Move:
    change = changed_part(vector, site.weight)
    if change is None:
        return _Move(site, 0.0)
    start: Tensor = site.weight.view(base.tensor(site.weight.tensor))
    low_rank = isinstance(change, Factors)
    some = start[:: max(1, len(start) // SOME_ROWS)] if low_rank else start
    own = energy(some.to(change.device)) * len(start) / len(some)
    return _Move(site, sqrt(energy(change) / own) if own else inf, low_rank)


def _find_swapped(
    vector: Deltas, suspects: Sequence[Site], sites: Sequence[Site], base: Checkpoint
) -> tuple[str, str] | None:
    """Return the first suspect that holds another weight of the base than its own, and where the base has that.

    The other weight must be at most half as far from the fine-tuned one as the base's own.
    """

    @cache
    def start(site: Site) -> Tensor:
        return _corner(site.weight.view(base.tensor(site.weight.tensor)))

    def others(site: Site) -> Iterator[tuple[str, Tensor]]:
        yield "there with the sign flipped", -start(site)
        for other in sites:
            if other.shape == site.shape and other is not site:
                yield f"at {other.name}", start(other)
            if other.shape == site.shape[::-1]:
                yield ("there" if other is site else f"at {other.name}") + ", transposed", start(other).T

    for site in suspects:
        own = start(site)
        tuned = own + _corner(changed_part(vector, site.weight)).to(own)
        distances = {place: float((tuned - other).norm()) for place, other in others(site)}
        nearest = min(distances, key=lambda place: distances[place])
        if distances[nearest] < float((tuned - own).norm()) / 2:
            return site.name, nearest
    return None


def _corner(weight: Tensor) -> Tensor:
    """Return the first rows and columns, as float32 in main memory."""
    return weight[:CORNER, :CORNER].to("cpu").float()
