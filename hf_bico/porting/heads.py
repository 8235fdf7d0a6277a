"""Makes the heads that give models their task: of class names, fitted to samples, or read from a fine-tuned source.

Knows loaded models and samples; not how a change is carried or evaluated, nor how heads are written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_bico.alignment.methods.training import Trained
from hf_bico.alignment.objectives.base import Head, Heads, OwnHead
from hf_bico.alignment.objectives.classification import ClassHead, carried_head, logistic_head, ridge_head
from hf_bico.alignment.objectives.clip import ContrastHead, ZeroShotHead, caption_head, zero_shot_head
from hf_bico.alignment.objectives.language import AnswerHead, LanguageHead
from hf_bico.data.classes import NAMES_REMEDY, SHOWN, folded
from hf_bico.data.dataset import DataSet
from hf_bico.data.draw import CalibrationDraw
from hf_bico.errors import (
    BrokenWeightsError,
    ClassNamesError,
    DataUnknownError,
    UnsuitableMethodError,
    UnsupportedModelError,
)
from hf_bico.hub.repo_metadata import only_count
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.checkpoints import Checkpoint
from hf_bico.models.deltas import Deltas
from hf_bico.models.families.live import CLASS, FIRST_TOKEN, LiveModel
from hf_bico.models.families.pooling import read_pooling
from hf_bico.models.inference import features_of
from hf_bico.models.model import Model
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.head_plan import HeadPlan, parameter, place_in_source
from hf_bico.porting.model_pair import ModelPair
from hf_bico.settings import Settings


def read_head(source: Model | Adapter, base: Model) -> ClassHead | None:
    """Read the head of a fine-tuned model or an adapter of `base`, as `base` runs it; None if it has none."""
    pooling = read_pooling(source.folder) if isinstance(source, Model) and source.folder is not None else None
    if pooling is not None and pooling.head:
        *before, last = pooling.head
        return ClassHead(*last.parts, *((before[0].parts, before[0].activation) if before else ()))
    place = place_in_source(source, base)
    by_name = {name: _layer(source.checkpoint, name) for name in place.layers}
    layers = [layer for layer in by_name.values() if layer is not None]
    if not layers:
        return None
    if len(layers) < len(by_name):
        lacking = next(name for name, layer in by_name.items() if layer is None)
        raise BrokenWeightsError(f"'{source.name}' has a part of a head, but no '{lacking}'", "copy the model again")
    hidden_layer = layers[0] if len(layers) > 1 else None
    return ClassHead(*layers[-1], hidden_layer, place.activation if hidden_layer else None, CLASS)


def _layer(checkpoint: Checkpoint, name: str) -> tuple[Tensor, Tensor] | None:
    """Read weight and bias of a layer, wherever an adapter or a wrapper puts it."""
    weight, bias = (parameter(checkpoint, name, kind) for kind in ("weight", "bias"))
    rows = None if weight is None else checkpoint.tensor(weight).float()
    if rows is None or rows.ndim != 2:
        return None
    return rows, torch.zeros(len(rows)) if bias is None else checkpoint.tensor(bias).float()


def make_heads(models: ModelPair, class_names: Sequence[str], drawn: CalibrationDraw | None) -> Heads:
    """Make the heads of both pretrained models and of the fine-tuned source, by the objective of the settings."""
    settings, objective = models.settings, models.settings.objective
    if objective == "zero-shot":
        return _zero_shot_heads(models, class_names)
    if objective in ("contrastive", "classification"):
        if drawn is None:
            raise ValueError(f"{objective} heads are made from samples")
        if objective == "classification":
            return _classification_heads(models, class_names, drawn)
        names = class_names if drawn.data.labelled else ()
        source, target = (
            caption_head(model, drawn.samples, settings.batch, names, settings.templates)
            for model in (models.source, models.target)
        )
        return Heads(source, target, source)
    per_byte = models.pairing is not None
    by_name: dict[str, Head] = {
        "text-to-text": AnswerHead(tuple(class_names), per_byte=per_byte),
        "language-modelling": LanguageHead(per_byte=per_byte),
    }
    shared = by_name[objective] if isinstance(objective, str) else OwnHead(objective)
    return Heads(shared, shared, shared)


def _zero_shot_heads(models: ModelPair, class_names: Sequence[str]) -> Heads:
    """Embed the class names; the fine-tuned source has its own text side, which may differ."""
    if not class_names:
        raise ClassNamesError(
            "the models classify by class names, and the data has neither labels nor names",
            "use data with labels; captions work in 'hf-bico port' with --method bico, theseus and the like",
        )
    templates = models.settings.templates
    source, target = (zero_shot_head(model, class_names, templates) for model in (models.source, models.target))
    with models.tuned_source():
        return Heads(source, target, zero_shot_head(models.source, class_names, templates))


def _classification_heads(models: ModelPair, class_names: Sequence[str], drawn: CalibrationDraw) -> Heads:
    """Fit ridge heads to the pretrained models' features; the fine-tuned source keeps its own head."""
    size, samples = models.settings.batch, drawn.samples
    source, target = (features_of(model, samples, size) for model in (models.source, models.target))
    own = source_head(models, class_names)
    labels: Sequence[int] = samples.labels
    if drawn.labels == "pseudo" or own is None:
        with models.tuned_source():
            tuned = features_of(models.source, samples, size, None if own is None else own.reading)
        if own is None and drawn.labels == "pseudo":
            raise DataUnknownError(
                "the data has no labels, and the fine-tuned source has no head that could predict any",
                "use data with labels",
            )
        own = own or logistic_head(tuned, labels, len(class_names))
        labels = own.logits(tuned).argmax(-1).tolist() if drawn.labels == "pseudo" else labels
    ridges = [ridge_head(features, labels, len(class_names)) for features in (source, target)]
    return Heads(ridges[0], ridges[1], own)


