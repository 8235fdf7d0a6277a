"""T5 and its multilingual kin: the encoder's sites, as in version 1.0 or with the gated layers of 1.1."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from hf_bico.models.families.base import EMBEDDINGS, NORM, Shapes
from hf_bico.models.families.blueprints import (
    CLASSIFICATION_HEAD,
    OUTPUT_EMBEDDINGS,
    POSITIONS,
    Blueprint,
    DescribedFamily,
    mapped_class,
    require_class,
)
from hf_bico.models.families.text_models import SequenceModel

_ATTENTION = {
    "attn.q": "layer.0.SelfAttention.q",
    "attn.k": "layer.0.SelfAttention.k",
    "attn.v": "layer.0.SelfAttention.v",
    "attn.out": "layer.0.SelfAttention.o",
}
_PLAIN = {"mlp.up": "layer.1.DenseReluDense.wi", "mlp.down": "layer.1.DenseReluDense.wo"}
_GATED = {
    "mlp.gate": "layer.1.DenseReluDense.wi_0",
    "mlp.up": "layer.1.DenseReluDense.wi_1",
    "mlp.down": "layer.1.DenseReluDense.wo",
}


def _blueprint(mlp: Mapping[str, str]) -> Blueprint:
    return Blueprint(
        prefixes=("", "transformer."),
        stem="encoder.block.",
        modules={**_ATTENTION, **mlp},
        beside=r"layer\.\d\.layer_norm\.weight|layer\.0\.SelfAttention\.relative_attention_bias\.weight",
        needs=("encoder.final_layer_norm.weight",),
    )


class T5(DescribedFamily):
    name = "T5"
    blueprints = (_blueprint(_PLAIN), _blueprint(_GATED))
    objectives = ("text-to-text",)
    pipeline_tag = "text2text-generation"
    auto_class = "AutoModelForSeq2SeqLM"
    live = SequenceModel
    reasons: ClassVar[Mapping[str, str]] = {
        r"(^|\.)decoder\.": "decoder",
        r"^lm_head\.": OUTPUT_EMBEDDINGS,
        r"^(classification_head|classifier)\.": CLASSIFICATION_HEAD,
        r"layer_norm\.": NORM,
        r"(^|\.)(shared|embed_tokens)\.": EMBEDDINGS,
        r"relative_attention_bias\.": POSITIONS,
    }

    def task(self, objective: str | None, has_head: bool, used_loss: bool) -> str | None:
        """Only a T5 with a decoder gives the loss of answers."""
        return self.pipeline_tag if objective in self.objectives and used_loss else None

    def class_for(self, folder: Path, config: Mapping[str, Any], shapes: Shapes) -> tuple[str, dict[str, Any]]:
        """Run the whole model if there is a decoder, whatever the configuration names; otherwise the encoder."""
        whole = mapped_class({"model_type": "t5", **config}, "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES") or ""
        has_decoder = any(self.reason(name, config) == "decoder" for name in shapes)
        named = whole if has_decoder else f"{whole.removesuffix('ForConditionalGeneration')}EncoderModel"
        return require_class(named, folder, config), {}
