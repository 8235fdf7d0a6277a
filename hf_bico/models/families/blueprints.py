"""Families from tables: transformers models whose blocks are linear modules by name.

Reads names, shapes and configurations; no torch at plan time. Knows no one kind of model.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from hf_bico.errors import UnsupportedModelError
from hf_bico.models.checkpoints import FileCheckpoint
from hf_bico.models.families.base import NO_SITE, Shapes, block_sites, count_blocks
from hf_bico.models.families.pooling import SENTENCE_FILES
from hf_bico.models.families.pretrained import (
    PretrainedFamily,
    bare_model_of,
    first_architecture,
    has_class,
    require_config,
)
from hf_bico.models.layout import Layout, Site, Tokens
from hf_bico.utils.files import folder_name
from hf_bico.utils.samples import TEXTS

TEXT_FILES = ("generation_config.json", "chat_template.jinja")
"""The files beside a language model's weights that are neither configuration nor tokenizer."""
POSITIONS, CLASSIFICATION_HEAD = "positions", "classification head"
OUTPUT_EMBEDDINGS, PRETRAINING_HEAD = "output embeddings", "pretraining head"
HEAD_REASONS = (CLASSIFICATION_HEAD, PRETRAINING_HEAD)
"""The reasons for tensors that a backbone runs without."""


@dataclass(frozen=True)
class Blueprint:
    """One spelling of the names in one kind of model, after one of the `prefixes` that files have.

    `stem` precedes a block's number. `modules` maps the roles in a block to modules: one module for several roles is
    packed, and holds them one after another. `beside` matches what else a block may hold; a model with anything more is
    of another kind. `needs` lists tensors that must exist.
    """

    prefixes: tuple[str, ...]
    stem: str
    modules: Mapping[str, str]
    beside: str
    needs: tuple[str, ...] = ()
    transposed: bool = False
    """Whether weights are stored as (in, out)."""

    def prefix_in(self, shapes: Shapes) -> str | None:
        """Return the prefix under which these tensors fit; None if they do not."""
        return next((prefix for prefix in self.prefixes if self._is_under(prefix, shapes)), None)

    def _is_under(self, prefix: str, shapes: Shapes) -> bool:
        first = [f"{self.stem}0.{module}.weight" for module in self.modules.values()]
        if not all(prefix + name in shapes for name in (*first, *self.needs)):
            return False
        known = "|".join(re.escape(module) for module in self.modules.values())
        allowed = re.compile(rf"\d+\.(?:(?:{known})\.(?:weight|bias)|{self.beside})")
        stem = prefix + self.stem
        return all(allowed.fullmatch(name[len(stem) :]) for name in shapes if name.startswith(stem))

    def block_sites(self, shapes: Shapes, prefix: str, block: int) -> list[Site]:
        modules = {role: f"{module}." for role, module in self.modules.items()}
        stem = f"{prefix}{self.stem}{block}."
        return block_sites(shapes, stem, f"blocks.{block}.", block, modules, transposed=self.transposed)


