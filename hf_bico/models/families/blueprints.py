"""Transformers models whose blocks are linear modules by name, as tables: from a table to a family's layout.

Reads names, shapes and configurations. Knows neither torch at plan time nor any one kind of model.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hf_bico.errors import UnsupportedModelError
from hf_bico.models.checkpoints import FileCheckpoint
from hf_bico.models.families.base import Shapes, count_blocks
from hf_bico.models.families.pretrained import (
    PretrainedFamily,
    bare_model_of,
    first_architecture,
    has_class,
    require_config,
)
from hf_bico.models.layout import Layout, Site, Slot, Tokens
from hf_bico.utils.samples import TEXTS

TEXT_FILES = ("generation_config.json", "chat_template.jinja")
"""The files beside a language model's weights that are neither configuration nor tokenizer."""
NORM, EMBEDDINGS, POSITIONS, CLASSIFICATION_HEAD = "LayerNorm", "embeddings", "positions", "classification head"
TIED, OUTPUT_EMBEDDINGS, PRETRAINING_HEAD = "tied weights", "output embeddings", "pretraining head"
NO_SITE = "no linear site"
HEADS = (CLASSIFICATION_HEAD, PRETRAINING_HEAD)
"""What a backbone runs without."""

_ATTENTION_INPUTS = ("attn.q", "attn.k", "attn.v")
_GATED_INPUTS = ("mlp.gate", "mlp.up")


@dataclass(frozen=True)
class Blueprint:
    """How one spelling of one kind of model names its parts, after one of the `prefixes` that files have.

    `stem` stands before a block's number. `modules` has the module of each role in a block: one that stands for several
    roles is packed, and holds them one after the other. `beside` matches what else a block may hold; a model with
    anything more is of another kind. `outside` has the modules of roles outside of the blocks, where there are such.
    A model also has the tensors that it `needs`.
    """

    prefixes: tuple[str, ...]
    stem: str
    modules: Mapping[str, str]
    beside: str
    outside: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    transposed: bool = False
    """Whether weights are kept as (in, out)."""

    def prefix_in(self, shapes: Shapes) -> str | None:
        """The prefix under which these tensors are such a model; None where they are not."""
        return next((prefix for prefix in self.prefixes if self._is_under(prefix, shapes)), None)

    def _is_under(self, prefix: str, shapes: Shapes) -> bool:
        first = [f"{self.stem}0.{module}.weight" for module in self.modules.values()]
        if not all(prefix + name in shapes for name in (*first, *self.needs)):
            return False
        known = "|".join(re.escape(module) for module in self.modules.values())
        allowed = re.compile(rf"\d+\.(?:(?:{known})\.(?:weight|bias)|{self.beside})")
        stem = prefix + self.stem
        return all(allowed.fullmatch(name[len(stem) :]) for name in shapes if name.startswith(stem))

    def block_sites(self, shapes: Shapes, prefix: str, block: int, text: bool) -> list[Site]:
        """The sites of one block, those of a packed module by their share of its rows."""
        sites = []
        for role, module in self.modules.items():
            roles = [other for other, its_module in self.modules.items() if its_module == module]
            path = f"{prefix}{self.stem}{block}.{module}"
            name = f"blocks.{block}.{role}"
            share = None if len(roles) == 1 else (roles.index(role), len(roles))
            sites.append(self._site(shapes, path, name, role, block, text, share))
        return sites

    def outside_sites(self, shapes: Shapes, prefix: str, text: bool) -> list[Site]:
        return [
            self._site(shapes, prefix + module, role, role, None, text)
            for role, module in self.outside.items()
            if f"{prefix}{module}.weight" in shapes
        ]

    def _site(
        self,
        shapes: Shapes,
        path: str,
        name: str,
        role: str,
        block: int | None,
        text: bool,
        share: tuple[int, int] | None = None,
    ) -> Site:
        weight, bias = f"{path}.weight", f"{path}.bias"
        first, second = shapes[weight]
        rows, columns = (second, first) if self.transposed else (first, second)
        span = None
        if share is not None:
            number, count = share
            rows //= count
            span = (number * rows, (number + 1) * rows)
        slots = Slot(weight, span, self.transposed), Slot(bias, span) if bias in shapes else None
        return Site(name, role, block, self._input(name, role), (rows, columns), *slots, text=text)

    def _input(self, name: str, role: str) -> str:
        """Sites that read the same activation: q, k and v, and a gate with what it opens."""
        if role in _ATTENTION_INPUTS:
            return f"{name.removesuffix(role)}attn.in"
        if role in _GATED_INPUTS and "mlp.gate" in self.modules:
            return f"{name.removesuffix(role)}mlp.in"
        return name


