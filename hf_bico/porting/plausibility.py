"""Whether a task vector is one that fine-tuning gives: how far each weight went, and whether it is still in its place.

Knows task vectors, sites and a base's weights; not models, samples or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
"""The median site's |tau| / |W| that fine-tuning does not reach; two unrelated models lie above 1."""
FURTHEST = 1.0
"""The |tau| / |W| of a single site that fine-tuning does not reach: a weight that has nothing to do with the base's
lies further away, since both norms add up. On the small worlds of three seeds the furthest site of 36 fine-tunes went
0.15, of 12 LoRAs 0.20, of LoRAs trained ten times as long 0.50, and of three decoders' LoRAs 0.22; transposed, at
another site's place or of another model, none went less than 1.20."""
SUSPECT = 0.55
"""A site that went so far is looked for at other places of the base; of the honest ones above, none did."""
LOOKED_AT = 64
"""So many rows and columns of a weight tell it from another: unrelated ones agree by about 1 / 64 there."""


def require_plausible(vector: Deltas, sites: Sequence[Site], base: Checkpoint, force: bool) -> None:
    """Refuse a vector that changes nothing that can be carried, or, unless by `force`, that no fine-tuning would give.

    `sites` are those that it changes.
    """
    if not sites:
        where = "only in tensors that are not carried" if len(vector) else "nowhere"
        raise EmptyTaskVectorError(
            f"the fine-tuned model differs from its base {where}",
            "check that --base is not the fine-tuned model itself",
        )
    problem = None if force else implausible(vector, sites, base)
    if problem is not None:
        raise problem


def implausible(vector: Deltas, sites: Sequence[Site], base: Checkpoint) -> ImplausibleTaskVectorError | None:
    """Why no fine-tuning of this base would give the vector; None where one may."""
    if not sites:
        return None
    moves = [_move(vector, site, base) for site in sites]
    # a product of factors was trained as one, and is in its place: how far it went says how hard
    whole = [move for move in moves if not move.low_rank]
    moved = _Places(vector, sites, base).first_moved([move.site for move in whole if move.ratio > SUSPECT])
    if moved is not None:
        return ImplausibleTaskVectorError(
            f"the fine-tuned model has at {moved.site} what its base has {moved.place}",
            "save the fine-tuned model again in the layout of its base, or insist with --force",
        )
    usual = median(move.ratio for move in moves)
    if usual > IMPLAUSIBLE:
        return ImplausibleTaskVectorError(
            f"the fine-tuned model differs from its base by {usual:.0%} of the weights' own norm, "
            "which fine-tuning does not do",
            "name the model that was really fine-tuned with --base, or insist with --force",
        )
    strays = [move for move in whole if FURTHEST < move.ratio < inf]  # what was zero may become anything
    if strays:
        return ImplausibleTaskVectorError(
            f"the fine-tuned model's weights at {_listed([move.site.name for move in strays])} have nothing in common "
            f"with its base's: they differ by up to {max(move.ratio for move in strays):.0%} of their norm",
            "check how these layers were saved; where they were made anew on purpose, insist with --force",
        )
    return None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more sites" if len(names) > 3 else "")


@dataclass(frozen=True)
class _Move:
    """How far the weight of a site went, |tau| / |W|, and whether by factors."""

    site: Site
    ratio: float
    low_rank: bool = False


def _move(vector: Deltas, site: Site, base: Checkpoint) -> _Move:
    change = changed_part(vector, site.weight)
    if change is None:
        return _Move(site, 0.0)
    start: Tensor = site.weight.view(base.tensor(site.weight.tensor))
    own = energy(start.to(change.device))
    return _Move(site, sqrt(energy(change) / own) if own else inf, isinstance(change, Factors))


@dataclass(frozen=True)
class _Moved:
    """A site that holds something else of the base than its own weight, and what that is."""

    site: str
    place: str


class _Places:
    """The base's weights, among which one that went far is looked for."""

    def __init__(self, vector: Deltas, sites: Sequence[Site], base: Checkpoint) -> None:
        self.vector, self.sites = vector, sites
        self.start: Callable[[Site], Tensor] = cache(
            lambda site: _corner(site.weight.view(base.tensor(site.weight.tensor)))
        )

    def first_moved(self, suspects: Sequence[Site]) -> _Moved | None:
        """The first of the suspects that is found elsewhere."""
        return next((found for site in suspects if (found := self._elsewhere(site)) is not None), None)

    def _elsewhere(self, site: Site) -> _Moved | None:
        """Where the base has what the fine-tuned model has at a site: half as far off, at most, as the base's own."""
        change, own = changed_part(self.vector, site.weight), self.start(site)
        tuned = own + _corner(change).to(own)
        limit = float((tuned - own).norm()) / 2
        found = {place: float((tuned - other).norm()) for place, other in self._others(site)}
        nearest = min(found, key=lambda place: found[place], default=None)
        return None if nearest is None or found[nearest] >= limit else _Moved(site.name, nearest)

    def _others(self, site: Site) -> Iterator[tuple[str, Tensor]]:
        """What else the base has that would fit, and where."""
        yield "there with the sign flipped", -self.start(site)
        for other in self.sites:
            if other.shape == site.shape and other is not site:
                yield f"at {other.name}", self.start(other)
            if other.shape == site.shape[::-1]:
                yield ("there" if other is site else f"at {other.name}") + ", transposed", self.start(other).T


def _corner(weight: Tensor) -> Tensor:
    """The first rows and columns, as float32 in main memory."""
    return weight[:LOOKED_AT, :LOOKED_AT].to("cpu").float()
