"""The families that this tool knows, and which of them a model belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hf_bico.errors import UnknownFamilyError
from hf_bico.families.base import TEXT_TOWER, Family, LiveModel, Shapes
from hf_bico.families.generic import Generic, require_same_kind
from hf_bico.families.openclip import OpenClip
from hf_bico.families.transformers_clip import TransformersClip

if TYPE_CHECKING:
    from torch import nn

_KNOWN: tuple[Family, ...] = (OpenClip(), TransformersClip())
FAMILIES: tuple[Family, ...] = (*_KNOWN, Generic())


def family_of(shapes: Shapes, what: str, model: Path | nn.Module) -> Family:
    """The family that recognises these tensors, else one that takes the model itself: its folder, or as it is loaded.

    `what` names the model in the error.
    """
    for family in _KNOWN:
        if family.recognises(shapes):
            return family
    for family in FAMILIES:
        if family.accepts(model):
            return family
    known = ", ".join(family.name for family in _KNOWN)
    raise UnknownFamilyError(
        f"{what} is of no known family (its tensors look like '{next(iter(shapes), 'nothing')}')",
        f"use a model of one of these families: {known}",
    )


__all__ = ["FAMILIES", "TEXT_TOWER", "Family", "LiveModel", "family_of", "require_same_kind"]
