"""From a task vector over the source to one over the target, site by site, with an account of its energy.

Knows task vectors, sites and methods; not models, samples or files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from hf_bico.alignment.methods.base import SiteDelta, SiteLossChange, TransportedSite
from hf_bico.alignment.statistics import LossGradient
from hf_bico.models.checkpoints import Checkpoint
from hf_bico.models.deltas import Deltas
from hf_bico.models.layout import Site, SitePair, Slot
from hf_bico.models.low_rank import Change, Factors, dense, energy, is_zero, stacked, total


def changed_part(vector: Deltas, slot: Slot) -> Any:
    """The change of one slot, factors where a weight has them; None where nothing changed."""
    if slot.tensor not in vector:
        return None
    part: Change = slot.view(vector.change(slot.tensor))
    return None if is_zero(part) else part


def descent_along(delta: SiteDelta, descent: LossGradient) -> SiteLossChange:
    """What a change of a site does to the loss that the gradient is of, to first order."""
    change = own = 0.0
    of_gradient = descent.energies[0]
    if delta.weight is not None:
        change += _inner(descent.weight.float(), delta.weight)
        own = energy(delta.weight)
    if delta.bias is not None:
        gradient = descent.bias.float()
        change += float((delta.bias.to(gradient) * gradient).sum())
        own += energy(delta.bias)
        of_gradient += descent.energies[1]  # where there is no bias, nothing learns this
    return SiteLossChange(change, of_gradient, own)


def _inner(gradient: Tensor, change: Change) -> float:
    """<gradient, change>; of factors without their product."""
    if isinstance(change, Factors):
        left, right = (part.to(gradient) for part in (change.left, change.right))
        return float(((gradient @ right.T) * left).sum())
    return float((gradient * change.to(gradient)).sum())


def site_delta(vector: Deltas, site: Site) -> SiteDelta:
    """What the vector changes at one site."""
    return SiteDelta(changed_part(vector, site.weight), None if site.bias is None else changed_part(vector, site.bias))


def joined(parts: Sequence[Mapping[str, TransportedSite]]) -> dict[str, TransportedSite]:
    """What was carried in several parts, as one; with the maps of the first, and the mean of what went unseen."""
    return {name: _joined([part[name] for part in parts]) for name in parts[0]}


def _joined(parts: Sequence[TransportedSite]) -> TransportedSite:
    if len(parts) == 1:
        return parts[0]
    deltas = [part.delta for part in parts]
    weights = [delta.weight for delta in deltas if delta.weight is not None]
    biases = [delta.bias for delta in deltas if delta.bias is not None]
    unseen = [part.unseen for part in parts if part.unseen is not None]
    delta = SiteDelta(total(weights) if weights else None, dense(total(biases)) if biases else None)
    first = parts[0].descent  # later ones are of a target that has moved
    descent = None if first is None else first.scaled(len(parts))
    return replace(parts[0], delta=delta, unseen=mean(unseen) if unseen else None, descent=descent)


def gather(
    carried: Mapping[str, TransportedSite], pairs: Iterable[SitePair], target: Checkpoint, alpha: float
) -> Deltas:
    """alpha times the carried changes, put into the target's tensors."""
    parts: dict[str, list[tuple[Slot, Change]]] = defaultdict(list)
    for pair in pairs:
        delta = carried[pair.target.name].delta
        for slot, change in ((pair.target.weight, delta.weight), (pair.target.bias, delta.bias)):
            if slot is not None and change is not None:
                parts[slot.tensor].append((slot, alpha * change))
    return Deltas({name: _put_together(found, target, name) for name, found in parts.items()})


def _put_together(parts: Sequence[tuple[Slot, Change]], target: Checkpoint, name: str) -> Change:
    """The change of one tensor from those of its slots; of factors alone, factors."""
    shape, wide = target.shapes[name], torch.promote_types(target.tensor(name).dtype, torch.float32)
    factors = [(slot, change) for slot, change in parts if isinstance(change, Factors)]
    if len(factors) == len(parts):
        placed = [(slot.rows[0] if slot.rows else 0, part.to("cpu", wide)) for slot, part in factors]
        if factors[0][0].transposed:
            return stacked(placed, shape[1]).T
        return stacked(placed, shape[0])
    whole = torch.zeros(shape, dtype=wide)
    for slot, change in parts:
        slot.view(whole).copy_(dense(change))
    return whole
