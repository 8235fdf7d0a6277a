"""Taps on sites during a pass; activation checkpointing.

Watching a model's sites during a pass: what they read and write, and the gradients at what they write.

Knows what a site is; neither the models' libraries, nor what is done with what is seen.

Parts of a model that keep only what enters them for the backward pass, which runs them once more.

Knows functions of tensors, and who watches them; not models. Parameters must have no gradients, and nothing may be
drawn at random. `torch.utils.checkpoint` does it for any part; one that is known to be a function of one tensor, and to
show nobody else what it finds on the way, needs less bookkeeping.

Weights that accelerate keeps in main memory until a module runs. Knows its ways; not what the weights are for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import NoneType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from hf_bico.errors import ObjectiveError
from hf_bico.models.layout import Site

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TextRows:
    """The tokens of a batch of texts, (samples, tokens), and which of them are real and no padding.

    In main memory where they are looked at: a device is not waited for.
    """

    ids: Tensor
    mask: Tensor


@dataclass
class Trace:
    """What one forward pass shows: each site's input, and its output while still in the graph."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)
    _again: int = 0

    def tap(self, site: Site, x: Tensor, y: Tensor) -> Tensor:
        """Note what `site` read and wrote; returns y, which requires grad from here on."""
        if torch.is_grad_enabled() and not y.requires_grad:
            y.requires_grad_()
        if not self.is_recomputing:
            if site.name in self._done:
                raise ObjectiveError(
                    f"the objective ran '{site.name}' more than once on one batch",
                    "run the model once, on the whole batch",
                )
            self._done.add(site.name)
            self._note(site, x.detach(), y)
        return y

    def _note(self, site: Site, x: Tensor, y: Tensor) -> None:
        self.inputs[site.input] = x
        self.outputs[site.name] = y

    def require(self, sites: Sequence[Site]) -> None:
        """Refuse a pass that did not run these sites."""
        idle = next((site.name for site in sites if site.name not in self._done), None)
        if idle is not None:
            raise ObjectiveError(f"the objective does not run '{idle}'", "use the features that the whole model gives")

    @property
    def is_recomputing(self) -> bool:
        return self._again > 0

    def recomputing(self) -> AbstractContextManager[None]:
        """Inside, sites run once more to find what was thrown away: what they read and write was seen before."""
        return _Recomputing(self)


@dataclass
class _Recomputing(AbstractContextManager[None]):
    """Entered anew for each loss: a graph that is kept is recomputed for every one."""

    trace: Trace

    def __enter__(self) -> None:
        self.trace._again += 1

    def __exit__(self, *_: object) -> None:
        self.trace._again -= 1


Heard = Callable[[Site, Tensor], None]
"""What takes a site's input, output or gradient as soon as it is known."""


class Stream(Trace):
    """Hands on what the sites show as soon as it is known, and keeps nothing: one pass after the other.

    An activation that several sites read is told once. Outputs are told out of the graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.listen()

    def listen(self, reads: Heard | None = None, writes: Heard | None = None) -> None:
        """Begin another pass, and hand on what its sites read and write."""
        self._reads, self._writes = reads, writes
        self._gradients: Heard | None = None
        self._read: set[str] = set()
        self._done = set()

    def tap(self, site: Site, x: Tensor, y: Tensor) -> Tensor:
        y = super().tap(site, x, y)
        if y.requires_grad:
            y.register_hook(lambda gradient: self._gradient(site, gradient))
        return y

    def _note(self, site: Site, x: Tensor, y: Tensor) -> None:
        if self._reads is not None and site.input not in self._read:
            self._read.add(site.input)
            self._reads(site, x)
        if self._writes is not None:
            self._writes(site, y.detach())

    def _gradient(self, site: Site, gradient: Tensor) -> None:
        if self._gradients is not None:
            self._gradients(site, gradient)

    def differentiate(self, loss: Tensor | None, gradients: Heard, keep: bool = False) -> None:
        """Tell the gradient of the loss at the output of every site that it feels, those of later sites first.

        `keep` keeps the graph, for another loss.
        """
        if loss is None:
            raise ValueError("a pass gave no loss to differentiate")
        self._gradients = gradients
        try:
            torch.autograd.grad(loss, _leaves(loss), retain_graph=keep, allow_unused=True)
        finally:
            self._gradients = None


def _leaves(loss: Tensor) -> list[Tensor]:
    """Whatever the loss was computed from that requires grad: the outputs of the first sites, or what came before."""
    found, seen, waiting = [], set[Any](), [loss.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [parent for parent, _ in node.next_functions]
    return found


class Observable(Protocol):
    """A model whose sites can be watched during a forward pass."""

    def observed(self, sites: Sequence[Site], trace: Trace) -> AbstractContextManager[Trace]: ...

    def checkpointed(self, trace: Trace, whole_blocks: bool, looked_into: bool) -> AbstractContextManager[None]:
        """Less memory for the backward pass, at the price of a second forward pass of blocks, or of their MLPs.

        `looked_into` says that a loss may be of what these do not return.
        """

    def weight(self, name: str) -> Tensor:
        """The weight of a site as (out, in)."""


@dataclass(frozen=True)
class Losses:
    """What one forward pass over one batch gives, in the graph.

    `task` is the SUM of the samples' losses. `expected` has one entry for each rank of likelihood: the sum over the
    samples of the loss with the label of that rank, times the root of its probability. `text` says which rows of text
    sites are real tokens, where texts were read. Where right and wrong can be told, `answers` counts what the loss is
    the sum over, samples or tokens, and `wrong` those of them that the model does not get right. A task loss that
    `stands_in` for another has its gradients, and no meaning of its own.
    """

    task: Tensor | None = None
    expected: tuple[Tensor, ...] = ()
    text: TextRows | None = None
    answers: Tensor | None = None
    wrong: Tensor | None = None
    stands_in: bool = False


Pass = Callable[[], Losses]
"""One forward pass of a model over one batch."""

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


def kept_away(model: nn.Module) -> dict[str, Tensor]:
    """The weights that are not where the model runs, by their parameters' names."""
    found = {}
    for place, module in model.named_modules():
        hook: Any = getattr(module, "_hf_hook", None)
        maps = [getattr(one, "weights_map", None) for one in getattr(hook, "hooks", [hook])]  # several may be chained
        kept = next((one for one in maps if one is not None), None)
        for name, parameter in module.named_parameters(place, recurse=False):
            if parameter.is_meta and kept is not None:
                found[name] = kept[name.rpartition(".")[2]]
    return found
