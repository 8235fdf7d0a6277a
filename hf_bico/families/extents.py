"""What a configuration asks for, held against the weights beside it before anything of that size is made.

There is no limit for models as such: weights of any size are there already, and a configuration may ask for as much.
Reads numbers and shapes; torch only counts here. Knows no kind of model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

from hf_bico.errors import BrokenWeightsError
from hf_bico.families.base import Shapes

TIMES, ELEMENTS, MODULES = 4, 2**24, 5_000
"""A model may have so many times what its weights hold, as with tied embeddings, and so much more where it is small."""
_SIZE = re.compile(
    r"size|width|dim|layer|depth|block|head|vocab|position|channel|label|num|embd|inner|expert|stage|hidden|context"
    r"|n_ctx|d_model|d_ff|d_kv|ffn|group|ratio|length|patch|rank|levels|token"
)
"""What is in the name of a number that says how large something is."""
_COUNT, _MOST_COUNTED = re.compile(r"(layer|depth|label|block|stage|head|expert)s?$"), 1_000_000
"""What is counted out one by one when a configuration is read, whatever is built from it."""
_NO_SIZE = re.compile(r"theta|base|max_length|max_seq|_id$|_ids$|factor|eps|scal|total|param|seed|flops")
_SIDE = re.compile(r"size|edge|height|width|pixels|crop|pad")
_TIMES_IMAGE, _MOST_SIDE = 8, 4096
"""A processor may make an image larger before it is cut, but not by so much."""
_DEEPEST = 50


class TooLargeError(ValueError):
    """A model that is being built outgrows the weights that it is built for."""


def elements_of(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())


def require_within(config: Mapping[str, Any], shapes: Shapes, called: str) -> None:
    """Refuse a configuration with a size that no part of these weights can have."""
    most = max(elements_of(shapes), ELEMENTS)
    for name, value in _sizes(config):
        limit = min(most, _MOST_COUNTED) if _COUNT.search(name) else most
        if not abs(value) <= limit:
            raise BrokenWeightsError(
                f"the configuration of {called} says {name} {_shown(value)}, more than {limit:,}: no part of its "
                "weights has that size",
                "copy or download the configuration again",
            )


def require_drawable(processor: Mapping[str, Any], image_size: tuple[int, int] | None) -> None:
    """A ValueError for a processor that would make far larger images than the model takes."""
    most = max(_TIMES_IMAGE * max(image_size or (0, 0)), _MOST_SIDE)
    for name, value in _numbers(processor):
        if _SIDE.search(name) and not 0 <= value <= most:
            raise ValueError(f"its {name} is {_shown(value)}, and {most:,} is the most for this model")


def _sizes(config: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """The numbers of a configuration that are the size of something, by name."""
    return ((name, value) for name, value in _numbers(config) if _SIZE.search(name) and not _NO_SIZE.search(name))


def _numbers(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, int | float]]:
    """All numbers of a configuration, by the names that they have in small letters."""
    if isinstance(value, Mapping) and depth < _DEEPEST:
        for key, inner in value.items():
            yield from _numbers(inner, str(key), depth + 1)
    elif isinstance(value, list | tuple) and depth < _DEEPEST:
        for inner in value:
            yield from _numbers(inner, name, depth + 1)
    elif type(value) in (int, float):
        yield name.lower()[:60], value


def _shown(value: int | float) -> str:
    return f"{value:.3g}" if abs(value) < 1e300 else "more than 1e300"


@contextmanager
def bounded(shapes: Shapes) -> Iterator[None]:
    """A TooLargeError as soon as a model that is built inside has far more parts, or numbers, than these weights.

    On the meta device, nothing of it takes memory until then.
    """
    from torch.nn.modules import module as torch_module

    most_elements = TIMES * elements_of(shapes) + ELEMENTS
    most_modules = TIMES * len(shapes) + MODULES
    elements = modules = 0

    def count_parameter(_: Any, name: str, parameter: Any) -> None:
        nonlocal elements
        elements += 0 if parameter is None else parameter.numel()
        if elements > most_elements:
            raise TooLargeError(f"it asks for more than {most_elements:,} numbers, {TIMES} times what the weights hold")

    def count_module(*_: Any) -> None:
        nonlocal modules
        modules += 1
        if modules > most_modules:
            raise TooLargeError(f"it asks for more than {most_modules:,} layers, and has {len(shapes):,} tensors")

    hooks = (
        torch_module.register_module_parameter_registration_hook(count_parameter),
        torch_module.register_module_module_registration_hook(count_module),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
