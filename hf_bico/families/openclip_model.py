"""Loaded open_clip models: how their sites are watched, and what they make of images and texts.

Knows open_clip's modules; not how its files are laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hf_bico.errors import MissingProcessorError, MissingTextTowerError, UnsupportedModelError
from hf_bico.families.base import WHOLE_MODEL
from hf_bico.families.explicit_attention import explicit_attention
from hf_bico.families.live import ClipModel
from hf_bico.sites import Site

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hf_bico.watching import Trace


class OpenClipModel(ClipModel):
    """A loaded open_clip model, or its visual tower alone."""

    transform: Any = None
    tokenizer: Any = None

    @property
    def visual(self) -> Any:
        return getattr(self.module, "visual", self.module)

    def _preprocess(self, images: Sequence[Any]) -> Tensor:
        import torch

        if self.transform is None:
            raise MissingProcessorError(
                "a loaded open_clip model does not know its preprocessing",
                "pass the model's folder, or prepared tensors",
            )
        return torch.stack([self.transform(image) for image in images])

    def image_features(self, pixels: Tensor) -> Tensor:
        output = self.visual(pixels)
        features: Tensor = output[0] if isinstance(output, tuple) else output  # (pooled, tokens) in some models
        if features.ndim != 2:
            raise UnsupportedModelError("this vision transformer does not pool its tokens", "use a model that does")
        return features

    @property
    def text(self) -> Any:
        """The module that holds the text tower: the model itself, unless the tower is a module of its own."""
        return getattr(self.module, "text", self.module)

    def text_features(self, prompts: Sequence[str]) -> Tensor:
        from hf_bico.runtime.environment import sent

        model: Any = self.module
        features: Tensor = model.encode_text(sent(self._text_ids(prompts), self.device))
        return features

    def text_tokens(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """The row that is pooled counts as real, whatever stands there: some models read a text off its padding."""
        ids = self._text_ids(prompts)
        return ids, _real_tokens(ids, self.tokenizer) | self._pooled_tokens(ids)

    def _text_ids(self, prompts: Sequence[str]) -> Tensor:
        if not hasattr(self.module, "encode_text"):
            raise MissingTextTowerError("the model is a visual tower without a text side", WHOLE_MODEL)
        if self.tokenizer is None:
            raise MissingProcessorError(
                "a loaded open_clip model does not know its tokenizer", "pass its Hub id or folder instead"
            )
        ids: Tensor = self.tokenizer(list(prompts))
        return ids

    def _pooled_tokens(self, ids: Tensor) -> Tensor:
        """Which token of each text is pooled: its end in CLIP's manner, the first or the last in some models."""
        import torch

        text = self.text
        how = getattr(text, "text_pool_type", getattr(text, "pool_type", None))
        end: Any = getattr(text, "text_eos_id", getattr(text, "eos_id", None))
        pooled = torch.zeros_like(ids, dtype=torch.bool)
        if how in ("argmax", "eos"):
            places = ids.argmax(-1) if how == "argmax" else torch.eq(ids, end).int().argmax(-1)
            pooled[torch.arange(len(ids), device=ids.device), places] = True
        elif how in ("first", "last"):
            pooled[:, 0 if how == "first" else -1] = True
        return pooled

    def logit_scale_and_bias(self) -> tuple[Tensor, Tensor | None]:
        model: Any = self.module
        return model.logit_scale.exp(), getattr(model, "logit_bias", None)

    def _watch(self, site: Site, trace: Trace, stack: ExitStack) -> None:
        if site.block is None:
            watch = self._watch_text_projection if site.tower else self._watch_projection
            watch(site, trace, stack)
            return
        block = (self.text if site.tower else self.visual).transformer.resblocks[site.block]
        if site.role in ("attn.q", "attn.k", "attn.v"):
            attention = explicit_attention(block.attn, stack)
            attention.watched[site.role] = (site, trace)
        elif site.role == "attn.out":
            explicit_attention(block.attn, stack)  # nn.MultiheadAttention never calls its out_proj as a module
            self._watch_linear(block.attn.out_proj, site, trace, stack)
        else:
            self._watch_linear(block.mlp.c_fc if site.role == "mlp.up" else block.mlp.c_proj, site, trace, stack)

    def _watch_projection(self, site: Site, trace: Trace, stack: ExitStack) -> None:
        """`visual` skips a projection that is None and gives the pooled features; the hook projects them."""
        visual, projection = self.visual, self.visual.proj

        def project(_: nn.Module, __: Any, output: Any) -> Any:
            pooled, *tokens = output if isinstance(output, tuple) else (output,)
            features = trace.tap(site, pooled, pooled @ projection)
            return (features, *tokens) if tokens else features

        visual.proj = None
        stack.callback(setattr, visual, "proj", projection)
        stack.callback(visual.register_forward_hook(project).remove)

    def _watch_text_projection(self, site: Site, trace: Trace, stack: ExitStack) -> None:
        """open_clip runs a projection that is an nn.Linear as a module: one with the same weight shadows the tensor."""
        import torch

        text = self.text
        projection = text.text_projection
        if not isinstance(projection, torch.nn.Linear):
            weight = torch.nn.Parameter(projection.detach().T, requires_grad=False)
            projection = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            projection.weight = weight
            text.__dict__["text_projection"] = projection
            stack.callback(text.__dict__.pop, "text_projection")
        self._watch_linear(projection, site, trace, stack)


def _real_tokens(ids: Tensor, tokenizer: Any) -> Tensor:
    """Which tokens are no padding, by the tokenizer: up to its end token, or all but its padding."""
    import torch

    end = getattr(tokenizer, "eot_token_id", None)
    if end is None:
        return torch.ne(ids, tokenizer.tokenizer.pad_token_id)
    is_end = torch.eq(ids, end).long()  # open_clip's own tokenizer pads with 0, which is a word too
    return torch.eq(is_end.cumsum(-1) - is_end, 0)