def source_head(models: ModelPair, class_names: Sequence[str]) -> ClassHead | None:
    """Read the fine-tuned source's head, with its classes in the data set's order; None if it has none.

    A head that cannot be used counts for none where another is to be fitted.
    """
    lineage = models.lineage
    try:
        head = read_head(lineage.source, lineage.base)
    except UnsuitableMethodError:
        if not models.settings.probe:
            raise
        return None
    return None if head is None else _in_class_order(head, lineage.source.origin.head_names, class_names)


@dataclass(frozen=True)
class TargetHead:
    """A classification head for the target; `origin` is "carried" from the source or "fitted" to the samples."""

    head: ClassHead
    origin: str


def target_head(calibration: Calibration, changes: Deltas, trained: Trained | None = None) -> TargetHead | None:
    """Return the head for the target with these changes; None if the objective is not classification.

    The source's head was tuned together with its features, so it is carried by the map from the changed target's
    features to those of the fine-tuned source. A trained target keeps the head that it was trained with.
    """
    if calibration.settings.objective != "classification":
        return None
    models, samples, size = calibration.models, calibration.drawn_samples, calibration.settings.batch
    if trained is not None and isinstance(calibration.heads.target, ClassHead):
        return TargetHead(calibration.heads.target, "fitted")
    own = None if calibration.settings.probe else source_head(models, calibration.class_names)
    reading = target_reading(models, own)
    with models.with_changes(changes):
        target = features_of(models.target, samples, size, reading)
    if own is None:
        fitted = logistic_head(target, samples.labels, len(calibration.class_names))
        return TargetHead(replace(fitted, reading=reading), "fitted")
    with models.tuned_source():
        source = features_of(models.source, samples, size, own.reading)
    return TargetHead(replace(carried_head(own, source, target), reading=reading), "carried")


def target_reading(models: ModelPair, own: ClassHead | None) -> str | None:
    """Return what the target's head reads, if not its features: the first token, where it brings a pooler along."""
    planned = HeadPlan.of(models.lineage.target, own is not None and own.hidden is not None)
    return FIRST_TOKEN if planned.past_pooler else None


