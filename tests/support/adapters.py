"""Adapters that peft itself made over small models, and what peft says that they change."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from support.toys import WRITERS, Toy, random_state

TOY = Toy()
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."

READ_BY_PEFT: dict[str, dict[str, Any]] = {
    "ADALORA": {"init_r": 4, "target_r": 2, "total_step": 10, "tinit": 1, "tfinal": 1},
    "LOHA": {"r": 4, "alpha": 3},
    "LOKR": {"r": 4, "alpha": 3},
    "VERA": {"r": 4},
    "PVERA": {"r": 4},
    "FOURIERFT": {"n_frequency": 50},
    "WAVEFT": {"n_frequency": 50},
    "VBLORA": {"r": 4, "num_vectors": 8, "vector_length": 8},
    "RANDLORA": {"r": 4},
    "SHIRA": {"r": 4, "random_seed": 1},
    "C3A": {"block_size": 8},
    "GRALORA": {"r": 4, "gralora_k": 2},
    "DELORA": {"r": 4},
}
"""Of every kind that is read by peft itself, a configuration for small layers."""


@dataclass(frozen=True)
class Base:
    """A model folder, and the way its own library reads it."""

    folder: Path
    load: Callable[[Path], nn.Module]

    def model(self) -> nn.Module:
        """A copy of its own for each who asks."""
        return deepcopy(self._model)

    @cached_property
    def _model(self) -> nn.Module:
        return self.load(self.folder).float().eval()


def transformers_base(folder: Path, toy: Toy = TOY) -> Base:
    from transformers import CLIPModel

    return Base(WRITERS["transformers"](folder, toy, random_state(toy, 0)), CLIPModel.from_pretrained)


def open_clip_base(folder: Path, toy: Toy = TOY) -> Base:
    import open_clip

    from support.toys import open_clip_config

    def load(written: Path) -> nn.Module:
        model: nn.Module = open_clip.CLIP(**open_clip_config(toy))
        model.load_state_dict(load_file(written / "open_clip_model.safetensors"), strict=False)
        return model

    return Base(WRITERS["open_clip"](folder, toy, random_state(toy, 0)), load)


def saved_base(folder: Path, build: Callable[[], Any]) -> Base:
    """A transformers model of any class, in the folder that it saves itself to."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(folder)
    return Base(folder, type(model).from_pretrained)


def lora(targets: Any, **fields: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 2, "lora_alpha": 6, "target_modules": targets, **fields})


def other(kind: str, **fields: Any) -> peft.PeftConfig:
    return peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)](**fields)


def adapted(model: nn.Module, config: peft.PeftConfig, seed: int = 1) -> peft.PeftModel:
    """The model with an adapter of which no parameter is as it was initialised."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapter = peft.get_peft_model(model, config).eval()
        for parameter in adapter.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return adapter


def saved(base: Base, config: peft.PeftConfig, folder: Path, seed: int = 1) -> Path:
    adapted(base.model(), config, seed).save_pretrained(folder)
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / WEIGHTS)


def rewritten(folder: Path, tensors: Mapping[str, Tensor] | None = None, **fields: Any) -> Path:
    """The adapter with these tensors instead, and these fields of its configuration."""
    if tensors is not None:
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    file = folder / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def renamed(folder: Path, rename: Callable[[str], str]) -> Path:
    return rewritten(folder, {rename(name): tensor for name, tensor in tensors_of(folder).items()})


def merged(model: Any) -> nn.Module:
    """All of an adapter merged; where a module is wrapped around others that are, peft needs several goes."""
    inner = model.merge_and_unload()
    while any(isinstance(part, BaseTunerLayer) for part in inner.modules()):
        inner = model.merge_and_unload()
    return inner


def by_peft(folder: Path, base: Base, model: nn.Module | None = None) -> dict[str, Tensor]:
    """What peft's merge changes of every tensor of the base, in float64, by the names in its file."""
    start = base.model() if model is None else model
    before = _state(start.double())
    after = _state(merged(peft.PeftModel.from_pretrained(start.float(), folder).eval().double()))
    return {name: after[name] - before[name] for name in before}


def _state(model: Any) -> dict[str, Tensor]:
    """A copy of a model's tensors, as its own library would save them."""
    if not hasattr(model, "save_pretrained"):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: tensor.clone() for name, tensor in load_file(Path(folder) / "model.safetensors").items()}


def assert_same(vector: Mapping[str, Tensor], truth: Mapping[str, Tensor], tolerance: float = 1e-6) -> None:
    """Every tensor that changes is in the vector, and changes in it by the same; nothing else is there."""
    assert set(vector) == {name for name, change in truth.items() if change.any()}
    assert len(vector)
    for name, ours in vector.items():
        error = (ours.double() - truth[name]).abs().max() / truth[name].abs().max()
        assert error <= tolerance, f"{name}: {error:.1e}"
