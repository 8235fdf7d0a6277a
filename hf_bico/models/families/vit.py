"""Image transformers, bare or with a classification head: ViT and DeiT, in files and as loaded models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_bico.models.families.base import EMBEDDINGS, NORM, HeadModules, Shapes, patch_tokens
from hf_bico.models.families.blueprints import CLASSIFICATION_HEAD, POSITIONS, BackboneFamily, Blueprint
from hf_bico.models.families.live import ImageModel
from hf_bico.models.families.pretrained import PROCESSOR_FILES, PretrainedModel
from hf_bico.models.layout import Layout, Tokens, count_heads
from hf_bico.utils.samples import IMAGES

if TYPE_CHECKING:
    from torch import Tensor


_IN_FILES = Blueprint(
    prefixes=("vit.", "deit.", ""),
    stem="encoder.layer.",
    modules={
        "attn.q": "attention.attention.query",
        "attn.k": "attention.attention.key",
        "attn.v": "attention.attention.value",
        "attn.out": "attention.output.dense",
        "mlp.up": "intermediate.dense",
        "mlp.down": "output.dense",
    },
    beside=r"layernorm_(?:before|after)\.(?:weight|bias)",
    needs=("embeddings.cls_token", "embeddings.position_embeddings", "embeddings.patch_embeddings.projection.weight"),
)
_LOADED = replace(
    _IN_FILES,
    stem="layers.",
    modules={
        "attn.q": "attention.q_proj",
        "attn.k": "attention.k_proj",
        "attn.v": "attention.v_proj",
        "attn.out": "attention.o_proj",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    },
)


class VitModel(PretrainedModel, ImageModel):
    """A loaded ViT or DeiT, bare or with a head."""

    def image_features(self, pixels: Tensor) -> Tensor:
        """Return the class token after the final norm."""
        model: Any = self.module
        features: Tensor = model.base_model(pixel_values=pixels).last_hidden_state[:, 0]
        return features


class Vit(BackboneFamily):
    name = "ViT"
    processor_files = PROCESSOR_FILES
    blueprints = (_IN_FILES, _LOADED)
    reads = IMAGES
    objectives = ("classification",)
    pipeline_tag = "image-classification"
    auto_class = "AutoModelForImageClassification"
    head_modules: ClassVar[Mapping[str, HeadModules]] = {
        "vit": HeadModules("ViTForImageClassification"),
        "deit": HeadModules("DeiTForImageClassification"),
    }
    live = VitModel
    reasons: ClassVar[Mapping[str, str]] = {
        r"^(cls_|distillation_)?classifier\.": CLASSIFICATION_HEAD,
        r"(^|\.)pooler\.": "unused pooler",
        r"(^|\.)layernorm\w*\.": NORM,
        r"embeddings\.cls_token$": "class token",
        r"embeddings\.position_embeddings$": POSITIONS,
        r"embeddings\.patch_embeddings\.": "patch stem",
        r"(^|\.)embeddings\.": EMBEDDINGS,
    }

    def tokens(self, shapes: Shapes, prefix: str, config: Mapping[str, Any]) -> tuple[Tokens, tuple[int, int]]:
        patch = shapes[f"{prefix}embeddings.patch_embeddings.projection.weight"][-1]
        positions = shapes[f"{prefix}embeddings.position_embeddings"][1]
        special = 2 if f"{prefix}embeddings.distillation_token" in shapes else 1
        found = patch_tokens(positions, patch, config.get("image_size"), prefix=special, what="the image transformer")
        return found, found.image_size(patch)

    def own_names(self, blueprint: Blueprint, shapes: Shapes, prefix: str) -> Mapping[str, str]:
        """transformers names the layers of a block differently from the files on the Hub."""
        if blueprint is _LOADED:
            return {}
        modules = {own: _LOADED.modules[role] for role, own in blueprint.modules.items()}
        stem = prefix + blueprint.stem
        found = {}
        for name in shapes:
            if name.startswith(stem):
                number, _, inside = name[len(stem) :].partition(".")
                module, _, parameter = inside.rpartition(".")
                found[name] = f"{prefix}{_LOADED.stem}{number}.{modules.get(module, module)}.{parameter}"
        return found

    def heads(self, config: Mapping[str, Any]) -> int | None:
        return count_heads(config.get("hidden_size", 0), config.get("num_attention_heads"))

    def backbone(
        self, folder: Path, config: Mapping[str, Any], shapes: Shapes, layout: Layout
    ) -> tuple[str, dict[str, Any]]:
        """Drop the pooler, which no head reads."""
        distilled = any(name.endswith("embeddings.distillation_token") for name in shapes)
        return "DeiTModel" if distilled else "ViTModel", {"add_pooling_layer": False}
