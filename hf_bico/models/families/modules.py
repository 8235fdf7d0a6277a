"""Derive the layout of any model from its modules: linear maps, and the numbered blocks around them.

Reads module classes and parameter names; a model on the meta device will do. Knows no file and no kind of model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from hf_bico.models.families.base import EMBEDDINGS, NO_SITE, NORM, TIED, Shapes
from hf_bico.models.layout import Layout, Site, Slot


def has_linear(module: nn.Module) -> bool:
    """Tell whether a model has anything that could be a site."""
    return any(isinstance(part, _linear_classes()) for part in module.modules())


def _linear_classes() -> tuple[type[nn.Module], ...]:
    """Return the classes of linear maps; transformers' Conv1D, which is stored transposed, once that is imported."""
    loaded = sys.modules.get("transformers.pytorch_utils")
    return (nn.Linear,) if loaded is None else (nn.Linear, loaded.Conv1D)


def stored_names(module: nn.Module, shapes: Shapes) -> dict[str, str]:
    """Map a model's own tensor names to those in a checkpoint, for tensors stored as they are.

    transformers renames tensors when it loads them, and splits or joins some; those are left out.
    """
    from transformers import conversion_mapping as mapping
    from transformers import core_model_loading as loading

    model: Any = module
    own = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    changes = mapping.get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, loading.WeightRenaming)]
    converters = [change for change in changes if isinstance(change, loading.WeightConverter)]
    found: dict[str, str] = {}
    # in transformers' own order: some renamings take effect with the first name that matches
    for stored in sorted(shapes, key=loading.dot_natural_key):
        name, converted = loading.rename_source_key(stored, renamings, converters, model.base_model_prefix, own)
        if name not in own and stored in own:
            name, converted = stored, None
        if converted is None and own.get(name) == tuple(shapes[stored]):
            found[name] = stored
    return found


def module_layout(family: str, module: nn.Module, stored: Mapping[str, str] | None = None) -> Layout:
    """Return the layout of a model by its own tensor names, or by those in `stored`: no other weight is a site."""
    names = {name: name for name in module.state_dict()} if stored is None else stored
    linear, tied = _linear_modules(module), tied_names(module)
    usable = [path for path in linear if f"{path}.weight" in names and f"{path}.weight" not in tied]
    stack = _only_stack(module, usable)
    sites = []
    for path in usable:
        bias = f"{path}.bias"
        has_bias = linear[path].bias is not None and bias in names and bias not in tied
        sites.append(_site(path, stack, linear[path], names[f"{path}.weight"], names[bias] if has_bias else None))
    blocks = 0 if stack is None else len(module.get_submodule(stack))  # type: ignore[arg-type]
    taken = {slot.tensor for site in sites for slot in site.slots}
    modules = dict(module.named_modules())
    others = {name: _reason(own, modules, tied) for own, name in names.items() if name not in taken}
    own_names = {name: own for own, name in names.items() if own != name}
    return Layout(
        family=family,
        sites=tuple(sites),
        blocks=blocks,
        tokens=None,
        image_size=None,
        others=others,
        kind=type(module).__name__,
        own_names=own_names,
    )


def _linear_modules(module: nn.Module) -> dict[str, Any]:
    """Return every module that computes x W^T + b, by path; attention's `out_proj` never runs as a module."""
    inside = {id(part.out_proj) for part in module.modules() if isinstance(part, nn.MultiheadAttention)}
    return {path: part for path, part in module.named_modules() if path and id(part) not in inside and _is_linear(part)}


def _is_linear(module: nn.Module) -> bool:
    # a subclass with a forward of its own may compute anything
    if getattr(type(module), "forward", None) not in [linear.forward for linear in _linear_classes()]:
        return False
    weight = module._parameters.get("weight")
    return type(weight) is nn.Parameter and weight.is_floating_point() and weight.ndim == 2


def tied_names(module: nn.Module) -> set[str]:
    """Return the tensors that are used in several places: no single pair of maps is right for them."""
    places: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    tied = {name for names in places.values() if len(names) > 1 for name in names}
    # the class's declaration covers skeletons, and weights that were untied when they were loaded
    expand = getattr(module, "get_expanded_tied_weights_keys", None)
    declared: Mapping[str, str] = {} if expand is None else expand(all_submodels=True)
    return tied | declared.keys() | set(declared.values())


def _only_stack(module: nn.Module, paths: list[str]) -> str | None:
    """Return the path of the one outermost list of modules with sites in it; None if there are several or none."""
    lists = [path for path, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    holding = [path for path in lists if any(site.startswith(f"{path}.") for site in paths)]
    outermost = [path for path in holding if not any(path.startswith(f"{other}.") for other in holding)]
    return outermost[0] if len(outermost) == 1 else None


def _site(path: str, stack: str | None, module: Any, weight: str, bias: str | None) -> Site:
    block, role = None, path
    if stack is not None and path.startswith(f"{stack}."):
        number, _, inside = path[len(stack) + 1 :].partition(".")
        block, role = int(number), inside or stack.rpartition(".")[2]
    transposed = not isinstance(module, nn.Linear)
    rows, columns = reversed(module.weight.shape) if transposed else module.weight.shape
    slots = Slot(weight, transposed=transposed), None if bias is None else Slot(bias)
    return Site(path, role, block, path, (rows, columns), *slots)


def _reason(name: str, modules: Mapping[str, nn.Module], tied: set[str]) -> str:
    owner = modules.get(name.rpartition(".")[0])
    if isinstance(owner, nn.Embedding):
        return EMBEDDINGS
    if isinstance(owner, _ConvNd):
        return "convolution"
    if owner is not None and "norm" in type(owner).__name__.lower():
        return NORM
    return TIED if name in tied else NO_SITE
