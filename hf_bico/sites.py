"""Sites: one weight matrix at one place of a model, read as (out, in) whatever its storage.

Pure descriptions made from names and shapes; this module knows neither torch nor any model library.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

ROLES = ("attn.q", "attn.k", "attn.v", "attn.out", "mlp.up", "mlp.down", "proj")


@dataclass(frozen=True)
class Slot:
    """Where a weight or bias lives: a tensor of the checkpoint, or some of its rows, maybe transposed."""

    tensor: str
    rows: tuple[int, int] | None = None
    transposed: bool = False

    def view(self, tensor: Any) -> Any:
        """The part of `tensor` that is this slot, as (out, in) or (out,); writing to the view writes there."""
        part = tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]
        return part.T if self.transposed else part


@dataclass(frozen=True)
class Site:
    """One linear map y = x W^T + b of a model.

    `name` and `role` are canonical: the same place has the same name in every library. `input` names what the
    site reads, so that sites that read the same activation (q, k and v) share its statistics.
    """

    name: str
    role: str
    block: int | None
    input: str
    shape: tuple[int, int]
    weight: Slot
    bias: Slot | None = None

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True)
class Tokens:
    """How rows of an activation are laid out: prefix tokens (CLS, registers), then a grid of patches."""

    prefix: int
    grid: tuple[int, int]

    def image_size(self, patch: int) -> tuple[int, int]:
        return (self.grid[0] * patch, self.grid[1] * patch)


@dataclass(frozen=True)
class Layout:
    """A model as its family reads it: the sites, the tokens, and why each other tensor stays behind."""

    family: str
    sites: tuple[Site, ...]
    blocks: int
    tokens: Tokens
    image_size: tuple[int, int]
    others: dict[str, str]

    def site(self, name: str) -> Site:
        return next(site for site in self.sites if site.name == name)

    def slots(self) -> Iterable[Slot]:
        return (slot for site in self.sites for slot in site.slots)


@dataclass(frozen=True)
class SitePair:
    """A target site and the source site whose change it takes."""

    source: Site
    target: Site
