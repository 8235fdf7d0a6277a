"""Classification heads in models' files: where each kind of model keeps one, how it is read, and how written.

Knows tensors' names and configurations; not how a head is found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_bico.alignment.objectives.classification import ClassHead, in_form
from hf_bico.errors import BrokenWeightsError, UnsupportedModelError
from hf_bico.hub.repo_metadata import ADAPTER_CONFIG
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.checkpoints import ADAPTER_FILE, Checkpoint, save_tensors
from hf_bico.models.families.modules import stored_names
from hf_bico.models.families.pretrained import bare_model
from hf_bico.models.model import Model


@dataclass(frozen=True)
class HeadPlace:
    """Where models of one kind keep a classification head: the class that has it, and the layers' names in it."""

    model_class: str
    out: str = "classifier"
    hidden: str | None = None
    activation: str | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        return (self.out,) if self.hidden is None else (self.hidden, self.out)


_WITH_HIDDEN = {"hidden": "classifier.dense", "out": "classifier.out_proj", "activation": "tanh"}
PLACES = {
    "bert": HeadPlace("BertForSequenceClassification"),
    "roberta": HeadPlace("RobertaForSequenceClassification", **_WITH_HIDDEN),
    "xlm-roberta": HeadPlace("XLMRobertaForSequenceClassification", **_WITH_HIDDEN),
    "distilbert": HeadPlace("DistilBertForSequenceClassification", hidden="pre_classifier", activation="relu"),
    "vit": HeadPlace("ViTForImageClassification"),
    "deit": HeadPlace("DeiTForImageClassification"),
}
"""By the `model_type` of a configuration."""


def config_of(model: Model) -> dict[str, Any]:
    """The configuration of a model, from its folder or as it is loaded."""
    if model.folder is not None:
        return dict(model.family.read_config(model.folder))
    return dict(model.module.config.to_dict())


def place_of(model: Model) -> HeadPlace:
    """Where this kind of model keeps a head."""
    kind = config_of(model).get("model_type")
    if kind not in PLACES:
        raise UnsupportedModelError(
            f"where a model of type '{kind}' keeps a classification head is not known",
            f"use one of: {', '.join(PLACES)}",
        )
    return PLACES[kind]


def head_of(source: Model | Adapter, place: HeadPlace) -> ClassHead | None:
    """The head that a fine-tuned model or an adapter holds; None where it holds none."""
    found = {name: _layer(source.checkpoint, name) for name in place.layers}
    layers = [layer for layer in found.values() if layer is not None]
    if not layers:
        return None
    if len(layers) < len(found):
        lacking = next(name for name, layer in found.items() if layer is None)
        raise BrokenWeightsError(f"'{source.name}' has a part of a head, but no '{lacking}'", "copy the model again")
    return ClassHead(*layers[-1], layers[0] if len(layers) > 1 else None, place.activation)


def _layer(checkpoint: Checkpoint, name: str) -> tuple[Tensor, Tensor] | None:
    """Weight and bias of a layer, wherever an adapter or a wrapper puts it."""

    def tensor(kind: str) -> Tensor | None:
        endings = (f"{name}.{kind}", f"{name}.modules_to_save.{kind}", f"{name}.modules_to_save.default.{kind}")
        for own in checkpoint.shapes:
            if any(own == ending or own.endswith(f".{ending}") for ending in endings):
                found: Tensor = checkpoint.tensor(own)
                return found.float()
        return None

    weight = tensor("weight")
    bias = None if weight is None else tensor("bias")
    if weight is None or weight.ndim != 2:
        return None
    return weight, torch.zeros(len(weight)) if bias is None else bias


@dataclass(frozen=True)
class JoinedCheckpoint:
    """Tensors of which some are held here, in place of or beside those of another."""

    inner: Checkpoint
    own: Mapping[str, Tensor]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {**self.inner.shapes, **{name: tuple(tensor.shape) for name, tensor in self.own.items()}}

    def tensor(self, name: str) -> Tensor:
        return self.own[name] if name in self.own else self.inner.tensor(name)


