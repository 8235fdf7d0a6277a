"""Makes the heads that give models their task, and reads and writes classification heads in models' files.

Knows where each kind of model stores its head; not how a change is carried or evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_bico.alignment.methods.training import Trained
from hf_bico.alignment.objectives.base import Head, Heads, OwnHead
from hf_bico.alignment.objectives.classification import ClassHead, carried_head, in_form, logistic_head, ridge_head
from hf_bico.alignment.objectives.clip import ContrastHead, ZeroShotHead, caption_head, zero_shot_head
from hf_bico.alignment.objectives.language import AnswerHead, LanguageHead
from hf_bico.data.classes import SHOWN, folded
from hf_bico.data.dataset import DataSet
from hf_bico.data.draw import CalibrationDraw
from hf_bico.errors import (
    BrokenWeightsError,
    ClassNamesError,
    DataUnknownError,
    UnsuitableMethodError,
    UnsupportedModelError,
)
from hf_bico.hub.repo_metadata import ADAPTER_CONFIG, only_count
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.checkpoints import ADAPTER_FILE, Checkpoint, save_tensors
from hf_bico.models.deltas import Deltas
from hf_bico.models.families import all_families
from hf_bico.models.families.base import HeadModules
from hf_bico.models.families.live import LiveModel
from hf_bico.models.families.modules import stored_names
from hf_bico.models.families.pretrained import bare_model
from hf_bico.models.inference import features_of
from hf_bico.models.model import Model
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.model_pair import ModelPair
from hf_bico.settings import Settings


def _config(model: Model) -> dict[str, Any]:
    return dict(model.module.config.to_dict() if model.folder is None else model.family.read_config(model.folder))


def head_modules(model: Model) -> HeadModules:
    """Return the names of the head's layers in this type of model."""
    kind = str(_config(model).get("model_type"))
    known = model.family.head_modules
    if kind not in known:
        raise UnsupportedModelError(
            f"where a model of type '{kind}' keeps a classification head is not known",
            f"use one of: {', '.join(name for family in all_families() for name in family.head_modules)}",
        )
    return known[kind]


def read_head(source: Model | Adapter, place: HeadModules) -> ClassHead | None:
    """Read the head of a fine-tuned model or an adapter; None if it has none."""
    by_name = {name: _layer(source.checkpoint, name) for name in place.layers}
    layers = [layer for layer in by_name.values() if layer is not None]
    if not layers:
        return None
    if len(layers) < len(by_name):
        lacking = next(name for name, layer in by_name.items() if layer is None)
        raise BrokenWeightsError(f"'{source.name}' has a part of a head, but no '{lacking}'", "copy the model again")
    return ClassHead(*layers[-1], layers[0] if len(layers) > 1 else None, place.activation)


def _layer(checkpoint: Checkpoint, name: str) -> tuple[Tensor, Tensor] | None:
    """Read weight and bias of a layer, wherever an adapter or a wrapper puts it."""

    def tensor(kind: str) -> Tensor | None:
        endings = tuple(f".{name}.{inside}{kind}" for inside in ("", "modules_to_save.", "modules_to_save.default."))
        own = next((own for own in checkpoint.shapes if f".{own}".endswith(endings)), None)
        return None if own is None else checkpoint.tensor(own).float()

    weight = tensor("weight")
    bias = None if weight is None else tensor("bias")
    if weight is None or weight.ndim != 2:
        return None
    return weight, torch.zeros(len(weight)) if bias is None else bias


@dataclass(frozen=True)
class JoinedCheckpoint:
    """A checkpoint with further tensors, which replace those of the same name."""

    inner: Checkpoint
    own: Mapping[str, Tensor]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {**self.inner.shapes, **{name: tuple(tensor.shape) for name, tensor in self.own.items()}}

    def tensor(self, name: str) -> Tensor:
        return self.own[name] if name in self.own else self.inner.tensor(name)


