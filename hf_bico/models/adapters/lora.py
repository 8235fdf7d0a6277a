"""Turn the tensors of a LoRA into changes of its base's tensors; low-rank changes stay factors.

Matching needs names and shapes alone; torch is imported when a change is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import sqrt
from typing import TYPE_CHECKING, TypeAlias

from hf_bico.errors import (
    AdapterError,
    BaseMismatchError,
    EmptyTaskVectorError,
    NonFiniteWeightsError,
    UnsupportedAdapterError,
)
from hf_bico.models.adapters.config import MERGE, AdapterConfig, expressions_of
from hf_bico.models.adapters.lora_names import (
    OTHER_BASE,
    AdapterKeys,
    LoraKeys,
    parameters_of,
    places_of,
    read_keys,
    require_targeted,
    tensors_of,
)
from hf_bico.models.adapters.patterns import BROKEN, Patterns, require_quick
from hf_bico.models.checkpoints import Checkpoint, LazyMapping, non_float_tensors
from hf_bico.models.families.base import Shapes
from hf_bico.models.name_matching import Overlap, reinitialised_head

if TYPE_CHECKING:
    from torch import Tensor

    from hf_bico.models.low_rank import Change


IsTransposed: TypeAlias = Callable[[str], bool]
"""Whether a tensor of the base is kept as (in, out): for square weights, whose shape does not tell."""


@dataclass(frozen=True)
class Product:
    """A LoRA layer's change of a weight."""

    keys: LoraKeys
    scaling: float
    transposed: bool
    shape: tuple[int, ...]

    def read(self, adapter: Checkpoint, base: Checkpoint, name: str) -> Change:
        from hf_bico.models.low_rank import Factors

        a, b = _wide(adapter.tensor(self.keys.a)), _wide(adapter.tensor(self.keys.b))
        if len(self.shape) > 2:  # a convolution: A holds the kernel, B mixes its outputs
            return (self.scaling * b.flatten(1) @ a.flatten(1)).view(self.shape)
        product = Factors(self.scaling * b, a)
        return product.T if self.transposed else product


@dataclass(frozen=True)
class Bias:
    """A LoRA layer's change of a bias."""

    key: str
    scaling: float

    def read(self, adapter: Checkpoint, base: Checkpoint, name: str) -> Change:
        return self.scaling * _wide(adapter.tensor(self.key))


@dataclass(frozen=True)
class Whole:
    """A tensor that replaces the base's."""

    key: str

    def read(self, adapter: Checkpoint, base: Checkpoint, name: str) -> Change:
        value = _wide(adapter.tensor(self.key))
        return value - base.tensor(name).to(value)


@dataclass(frozen=True)
class Beside:
    """A LoRA layer's change of a tensor that the file holds as well: a trained bias, or a copy of an embedding."""

    change: Product | Bias
    whole: Whole

    def read(self, adapter: Checkpoint, base: Checkpoint, name: str) -> Change:
        from hf_bico.models.low_rank import total

        change, value = self.change.read(adapter, base, name), adapter.tensor(self.whole.key)
        copied = bool((base.tensor(name).to(value) == value).all())
        return change if copied else total([change, self.whole.read(adapter, base, name)])


Entry: TypeAlias = Product | Bias | Whole | Beside


@dataclass
class AdapterChanges(LazyMapping["Change"]):
    """The changes of a LoRA, by the base's names; read on access."""

    adapter: Checkpoint
    base: Checkpoint
    names: dict[str, Entry]
    overlap: Overlap
    """Its `extra` are tensors that the base lacks, such as a new head."""
    called: str
    _finite: set[str] = field(default_factory=set)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.base.shapes[name]

    def __getitem__(self, name: str) -> Change:
        change = self.names[name].read(self.adapter, self.base, name)
        if name not in self._finite:
            require_finite(change, name, self.called)
            self._finite.add(name)
        return change

    @property
    def ranks(self) -> dict[str, int]:
        """Ranks of the low-rank changes, by name."""
        changes = {name: entry.change if isinstance(entry, Beside) else entry for name, entry in self.names.items()}
        products = {name: change for name, change in changes.items() if isinstance(change, Product)}
        return {name: self.adapter.shapes[change.keys.a][0] for name, change in products.items()}


