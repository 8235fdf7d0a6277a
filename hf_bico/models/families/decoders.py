"""Decoders: GPT-2, and all that name their layers as Llama does (Mistral, Qwen2, Qwen3 and kin)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_bico.models.families.base import EMBEDDINGS, NORM, TIED, Shapes
from hf_bico.models.families.blueprints import (
    CLASSIFICATION_HEAD,
    OUTPUT_EMBEDDINGS,
    POSITIONS,
    Blueprint,
    DescribedFamily,
    mapped_class,
    require_class,
)
from hf_bico.models.families.pretrained import first_architecture
from hf_bico.models.families.text_models import CausalModel
from hf_bico.models.layout import Site

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hf_bico.models.hooks import Trace


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
    """A decoder's class that models language, and its tied embeddings."""

    objectives = ("language-modelling",)
    pipeline_tag = "text-generation"
    auto_class = "AutoModelForCausalLM"
    live = CausalModel

    def class_for(self, folder: Path, config: Mapping[str, Any], shapes: Shapes) -> tuple[str, dict[str, Any]]:
        named = first_architecture(config) or ""
        if not named.endswith(CAUSAL_ENDINGS):
            named = mapped_class(config, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES") or ""
        return require_class(named, folder, config), {}

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


_PACKED = "attn.c_attn"
_GPT2 = Blueprint(
    prefixes=("transformer.", ""),
    stem="h.",
    modules={
        "attn.q": _PACKED,
        "attn.k": _PACKED,
        "attn.v": _PACKED,
        "attn.out": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    beside=r"ln_\d\.(?:weight|bias)|attn\.(?:masked_)?bias",  # old files hold the causal mask as well
    needs=("wte.weight", "wpe.weight"),
    transposed=True,
)


class Gpt2Model(CausalModel):
    """A loaded GPT-2: q, k and v are one module, and weights are stored as (in, out)."""

    def _watch(self, site: Site, trace: Trace, stack: ExitStack) -> None:
        """Tap the site's own part of a packed module's output."""
        span = site.weight.rows
        if span is None:
            return super()._watch(site, trace, stack)
        import torch

        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            before, own, after = output.tensor_split(span, dim=-1)
            return torch.cat([before, trace.tap(site, inputs[0], own), after], dim=-1)

        module = self.module.get_submodule(site.weight.tensor.removesuffix(".weight"))
        stack.callback(module.register_forward_hook(hook).remove)
        return None


class Gpt2(DecoderFamily):
    name = "GPT-2"
    blueprints = (_GPT2,)
    live = Gpt2Model
    reasons: ClassVar[Mapping[str, str]] = {
        r"(^|\.)ln_\w+\.": NORM,
        r"(^|\.)wte\.": EMBEDDINGS,
        r"(^|\.)wpe\.": POSITIONS,
        r"^lm_head\.": OUTPUT_EMBEDDINGS,
        r"^score\.": CLASSIFICATION_HEAD,
    }

    def recognises(self, shapes: Shapes) -> bool:
        found = self._match(shapes)
        if found is None:
            return False
        columns, rows = shapes[f"{found[1]}h.0.{_PACKED}.weight"]
        return rows == 3 * columns