class DescribedFamily(PretrainedFamily):
    """A family of transformers models that blueprints describe, one for each spelling of names."""

    processor_files = TEXT_FILES
    blueprints: ClassVar[tuple[Blueprint, ...]]
    reasons: ClassVar[Mapping[str, str]]
    """Why a tensor beside the sites stays behind, by an expression for a part of its name; the first one holds."""
    reads: ClassVar[str] = TEXTS
    objectives: ClassVar[tuple[str, ...]]

    def recognises(self, shapes: Shapes) -> bool:
        return self._found(shapes) is not None

    def _found(self, shapes: Shapes) -> tuple[Blueprint, str] | None:
        found = ((blueprint, blueprint.prefix_in(shapes)) for blueprint in self.blueprints)
        return next(((blueprint, prefix) for blueprint, prefix in found if prefix is not None), None)

    def layout(self, shapes: Shapes, config: Mapping[str, Any]) -> Layout:
        found = self._found(shapes)
        if found is None:
            raise ValueError(f"not of the family {self.name}")
        blueprint, prefix = found
        text = self.reads == TEXTS
        blocks = count_blocks(shapes, prefix + blueprint.stem)
        sites = [site for block in range(blocks) for site in blueprint.block_sites(shapes, prefix, block, text)]
        sites += self.outside_sites(blueprint, shapes, prefix, config)
        tokens, image_size = self.tokens(shapes, prefix, config)
        taken = {slot.tensor for site in sites for slot in site.slots}
        return Layout(
            *(self.name, tuple(sites), blocks, tokens, image_size),
            others={name: self.reason(name, config) for name in shapes if name not in taken},
            own_names=self.own_names(blueprint, shapes, prefix),
            heads=self.heads(config),
            reads=self.reads,
            objectives=self.objectives,
        )

    def outside_sites(self, blueprint: Blueprint, shapes: Shapes, prefix: str, config: Mapping[str, Any]) -> list[Site]:
        """The sites outside of the blocks."""
        return []

    def tokens(
        self, shapes: Shapes, prefix: str, config: Mapping[str, Any]
    ) -> tuple[Tokens | None, tuple[int, int] | None]:
        """How the rows of images are laid out, and the images' size; texts have neither."""
        return None, None

    def reason(self, name: str, config: Mapping[str, Any]) -> str:
        """Why a tensor beside the sites stays behind."""
        return next((reason for part, reason in self.reasons.items() if re.search(part, name)), NO_SITE)

    def own_names(self, blueprint: Blueprint, shapes: Shapes, prefix: str) -> Mapping[str, str]:
        """The names in the loaded model of tensors that these files keep under others."""
        return {}

    def heads(self, config: Mapping[str, Any]) -> int | None:
        """How many attention heads a block has, where that says how its rows are cut."""
        return None

    @abstractmethod
    def class_for(self, folder: Path, config: Mapping[str, Any], shapes: Shapes) -> tuple[str, dict[str, Any]]:
        """The class by which a folder's model is run, and what it is told when it is made."""

    def model_class(self, folder: Path) -> tuple[str, Mapping[str, Any], dict[str, Any]]:
        config = require_config(self, folder)
        name, options = self.class_for(folder, config, FileCheckpoint.in_folder(folder, self.library).shapes)
        return name, config, options


class BackboneFamily(DescribedFamily):
    """A family whose models need no head: they run by the class that the configuration names, or as the backbone.

    As the backbone where the files do not hold all of that class, or hold sites that it has no place for.
    """

    def task(self, objective: str | None, has_head: bool, used_loss: bool) -> str | None:
        return self.pipeline_tag if has_head else None

    @abstractmethod
    def backbone(
        self, folder: Path, config: Mapping[str, Any], shapes: Shapes, layout: Layout
    ) -> tuple[str, dict[str, Any]]:
        """The class without a head, and what it is told when it is made."""

    def class_for(self, folder: Path, config: Mapping[str, Any], shapes: Shapes) -> tuple[str, dict[str, Any]]:
        from hf_bico.models.families.modules import stored_names, tied_names

        layout, named = self.layout(shapes, config), first_architecture(config)
        if named is not None and has_class(named):
            whole = bare_model_of(folder, named, config, shapes)
            stored = stored_names(whole, shapes)
            made_up = set(whole.state_dict()) - stored.keys() - tied_names(whole)
            if not made_up and layout.tensors <= set(stored.values()):
                return named, {}
        return self.backbone(folder, config, shapes, layout)


def mapped_class(config: Mapping[str, Any], mapping: str) -> str | None:
    """The class that transformers has for the configured type of model, by the name of one of its own tables."""
    from transformers.models.auto import modeling_auto

    named: str | None = getattr(modeling_auto, mapping).get(config.get("model_type"))
    return named


def no_class(name: str, config: Mapping[str, Any]) -> UnsupportedModelError:
    """The error for a model that only code from its own repo could run."""
    kind = first_architecture(config) or config.get("model_type") or "model of no class"
    return UnsupportedModelError(
        f"'{name}' is a {kind}, for which the installed transformers has no class of its own",
        "use a model that transformers runs without code from a repo",
    )
