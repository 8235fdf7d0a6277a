"""Plans where a classification head comes from and goes to: the layers that it has in the source, and in the target.

Reads names, shapes and configurations; imports no torch, so that a plan can refuse what a port would.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_bico.errors import ModelError, UnsuitableMethodError, UnsupportedModelError
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.checkpoints import Checkpoint
from hf_bico.models.families import all_families
from hf_bico.models.families.base import FIT_INSTEAD, HeadModules
from hf_bico.models.families.encoders import POOLER
from hf_bico.models.families.pooling import declares_pooling, read_pooling
from hf_bico.models.families.pretrained import origin_of
from hf_bico.models.model import Model
from hf_bico.porting.lineage import Lineage

_SAVED = ("", "modules_to_save.", "modules_to_save.default.")
"""What adapters and wrappers put before the name of a parameter."""


def read_config(model: Model) -> dict[str, Any]:
    return dict(model.module.config.to_dict() if model.folder is None else model.family.read_config(model.folder))


def head_modules(model: Model) -> HeadModules:
    """Return the names of the head's layers in this type of model."""
    kind = str(read_config(model).get("model_type"))
    known = model.family.head_modules
    if kind not in known:
        raise UnsupportedModelError(
            f"where a model of type '{kind}' keeps a classification head is not known",
            f"use one of: {', '.join(name for family in all_families() for name in family.head_modules)}",
        )
    return known[kind]


def has_pooler(model: Model) -> bool:
    """Tell whether a model has a pooler that its class reads texts by."""
    return any(site.role == POOLER for site in model.layout.sites)


def files_of(model: Model) -> Path | None:
    """Return the folder of a model; of a loaded module, the one that it was read from, if known."""
    return origin_of(model.module) if model.folder is None else model.folder


def pools_by_file(model: Model) -> bool:
    """Tell whether the files of a model of texts say how its tokens are pooled."""
    folder = files_of(model)
    return folder is not None and declares_pooling(folder, {} if model.place is None else model.place.sizes)


def place_in_source(source: Model | Adapter, base: Model) -> HeadModules:
    """Return the layers of a fine-tuned model's head; with a pooler that its base lacks, which is its hidden layer."""
    place = head_modules(base)
    if place.pooler is None or has_pooler(base) or parameter(source.checkpoint, place.out, "weight") is None:
        return place
    if parameter(source.checkpoint, place.pooler, "weight") is None:
        raise UnsuitableMethodError(
            f"the head of '{source.name}' reads a pooler, which neither it nor its base '{base.name}' holds",
            FIT_INSTEAD,
        )
    return place.by_pooler


def parameter(checkpoint: Checkpoint, layer: str, kind: str) -> str | None:
    """Return the name of a layer's weight or bias, wherever an adapter or a wrapper puts it; None without one."""
    endings = tuple(f".{layer.removeprefix('bert.')}.{inside}{kind}" for inside in _SAVED)
    return next((own for own in checkpoint.shapes if f".{own}".endswith(endings)), None)


@dataclass(frozen=True)
class HeadPlan:
    """How a classification head is written for a target."""

    place: HeadModules | None
    """The layers of the target's class; None for dense layers behind a sentence encoder's pooling."""
    past_pooler: bool = False
    """Whether the head reads the first token, and its hidden layer is written as the pooler."""

    @classmethod
    def of(cls, target: Model, has_hidden: bool) -> HeadPlan:
        """Plan a head for a target; `has_hidden` says whether it has a hidden layer."""
        place = head_modules(target)
        if pools_by_file(target):
            return cls(None)
        if place.pooler is not None and (has_hidden or not has_pooler(target)):
            return cls(place.by_pooler, past_pooler=True)
        return cls(place)


def has_usable_head(lineage: Lineage) -> bool:
    """Tell whether the fine-tuned source has a classification head, with all that it reads."""
    try:
        place = place_in_source(lineage.source, lineage.base)
    except ModelError:
        return False
    if parameter(lineage.source.checkpoint, place.out, "weight") is not None:
        return True
    folder = lineage.source.folder
    pooling = None if folder is None or isinstance(lineage.source, Adapter) else read_pooling(folder)
    return pooling is not None and bool(pooling.head)


def head_refusal(lineage: Lineage, fitted: bool = False) -> ModelError | None:
    """Return the error that a port would raise over the classification head of these models, if any."""
    if "classification" not in lineage.base.layout.objectives[:1]:
        return None
    try:
        place = place_in_source(lineage.source, lineage.base)
        own = parameter(lineage.source.checkpoint, place.out, "weight")
        hidden = None if place.hidden is None else parameter(lineage.source.checkpoint, place.hidden, "weight")
        target = HeadPlan.of(lineage.target, own is not None and hidden is not None and not fitted)
        if own is None or fitted or target.place is None or hidden is None:
            return None
        units, width = lineage.source.checkpoint.shapes[hidden][0], lineage.target.layout.sites[0].shape[1]
        target.place.require_room(units, place.activation, width)
    except ModelError as error:
        return None if fitted and isinstance(error, UnsuitableMethodError) else error
    return None
