"""The families that this tool knows, and which of them a model belongs to."""

from __future__ import annotations

from hf_bico.errors import UnknownFamilyError
from hf_bico.families.base import Family, LiveModel, Shapes
from hf_bico.families.openclip import OpenClip
from hf_bico.families.transformers_clip import TransformersClip

FAMILIES: tuple[Family, ...] = (OpenClip(), TransformersClip())


def family_of(shapes: Shapes, what: str) -> Family:
    """The family that recognises these tensors; `what` names the model in the error."""
    for family in FAMILIES:
        if family.recognises(shapes):
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise UnknownFamilyError(
        f"{what} is of no known family (its tensors look like '{next(iter(shapes), 'nothing')}')",
        f"use a model of one of these families: {known}",
    )


__all__ = ["FAMILIES", "Family", "LiveModel", "family_of"]
