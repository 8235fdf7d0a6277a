"""The outline of a plain open_clip model has the modules that open_clip builds."""

from __future__ import annotations

from typing import Any

import open_clip
import pytest
import torch
from torch import nn

from hf_bico.models.families.open_clip_outline import outline

PLAIN = ("ViT-B-32", "ViT-B-16-plus-240", "ViT-B-32-quickgelu", "ViT-L-14-336", "ViT-H-14", "ViT-bigG-14")
OTHERS = ("RN50", "coca_ViT-B-32", "convnext_base", "ViT-B-16-SigLIP", "ViTamin-S")
KINDS = (nn.Linear, nn.Embedding, nn.Conv2d, nn.MultiheadAttention)


def built(name: str) -> tuple[dict[str, Any], nn.Module]:
    config = open_clip.get_model_config(name)
    assert config is not None
    with torch.device("meta"):
        model = open_clip.create_model(name, device="meta", load_weights=False)
    return {"model_cfg": config}, model


def kinds(model: nn.Module) -> dict[str, set[str]]:
    """The kinds of layers that each module with tensors of its own is of."""
    owners = {name.rpartition(".")[0] for name in model.state_dict()}
    return {
        path: {kind.__name__ for kind in KINDS if isinstance(part, kind)}
        for path, part in model.named_modules()
        if path in owners
    }


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_clip_has_the_modules_of_open_clip(name: str) -> None:
    config, model = built(name)
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    found = outline(config, shapes)
    assert found is not None
    assert {key: tuple(tensor.shape) for key, tensor in found.state_dict().items()} == shapes
    assert kinds(found) == kinds(model)
    assert (type(found).__name__, type(found).__module__) == (type(model).__name__, type(model).__module__)
    with_tensors = {path for path, part in model.named_modules() if any(True for _ in part.parameters())}
    assert with_tensors == {path for path, _ in found.named_modules()}
    assert all(parameter.is_meta for parameter in found.parameters())


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_model_is_left_to_open_clip(name: str) -> None:
    config, model = built(name)
    assert outline(config, {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}) is None


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({}, "visual.proj"),
        ({"model_cfg": {"vision_cfg": {}}}, "visual.proj"),
        ({"model_cfg": {"vision_cfg": {}, "text_cfg": {}, "custom_text": True}}, "visual.proj"),
        ({"model_cfg": {"vision_cfg": {"timm_model_name": "vit"}, "text_cfg": {}}}, "visual.proj"),
        ({"model_cfg": {"vision_cfg": {}, "text_cfg": {}}}, "text.transformer.resblocks.0.ln_1.weight"),
        ({"model_cfg": {"vision_cfg": {}, "text_cfg": {}}}, "visual.transformer.resblocks.0.ls_1.gamma"),
    ],
)
def test_what_is_not_plain_has_no_outline(config: dict[str, Any], name: str) -> None:
    assert outline(config, {name: (2,)}) is None
