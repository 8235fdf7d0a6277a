"""The layout of a CLIP with a vision and a text tower, from tables of names; shared by both libraries. No torch."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from hf_bico.models.families.base import (
    NO_SITE,
    TEXT_TOWER,
    ZERO_SHOT_TASK,
    Family,
    Shapes,
    block_sites,
    count_blocks,
    patch_tokens,
    prefix_before,
)
from hf_bico.models.layout import STEM, TEXT_SIDE, Axis, Layout, Site

WHOLE_MODEL = "name the whole CLIP model; a fine-tuned tower is completed by --base"


class ClipFamily(Family):
    """A CLIP with a vision transformer, whole or its vision tower alone; the tables have names after its prefix."""

    pipeline_tag = ZERO_SHOT_TASK
    tower_name: ClassVar[str]
    """The vision tower in errors."""
    roots: ClassVar[tuple[str, ...]]
    """What the library itself puts before the tower's names: in a whole model, and in a tower alone."""
    stem: ClassVar[str]
    """Precedes a block's number."""
    modules: ClassVar[Mapping[str, str]]
    """The linear maps of a block, as `block_sites` takes them."""
    residual_names: ClassVar[Mapping[str, str]]
    """Canonical names of tensors along the residual stream."""
    block_residual_names: ClassVar[Mapping[str, str]]
    reasons: ClassVar[Mapping[str, str]]
    """Why other tensors of the tower stay behind, by an expression for a part of the name; the first one counts."""

    def vision_prefix(self, shapes: Shapes) -> str | None:
        """Return what precedes the vision tower's names; None if there is no such tower."""
        prefix = prefix_before(shapes, self._own_name("class"))
        first = f"{prefix}{self.stem}0.{self.modules['attn.q']}weight"
        return prefix if prefix is not None and first in shapes else None

    def _own_name(self, canonical: str) -> str:
        return next(own for own, name in self.residual_names.items() if name == canonical)

    def recognises(self, shapes: Shapes) -> bool:
        return self.vision_prefix(shapes) is not None

    def has_own_names(self, shapes: Shapes) -> bool:
        return self.vision_prefix(shapes) in self.roots

    def layout(self, shapes: Shapes, config: Mapping[str, Any]) -> Layout:
        root = self.vision_prefix(shapes)
        if root is None:
            raise ValueError(f"not of the family {self.name}")
        vision_sites = self._tower_sites(shapes, root + self.stem, "") + self.projection_sites(shapes, root)
        text_sites = [replace(site, text=True, tower=TEXT_SIDE) for site in self.text_sites(shapes, root)]
        sites = (*vision_sites, *text_sites)
        width, *_, patch = shapes[root + self._own_name(STEM)]
        positions, _ = shapes[root + self._own_name("positions")]
        vision = self.vision_config(config)
        tokens = patch_tokens(positions, patch, vision.get("image_size"), prefix=1, what=self.tower_name)
        taken = {slot.tensor for site in sites for slot in site.slots}
        blocks = count_blocks(shapes, root + self.stem)
        return Layout(
            family=self.name,
            sites=sites,
            blocks=blocks,
            tokens=tokens,
            image_size=tokens.image_size(patch),
            others={name: self._reason(name, root) for name in shapes if name not in taken},
            heads=self.heads(vision, width),
            residual=self.residual(shapes, root, blocks),
            objectives=("zero-shot", "contrastive"),
            text_blocks=len({site.block for site in text_sites} - {None}),
        )

    def _tower_sites(self, shapes: Shapes, stem: str, tower: str) -> list[Site]:
        sites = []
        for block in range(count_blocks(shapes, stem)):
            sites += block_sites(shapes, f"{stem}{block}.", f"{tower}blocks.{block}.", block, self.modules)
        return sites

    @abstractmethod
    def projection_sites(self, shapes: Shapes, root: str) -> list[Site]:
        """Return the projection of the image features, if there is one."""

    @abstractmethod
    def text_sites(self, shapes: Shapes, root: str) -> list[Site]:
        """Return the sites of the text tower, if the model has one."""

    @abstractmethod
    def vision_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the part of the configuration that is about the vision tower."""

    @abstractmethod
    def heads(self, vision: Mapping[str, Any], width: int) -> int | None:
        """Return the number of attention heads in a block, if it is known."""

    def residual(self, shapes: Shapes, root: str, blocks: int) -> tuple[Axis, ...]:
        """Return the tensors beside the sites that run over the residual stream."""
        names = {root + own: name for own, name in self.residual_names.items()}
        for block in range(blocks):
            stem = f"{root}{self.stem}{block}."
            names |= {stem + own: f"blocks.{block}.{name}" for own, name in self.block_residual_names.items()}
        return tuple(
            # the stream is the last axis of all but the patch stem, a convolution
            Axis(name, tensor, 0 if name == STEM else len(shapes[tensor]) - 1)
            for tensor, name in names.items()
            if tensor in shapes
        )

    def _reason(self, name: str, root: str) -> str:
        if not name.startswith(root):
            return TEXT_TOWER
        own = name[len(root) :]
        return next((reason for part, reason in self.reasons.items() if re.search(part, own)), NO_SITE)
