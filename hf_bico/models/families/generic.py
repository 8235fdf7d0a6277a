"""The generic family: any two models of one transformers class that no other family knows, with sites by module path.

A class that ends in ForCausalLM reads texts and models language. For all others the caller gives the loss, and the
token layout is unknown: rows of the two models pair one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_bico.errors import ModelError, UnsupportedModelError
from hf_bico.models.checkpoints import FileCheckpoint
from hf_bico.models.families.base import NO_SITE, Shapes
from hf_bico.models.families.blueprints import OUTPUT_EMBEDDINGS, TEXT_FILES
from hf_bico.models.families.live import ImageModel
from hf_bico.models.families.pretrained import (
    PROCESSOR_FILES,
    PretrainedFamily,
    PretrainedModel,
    bare_model,
    first_architecture,
    has_class,
    require_config,
)
from hf_bico.models.families.text_models import CausalModel
from hf_bico.models.layout import Layout, Site
from hf_bico.models.wrapped_names import likely_prefixes
from hf_bico.utils.samples import TEXTS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hf_bico.models.hooks import Trace


class Generic(PretrainedFamily):
    name = "generic"
    can_be_spread = False
    processor_files = (*PROCESSOR_FILES, *TEXT_FILES)
    reads = None
    pipeline_tag = "text-generation"
    auto_class = "AutoModelForCausalLM"

    def task(self, objective: str | None, has_head: bool, used_loss: bool) -> str | None:
        return self.pipeline_tag if objective == "language-modelling" else None

    def recognises(self, shapes: Shapes) -> bool:
        return False

    def accepts(self, model: Path | nn.Module) -> bool:
        if isinstance(model, Path):
            name = first_architecture(self.read_config(model))
            return name is not None and has_class(name)
        from hf_bico.models.families.modules import has_linear

        return has_linear(model)

    def own_prefix(self, shapes: Shapes, config: Mapping[str, Any]) -> str:
        """Return the prefix without which most names are those of the configured class."""
        from hf_bico.models.families.modules import stored_names

        prefixes = likely_prefixes(shapes)
        if not prefixes:
            return ""
        try:
            skeleton = bare_model(first_architecture(config) or "", config, shapes)
        except ValueError:
            return ""  # the layout reports it

        def fitting(prefix: str) -> tuple[int, int]:
            found = stored_names(skeleton, {name.removeprefix(prefix): shape for name, shape in shapes.items()})
            return len(found), sum(own == name for own, name in found.items())

        return max(("", *prefixes), key=fitting)

    def layout(self, shapes: Shapes, config: Mapping[str, Any]) -> Layout:
        from hf_bico.models.families.modules import module_layout, stored_names

        skeleton = bare_model(first_architecture(config) or "", config, shapes)
        stored = stored_names(skeleton, shapes)
        layout = _of_language(skeleton, module_layout(self.name, skeleton, stored))
        known = set(stored.values())
        layout.others.update((name, NO_SITE) for name in shapes if name not in known)
        return layout

    def model_class(self, folder: Path) -> tuple[str, Mapping[str, Any], dict[str, Any]]:
        config = require_config(self, folder)
        return first_architecture(config) or "", config, {}

    def _live(self, module: nn.Module, folder: Path | None = None) -> PretrainedModel:
        from hf_bico.models.families.modules import module_layout, stored_names

        names = None
        if folder is not None:
            names = {name: name for name in stored_names(module, FileCheckpoint.in_folder(folder).shapes)}
        layout = _of_language(module, module_layout(self.name, module, names))
        return GenericCausalModel(module, layout) if _models_language(module) else GenericModel(module, layout)


class _CheckedModel(PretrainedModel):
    """A loaded model of which only the module classes are known."""

    def _watch(self, site: Site, trace: Trace, stack: ExitStack) -> None:
        """Tap a site; its input and output must be unchanged when the pass ends."""
        super()._watch(site, trace, stack)
        seen: list[tuple[Tensor, int]] = []

        def note(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not trace.is_recomputing:
                seen[:] = [(tensor, tensor._version) for tensor in (inputs[0], output)]

        def require_unchanged(*_: Any) -> None:
            changed = any(tensor._version != version for tensor, version in seen)
            seen.clear()
            if changed:
                raise UnsupportedModelError(
                    f"the model changes in place what '{site.name}' reads or writes, so it cannot be observed",
                    "use a model without in-place operations there",
                )

        module = self.module.get_submodule(site.weight.tensor.removesuffix(".weight"))
        stack.callback(module.register_forward_hook(note).remove)
        stack.callback(self.module.register_forward_hook(require_unchanged).remove)
        stack.push(lambda kind, *_: None if kind else require_unchanged())  # if only some modules ran


class GenericModel(_CheckedModel, ImageModel):
    """A loaded model with sites and nothing else: no features, no text side."""

    def image_features(self, pixels: Tensor) -> Tensor:
        raise UnsupportedModelError(
            "it is not known what the features of a generic model are",
            "port it from Python, with objective= a callable (model, batch) -> loss, and without a probe",
        )


class GenericCausalModel(_CheckedModel, CausalModel):
    """A loaded decoder that no family knows."""


def _models_language(module: nn.Module) -> bool:
    return type(module).__name__.endswith("ForCausalLM") and hasattr(module, "get_output_embeddings")


def _of_language(module: nn.Module, layout: Layout) -> Layout:
    """Turn the layout into that of a decoder: its sites read text tokens, and the output layer is left out."""
    if not _models_language(module):
        return layout
    model: Any = module
    output = model.get_output_embeddings()
    path = next((path for path, part in module.named_modules() if part is output), "")
    sites = tuple(replace(site, text=True) for site in layout.sites if site.name != path)
    left = {slot.tensor: OUTPUT_EMBEDDINGS for site in layout.sites if site.name == path for slot in site.slots}
    others = {**layout.others, **left}
    return replace(layout, sites=sites, others=others, reads=TEXTS, objectives=("language-modelling",))


def require_same_kind(base: Layout, target: Layout) -> None:
    """Refuse two models of different classes where only classes say what pairs, or with other inputs."""
    if base.kind != target.kind:
        names = [layout.kind or f"of the family {layout.family}" for layout in (base, target)]
        raise ModelError(
            f"the base is {names[0]} and the target {names[1]}: between generic models, both are of one class",
            "choose a target of the base's own class",
        )
    if base.reads != target.reads:
        raise ModelError(
            f"the base reads {base.reads} and the target {target.reads}", "choose a target that reads the same"
        )