def own_head(model: Model, holder: Model | Adapter, live: LiveModel, data: DataSet, settings: Settings) -> Head:
    """Make the head of a model that is evaluated on its own; `holder` is what stores a classifier's head."""
    objective, names = settings.objective, data.class_names
    if objective == "language-modelling":
        return LanguageHead()
    if objective == "text-to-text":
        return AnswerHead(names)
    if objective == "classification":
        head = read_head(holder, model)
        if head is None:
            raise UnsupportedModelError(
                f"'{holder.name}' has no classification head", "measure it by a linear probe: --probe 100"
            )
        return _in_class_order(head, holder.origin.head_names, names)
    if data.labelled:
        return zero_shot_head(live, names, settings.templates)
    return ContrastHead()


def _in_class_order(head: ClassHead, own: Sequence[str], class_names: Sequence[str]) -> ClassHead:
    """Sort a head's classes into the data set's order, by name if both have the same names."""
    if not class_names:
        raise ClassNamesError(
            "neither the data nor the fine-tuned model names the classes",
            NAMES_REMEDY,
        )
    if len(head.bias) != len(class_names):
        raise ClassNamesError(
            f"the fine-tuned model tells {len(head.bias)} classes apart, and the data set has {len(class_names)}",
            "use data with the model's own classes",
        )
    ours, theirs = _spelt_alike(own, class_names)
    if sorted(ours) == sorted(theirs) and len(set(ours)) == len(ours):
        return head.in_order([ours.index(name) for name in theirs])
    if only_count(own) or only_count(class_names):  # numbers only count: the first of them is the first class
        return head
    shared = [name for name in theirs if name in ours and len(ours) == len(theirs)]
    moved = [name for name in shared if ours.index(name) != theirs.index(name)]
    if moved:
        raise ClassNamesError(
            f"'{class_names[theirs.index(moved[0])]}' is class {ours.index(moved[0])} of the fine-tuned model and "
            f"{theirs.index(moved[0])} of the data set, and not all of their classes are the same",
            "use data with the model's own classes",
        )
    return head


def _spelt_alike(*sides: Sequence[str]) -> list[list[str]]:
    """Normalise capitals, accents and word separators in class names, unless two classes would become equal.

    >>> _spelt_alike(["LABEL_ONE", "Two"], ["two", "label one"])
    [['label one', 'two'], ['two', 'label one']]
    >>> _spelt_alike(["caf\u00e9"], ["cafe\u0301"])
    [['café'], ['café']]
    """
    alike = [[" ".join(re.split(r"[\s_-]+", folded(name))) for name in names] for names in sides]
    return alike if all(len(set(names)) == len(names) for names in alike) else [list(names) for names in sides]


def class_order_notice(own: Sequence[str], class_names: Sequence[str], sorts_classes: bool) -> list[str]:
    """Return a notice if a head's classes have other names than the data set's, and are paired by order only.

    Labels that are numbers say themselves which class of the head they mean, unless they are texts that were sorted.
    """
    ours, theirs = _spelt_alike(own, class_names)
    if sorted(ours) == sorted(theirs) or (not sorts_classes and (only_count(own) or only_count(class_names))):
        return []
    if only_count(own):
        pairs = [f"'{name[:SHOWN]}' is its class {number}" for number, name in enumerate(class_names)]
        listed = ", ".join(pairs[:2] + (["..."] if len(pairs) > 3 else []) + pairs[2:][-1:])
        return [
            "The fine-tuned model does not name its classes, and the data set's were paired with them in sorted order: "
            f"{listed}. --class-names gives another order."
        ]
    first, other = (
        ", ".join(name[:SHOWN] for name in names[:3]) + (", ..." if len(names) > 3 else "")
        for names in (own, class_names)
    )
    return [
        f"The fine-tuned model's classes are called {first} and the data set's {other}: they were paired in this order."
    ]


def tuned_target_head(models: ModelPair, class_names: Sequence[str], pretrained: Head) -> Head:
    """Return the head of a fine-tuned target, whose text side may differ."""
    if isinstance(pretrained, ZeroShotHead):
        return zero_shot_head(models.target, class_names, models.settings.templates)
    return pretrained
