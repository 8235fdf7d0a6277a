"""Any two models of one transformers class that no other family knows: sites by module path, losses by the caller.

There is no zero-shot head here, and how tokens are laid out is not known: rows of the two models pair one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_bico.checkpoints import FileCheckpoint
from hf_bico.errors import ModelError, UnsupportedModelError
from hf_bico.families.base import Family, LiveModel, Shapes
from hf_bico.families.pretrained import (
    PROCESSOR_FILES,
    PretrainedModel,
    bare_model,
    bare_model_of,
    first_architecture,
    has_class,
    load_pretrained,
    origin_of,
    require_config,
)
from hf_bico.sites import Layout, Site

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hf_bico.statistics import Trace


class Generic(Family):
    name = "generic"
    library = "transformers"
    config_file = "config.json"
    processor_files = (*PROCESSOR_FILES, "generation_config.json", "chat_template.jinja")

    def recognises(self, shapes: Shapes) -> bool:
        return False

    def accepts(self, model: Path | nn.Module) -> bool:
        if isinstance(model, Path):
            name = first_architecture(self.read_config(model))
            return name is not None and has_class(name)
        from hf_bico.families.module_layout import has_linear

        return has_linear(model)

    def require_zero_shot(self) -> None:
        raise _no_zero_shot()

    def layout(self, shapes: Shapes, config: Mapping[str, Any]) -> Layout:
        from hf_bico.families.module_layout import module_layout, stored_names

        if config.get("quantization_config"):
            raise UnsupportedModelError(
                "the weights of this model are quantised, and not kept as its layers multiply by them",
                "name the model that it was quantised from",
            )
        skeleton = bare_model(first_architecture(config) or "", config)
        stored = stored_names(skeleton, shapes)
        layout = module_layout(self.name, skeleton, stored)
        known = set(stored.values())
        layout.others.update((name, "no linear site") for name in shapes if name not in known)
        return layout

    def skeleton(self, folder: Path) -> nn.Module:
        config = require_config(self, folder)
        return bare_model_of(folder, first_architecture(config) or "", config)

    def load(self, folder: Path, device: torch.device, dtype: torch.dtype) -> LiveModel:
        from hf_bico.families.module_layout import module_layout, stored_names

        name = first_architecture(require_config(self, folder)) or ""
        module = load_pretrained(folder, name, device, dtype)
        stored = stored_names(module, FileCheckpoint.in_folder(folder, self.library).shapes)
        live = GenericModel(module, module_layout(self.name, module, {name: name for name in stored}))
        live.folder = folder
        return live

    def wrap(self, module: nn.Module) -> LiveModel:
        from hf_bico.families.module_layout import module_layout

        live = GenericModel(module, module_layout(self.name, module))
        live.folder = origin_of(module)
        return live


class GenericModel(PretrainedModel):
    """A loaded model that shows its sites and nothing else: no features, no text side."""

    def image_features(self, pixels: Tensor) -> Tensor:
        raise _no_zero_shot()

    def text_features(self, prompts: Sequence[str]) -> Tensor:
        raise _no_zero_shot()

    def logit_scale_and_bias(self) -> tuple[Tensor, Tensor | None]:
        raise _no_zero_shot()

    def _watch(self, site: Site, trace: Trace, stack: ExitStack) -> None:
        """As for every transformers model; and what the site read and wrote must still be there in the end."""
        super()._watch(site, trace, stack)
        seen: list[tuple[Tensor, int]] = []

        def note(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen.extend((tensor, tensor._version) for tensor in (inputs[0], output))

        def unchanged(kind: Any, *_: Any) -> None:
            if kind is None and any(tensor._version != version for tensor, version in seen):
                raise UnsupportedModelError(
                    f"the model changes in place what '{site.name}' reads or writes, so that it cannot be watched",
                    "use a model without in-place operations there",
                )

        module = self.module.get_submodule(site.weight.tensor.removesuffix(".weight"))
        stack.callback(module.register_forward_hook(note).remove)
        stack.push(unchanged)


def _no_zero_shot() -> UnsupportedModelError:
    return UnsupportedModelError(
        "a generic model has no zero-shot head, which the objective 'auto' needs",
        "port it from Python, with objective= a callable (model, batch) -> loss",
    )


def require_same_kind(base: Layout, target: Layout) -> None:
    """Refuse two models whose sites have nothing to do with each other: of different classes, where classes matter."""
    if base.kind != target.kind:
        names = [layout.kind or f"of the family {layout.family}" for layout in (base, target)]
        raise ModelError(
            f"the base is {names[0]} and the target {names[1]}: between generic models, both are of one class",
            "choose a target of the base's own class",
        )
