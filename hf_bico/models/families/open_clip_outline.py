"""The modules of a plain open_clip CLIP, made from the names and shapes of its tensors, without importing open_clip.

That takes seconds, and what writes an adapter needs only where the linear layers are. Any other model is left to
open_clip itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_bico.models.families.base import Shapes

_NORM = r"ln_\w+\.(?:weight|bias)"
_BLOCK = (
    rf"transformer\.resblocks\.\d+\.(?:{_NORM}|mlp\.c_(?:fc|proj)\.(?:weight|bias)"
    r"|attn\.(?:in_proj_(?:weight|bias)|out_proj\.(?:weight|bias)))"
)
_VISION = rf"visual\.(?:class_embedding|positional_embedding|proj|conv1\.weight|{_NORM}|{_BLOCK})"
_TEXT = rf"positional_embedding|text_projection|logit_scale|token_embedding\.weight|{_NORM}|{_BLOCK}"
_PLAIN = re.compile(f"{_VISION}|{_TEXT}")
_FIELDS = {
    "vision_cfg": {"image_size", "patch_size", "width", "layers", "head_width", "mlp_ratio"},
    "text_cfg": {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "hf_tokenizer_name"},
}
_EMPTY: dict[str, Any] = {
    "conv1": lambda: nn.Conv2d(1, 1, 1, bias=False),
    "attn": lambda: nn.MultiheadAttention(1, 1),
    "token_embedding": lambda: nn.Embedding(1, 1),
    **dict.fromkeys(("c_fc", "c_proj"), lambda: nn.Linear(1, 1)),
}
"""Modules of each name, to be given the right shapes."""


def outline(config: Mapping[str, Any], shapes: Shapes) -> nn.Module | None:
    """Return the modules on the meta device, with open_clip's names and kinds; None of a model that is not plain."""
    model = config.get("model_cfg")
    if not isinstance(model, Mapping) or model.keys() - {"embed_dim", "quick_gelu", *_FIELDS}:
        return None
    towers = {name: model.get(name) for name in _FIELDS}
    if any(not isinstance(tower, Mapping) or tower.keys() - _FIELDS[name] for name, tower in towers.items()):
        return None
    if not all(map(_PLAIN.fullmatch, shapes)):
        return None
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers initialise nothing here
        return _root(shapes).eval()


def _root(shapes: Shapes) -> nn.Module:
    root: nn.Module = type("CLIP", (nn.Module,), {"__module__": "open_clip.model"})()
    for name, shape in shapes.items():
        *path, tensor = name.split(".")
        owner = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, _made(part))
            owner = getattr(owner, part)
        setattr(owner, tensor, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))
    return root


def _made(name: str) -> nn.Module:
    made: nn.Module = _EMPTY[name]() if name in _EMPTY else nn.LayerNorm(1) if name.startswith("ln_") else nn.Module()
    return made
