"""Parts of a model that keep only what enters them for the backward pass, which runs them once more.

Knows functions of tensors, and who watches them; not models. Parameters must have no gradients, and nothing may be
drawn at random. `torch.utils.checkpoint` does it for any part; one that is known to be a function of one tensor, and to
show nobody else what it finds on the way, needs less bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from hf_bico.watching import Trace

PLAIN = (NoneType, bool, int, float, str, torch.dtype, torch.device)
"""What a part may be given beside tensors: nothing in which it could leave what it finds on the way."""


def recomputed(run: Callable[..., Any], trace: Trace, is_function: bool = False) -> Callable[..., Any]:
    """The same function, but thrifty. Sites in it tell the trace what they read at once, and their gradients later.

    `is_function` says that gradients pass through what it returns, and nowhere else.
    """

    def again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), trace.recomputing()

    def part(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*arguments, **options)
        if is_function and _enters_alone(arguments, options):
            x, *others = arguments
            x = x if x.requires_grad else x.detach().requires_grad_()
            structure, *leaves = _Recomputed.apply(lambda x: run(x, *others, **options), trace, x)
            return tree_unflatten(leaves, structure)
        return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=again, **options)

    return part


def _enters_alone(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Whether the first argument is a tensor that can be felt, no other one is, and nothing can be written to."""
    if not arguments or not isinstance(arguments[0], Tensor) or not arguments[0].is_floating_point():
        return False
    return all(map(_is_plain, (*arguments[1:], *options.values())))


def _is_plain(one: Any) -> bool:
    if isinstance(one, Tensor):
        return not one.requires_grad
    return all(map(_is_plain, one)) if isinstance(one, tuple) else isinstance(one, PLAIN)


class _Recomputed(torch.autograd.Function):
    """A function of one tensor; gives the structure of its result, and then the leaves."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Any], trace: Trace, x: Tensor) -> Any:
        ctx.run, ctx.trace = run, trace
        ctx.save_for_backward(x)
        leaves, structure = tree_flatten(run(x))
        return structure, *leaves

    @staticmethod
    def backward(ctx: Any, _: None, *gradients: Tensor | None) -> tuple[None, None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), ctx.trace.recomputing():
            leaves = tree_leaves(ctx.run(x))
        pairs = [(leaf, gradient) for leaf, gradient in zip(leaves, gradients, strict=True) if gradient is not None]
        felt = [(leaf, gradient) for leaf, gradient in pairs if leaf.requires_grad]
        torch.autograd.backward([leaf for leaf, _ in felt], [gradient for _, gradient in felt])
        return None, None, x.grad
