"""Decoders in Llama's manner: Llama, Mistral, Qwen2, Qwen3, and all others that name their layers exactly so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from hf_bico.families.base import Shapes
from hf_bico.families.blueprints import (
    CLASSIFICATION_HEAD,
    EMBEDDINGS,
    NORM,
    OUTPUT_EMBEDDINGS,
    POSITIONS,
    TIED,
    Blueprint,
    DescribedFamily,
    mapped_class,
    no_class,
)
from hf_bico.families.pretrained import first_architecture, has_class
from hf_bico.families.text_models import CausalModel
from hf_bico.utils.files import folder_name

CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel")
_LLAMA = Blueprint(
    prefixes=("model.", ""),
    stem="layers.",
    modules={
        "attn.q": "self_attn.q_proj",
        "attn.k": "self_attn.k_proj",
        "attn.v": "self_attn.v_proj",
        "attn.out": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
    beside=r"(?:self_attn\.)?\w*norm\.(?:weight|bias)|self_attn\.rotary_emb\.inv_freq",
    needs=("embed_tokens.weight",),
)


class DecoderFamily(DescribedFamily):
    """What all decoders share: a class that models language, and the tie of its two embeddings."""

    objectives = ("language-modelling",)
    live = CausalModel

    def runs_as(self, folder: Path, config: Mapping[str, Any], shapes: Shapes) -> tuple[str, dict[str, Any]]:
        named = first_architecture(config) or ""
        if not named.endswith(CAUSAL_ENDINGS):
            named = mapped_class(config, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES") or ""
        if not has_class(named):
            raise no_class(folder_name(folder), config)
        return named, {}

    def reason(self, name: str, config: Mapping[str, Any]) -> str:
        found = super().reason(name, config)
        return TIED if found == OUTPUT_EMBEDDINGS and config.get("tie_word_embeddings") else found


class Decoder(DecoderFamily):
    name = "decoder"
    blueprints = (_LLAMA,)
    reasons: ClassVar[Mapping[str, str]] = {
        r"norm\.": NORM,
        r"(^|\.)embed_tokens\.": EMBEDDINGS,
        r"^lm_head\.": OUTPUT_EMBEDDINGS,
        r"^score\.": CLASSIFICATION_HEAD,
        r"inv_freq$": POSITIONS,
    }
