"""LoRAs of the scene's models, their ports, and the same ports by dense changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import hf_bico
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.deltas import Deltas
from hf_bico.models.low_rank import Factors
from hf_bico.models.model import Model
from support.paper import PAPER
from support.scenes import Scene

LORAS: dict[str, dict[str, Any]] = {
    "transformers": {"target_modules": r"vision_model\..*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)"},
    "open_clip": {
        "target_modules": r"visual\..*\.(c_fc|c_proj)",
        "target_parameters": [f"visual.transformer.resblocks.{block}.attn.in_proj_weight" for block in (0, 1)],
    },
}


CPU = torch.device("cpu")


def write_lora(scene: Scene, library: str, folder: Path, rank: int = 3, seed: int = 0, **config: Any) -> Path:
    """A LoRA over the scene's base, made and saved by peft, of which nothing is zero."""
    model = Model.open(scene.base, "the base", library).load(CPU, torch.float32).module
    settings = peft.LoraConfig(**{"r": rank, "lora_alpha": 2 * rank, **LORAS[library], **config})
    adapted = peft.get_peft_model(model, settings)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.05, generator=generator)
    adapted.save_pretrained(folder)
    return folder


def port(scene: Scene, source: Path, **options: Any) -> hf_bico.Ported:
    usual = {"base": scene.base, "data": scene.data, "n": 24, **PAPER}
    return hf_bico.port(source, to=scene.target, **{**usual, **options})


def forbid_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    def dense(self: Factors) -> torch.Tensor:
        raise AssertionError(f"a dense change of shape {self.shape} was formed")

    monkeypatch.setattr(Factors, "dense", dense)


def ported_as_dense(monkeypatch: pytest.MonkeyPatch, scene: Scene, source: Path, **options: Any) -> hf_bico.Ported:
    """The same port with every product multiplied out at the start."""
    factored = Adapter.deltas

    def multiplied(self: Adapter, base: Model) -> Deltas:
        found = factored(self, base)
        return Deltas({name: found[name] for name in found}, found.overlap)

    with monkeypatch.context() as context:
        context.setattr(Adapter, "deltas", multiplied)
        return port(scene, source, **options)
