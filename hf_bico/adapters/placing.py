"""Where in its base each layer of an adapter lies, from names and shapes alone: no tensors, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from hf_bico.adapters.config import MERGE
from hf_bico.adapters.keys import AdapterKeys, LoraKeys, parameters_of
from hf_bico.errors import BaseMismatchError, UnsupportedAdapterError
from hf_bico.overlaps import align_names

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

# what the prefix of a tower holds, by a word in the name of its class
_TOWERS = {"vision": "vis", "text": "text", "audio": "audio"}
_OTHER_BASE = "name the model that the adapter was trained on with --base"
_TWICE = (
    "changes '{}' of a packed attention through peft's nn.MultiheadAttention, which applies the change of out_proj "
    "twice, or not at all before it is merged"
)


def product_shape(layer: LoraKeys, shapes: Shapes) -> tuple[int, int]:
    """(out, in) of B A; of a convolution, with its kernel flattened."""
    a, b = shapes[layer.a], shapes[layer.b]
    columns = 1
    for extent in a[1:]:
        columns *= extent
    return b[0], columns


def fits(product: tuple[int, int], tensor: tuple[int, ...]) -> bool:
    """Whether a product can be the change of a tensor, as it is or transposed."""
    columns = 1
    for extent in tensor[1:]:
        columns *= extent
    return len(tensor) > 1 and (product == (tensor[0], columns) or product[::-1] == tuple(tensor))


def places_of(keys: AdapterKeys, adapter: Shapes, base: Shapes, trained_on: str, called: str) -> dict[str, str]:
    """The name in the base of every module with LoRA layers and of every whole tensor that has one there."""
    names = [*keys.lora, *keys.whole]
    known = {*base, *(path for name in base for path in _parents(name))}
    fitting = _fitting(keys, adapter, base, known, trained_on)
    try:
        # a bare tower's adapter in a model of several; else the prefix that most names agree with
        places = {name: fitting[0] + name for name in names if fitting[0] + name in known} if len(fitting) == 1 else {}
        places = places or align_names(names, known)
    except BaseMismatchError as error:
        raise BaseMismatchError(
            f"the layers of '{called}' ('{names[0]}' and so on) could be of several parts of its base, or of none",
            "save the adapter over the whole model, or name another base with --base",
        ) from error
    homeless = [module for module in keys.lora if module not in places]
    if homeless:
        raise BaseMismatchError(
            f"'{called}' changes '{homeless[0]}' ({len(homeless)} of {len(keys.lora)} layers), which its base lacks",
            _OTHER_BASE,
        )
    return places


def _parents(name: str) -> Iterable[str]:
    """The modules that a tensor lies in."""
    return (name[:index] for index, letter in enumerate(name) if letter == ".")


def _fitting(keys: AdapterKeys, adapter: Shapes, base: Shapes, known: set[str], trained_on: str) -> list[str]:
    """The prefixes under which every layer fits a tensor of the base; of several, that of the class it was trained on.

    Where the class says nothing, names that are the base's own as they are decide.
    """
    first = next(iter(keys.lora), None)
    options = [] if first is None else [name[: -len(first)] for name in known if f".{name}".endswith(f".{first}")]
    owned: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in base.items():
        owned.setdefault(name.rpartition(".")[0], []).append(shape)
    fitting = [prefix for prefix in sorted(options) if _all_fit(prefix, keys, adapter, owned)]
    if len(fitting) < 2:
        return fitting
    marks = [mark for word, mark in _TOWERS.items() if word in trained_on.lower()]
    return [prefix for prefix in fitting if any(mark in prefix.lower() for mark in marks)] or [
        prefix for prefix in fitting if not prefix
    ]


def _all_fit(prefix: str, keys: AdapterKeys, adapter: Shapes, owned: Mapping[str, list[tuple[int, ...]]]) -> bool:
    return all(
        any(fits(product_shape(layer, adapter), shape) for shape in owned.get(prefix + module, ()))
        for module, layers in keys.lora.items()
        for layer in layers
    )


@dataclass(frozen=True)
class Target:
    """What one LoRA layer changes."""

    tensor: str
    pattern_name: str
    """By which peft looks up the layer's rank and alpha."""
    parameter: bool = False
    """Whether it is one of `target_parameters`."""


def tensors_of(
    module: str, place: str, layers: list[LoraKeys], adapter: Shapes, base: Shapes, targets: Iterable[str], called: str
) -> list[Target]:
    """What each layer of a module changes."""
    parameters = {name: place + name[len(module) :] for name in parameters_of(module, list(targets))}
    candidates = [Target(tensor, name, True) for name, tensor in parameters.items() if tensor in base]
    if not candidates or place.endswith(".out_proj"):
        _refuse_packed_attention(place, base, called)
    if not candidates:
        if len(layers) > 1 or f"{place}.weight" not in base:
            raise BaseMismatchError(f"'{called}' changes '{place}.weight', which its base lacks", _OTHER_BASE)
        return [Target(f"{place}.weight", module)]
    found: list[Target] = []
    for layer in layers:
        matching = [target for target in candidates if base[target.tensor] == product_shape(layer, adapter)]
        if len(matching) != 1 or matching[0] in found:
            raise UnsupportedAdapterError(
                f"'{called}' changes parameters of '{module}', and which of {len(candidates)} cannot be told", MERGE
            )
        found += matching
    return found


def _refuse_packed_attention(place: str, base: Shapes, called: str) -> None:
    if f"{place.removesuffix('.out_proj')}.in_proj_weight" in base:
        raise UnsupportedAdapterError(f"'{called}' {_TWICE.format(place)}", MERGE)
