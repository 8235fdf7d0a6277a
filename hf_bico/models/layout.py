"""Sites: one weight matrix at one place of a model, read as (out, in) whatever its storage.

Pure descriptions made from names and shapes; this module knows neither torch nor any model library.
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
    """Where a weight or bias lives: a tensor of the checkpoint, kept as (in, out) if `transposed`, or some rows of it.

    The rows are those of (out, in): of a packed GPT-2 weight, which is kept as (in, out), they are its columns.
    """

    tensor: str
    rows: tuple[int, int] | None = None
    transposed: bool = False

    def view(self, tensor: Any) -> Any:
        """The part of `tensor` that is this slot, as (out, in) or (out,); writing to the view writes there."""
        whole = tensor.T if self.transposed else tensor
        return whole if self.rows is None else whole[self.rows[0] : self.rows[1]]


@dataclass(frozen=True)
class Site:
    """One linear map y = x W^T + b of a model.

    `name` and `role` are canonical: the same place has the same name in every library. `input` names what the
    site reads, so that sites that read the same activation (q, k and v) share its statistics. Of a `text` site the rows
    are the tokens of a text. `tower` is "" in a model's main tower, whose blocks are matched on their own.
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
        """What tables and pictures call its kind: the role, and the tower where that is not the main one."""
        return f"{self.tower}.{self.role}" if self.tower else self.role

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
class Axis:
    """A tensor outside the sites one of whose axes runs over the residual stream: a LayerNorm, the class token.

    `name` is canonical, as a site's is; `tensor` is the checkpoint's own name.
    """

    name: str
    tensor: str
    axis: int


@dataclass(frozen=True)
class Layout:
    """A model as its family reads it: the sites, the tokens, and why each other tensor stays behind.

    Without `tokens`, rows of two models pair one by one; without `image_size`, prepared images run as they are.
    `kind` is the model's class, where only models of one class have the same sites. `own_names` are the names in the
    loaded model of tensors that its files keep under others. `heads` counts the attention heads of each block, and
    `residual` has what runs over the residual stream beside the sites; None and empty where that is not known. `reads`
    says what a sample is to the model, `objectives` which losses it can give, the usual one first, and `text_blocks`
    counts the blocks of a second, text tower.
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
        """Those of the main tower."""
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


def descent_sites(pairs: Iterable[SitePair]) -> set[str]:
    """The target sites whose descent is looked at: those outside of MLPs, or all where there are no others.

    MLPs hold two thirds of the weights, and add little to what the others foretell (benchmarks/foresight.py).
    """
    names = {pair.target.name: pair.target.role.startswith("mlp.") for pair in pairs}
    return {name for name, in_mlp in names.items() if not in_mlp} or set(names)


def residual_axes(
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str],
    stem: str,
    blocks: int,
    block_names: Mapping[str, str],
) -> tuple[Axis, ...]:
    """The tensors beside the sites that run over the residual stream, from canonical names by the model's own.

    `names` has those outside the blocks, `block_names` those of each block, after `stem` and the block's number. All
    have the stream last but for the patch stem, which is a convolution.
    """
    inside = {
        f"{stem}{block}.{own}": f"blocks.{block}.{name}" for block in range(blocks) for own, name in block_names.items()
    }
    return tuple(
        Axis(name, tensor, 0 if name == STEM else len(shapes[tensor]) - 1)
        for tensor, name in {**names, **inside}.items()
        if tensor in shapes
    )


def count_heads(width: int, heads: Any) -> int | None:
    """The configured number of attention heads, where it can be true of a tower of this width.

    >>> count_heads(768, 12), count_heads(768, 7), count_heads(768, None)
    (12, None, None)
    """
    return heads if type(heads) is int and heads > 0 and width % heads == 0 else None