@dataclass(frozen=True)
class HeadForm:
    """A head as it is written beside a target, whose class has one."""

    place: HeadPlace
    head: ClassHead
    class_names: tuple[str, ...]
    origin: str
    """ "carried" from the source, or "fitted" to the calibration samples."""

    @classmethod
    def of(cls, head: ClassHead, target: Model, class_names: Sequence[str], origin: str) -> HeadForm:
        """The head in the form that the target's class has."""
        place = place_of(target)
        form = cls(place, in_form(head, place.activation, head.width), tuple(class_names), origin)
        skeleton = form.skeleton(target)
        known = {*form.over(target, skeleton).layout.own_names.values(), *form.tensors}
        lacking = [name for name in skeleton.state_dict() if name not in known]
        if lacking:
            raise UnsupportedModelError(
                f"'{target.name}' lacks '{lacking[0]}', which a {place.model_class} needs",
                "choose a target that has it, or write the change alone with --format delta",
            )
        return form

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By their names in the class that has the head."""
        layers = {self.place.out: (self.head.weight, self.head.bias)}
        if self.place.hidden is not None and self.head.hidden is not None:
            layers[self.place.hidden] = self.head.hidden
        return {
            f"{name}.{kind}": tensor.detach().to("cpu", torch.float32).contiguous()
            for name, layer in layers.items()
            for kind, tensor in zip(("weight", "bias"), layer, strict=True)
        }

    def config(self, target: Model) -> dict[str, Any]:
        """The target's configuration, with the head's class and the names of its classes."""
        names = {str(number): name for number, name in enumerate(self.class_names)}
        return {
            **config_of(target),
            "architectures": [self.place.model_class],
            "id2label": names,
            "label2id": {name: int(number) for number, name in names.items()},
            "problem_type": "single_label_classification",
        }

    def skeleton(self, target: Model) -> nn.Module:
        """The class that has the head, without weights."""
        return bare_model(self.place.model_class, self.config(target), target.checkpoint.shapes)

    def over(self, target: Model, skeleton: nn.Module) -> Model:
        """The target with its tensors known by their names in the class that has the head."""
        own = {stored: name for name, stored in stored_names(skeleton, target.checkpoint.shapes).items()}
        return replace(target, layout=replace(target.layout, own_names=own))

    def model(self, target: Model, changes: Mapping[str, Tensor]) -> nn.Module:
        """The class that has the head, with the target's weights, changes and all, in float32."""
        skeleton: Any = self.skeleton(target)
        own = self.over(target, skeleton).layout.own_names
        found = {own[name]: target.checkpoint.tensor(name).float() for name in own}
        for name, change in changes.items():
            found[own[name]] = found[own[name]] + change.float()
        module: nn.Module = type(skeleton)(skeleton.config).float()
        module.load_state_dict({**found, **self.tensors})
        return module.eval()

    def add_to_model(self, target: Model, folder: Path) -> None:
        """Put the head beside the weights that a full model's folder holds, and into its configuration."""
        from safetensors.torch import load_file

        *others, last = sorted(folder.glob("model*.safetensors"))
        for file in others:  # a head of the target's own, for other classes, gives way
            kept = load_file(file)
            if kept.keys() & self.tensors.keys():
                kept = {name: tensor for name, tensor in kept.items() if name not in self.tensors}
                save_tensors(kept, file, {"format": "pt"})
        save_tensors({**load_file(last), **self.tensors}, last, {"format": "pt"})
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            content = json.loads(index.read_text(encoding="utf-8"))
            content["weight_map"] |= dict.fromkeys(self.tensors, last.name)
            index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        config = json.dumps(self.config(target), indent=2, sort_keys=True)
        (folder / "config.json").write_text(config + "\n", encoding="utf-8")

    def add_to_adapter(self, folder: Path) -> None:
        """Put the head into an adapter, as a module that peft saves whole."""
        from safetensors.torch import load_file

        weights, config = folder / ADAPTER_FILE, folder / ADAPTER_CONFIG
        prefix = "base_model.model."
        tensors = load_file(weights) | {prefix + name: tensor for name, tensor in self.tensors.items()}
        save_tensors(dict(sorted(tensors.items())), weights, {"format": "pt"})
        content = json.loads(config.read_text(encoding="utf-8"))
        modules = {*(content.get("modules_to_save") or ()), *(name.partition(".")[0] for name in self.place.layers)}
        content["modules_to_save"] = sorted(modules)
        config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
