"""The registry of families: which there are, and which one a model belongs to. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hf_bico.errors import UnknownFamilyError, UsageError
from hf_bico.models.families.base import Family, Shapes
from hf_bico.models.families.decoders import Decoder, Gpt2
from hf_bico.models.families.encoders import Encoder
from hf_bico.models.families.generic import Generic
from hf_bico.models.families.open_clip import OpenClip
from hf_bico.models.families.t5 import T5
from hf_bico.models.families.transformers_clip import TransformersClip
from hf_bico.models.families.vit import Vit
from hf_bico.models.wrapped_names import clean_names

if TYPE_CHECKING:
    from torch import nn


_BUILT_IN: tuple[Family, ...] = (OpenClip(), TransformersClip(), Decoder(), Gpt2(), T5(), Encoder(), Vit())
_GENERIC = Generic()
_registered: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Make a new kind of model known, for this process.

    Built-in families are asked first, then registered ones in the order of their registration, the generic one last. A
    family replaces one that was registered under the same name before, so that a notebook's cell can run again; the
    names of built-in families are refused.
    """
    if not isinstance(family, Family):
        raise TypeError(f"a family is an instance of a subclass of Family, not {family!r}")
    if family.name in {known.name for known in (*_BUILT_IN, _GENERIC)}:
        raise UsageError(f"'{family.name}' is the name of a built-in family", "give the new family a name of its own")
    _registered[family.name] = family


def all_families() -> tuple[Family, ...]:
    """Return every family, in the order in which they are asked."""
    return (*_BUILT_IN, *_registered.values(), _GENERIC)


def family_named(name: str | None) -> Family | None:
    """Return the family that a record names, or None if it is not known."""
    return next((family for family in all_families() if family.name == name), None)


def family_of(shapes: Shapes, what: str, model: Path | nn.Module) -> Family:
    """Return the family that recognises these tensors, or else accepts the model itself: its folder, or loaded.

    `what` names the model in the error.
    """
    known = all_families()
    family = next((family for family in known if family.recognises(shapes)), None)
    family = family or next((family for family in known if family.accepts(model)), None)
    if family is None:
        raise UnknownFamilyError(
            f"{what} does not belong to a known family (its tensors look like '{next(iter(shapes), 'nothing')}')",
            f"use a model of one of these families: {', '.join(family.name for family in known[:-1])}",
        )
    return family


def unwrapped_names(shapes: Shapes, folder: Path, called: str) -> Mapping[str, str]:
    """Map the tensor names that a training tool has changed to those that the model's library gives.

    `folder` holds the model's configuration, `called` names the model in errors.
    """
    known = all_families()
    names = clean_names(shapes, lambda found: any(family.has_own_names(found) for family in known), called)
    own = {names.get(name, name): shape for name, shape in shapes.items()}
    if any(family.recognises(own) for family in known) or not _GENERIC.accepts(folder):
        return names
    prefix = _GENERIC.own_prefix(own, _GENERIC.read_config(folder))
    cut = {name: names.get(name, name).removeprefix(prefix) for name in shapes}
    return {name: other for name, other in cut.items() if name != other}
