"""Weights that accelerate keeps in main memory until a module runs. Knows its ways; not what the weights are for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def kept_away(model: nn.Module) -> dict[str, Tensor]:
    """The weights that are not where the model runs, by their parameters' names."""
    found = {}
    for place, module in model.named_modules():
        hook: Any = getattr(module, "_hf_hook", None)
        maps = [getattr(one, "weights_map", None) for one in getattr(hook, "hooks", [hook])]  # several may be chained
        kept = next((one for one in maps if one is not None), None)
        for name, parameter in module.named_parameters(place, recurse=False):
            if parameter.is_meta and kept is not None:
                found[name] = kept[name.rpartition(".")[2]]
    return found
