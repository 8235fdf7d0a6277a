"""GPT-2: weights kept as (in, out), and q, k and v packed in one module."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, ClassVar

from hf_bico.families.base import Shapes
from hf_bico.families.blueprints import CLASSIFICATION_HEAD, EMBEDDINGS, NORM, OUTPUT_EMBEDDINGS, POSITIONS, Blueprint
from hf_bico.families.decoders import DecoderFamily
from hf_bico.families.text_models import CausalModel
from hf_bico.sites import Site

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hf_bico.watching import Trace

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
    """A loaded GPT-2."""

    def _watch(self, site: Site, trace: Trace, stack: ExitStack) -> None:
        """Of a packed module, the site's own part of the output is tapped, and put back in its place."""
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
        found = self._found(shapes)
        if found is None:
            return False
        columns, rows = shapes[f"{found[1]}h.0.{_PACKED}.weight"]
        return rows == 3 * columns
