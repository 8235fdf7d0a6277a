"""open_clip's packed self-attention, computed so that its parts can be watched. Knows one module, not the model."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hf_bico.errors import UnsupportedModelError
from hf_bico.sites import Site

if TYPE_CHECKING:
    from torch import Tensor

    from hf_bico.watching import Trace


class ExplicitAttention:
    """Packed self-attention computed with q, k and v apart, so that each can be watched.

    Stands in for the forward of any module that holds `in_proj_weight`: torch's nn.MultiheadAttention and
    open_clip's own attention class alike.
    """

    def __init__(self, attention: Any) -> None:
        if getattr(attention, "logit_scale", None) is not None:
            raise UnsupportedModelError(
                "this transformer uses scaled cosine attention, whose q and k cannot be shown apart",
                "use a model with plain attention",
            )
        if getattr(attention, "in_proj_weight", None) is None:
            raise UnsupportedModelError(
                "this transformer keeps q, k and v in separate tensors of one attention module",
                "use a model with a packed in_proj_weight",
            )
        self.attention = attention
        self.watched: dict[str, tuple[Site, Trace]] = {}
        # torch's module takes (query, key, value) and returns a pair; open_clip's takes x and returns a tensor
        self.returns_pair = "key" in inspect.signature(type(attention).forward).parameters
        self.batch_first = getattr(attention, "batch_first", True)

    def __call__(self, x: Tensor, key: Any = None, value: Any = None, attn_mask: Any = None, **_: Any) -> Any:
        from torch.nn import functional

        attention = self.attention
        if (key is not None and key is not x) or (value is not None and value is not x):
            raise UnsupportedModelError(
                "this transformer uses cross-attention", "use a model with self-attention alone"
            )
        rows = x if self.batch_first else x.transpose(0, 1)
        parts = [
            self._show(role, rows, weight, bias)
            for role, weight, bias in zip(
                ("attn.q", "attn.k", "attn.v"),
                attention.in_proj_weight.chunk(3),
                (None,) * 3 if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3),
                strict=True,
            )
        ]
        q, k, v = (part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for part in parts)
        q, k = _optional(attention, "ln_q")(q), _optional(attention, "ln_k")(k)
        heads = functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        if getattr(attention, "head_scale", None) is not None:
            heads = heads * attention.head_scale
        mixed = attention.out_proj(_optional(attention, "ln_inner")(heads.transpose(1, 2).flatten(2)))
        mixed = mixed if self.batch_first else mixed.transpose(0, 1)
        return (mixed, None) if self.returns_pair else mixed

    def _show(self, role: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from torch.nn import functional

        y = functional.linear(x, weight, bias)
        if role not in self.watched:
            return y
        site, trace = self.watched[role]
        return trace.tap(site, x, y)


def explicit_attention(attention: Any, stack: ExitStack) -> ExplicitAttention:
    """The explicit form of this module's forward, put in place once and taken away by `stack`."""
    current = attention.__dict__.get("forward")
    if isinstance(current, ExplicitAttention):
        return current
    explicit = ExplicitAttention(attention)
    attention.forward = explicit
    stack.callback(attention.__dict__.pop, "forward")
    return explicit


def _optional(module: Any, name: str) -> Any:
    return getattr(module, name, None) or (lambda x: x)