@dataclass(frozen=True)
class WrittenHead:
    """A classification head as it is written with a target."""

    place: HeadModules
    head: ClassHead
    class_names: tuple[str, ...]

    @classmethod
    def of(cls, head: ClassHead, target: Model, class_names: Sequence[str]) -> WrittenHead:
        """Bring a head into the shape that the target's class needs."""
        place = head_modules(target)
        written = cls(place, in_form(head, place.activation, head.width), tuple(class_names))
        skeleton = written.skeleton(target)
        known = {*written.over(target, skeleton).layout.own_names.values(), *written.tensors}
        lacking = [name for name in skeleton.state_dict() if name not in known]
        if lacking:
            raise UnsupportedModelError(
                f"'{target.name}' lacks '{lacking[0]}', which a {place.model_class} needs",
                "choose a target that has it, or write the change alone with --format delta",
            )
        return written

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The head's tensors by their names in the class that has it."""
        layers = {self.place.out: (self.head.weight, self.head.bias)}
        if self.place.hidden is not None and self.head.hidden is not None:
            layers[self.place.hidden] = self.head.hidden
        return {
            f"{name}.{kind}": tensor.detach().to("cpu", torch.float32).contiguous()
            for name, layer in layers.items()
            for kind, tensor in zip(("weight", "bias"), layer, strict=True)
        }

    def config(self, target: Model) -> dict[str, Any]:
        """Return the target's configuration with the head's model class and class names."""
        names = {str(number): name for number, name in enumerate(self.class_names)}
        return {
            **_config(target),
            "architectures": [self.place.model_class],
            "id2label": names,
            "label2id": {name: int(number) for number, name in names.items()},
            "problem_type": "single_label_classification",
        }

    def skeleton(self, target: Model) -> nn.Module:
        """Build the class that has the head, without weights."""
        return bare_model(self.place.model_class, self.config(target), target.checkpoint.shapes)

    def over(self, target: Model, skeleton: nn.Module) -> Model:
        """Return the target with its tensors renamed to those of the class that has the head."""
        own = {stored: name for name, stored in stored_names(skeleton, target.checkpoint.shapes).items()}
        return replace(target, layout=replace(target.layout, own_names=own))

    def model(self, target: Model, changes: Mapping[str, Tensor]) -> nn.Module:
        """Build the class that has the head, with the target's changed weights, in float32."""
        skeleton: Any = self.skeleton(target)
        own = self.over(target, skeleton).layout.own_names
        state = {own[name]: target.checkpoint.tensor(name).float() for name in own}
        for name, change in changes.items():
            state[own[name]] = state[own[name]] + change.float()
        module: nn.Module = type(skeleton)(skeleton.config).float()
        module.load_state_dict({**state, **self.tensors})
        return module.eval()

    def add_to_model(self, target: Model, folder: Path) -> None:
        """Add the head to the weights in a full model's folder, and to its configuration."""
        from safetensors.torch import load_file

        *others, last = sorted(folder.glob("model*.safetensors"))
        for file in others:  # the target's own head, for other classes, is dropped
            kept = load_file(file)
            if kept.keys() & self.tensors.keys():
                kept = {name: tensor for name, tensor in kept.items() if name not in self.tensors}
                save_tensors(kept, file, {"format": "pt"})
        save_tensors({**load_file(last), **self.tensors}, last, {"format": "pt"})
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            content = json.loads(index.read_text(encoding="utf-8"))
            content["weight_map"] |= dict.fromkeys(self.tensors, last.name)
            _write_json(content, index)
        _write_json(self.config(target), folder / "config.json")

    def add_to_adapter(self, folder: Path) -> None:
        """Add the head to an adapter, as a module that peft saves in full."""
        from safetensors.torch import load_file

        weights, config = folder / ADAPTER_FILE, folder / ADAPTER_CONFIG
        prefix = "base_model.model."
        tensors = load_file(weights) | {prefix + name: tensor for name, tensor in self.tensors.items()}
        save_tensors(dict(sorted(tensors.items())), weights, {"format": "pt"})
        content = json.loads(config.read_text(encoding="utf-8"))
        modules = {*(content.get("modules_to_save") or ()), *(name.partition(".")[0] for name in self.place.layers)}
        content["modules_to_save"] = sorted(modules)
        _write_json(content, config)


def _write_json(content: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
    by_name: dict[str, Head] = {"text-to-text": AnswerHead(tuple(class_names)), "language-modelling": LanguageHead()}
    shared = by_name[objective] if isinstance(objective, str) else OwnHead(objective)
    return Heads(shared, shared, shared)


def _zero_shot_heads(models: ModelPair, class_names: Sequence[str]) -> Heads:
    """Embed the class names; the fine-tuned source has its own text side, which may differ."""
    if not class_names:
        raise ClassNamesError(
            "classes are asked by their names, and the data has neither labels nor names",
            "use data with labels; captions are asked by 'hf-bico port' with --method bico, theseus and the like",
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
            tuned = features_of(models.source, samples, size)
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
    """Read the fine-tuned source's head, with its classes in the data set's order; None if it has none."""
    lineage = models.lineage
    head = read_head(lineage.source, head_modules(lineage.base))
    if head is None:
        return None
    has_pooler = [
        isinstance(model, Model) and any(site.role == "pooler" for site in model.layout.sites)
        for model in (lineage.source, lineage.base)
    ]
    if has_pooler == [True, False]:
        if models.settings.fit_head:
            return None
        raise UnsuitableMethodError(
            "the fine-tuned source's head reads a pooler that its base lacks, so that it cannot be carried",
            "fit a head to the calibration samples with --probe",
        )
    return _in_class_order(head, lineage.source.origin.head_names, class_names)


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
    own = None if calibration.settings.fit_head else source_head(models, calibration.class_names)
    with models.with_changes(changes):
        target = features_of(models.target, samples, size)
    if own is None:
        return TargetHead(logistic_head(target, samples.labels, len(calibration.class_names)), "fitted")
    with models.tuned_source():
        source = features_of(models.source, samples, size)
    return TargetHead(carried_head(own, source, target), "carried")


def own_head(model: Model, holder: Model | Adapter, live: LiveModel, data: DataSet, settings: Settings) -> Head:
    """Make the head of a model that is evaluated on its own; `holder` is what stores a classifier's head."""
    objective, names = settings.objective, data.class_names
    if objective == "language-modelling":
        return LanguageHead()
    if objective == "text-to-text":
        return AnswerHead(names)
    if objective == "classification":
        head = read_head(holder, head_modules(model))
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
            "give a file with one class name a line: --class-names FILE (class_names=[...] in Python)",
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
