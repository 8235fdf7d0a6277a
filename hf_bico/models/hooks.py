"""Capture the inputs, outputs and output gradients of a model's sites during a pass; recompute activations.

Knows what a site is; neither the models' libraries nor what the tensors are for. Recomputed parts keep only their input
for the backward pass, which runs them again: parameters must have no gradients, and nothing may be random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_bico.errors import ObjectiveError
from hf_bico.models.layout import Site

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TextRows:
    """The tokens of a batch of texts, (samples, tokens), and which are real; in main memory, to avoid device syncs.

    Where two models read the texts as different tokens, `marks` are those whose inputs pair, and those whose gradients
    do: as many in both models, in the same order.
    """

    ids: Tensor
    mask: Tensor
    marks: tuple[Tensor, Tensor] | None = None

    def same_as(self, other: TextRows) -> bool:
        """Tell whether two models read the texts as the same tokens, at the same places of a batch."""
        ids, mask, theirs = self.ids.cpu(), self.mask.cpu(), other.mask.cpu()
        return torch.equal(mask, theirs) and torch.equal(ids * mask, other.ids.cpu() * theirs)


@dataclass
class Trace:
    """The inputs of sites in one forward pass, and their outputs while still in the graph."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    _noted: set[str] = field(default_factory=set)
    _recomputations: int = 0

    def tap(self, site: Site, x: Tensor, y: Tensor) -> Tensor:
        """Note a site's input and output; return y, which requires grad from here on."""
        if torch.is_grad_enabled() and not y.requires_grad:
            y.requires_grad_()
        if not self.is_recomputing:
            if site.name in self._noted:
                raise ObjectiveError(
                    f"the objective ran '{site.name}' more than once on one batch",
                    "run the model once, on the whole batch",
                )
            self._noted.add(site.name)
            self._note(site, x.detach(), y)
        return y

    def _note(self, site: Site, x: Tensor, y: Tensor) -> None:
        self.inputs[site.input] = x
        self.outputs[site.name] = y

    def require(self, sites: Sequence[Site]) -> None:
        """Refuse a pass that did not run these sites."""
        skipped = next((site.name for site in sites if site.name not in self._noted), None)
        if skipped is not None:
            raise ObjectiveError(
                f"the objective does not run '{skipped}'", "use the features that the whole model gives"
            )

    @property
    def is_recomputing(self) -> bool:
        return self._recomputations > 0

    def recomputing(self) -> AbstractContextManager[None]:
        """Inside this context, sites run again for the backward pass and are not noted."""
        return _Recomputing(self)


@dataclass
class _Recomputing(AbstractContextManager[None]):
    """A context that can be entered for each loss: a retained graph is recomputed for every one."""

    trace: Trace

    def __enter__(self) -> None:
        self.trace._recomputations += 1

    def __exit__(self, *_: object) -> None:
        self.trace._recomputations -= 1


SiteCallback = Callable[[Site, Tensor], None]
"""Takes a site's input, output or gradient as soon as it is known."""


class Stream(Trace):
    """Passes inputs, outputs and gradients of sites to callbacks, and keeps nothing: one pass after another.

    An activation that several sites read is passed on once. Outputs are detached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.listen()

    def listen(self, reads: SiteCallback | None = None, writes: SiteCallback | None = None) -> None:
        """Begin a new pass, and pass on what its sites read and write."""
        self._reads, self._writes = reads, writes
        self._gradients: SiteCallback | None = None
        self._read: set[str] = set()
        self._noted = set()

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

    def differentiate(self, loss: Tensor | None, gradients: SiteCallback, keep: bool = False) -> None:
        """Call `gradients(site, dL/dy)` for every site that the loss depends on, last layers first.

        `keep` retains the graph for another loss.
        """
        if loss is None:
            raise ValueError("a pass gave no loss to differentiate")
        self._gradients = gradients
        try:
            torch.autograd.grad(loss, _leaves(loss), retain_graph=keep, allow_unused=True)
        finally:
            self._gradients = None


def _leaves(loss: Tensor) -> list[Tensor]:
    """Return the leaves of the loss's graph: the outputs of the first sites, or earlier tensors."""
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

    def checkpointed(self, trace: Trace, whole_blocks: bool) -> AbstractContextManager[None]:
        """Save memory in the backward pass by running blocks, or their MLPs, twice."""

    def weight(self, name: str) -> Tensor:
        """Return the weight of a site as (out, in)."""


@dataclass(frozen=True)
class Losses:
    """The losses of one forward pass over one batch, in the graph.

    `task` is the SUM of the samples' losses, or a number with the same gradients. `expected` has one entry for each
    rank of likelihood: the sum over the samples of the loss with the label of that rank, times the root of its
    probability. `text` has the tokens, where texts were read.
    """

    task: Tensor | None = None
    expected: tuple[Tensor, ...] = ()
    text: TextRows | None = None


Pass = Callable[[], Losses]
"""One forward pass of a model over one batch."""


def recomputed(run: Callable[..., Any], trace: Trace) -> Callable[..., Any]:
    """Wrap a function so that it is recomputed in the backward pass, with its sites noted in the first pass only."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), trace.recomputing()

    def part(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*arguments, **options)
        return checkpoint(
            run, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **options
        )

    return part


def offloaded_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that accelerate keeps off the model's device, by parameter name."""
    found = {}
    for place, module in model.named_modules():
        hook: Any = getattr(module, "_hf_hook", None)
        maps = [getattr(one, "weights_map", None) for one in getattr(hook, "hooks", [hook])]  # hooks may be chained
        kept = next((one for one in maps if one is not None), None)
        for name, parameter in module.named_parameters(place, recurse=False):
            if parameter.is_meta and kept is not None:
                found[name] = kept[name.rpartition(".")[2]]
    return found
