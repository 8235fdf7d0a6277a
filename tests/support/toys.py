"""Small CLIP models with random weights, in the real layouts of both libraries, and rows to run through them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_bico.experiments.demo.digits import CONTEXT_LENGTH, build_tokenizer

CLASS_NAMES = ("zero", "one", "two", "three")
TEXT_WIDTH = 16


@dataclass(frozen=True)
class Toy:
    """The shape of a small CLIP."""

    width: int = 16
    blocks: int = 2
    heads: int = 2
    grid: int = 4
    patch: int = 4
    embedding: int = 12
    mlp_ratio: int = 2
    text_width: int = TEXT_WIDTH
    text_blocks: int = 1

    @property
    def image_size(self) -> int:
        return self.grid * self.patch

    def but(self, **changes: int) -> Toy:
        return replace(self, **changes)


def open_clip_config(toy: Toy) -> dict[str, Any]:
    return {
        "embed_dim": toy.embedding,
        "vision_cfg": {
            "image_size": toy.image_size,
            "patch_size": toy.patch,
            "width": toy.width,
            "layers": toy.blocks,
            "head_width": toy.width // toy.heads,
            "mlp_ratio": float(toy.mlp_ratio),
        },
        "text_cfg": {
            "context_length": CONTEXT_LENGTH,
            "vocab_size": len(build_tokenizer()),
            "hf_tokenizer_name": "toy",
            "width": toy.text_width,
            "heads": 2,
            "layers": toy.text_blocks,
        },
    }


def random_state(toy: Toy, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights of an open_clip model, larger than at initialisation so that every part matters."""
    import open_clip

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        state = open_clip.CLIP(**open_clip_config(toy)).state_dict()
        for name, tensor in state.items():
            if tensor.ndim == 2 and "embedding" not in name:
                tensor.normal_(std=tensor.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                tensor.normal_(std=0.1)
    state["logit_scale"] = torch.tensor(2.0)
    return {name: tensor.to(dtype).contiguous() for name, tensor in state.items() if name != "attn_mask"}


def write_open_clip(folder: Path, toy: Toy, state: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    size = toy.image_size
    preprocess = {"size": [size, size], "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}
    config = {"model_cfg": open_clip_config(toy), "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    save_file(state, folder / "open_clip_model.safetensors", metadata={"format": "pt"})
    build_tokenizer().save_pretrained(folder)
    return folder


def transformers_config(toy: Toy) -> Any:
    from transformers import CLIPConfig

    tokenizer = build_tokenizer()
    vision = {
        "hidden_size": toy.width,
        "intermediate_size": toy.width * toy.mlp_ratio,
        "num_hidden_layers": toy.blocks,
        "num_attention_heads": toy.heads,
        "image_size": toy.image_size,
        "patch_size": toy.patch,
        "projection_dim": toy.embedding,
        "hidden_act": "gelu",
    }
    text = {
        "hidden_size": toy.text_width,
        "intermediate_size": toy.text_width * 4,
        "num_hidden_layers": toy.text_blocks,
        "num_attention_heads": 2,
        "max_position_embeddings": CONTEXT_LENGTH,
        "vocab_size": len(tokenizer),
        "projection_dim": toy.embedding,
        "hidden_act": "gelu",
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=toy.embedding)


def write_transformers(folder: Path, toy: Toy, state: dict[str, Tensor]) -> Path:
    """The same model in transformers' layout; `state` is in open_clip's."""
    from transformers import CLIPImageProcessor, CLIPModel

    model = CLIPModel(transformers_config(toy)).to(state["visual.proj"].dtype)
    model.load_state_dict(to_transformers(state))
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    size = toy.image_size
    processor = CLIPImageProcessor(
        size={"shortest_edge": size},
        crop_size={"height": size, "width": size},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    processor.save_pretrained(folder)
    return folder


WRITERS: dict[str, Callable[[Path, Toy, dict[str, Tensor]], Path]] = {
    "open_clip": write_open_clip,
    "transformers": write_transformers,
}

_PLAIN_NAMES = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "token_embedding": "text_model.embeddings.token_embedding",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
    "logit_scale": "logit_scale",
}
_BLOCK_NAMES = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_TOWERS = {
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
    "transformer.resblocks.": "text_model.encoder.layers.",
}


def to_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's tensors under transformers' names, q, k and v apart, projections transposed."""
    converted = {}
    for name, tensor in state.items():
        for key, value in _converted(name, tensor).items():
            converted[key] = value.contiguous()
    return converted


def _converted(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name == "visual.proj":
        return {"visual_projection.weight": tensor.T}
    if name == "text_projection":
        return {"text_projection.weight": tensor.T}
    for ours, theirs in _TOWERS.items():
        if name.startswith(ours):
            block, _, rest = name[len(ours) :].partition(".")
            if rest.startswith("attn.in_proj_"):
                kind = rest.removeprefix("attn.in_proj_")
                parts = zip("qkv", tensor.chunk(3), strict=True)
                return {f"{theirs}{block}.self_attn.{letter}_proj.{kind}": part for letter, part in parts}
            module, _, kind = rest.rpartition(".")
            return {f"{theirs}{block}.{_BLOCK_NAMES[module]}.{kind}": tensor}
    if name in _PLAIN_NAMES:
        return {_PLAIN_NAMES[name]: tensor}
    module, _, kind = name.rpartition(".")
    return {f"{_PLAIN_NAMES[module]}.{kind}": tensor}


def from_transformers(state: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' tensors back under the names of an open_clip state."""
    restored = {}
    for name, tensor in like.items():
        parts = [state[key] for key in _converted(name, tensor)]
        joined = torch.cat(parts) if len(parts) > 1 else parts[0]
        restored[name] = (joined.T if name in ("visual.proj", "text_projection") else joined).contiguous()
    return restored


def weights_of(folder: Path, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model folder's weights in open_clip's names, whatever its layout."""
    file = folder / "open_clip_model.safetensors"
    if file.is_file():
        return load_file(file)
    return from_transformers(load_file(folder / "model.safetensors"), like)


def random_rows(count: int, size: int, seed: int = 0) -> list[dict[str, Any]]:
    """Prepared images (smooth, so that resizing means something) with labels, a plain list."""
    generator = torch.Generator().manual_seed(seed)
    rough = torch.randn(count, 3, size, size, generator=generator)
    images = torch.nn.functional.avg_pool2d(rough, 3, stride=1, padding=1) * 2
    return [{"image": image, "label": index % len(CLASS_NAMES)} for index, image in enumerate(images)]


State = dict[str, torch.Tensor]


def changed(state: State, seed: int, share: float = 0.02, only: str = "visual.") -> State:
    """What fine-tuning might have made of a model: every tensor whose name begins so has moved."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + share * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        if name.startswith(only)
        else tensor
        for name, tensor in state.items()
    }


def fit(pixels: torch.Tensor, toy: Toy) -> torch.Tensor:
    size = (toy.image_size, toy.image_size)
    if tuple(pixels.shape[-2:]) == size:
        return pixels
    return torch.nn.functional.interpolate(pixels, size=size, mode="bilinear", align_corners=False, antialias=True)


def fingerprint(module: torch.nn.Module) -> object:
    return [
        (
            name,
            part.training,
            sorted(part.__dict__),
            sorted(key for key, value in part._parameters.items() if value is not None),
            len(part._forward_hooks),
        )
        for name, part in module.named_modules()
    ] + [(name, parameter.requires_grad, parameter.data_ptr()) for name, parameter in module.named_parameters()]
