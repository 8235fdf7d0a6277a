"""transformers' CLIP: `CLIPModel`, `CLIPVisionModel` and `CLIPVisionModelWithProjection`, by any spelling of names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_bico.errors import MissingTextTowerError
from hf_bico.models.families.base import TEXT_TOWER, Shapes, linear_site, prefix_before
from hf_bico.models.families.clip import WHOLE_MODEL, ClipFamily
from hf_bico.models.families.live import ClipModel
from hf_bico.models.families.pretrained import PROCESSOR_FILES, PretrainedFamily, PretrainedModel, require_config
from hf_bico.models.layout import Site, count_heads

if TYPE_CHECKING:
    from torch import Tensor


_HEADS = 12
"""transformers' default."""
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
            raise MissingTextTowerError("the model is a vision tower without a text encoder", WHOLE_MODEL)
        longest = model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(
            list(prompts), padding="max_length", max_length=longest, truncation=True, return_tensors="pt"
        )
        return tokens["input_ids"], tokens["attention_mask"].bool()

    def logit_scale_and_bias(self) -> tuple[Tensor, Tensor | None]:
        model: Any = self.module
        return model.logit_scale.exp(), None


class TransformersClip(ClipFamily, PretrainedFamily):
    name = "transformers CLIP"
    processor_files = PROCESSOR_FILES
    live = TransformersClipModel
    tower_name = "the vision tower"
    roots = ("vision_model.", "")
    stem = "encoder.layers."
    modules: ClassVar[Mapping[str, str]] = {
        "attn.q": "self_attn.q_proj.",
        "attn.k": "self_attn.k_proj.",
        "attn.v": "self_attn.v_proj.",
        "attn.out": "self_attn.out_proj.",
        "mlp.up": "mlp.fc1.",
        "mlp.down": "mlp.fc2.",
    }
    residual_names: ClassVar[Mapping[str, str]] = {
        "embeddings.class_embedding": "class",
        "embeddings.position_embedding.weight": "positions",
        "embeddings.patch_embedding.weight": "stem",
        "pre_layrnorm.weight": "norm.pre.weight",
        "pre_layrnorm.bias": "norm.pre.bias",
        "post_layernorm.weight": "norm.post.weight",
        "post_layernorm.bias": "norm.post.bias",
    }
    block_residual_names: ClassVar[Mapping[str, str]] = {
        "layer_norm1.weight": "attn.norm.weight",
        "layer_norm1.bias": "attn.norm.bias",
        "layer_norm2.weight": "mlp.norm.weight",
        "layer_norm2.bias": "mlp.norm.bias",
    }
    reasons: ClassVar[Mapping[str, str]] = {
        r"^(text_model\.|text_projection\.|logit_scale)": TEXT_TOWER,
        r"^embeddings\.class_embedding": "class token",
        r"^embeddings\.position": "positions",
        r"^embeddings\.patch_embedding": "patch stem",
        r"norm": "LayerNorm",
    }

    def projection_sites(self, shapes: Shapes, root: str) -> list[Site]:
        prefix = prefix_before(shapes, "visual_projection.weight")
        if prefix is None:
            return []
        return [linear_site(shapes, f"{prefix}visual_projection.weight", "", name="proj", role="proj", block=None)]

    def text_sites(self, shapes: Shapes, root: str) -> list[Site]:
        whole = root.removesuffix("vision_model.")
        sites = self._tower_sites(shapes, f"{whole}text_model.{self.stem}", "text.")
        projection = f"{whole}text_projection.weight"
        if sites and projection in shapes:
            sites.append(linear_site(shapes, projection, "", name="text.proj", role="proj", block=None))
        return sites

    def vision_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return config.get("vision_config") or config

    def heads(self, vision: Mapping[str, Any], width: int) -> int | None:
        return count_heads(width, vision.get("num_attention_heads", _HEADS))

    def model_class(self, folder: Path) -> tuple[str, Mapping[str, Any], dict[str, Any]]:
        config = require_config(self, folder)
        architectures = config.get("architectures")
        listed = architectures if isinstance(architectures, list) else []
        # old repos do not name their class: only the whole model has a `text_config`
        unnamed = "CLIPModel" if "text_config" in config else "CLIPVisionModel"
        return next((name for name in listed if name in _ARCHITECTURES), unnamed), config, {}
