"""Tells whether two models of a port are one: the same object or files, or, once they are read, equal weights."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hf_bico.errors import BaseMismatchError
from hf_bico.models.model import Model, OpenedRepo
from hf_bico.models.name_matching import align_names

if TYPE_CHECKING:
    from torch import Tensor

    from hf_bico.models.deltas import Deltas

BASE, FINE_TUNED = "The target is the base itself.", "The target is the fine-tuned model itself."
_SAME = 0.01
"""The largest distance from the fine-tuned weights, as a share of their change: a merge rounds by less."""


def is_opened_twice(one: OpenedRepo, other: OpenedRepo) -> bool:
    """Tell whether two models are one loaded module, or the same files of one repo or folder; reads no weights."""
    if one.folder is None or other.folder is None:
        loaded = one.module if isinstance(one, Model) else None
        return loaded is not None and isinstance(other, Model) and other.module is loaded
    if one.weights != other.weights:
        return False
    if one.commit is not None or other.commit is not None:
        return (one.name, one.commit) == (other.name, other.commit)
    return os.path.samefile(one.folder, other.folder)


def has_weights_of(target: Model, base: Model, change: Deltas | None = None) -> bool:
    """Tell whether the target's weights are the base's, with this change of them; ends at the first that is not."""
    start, found = base.as_loaded, target.as_loaded
    sites, others = ([(site.name, site.shape) for site in model.layout.main_sites] for model in (base, target))
    if target.family.name != base.family.name or sites != others:
        return False
    try:
        places = align_names(start.shapes, found.shapes)
    except BaseMismatchError:
        return False
    carried = {base.layout.own_names.get(site.weight.tensor, site.weight.tensor) for site in base.layout.main_sites}
    if not carried <= places.keys() or any(start.shapes[name] != found.shapes[place] for name, place in places.items()):
        return False
    changes = {} if change is None else change.renamed(base.layout.own_names)
    return all(_is_sum(found.tensor(place), start.tensor(name), changes.get(name)) for name, place in places.items())


def _is_sum(value: Tensor, start: Tensor, change: Tensor | None) -> bool:
    """Tell whether a weight is another one, or its sum with a change, in the coarser precision of the two."""
    import torch

    coarse = min(value.dtype, start.dtype, key=lambda dtype: dtype.itemsize)
    start = start.to(value.device)
    if change is None:
        return torch.equal(value.to(coarse), start.to(coarse))
    change = change.to(value.device)
    wide = torch.promote_types(start.dtype, change.dtype)
    off = value.to(coarse).to(wide) - (start.to(wide) + change.to(wide)).to(coarse).to(wide)
    return bool(off.norm() <= _SAME * change.norm())
