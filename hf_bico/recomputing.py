"""Parts of a model that keep only what enters them for the backward pass, which runs them once more.

Knows functions of tensors, and who watches them; not models. Parameters must have no gradients, and nothing may be
drawn at random: a part that one tensor enters then needs less bookkeeping than `torch.utils.checkpoint` does for any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_bico.watching import Trace


def recomputed(run: Callable[..., Any], trace: Trace) -> Callable[..., Any]:
    """The same function, but thrifty. Sites in it tell the trace what they read at once, and their gradients later."""

    def again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), trace.recomputing()

    def part(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*arguments, **options)
        if _enters_alone(arguments, options):
            x, *others = arguments
            x = x if x.requires_grad else x.detach().requires_grad_()
            return _Recomputed.apply(lambda x: run(x, *others, **options), trace, x)
        return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=again, **options)

    return part


def _enters_alone(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Whether the first argument is a tensor, and no other one is felt."""
    if not arguments or not isinstance(arguments[0], Tensor):
        return False
    return not any(tensor.requires_grad for tensor in _tensors([arguments[1:], options]))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | Mapping):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)


class _Recomputed(torch.autograd.Function):
    """A function of one tensor, which gives one or several."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Any], trace: Trace, x: Tensor) -> Any:
        ctx.run, ctx.trace = run, trace
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), ctx.trace.recomputing():
            made = ctx.run(x)
        pairs = zip(made if isinstance(made, tuple) else (made,), gradients, strict=True)
        felt = [(one, gradient) for one, gradient in pairs if gradient is not None and one.requires_grad]
        torch.autograd.backward([one for one, _ in felt], [gradient for _, gradient in felt])
        return None, None, x.grad
