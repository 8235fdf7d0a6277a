"""The families that this tool knows, and which of them a model belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hf_bico.errors import UnknownFamilyError
from hf_bico.models.families.base import Family, Shapes
from hf_bico.models.families.decoders import Decoder, Gpt2
from hf_bico.models.families.encoders import Encoder
from hf_bico.models.families.generic import Generic
from hf_bico.models.families.open_clip import OpenClip
from hf_bico.models.families.t5 import T5
from hf_bico.models.families.transformers_clip import TransformersClip
from hf_bico.models.families.vit import Vit

if TYPE_CHECKING:
    from torch import nn


_KNOWN: tuple[Family, ...] = (OpenClip(), TransformersClip(), Decoder(), Gpt2(), T5(), Encoder(), Vit())
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
