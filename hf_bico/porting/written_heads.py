"""Writes classification heads into models' files and adapters, in the form that their library reads back.

Knows where each kind of model keeps its head; not how a head was made.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_bico.alignment.objectives.classification import ClassHead, in_form
from hf_bico.errors import UnsupportedModelError
from hf_bico.hub.repo_metadata import ADAPTER_CONFIG
from hf_bico.models.checkpoints import ADAPTER_FILE, Checkpoint, save_tensors
from hf_bico.models.families.base import TOKENIZER_FILES, HeadModules
from hf_bico.models.families.modules import stored_names
from hf_bico.models.families.pooling import SENTENCE_FILES, DenseLayer, Pooling, read_pooling, write_head
from hf_bico.models.families.pretrained import bare_model
from hf_bico.models.model import Model
from hf_bico.porting.head_plan import HeadPlan, files_of, read_config


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
        place = HeadPlan.of(target, head.hidden is not None).place
        if place is None:
            raise ValueError("a sentence encoder keeps a head in modules of its own")
        written = cls(place, in_form(head, place, head.width), tuple(class_names))
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
        named = class_names_config(self.class_names)
        return {
            **read_config(target),
            "architectures": [self.place.model_class],
            **named,
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

        tensors = self._as_stored(target)
        *others, last = sorted(folder.glob("model*.safetensors"))
        for file in others:  # the target's own head, for other classes, is dropped
            kept = load_file(file)
            if kept.keys() & tensors.keys():
                kept = {name: tensor for name, tensor in kept.items() if name not in tensors}
                save_tensors(kept, file, {"format": "pt"})
        save_tensors({**load_file(last), **tensors}, last, {"format": "pt"})
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            content = json.loads(index.read_text(encoding="utf-8"))
            content["weight_map"] |= dict.fromkeys(tensors, last.name)
            _write_json(content, index)
        _write_json(self.config(target), folder / "config.json")

    def _as_stored(self, target: Model) -> dict[str, Tensor]:
        """Return the tensors by their names in the target's files: without a prefix where these have none."""
        stored, prefix = target.checkpoint.shapes, "bert."
        bare = not any(name.startswith(prefix) for name in stored)
        return {name.removeprefix(prefix) if bare else name: tensor for name, tensor in self.tensors.items()}

    def add_to_adapter(self, folder: Path) -> None:
        """Add the head to an adapter, as modules that peft saves in full."""
        from safetensors.torch import load_file

        weights, config = folder / ADAPTER_FILE, folder / ADAPTER_CONFIG
        prefix = "base_model.model."
        tensors = load_file(weights) | {prefix + name: tensor for name, tensor in self.tensors.items()}
        save_tensors(dict(sorted(tensors.items())), weights, {"format": "pt"})
        content = json.loads(config.read_text(encoding="utf-8"))
        modules = {*(content.get("modules_to_save") or ()), *self.place.saved_modules}
        content["modules_to_save"] = sorted(modules)
        _write_json(content, config)


def class_names_config(class_names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a configuration that name classes."""
    names = {str(number): name for number, name in enumerate(class_names)}
    return {"id2label": names, "label2id": {name: int(number) for number, name in names.items()}}


def _write_json(content: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class SentenceHead:
    """A classification head behind the pooling of a sentence encoder, as dense layers of sentence-transformers."""

    head: ClassHead
    class_names: tuple[str, ...]
    origin: Path
    """The target's folder."""
    pooling: Pooling

    @property
    def tensors(self) -> dict[str, Tensor]:
        """There are none among the model's own."""
        return {}

    @property
    def _layers(self) -> list[DenseLayer]:
        layers = [DenseLayer(self.head.weight.cpu().float(), self.head.bias.cpu().float())]
        if self.head.hidden is not None:
            weight, bias = (part.cpu().float() for part in self.head.hidden)
            layers.insert(0, DenseLayer(weight, bias, self.head.activation))
        return layers

    def skeleton(self, target: Model) -> nn.Module:
        return target.skeleton()

    def over(self, target: Model, skeleton: nn.Module) -> Model:
        return target

    def model(self, target: Model, changes: Mapping[str, Tensor]) -> nn.Module:
        """Build the encoder with its pooling and the head, with the target's changed weights, in float32."""
        encoder: Any = copy.deepcopy(target.load(torch.device("cpu"), torch.float32).module).float()
        own, state = target.layout.own_names, encoder.state_dict()
        with torch.no_grad():
            for name, change in changes.items():
                state[own.get(name, name)].add_(change.float())
        return PooledClassifier(encoder.base_model, self.pooling, self.head).eval()

    def add_to_model(self, target: Model, folder: Path) -> None:
        """Add the layers to the modules in a model's folder, and the class names to its configuration."""
        write_head(folder, self._layers, self.pooling)
        _write_json({**read_config(target), **class_names_config(self.class_names)}, folder / "config.json")

    def add_to_adapter(self, folder: Path) -> None:
        """Put modules and tokenizer beside an adapter: sentence-transformers reads them together."""
        for name in (*SENTENCE_FILES, *TOKENIZER_FILES):
            if (self.origin / name).is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes((self.origin / name).read_bytes())
        write_head(folder, self._layers, self.pooling)


class PooledClassifier(nn.Module):
    """An encoder of texts, its pooling, and a classification head."""

    def __init__(self, encoder: nn.Module, pooling: Pooling, head: ClassHead) -> None:
        super().__init__()
        self.encoder, self.pooling = encoder, pooling
        self.head = nn.ParameterList(nn.Parameter(tensor.detach().float().cpu()) for tensor in head.tensors)
        self._activation = head.activation

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **inputs: Tensor) -> Logits:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **inputs).last_hidden_state
        weight, bias, *hidden_layer = self.head
        layers = (hidden_layer[0], hidden_layer[1]) if hidden_layer else None
        rows = self.pooling.rows(hidden, attention_mask.bool())
        return Logits(ClassHead(weight, bias, layers, self._activation).logits(rows))


@dataclass(frozen=True)
class Logits:
    """What a classifier returns, under the name that transformers gives it."""

    logits: Tensor


def written_head(head: ClassHead, target: Model, class_names: Sequence[str]) -> WrittenHead | SentenceHead:
    """Bring a head into the form that the target's library reads."""
    folder = files_of(target)
    pooling = None if folder is None else read_pooling(folder)
    if pooling is None or folder is None:
        return WrittenHead.of(head, target, class_names)
    return SentenceHead(head, tuple(class_names), folder, pooling)
