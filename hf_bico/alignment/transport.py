"""Turn changes of sites into changes of the target's tensors.

Knows task vectors and sites; not models, samples or files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import torch

from hf_bico.alignment.methods.base import SiteDelta, TransportedSite
from hf_bico.models.checkpoints import Checkpoint
from hf_bico.models.deltas import Deltas
from hf_bico.models.layout import Site, SitePair, Slot
from hf_bico.models.low_rank import Change, Factors, dense, is_zero, stacked, total


def changed_part(vector: Deltas, slot: Slot) -> Any:
    """Return the change of one slot, as factors where the vector has factors; None where nothing changed."""
    if slot.tensor not in vector:
        return None
    part: Change = slot.view(vector.change(slot.tensor))
    return None if is_zero(part) else part


def site_delta(vector: Deltas, site: Site) -> SiteDelta:
    """Return the vector's change of one site."""
    return SiteDelta(changed_part(vector, site.weight), None if site.bias is None else changed_part(vector, site.bias))


def joined(parts: Sequence[Mapping[str, TransportedSite]]) -> dict[str, TransportedSite]:
    """Sum what was transported in several steps; with the maps of the first step and the mean unseen share."""
    return {name: _joined([part[name] for part in parts]) for name in parts[0]}


def _joined(parts: Sequence[TransportedSite]) -> TransportedSite:
    if len(parts) == 1:
        return parts[0]
    deltas = [part.delta for part in parts]
    weights = [delta.weight for delta in deltas if delta.weight is not None]
    biases = [delta.bias for delta in deltas if delta.bias is not None]
    unseen = [part.unseen for part in parts if part.unseen is not None]
    delta = SiteDelta(total(weights) if weights else None, dense(total(biases)) if biases else None)
    return replace(parts[0], delta=delta, unseen=mean(unseen) if unseen else None)


def scaled(carried: Mapping[str, TransportedSite], alpha: float) -> dict[str, TransportedSite]:
    """Multiply what was transported; of nothing, no factors stay."""
    return {
        name: replace(site, delta=site.delta.scaled(alpha) if alpha else SiteDelta()) for name, site in carried.items()
    }


def assemble_changes(
    carried: Mapping[str, TransportedSite], pairs: Iterable[SitePair], target: Checkpoint, alpha: float
) -> Deltas:
    """Assemble alpha times the carried changes into the target's tensors."""
    parts: dict[str, list[tuple[Slot, Change]]] = defaultdict(list)
    for pair in pairs:
        delta = carried[pair.target.name].delta
        for slot, change in ((pair.target.weight, delta.weight), (pair.target.bias, delta.bias)):
            if slot is not None and change is not None:
                parts[slot.tensor].append((slot, alpha * change))
    return Deltas({name: _assembled(slots, target, name) for name, slots in parts.items()})


def _assembled(parts: Sequence[tuple[Slot, Change]], target: Checkpoint, name: str) -> Change:
    """Return the change of one tensor from those of its slots; as factors if all of them are."""
    shape, wide = target.shapes[name], torch.promote_types(target.tensor(name).dtype, torch.float32)
    factors = [(slot, change) for slot, change in parts if isinstance(change, Factors)]
    if len(factors) == len(parts):
        placed = [(slot.rows[0] if slot.rows else 0, part.to("cpu", wide)) for slot, part in factors]
        return stacked(placed, shape[1]).T if factors[0][0].transposed else stacked(placed, shape[0])
    whole = torch.zeros(shape, dtype=wide)
    for slot, change in parts:
        slot.view(whole).copy_(dense(change))
    return whole