def changes_of(
    adapter: Checkpoint, config: AdapterConfig, base: Checkpoint, called: str, is_transposed: IsTransposed
) -> AdapterChanges:
    """Find the tensor of the base that each tensor of a LoRA changes; refuse those without one."""
    if not adapter.shapes:
        raise EmptyTaskVectorError(f"'{called}' holds no tensors and changes nothing", "save it again with peft")
    require_floats(adapter, called)
    keys = read_keys(adapter.shapes, called)
    _require_pairs(keys, adapter.shapes, called)
    _refuse_ignored(keys, config, called)
    places = places_of(keys, adapter.shapes, base.shapes, config.base_class, called)
    parameters = _target_parameters(keys, places, base.shapes, config)
    names = [*keys.lora, *(name for found in parameters.values() for name in found)]
    require_quick(expressions_of(config.raw), names, called)
    lora = _Lora(adapter.shapes, config, base.shapes, called, is_transposed)
    entries: dict[str, Entry] = {}
    for module, layers in keys.lora.items():
        entries |= lora.entries(module, places[module], layers, parameters[module])
    require_targeted(keys.lora, config.raw, called)
    shapes = {name: adapter.shapes[key] for name, key in keys.whole.items()}
    replaced = {name: places[name] for name in keys.whole if name in places}
    resized_head = reinitialised_head(replaced, shapes, base.shapes)
    for name, place in replaced.items():
        if name not in resized_head:
            _require_shape(called, place, shapes[name], base.shapes.get(place))
            own, whole = entries.get(place), Whole(keys.whole[name])
            entries[place] = Beside(own, whole) if isinstance(own, Product | Bias) else whole
    extra = [name for name in keys.whole if name not in places or name in resized_head]
    if not config.lora_bias:  # peft does not read them then
        extra += [layer.b_bias for layers in keys.lora.values() for layer in layers if layer.b_bias is not None]
    return AdapterChanges(adapter, base, dict(sorted(entries.items())), Overlap(extra=tuple(extra)), called)


def _target_parameters(
    keys: AdapterKeys, places: Mapping[str, str], base: Shapes, config: AdapterConfig
) -> dict[str, list[str]]:
    """Return the parameters of each module with LoRA layers that the configuration targets."""
    own: dict[str, list[str]] = {}
    for tensor in base:
        module, _, name = tensor.rpartition(".")
        own.setdefault(module, []).append(name)
    targets = frozenset(config.target_parameters)
    return {module: parameters_of(module, own.get(places[module], ()), targets) for module in keys.lora}


def require_floats(adapter: Checkpoint, called: str, counting: str | None = None) -> None:
    """Refuse tensors that are not stored as floats, unless their names end in `counting`: indices."""
    for name, dtype in non_float_tensors(adapter).items():
        if counting is None or not name.endswith(counting):
            raise UnsupportedAdapterError(
                f"'{name}' of '{called}' is kept as {dtype}, not as floating-point numbers",
                "save the adapter again in float32, float16 or bfloat16",
            )


def _refuse_ignored(keys: AdapterKeys, config: AdapterConfig, called: str) -> None:
    """Refuse a tensor of a layer with factors which peft reads only under its wrapper's name."""
    for name, key in keys.whole.items():
        owner, _, parameter = name.rpartition(".")
        # old releases wrote biases without the wrapper's name, and meant them
        meant = parameter == "bias" and config.raw.get("bias", "none") != "none"
        if owner in keys.lora and "base_layer" not in key.split(".") and not meant:
            raise AdapterError(
                f"'{called}' holds '{key}' beside factors of the same layer, where peft does not read it",
                "save the adapter again with peft",
            )


