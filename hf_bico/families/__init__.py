"""The families that this tool knows, and which of them a model belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hf_bico.errors import UnknownFamilyError
from hf_bico.families.base import TEXT_TOWER, Family, Shapes, Spread
from hf_bico.families.decoders import Decoder
from hf_bico.families.encoders import Encoder
from hf_bico.families.generic import Generic, require_same_kind
from hf_bico.families.gpt2 import Gpt2
from hf_bico.families.live import ClipModel, ImageModel, LiveModel
from hf_bico.families.openclip import OpenClip
from hf_bico.families.t5 import T5
from hf_bico.families.text_models import CausalModel, EncoderModel, SequenceModel, TextModel
from hf_bico.families.transformers_clip import TransformersClip
from hf_bico.families.vit import Vit

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


__all__ = [
    "FAMILIES",
    "TEXT_TOWER",
    "CausalModel",
    "ClipModel",
    "EncoderModel",
    "Family",
    "ImageModel",
    "LiveModel",
    "SequenceModel",
    "Spread",
    "TextModel",
    "family_of",
    "require_same_kind",
]
