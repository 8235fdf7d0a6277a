"""Watching a model's sites during a pass: what they read and write, and the gradients at what they write.

Knows what a site is; neither the models' libraries, nor what is done with what is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_bico.errors import ObjectiveError
from hf_bico.pairing import TextRows
from hf_bico.sites import Site


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