def _require_pairs(keys: AdapterKeys, shapes: Shapes, called: str) -> None:
    """Refuse factors that have no rank in common."""
    for layer in (layer for layers in keys.lora.values() for layer in layers):
        a, b = shapes[layer.a], shapes[layer.b]
        if min(len(a), len(b)) < 2 or b[1] != a[0] or any(extent != 1 for extent in b[2:]):
            raise AdapterError(
                f"the factors '{layer.a}' and '{layer.b}' of '{called}' are {a} and {b}: no product of a plain LoRA",
                "save the adapter again, or " + MERGE,
            )


@dataclass(frozen=True)
class _Lora:
    """The rules by which LoRA layers become changes of the base's tensors."""

    adapter: Shapes
    config: AdapterConfig
    base: Shapes
    called: str
    is_transposed: IsTransposed

    def entries(self, module: str, place: str, layers: list[LoraKeys], parameters: list[str]) -> dict[str, Entry]:
        """Return the changes by the layers of one module; `parameters` of it are targets themselves."""
        found: dict[str, Entry] = {}
        targets = tensors_of(module, place, layers, self.adapter, self.base, parameters, self.called)
        for layer, target in zip(layers, targets, strict=True):
            scaling = self._scaling(target.pattern_name, self.adapter[layer.a][0])
            # the weight of an embedding is the transposed product, that of a parameter never
            transposed = layer.embedding or (not target.parameter and self.is_transposed(target.tensor))
            product = (self.adapter[layer.b][0], *self.adapter[layer.a][1:])
            shape = tuple(product[::-1] if transposed else product)
            _require_shape(self.called, target.tensor, shape, self.base[target.tensor])
            found[target.tensor] = Product(layer, scaling, transposed, shape)
            if layer.b_bias is not None and self.config.lora_bias:
                bias = f"{place}.bias"
                _require_shape(self.called, bias, self.adapter[layer.b_bias], self.base.get(bias))
                found[bias] = Bias(layer.b_bias, scaling)
        return found

    def _scaling(self, name: str, rank: int) -> float:
        """Return alpha over the rank, or over its root; the configured rank must be that of the tensors."""
        stated = self._by_pattern(self._ranks, self.config.rank_pattern, name, self.config.rank)
        if stated != rank:
            raise AdapterError(
                f"'{name}' of '{self.called}' has rank {rank}, and its configuration says {stated}",
                "save the adapter again",
            )
        alpha = self._by_pattern(self._alphas, self.config.alpha_pattern, name, self.config.alpha)
        return float(alpha) / (sqrt(rank) if self.config.root_scaled else rank)  # rsLoRA divides by the root

    @cached_property
    def _ranks(self) -> Patterns:
        return Patterns(self.config.rank_pattern)

    @cached_property
    def _alphas(self) -> Patterns:
        return Patterns(self.config.alpha_pattern)

    def _by_pattern(self, patterns: Patterns, values: Mapping[str, float], name: str, otherwise: float) -> float:
        """Return the value of the first pattern that fits the name's end, as peft looks it up."""
        try:
            first = patterns.first(name)
        except BROKEN as error:
            raise AdapterError(
                f"a pattern in the configuration of '{self.called}' is broken: {error}", "save the adapter again"
            ) from error
        return otherwise if first is None else values[first]


def _require_shape(called: str, name: str, have: tuple[int, ...], want: tuple[int, ...] | None) -> None:
    if want is None:
        raise BaseMismatchError(f"'{called}' changes '{name}', which its base lacks", OTHER_BASE)
    if tuple(have) != tuple(want):
        raise BaseMismatchError(f"'{name}' is {tuple(have)} in '{called}' and {tuple(want)} in its base", OTHER_BASE)


def require_finite(change: Change, name: str, called: str) -> None:
    """Refuse a change with NaN or infinite values."""
    from hf_bico.models.low_rank import is_finite

    if not is_finite(change):
        raise NonFiniteWeightsError(
            f"what '{called}' changes of '{name}' holds NaN or infinite values",
            "use a checkpoint from before training diverged",
        )


def _wide(tensor: Tensor) -> Tensor:
    import torch

    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
