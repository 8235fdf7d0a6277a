"""transformers' CLIP: `CLIPModel`, `CLIPVisionModel` and `CLIPVisionModelWithProjection`, by any spelling of names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_bico.errors import MissingTextTowerError
from hf_bico.models.families.base import (
    CLIP_OBJECTIVES,
    TEXT_TOWER,
    WHOLE_MODEL,
    ZERO_SHOT_TASK,
    Shapes,
    count_blocks,
    patch_tokens,
    prefix_before,
)
from hf_bico.models.families.live import ClipModel
from hf_bico.models.families.pretrained import PROCESSOR_FILES, PretrainedFamily, PretrainedModel, require_config
from hf_bico.models.layout import TEXT_SIDE, Axis, Layout, Site, Slot, count_heads, residual_axes

if TYPE_CHECKING:
    from torch import Tensor


_MODULES = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.out": "self_attn.out_proj",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
_HEADS = 12
"""What transformers takes where the configuration does not say."""
_RESIDUAL = {
    "embeddings.class_embedding": "class",
    "embeddings.position_embedding.weight": "positions",
    "embeddings.patch_embedding.weight": "stem",
    "pre_layrnorm.weight": "norm.pre.weight",
    "pre_layrnorm.bias": "norm.pre.bias",
    "post_layernorm.weight": "norm.post.weight",
    "post_layernorm.bias": "norm.post.bias",
}
_BLOCK_RESIDUAL = {
    "layer_norm1.weight": "attn.norm.weight",
    "layer_norm1.bias": "attn.norm.bias",
    "layer_norm2.weight": "mlp.norm.weight",
    "layer_norm2.bias": "mlp.norm.bias",
}
_ARCHITECTURES = ("CLIPModel", "CLIPVisionModelWithProjection", "CLIPVisionModel")


class TransformersClipModel(PretrainedModel, ClipModel):
    """A loaded transformers CLIP, whole or its vision tower alone."""

    def image_features(self, pixels: Tensor) -> Tensor:
        model: Any = self.module
        pooled: Tensor = getattr(model, "vision_model", model)(pixel_values=pixels).pooler_output
        return model.visual_projection(pooled) if hasattr(model, "visual_projection") else pooled

    def text_features(self, prompts: Sequence[str]) -> Tensor:
        from hf_bico.runtime.environment import to_device

        model: Any = self.module
        ids, mask = (to_device(one.long(), self.device) for one in self.text_tokens(prompts))
        pooled = model.text_model(input_ids=ids, attention_mask=mask).pooler_output
        features: Tensor = model.text_projection(pooled)
        return features

    def text_tokens(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        model: Any = self.module
        if not hasattr(model, "text_model"):
            raise MissingTextTowerError("the model is a vision tower without a text side", WHOLE_MODEL)
        longest = model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(
            list(prompts), padding="max_length", max_length=longest, truncation=True, return_tensors="pt"
        )
        return tokens["input_ids"], tokens["attention_mask"].bool()

    def logit_scale_and_bias(self) -> tuple[Tensor, Tensor | None]:
        model: Any = self.module
        return model.logit_scale.exp(), None


class TransformersClip(PretrainedFamily):
    name = "transformers CLIP"
    pipeline_tag = ZERO_SHOT_TASK
    processor_files = PROCESSOR_FILES
    live = TransformersClipModel

    def recognises(self, shapes: Shapes) -> bool:
        return _vision_prefix(shapes) is not None

    def layout(self, shapes: Shapes, config: Mapping[str, Any]) -> Layout:
        root = _vision_prefix(shapes)
        if root is None:
            raise ValueError("not a transformers CLIP with a vision tower")
        stem = f"{root}encoder.layers."
        blocks = count_blocks(shapes, stem)
        sites = [site for block in range(blocks) for site in _block_sites(shapes, f"{stem}{block}.", block)]
        projection = _projection_name(shapes)
        if projection is not None:
            embedding, width = shapes[projection]
            sites.append(Site("proj", "proj", None, "proj", (embedding, width), Slot(projection)))
        text_sites = _text_sites(shapes, root)
        sites += text_sites
        patch = shapes[f"{root}embeddings.patch_embedding.weight"][-1]
        positions = shapes[f"{root}embeddings.position_embedding.weight"][0]
        vision = config.get("vision_config") or config
        tokens = patch_tokens(positions, patch, vision.get("image_size"), prefix=1, what="the vision tower")
        taken = {slot.tensor for site in sites for slot in site.slots}
        others = {name: _reason(name, root) for name in shapes if name not in taken}
        width = shapes[f"{root}embeddings.patch_embedding.weight"][0]
        return Layout(
            *(self.name, tuple(sites), blocks, tokens, tokens.image_size(patch), others),
            heads=count_heads(width, vision.get("num_attention_heads", _HEADS)),
            residual=_residual(shapes, root, blocks),
            objectives=CLIP_OBJECTIVES,
            text_blocks=len({site.block for site in text_sites} - {None}),
        )

    def model_class(self, folder: Path) -> tuple[str, Mapping[str, Any], dict[str, Any]]:
        config = require_config(self, folder)
        return _class_name(config), config, {}


def _class_name(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    named = next((name for name in listed if name in _ARCHITECTURES), None)
    # old repos do not name their class: `text_config` is what only the whole model has
    return named or ("CLIPModel" if "text_config" in config else "CLIPVisionModel")


def _vision_prefix(shapes: Shapes) -> str | None:
    prefix = prefix_before(shapes, "embeddings.class_embedding")
    stem = "encoder.layers.0.self_attn.q_proj.weight"
    return prefix if prefix is not None and f"{prefix}{stem}" in shapes else None


def _projection_name(shapes: Shapes) -> str | None:
    prefix = prefix_before(shapes, "visual_projection.weight")
    return None if prefix is None else f"{prefix}visual_projection.weight"


def _text_sites(shapes: Shapes, root: str) -> list[Site]:
    """Those of the text tower; none where the model is a vision tower alone."""
    whole = root.removesuffix("vision_model.")
    stem = f"{whole}text_model.encoder.layers."
    blocks = range(count_blocks(shapes, stem))
    sites = [site for block in blocks for site in _block_sites(shapes, f"{stem}{block}.", block, "text.")]
    projection = f"{whole}text_projection.weight"
    if sites and projection in shapes:
        embedding, width = shapes[projection]
        sites.append(Site("text.proj", "proj", None, "text.proj", (embedding, width), Slot(projection)))
    return [replace(site, text=True, tower=TEXT_SIDE) for site in sites]


def _block_sites(shapes: Shapes, stem: str, block: int, tower: str = "") -> list[Site]:
    name = f"{tower}blocks.{block}."
    sites = []
    for role, module in _MODULES.items():
        rows, columns = shapes[f"{stem}{module}.weight"]
        bias = Slot(f"{stem}{module}.bias") if f"{stem}{module}.bias" in shapes else None
        reads = f"{name}attn.in" if role in ("attn.q", "attn.k", "attn.v") else name + role
        sites.append(Site(name + role, role, block, reads, (rows, columns), Slot(f"{stem}{module}.weight"), bias))
    return sites


def _residual(shapes: Shapes, root: str, blocks: int) -> tuple[Axis, ...]:
    names = {root + own: name for own, name in _RESIDUAL.items()}
    return residual_axes(shapes, names, f"{root}encoder.layers.", blocks, _BLOCK_RESIDUAL)


def _reason(name: str, root: str) -> str:
    own = name[len(root) :] if name.startswith(root) else None
    if own is None or own.startswith(("text_model.", "text_projection.", "logit_scale")):
        return TEXT_TOWER
    if own.startswith("embeddings.class_embedding"):
        return "class token"
    if own.startswith("embeddings.position"):
        return "positions"
    if own.startswith("embeddings.patch_embedding"):
        return "patch stem"
    return "LayerNorm" if "norm" in own or "layrnorm" in own else "no linear site"
