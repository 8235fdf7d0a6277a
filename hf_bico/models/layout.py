"""Sites and layouts: which weight matrices a model has, read as (out, in) whatever their storage.

Descriptions made from names and shapes; knows neither torch nor any model library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_bico.utils.samples import IMAGES

ROLES = ("attn.q", "attn.k", "attn.v", "attn.out", "mlp.gate", "mlp.up", "mlp.down", "pooler", "proj")
"""The roles of the known families, in the order of tables and pictures; a generic model has roles of its own."""
TEXT_SIDE = "text"
"""The tower of a CLIP that reads texts; its main tower reads images."""

STEM = "stem"
"""The canonical name of the patch stem."""


@dataclass(frozen=True)
class Slot:
    """The location of a weight or bias: a tensor of the checkpoint, stored as (in, out) if `transposed`, or some rows.

    The rows are those of (out, in): in a packed GPT-2 weight, stored as (in, out), they are columns.
    """

    tensor: str
    rows: tuple[int, int] | None = None
    transposed: bool = False

    def view(self, tensor: Any) -> Any:
        """Return this slot's part of `tensor`, as (out, in) or (out,); writing to the view writes to the tensor."""
        whole = tensor.T if self.transposed else tensor
        return whole if self.rows is None else whole[self.rows[0] : self.rows[1]]


@dataclass(frozen=True)
class Site:
    """One linear map y = x W^T + b of a model.

    `name` and `role` are canonical: the same in every library. `input` names the activation that the site reads, so
    that sites with the same input (q, k and v) share its statistics. The rows of a `text` site are the tokens of a
    text. `tower` is "" in a model's main tower; the blocks of each tower are matched on their own.
    """

    name: str
    role: str
    block: int | None
    input: str
    shape: tuple[int, int]
    weight: Slot
    bias: Slot | None = None
    text: bool = False
    tower: str = ""

    @property
    def label(self) -> str:
        """The role, with the tower unless it is the main one, as tables and pictures show it."""
        return f"{self.tower}.{self.role}" if self.tower else self.role

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True)
class Tokens:
    """The rows of an activation: prefix tokens (CLS, registers), then a grid of patches."""

    prefix: int
    grid: tuple[int, int]

    @property
    def count(self) -> int:
        return self.prefix + self.grid[0] * self.grid[1]

    def image_size(self, patch: int) -> tuple[int, int]:
        return (self.grid[0] * patch, self.grid[1] * patch)


@dataclass(frozen=True)
class Axis:
    """A tensor outside the sites with one axis over the residual stream: a LayerNorm, the class token.

    `name` is canonical, as a site's is; `tensor` is the checkpoint's own name.
    """

    name: str
    tensor: str
    axis: int


@dataclass(frozen=True)
class Layout:
    """A model as its family reads it: the sites, the tokens, and why each other tensor stays behind.

    Without `tokens`, rows of two models pair one by one; without `image_size`, prepared images run as they are. `kind`
    is the model's class, if only models of one class have the same sites. `own_names` maps tensor names in files to
    those in the loaded model, where they differ. `heads` counts the attention heads of each block, and `residual` lists
    the tensors along the residual stream beside the sites; None and empty if not known. `reads` says what a sample is
    to the model, `objectives` which losses it can give, the default first, and `text_blocks` counts the blocks of a
    second, text tower.
    """

    family: str
    sites: tuple[Site, ...]
    blocks: int
    tokens: Tokens | None
    image_size: tuple[int, int] | None
    others: dict[str, str]
    kind: str = ""
    own_names: Mapping[str, str] = field(default_factory=dict)
    heads: int | None = None
    residual: tuple[Axis, ...] = ()
    reads: str = IMAGES
    objectives: tuple[str, ...] = ()
    text_blocks: int = 0

    def site(self, name: str) -> Site:
        return next(site for site in self.sites if site.name == name)

    @property
    def main_sites(self) -> tuple[Site, ...]:
        """The sites of the main tower."""
        return tuple(site for site in self.sites if not site.tower)

    @property
    def tensors(self) -> set[str]:
        """The tensors that hold sites."""
        return {slot.tensor for slot in self.slots()}

    def slots(self) -> Iterable[Slot]:
        return (slot for site in self.sites for slot in site.slots)


@dataclass(frozen=True)
class SitePair:
    """A target site and the source site whose change it takes."""

    source: Site
    target: Site


def count_heads(width: int, heads: Any) -> int | None:
    """Return the configured number of attention heads, if it is possible for a tower of this width.

    >>> count_heads(768, 12), count_heads(768, 7), count_heads(768, None)
    (12, None, None)
    """
    return heads if type(heads) is int and heads > 0 and width % heads == 0 else None