class DescribedFamily(PretrainedFamily):
    """A family of transformers models with one blueprint for each spelling of names."""

    processor_files = (*TEXT_FILES, *SENTENCE_FILES)
    blueprints: ClassVar[tuple[Blueprint, ...]]
    reasons: ClassVar[Mapping[str, str]]
    """Why other tensors stay behind, by an expression for a part of the name; the first one counts."""
    reads: ClassVar[str] = TEXTS
    objectives: ClassVar[tuple[str, ...]]

    def recognises(self, shapes: Shapes) -> bool:
        return self._match(shapes) is not None

    def _match(self, shapes: Shapes) -> tuple[Blueprint, str] | None:
        found = ((blueprint, blueprint.prefix_in(shapes)) for blueprint in self.blueprints)
        return next(((blueprint, prefix) for blueprint, prefix in found if prefix is not None), None)

    def layout(self, shapes: Shapes, config: Mapping[str, Any]) -> Layout:
        found = self._match(shapes)
        if found is None:
            raise ValueError(f"not of the family {self.name}")
        blueprint, prefix = found
        blocks = count_blocks(shapes, prefix + blueprint.stem)
        sites = [
            replace(site, text=self.reads == TEXTS)
            for block in range(blocks)
            for site in blueprint.block_sites(shapes, prefix, block)
        ]
        sites += self.outside_sites(blueprint, shapes, prefix, config)
        tokens, image_size = self.tokens(shapes, prefix, config)
        taken = {slot.tensor for site in sites for slot in site.slots}
        return Layout(
            family=self.name,
            sites=tuple(sites),
            blocks=blocks,
            tokens=tokens,
            image_size=image_size,
            others={name: self.reason(name, config) for name in shapes if name not in taken},
            own_names=self.own_names(blueprint, shapes, prefix),
            heads=self.heads(config),
            reads=self.reads,
            objectives=self.objectives,
        )

    def outside_sites(self, blueprint: Blueprint, shapes: Shapes, prefix: str, config: Mapping[str, Any]) -> list[Site]:
        """Return the sites outside of the blocks."""
        return []

    def tokens(
        self, shapes: Shapes, prefix: str, config: Mapping[str, Any]
    ) -> tuple[Tokens | None, tuple[int, int] | None]:
        """Return the token layout and size of images; None for texts."""
        return None, None

    def reason(self, name: str, config: Mapping[str, Any]) -> str:
        """Say why a tensor beside the sites stays behind."""
        return next((reason for part, reason in self.reasons.items() if re.search(part, name)), NO_SITE)

    def own_names(self, blueprint: Blueprint, shapes: Shapes, prefix: str) -> Mapping[str, str]:
        """Map tensor names in these files to those in the loaded model, where they differ."""
        return {}

    def heads(self, config: Mapping[str, Any]) -> int | None:
        """Return the number of attention heads in a block, if it matters for its rows."""
        return None

    @abstractmethod
    def class_for(self, folder: Path, config: Mapping[str, Any], shapes: Shapes) -> tuple[str, dict[str, Any]]:
        """Return the class that runs a folder's model, and its options."""

    def model_class(self, folder: Path) -> tuple[str, Mapping[str, Any], dict[str, Any]]:
        config = require_config(self, folder)
        name, options = self.class_for(folder, config, FileCheckpoint.in_folder(folder, self.library).shapes)
        return name, config, options


class BackboneFamily(DescribedFamily):
    """A family whose models need no head: they run as the configured class, or as the backbone.

    The backbone is taken if the files lack parts of that class, or hold sites that it has no place for.
    """

    def task(self, objective: str | None, has_head: bool, used_loss: bool) -> str | None:
        return self.pipeline_tag if has_head else None

    @abstractmethod
    def backbone(
        self, folder: Path, config: Mapping[str, Any], shapes: Shapes, layout: Layout
    ) -> tuple[str, dict[str, Any]]:
        """Return the class without a head, and its options."""

    def class_for(self, folder: Path, config: Mapping[str, Any], shapes: Shapes) -> tuple[str, dict[str, Any]]:
        from hf_bico.models.families.modules import stored_names, tied_names

        layout, named = self.layout(shapes, config), first_architecture(config)
        if named is not None and has_class(named):
            whole = bare_model_of(folder, named, config, shapes)
            stored = stored_names(whole, shapes)
            uninitialised = set(whole.state_dict()) - stored.keys() - tied_names(whole)
            if not uninitialised and layout.tensors <= set(stored.values()):
                return named, {}
        return self.backbone(folder, config, shapes, layout)


def mapped_class(config: Mapping[str, Any], mapping: str) -> str | None:
    """Look up the class of the configured model type in one of transformers' own tables."""
    from transformers.models.auto import modeling_auto

    named: str | None = getattr(modeling_auto, mapping).get(config.get("model_type"))
    return named


def require_class(name: str, folder: Path, config: Mapping[str, Any]) -> str:
    """Return the name of a class; refuse a folder whose model only code from its own repo could run."""
    if has_class(name):
        return name
    kind = first_architecture(config) or config.get("model_type") or "model of no class"
    raise UnsupportedModelError(
        f"'{folder_name(folder)}' is a {kind}, for which the installed transformers has no class of its own",
        "use a model that transformers runs without code from a repo",
    )
