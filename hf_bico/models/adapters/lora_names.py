"""Match the tensor names of a LoRA with the tensors of its base that they change.

Knows the spellings of old and new releases of peft, and its rules for targets: factors of a module that is not targeted
are silently ignored by peft, and refused here. Works on names and shapes; no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from math import prod
from typing import Any

from hf_bico.errors import AdapterError, BaseMismatchError, UnsupportedAdapterError
from hf_bico.models.adapters.config import MERGE, PEFT_PREFIX
from hf_bico.models.adapters.patterns import BROKEN, Patterns, endings
from hf_bico.models.families.base import Shapes
from hf_bico.models.name_matching import align_names

_LORA = re.compile(
    r"(?!.*\.lora_A\.(?:[^.]+\.)?bias$)"  # a plain LoRA has no bias there
    r"(?P<module>.*)\.(?P<part>lora_A|lora_B)(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?\.(?P<kind>weight|bias)"
)
_EMBEDDING = re.compile(r"(?P<module>.*)\.(?P<part>lora_embedding_[AB])(?:\.(?P<adapter>[^.]+))?")
_SAVED = re.compile(r"(?P<module>.*)\.modules_to_save\.(?:(?P<adapter>[^.]+)\.)?(?P<rest>.+)")
_ORIGINAL = re.compile(r"(^|\.)original_module\.")
_FOREIGN = re.compile(r"(^|\.)(lora_|token_adapter|trainable_tokens)")


@dataclass
class LoraKeys:
    """Names in the file of one LoRA layer's tensors."""

    a: str = ""
    b: str = ""
    b_bias: str | None = None
    embedding: bool = False


@dataclass
class AdapterKeys:
    """The tensors of an adapter: LoRA layers by module, and tensors that replace the base's."""

    lora: dict[str, list[LoraKeys]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    """The name in the file of each tensor that replaces the base's, by its name in the model."""


def read_keys(names: Iterable[str], called: str) -> AdapterKeys:
    """Sort the tensors of a LoRA.

    >>> keys = read_keys(["base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.default.weight"], "x")
    >>> keys.lora["q"][0].b
    'base_model.model.q.lora_B.default.weight'
    """
    found = AdapterKeys()
    layers: dict[str, LoraKeys] = {}
    copies: dict[str, str] = {}
    adapters: set[str] = set()
    for name in sorted(names):
        own = name.removeprefix(PEFT_PREFIX)
        lora, saved = _LORA.fullmatch(own) or _EMBEDDING.fullmatch(own), _SAVED.fullmatch(own)
        match = lora or saved
        if match is not None and match["adapter"]:
            adapters.add(match["adapter"])
        if len(adapters) > 1:
            raise AdapterError(
                f"'{called}' holds several adapters: {', '.join(sorted(adapters))}", "save each one separately"
            )
        if lora is not None:
            layer = layers.setdefault(lora["module"], LoraKeys())
            layer.embedding = lora["part"].startswith("lora_embedding")
            bias = not layer.embedding and lora["kind"] == "bias"
            _set(vars(layer), lora["part"][-1].lower() + ("_bias" if bias else ""), name, called)
        elif saved is not None:
            # with bias="all" peft writes a bias that is saved whole a second time, without the adapter's name
            whole = found.whole if saved["adapter"] else copies
            _set(whole, without_wrappers(f"{saved['module']}.{saved['rest']}"), name, called)
        elif _ORIGINAL.search(own) is None:
            if _FOREIGN.search(own):
                raise UnsupportedAdapterError(
                    f"'{called}' holds '{name}', which does not belong to a plain LoRA",
                    "merge it into its base with peft",
                )
            _set(found.whole, without_wrappers(own), name, called)
    found.whole = copies | found.whole
    for module, layer in layers.items():
        if not layer.a or not layer.b:
            raise AdapterError(f"'{called}' has only one of the two factors of '{module}'", "save the adapter again")
        found.lora.setdefault(without_wrappers(module), []).append(layer)
    return found


def _set(found: dict[str, str], place: str, name: str, called: str) -> None:
    """Note the name of a tensor in the file; refuse a second one."""
    if found.get(place):
        raise AdapterError(f"'{called}' holds the same tensor twice, as '{found[place]}' and '{name}'", "save it again")
    found[place] = name


def without_wrappers(name: str) -> str:
    """Return a name as it is in the bare model: peft inserts `base_layer` where it wraps.

    >>> without_wrappers("visual.base_layer.mlp.c_fc.base_layer.bias")
    'visual.mlp.c_fc.bias'
    """
    return ".".join(part for part in name.split(".") if part != "base_layer")


def parameters_of(module: str, own: Iterable[str], targets: Set[str]) -> list[str]:
    """Return the full names of a module's `own` parameters that are among `target_parameters`.

    peft takes a target for every parameter whose name equals it, or ends with it after a dot.

    >>> parameters_of("visual", ["proj", "class_embedding"], {"proj", "attn.in_proj_weight"})
    ['visual.proj']
    """
    names = (f"{module}.{name}" for name in own)
    return [name for name in names if not targets.isdisjoint(endings(name))]


# a part of the tower's prefix, by a word in the name of its class
_TOWERS = {"vision": "vis", "text": "text", "audio": "audio"}
OTHER_BASE = "name the model that the adapter was trained on with --base"


def product_shape(layer: LoraKeys, shapes: Shapes) -> tuple[int, int]:
    """Return (out, in) of B A; the kernel of a convolution is flattened."""
    return shapes[layer.b][0], prod(shapes[layer.a][1:])


def fits(product: tuple[int, int], tensor: tuple[int, ...]) -> bool:
    """Tell whether a product can be the change of a tensor, as it is or transposed."""
    return len(tensor) > 1 and (product == (tensor[0], prod(tensor[1:])) or product[::-1] == tuple(tensor))


def places_of(keys: AdapterKeys, adapter: Shapes, base: Shapes, trained_on: str, called: str) -> dict[str, str]:
    """Find the name in the base of every module with LoRA layers, and of every replaced tensor that exists there."""
    names = [*keys.lora, *keys.whole]
    # tensors, and the modules that contain them
    known = {*base, *(name[:index] for name in base for index, letter in enumerate(name) if letter == ".")}
    fitting = _fitting(keys, adapter, base, known, trained_on)
    try:
        # the adapter of a bare tower, in a model with several; otherwise the prefix with most matches
        places = {name: fitting[0] + name for name in names if fitting[0] + name in known} if len(fitting) == 1 else {}
        places = places or align_names(names, known)
    except BaseMismatchError as error:
        raise BaseMismatchError(
            f"the layers of '{called}' ('{names[0]}' and so on) could belong to several parts of its base, or to none",
            "save the adapter over the whole model, or name another base with --base",
        ) from error
    unmatched = [module for module in keys.lora if module not in places]
    if unmatched:
        raise BaseMismatchError(
            f"'{called}' changes '{unmatched[0]}' ({len(unmatched)} of {len(keys.lora)} layers), which its base lacks",
            OTHER_BASE,
        )
    return places


def _fitting(keys: AdapterKeys, adapter: Shapes, base: Shapes, known: set[str], trained_on: str) -> list[str]:
    """Return the prefixes under which every layer fits a tensor of the base."""
    first = next(iter(keys.lora), None)
    options = [] if first is None else [name[: -len(first)] for name in known if f".{name}".endswith(f".{first}")]
    owned: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in base.items():
        owned.setdefault(name.rpartition(".")[0], []).append(shape)
    products = [(module, product_shape(layer, adapter)) for module, layers in keys.lora.items() for layer in layers]
    fitting = [
        prefix
        for prefix in sorted(options)
        if all(any(fits(product, shape) for shape in owned.get(prefix + module, ())) for module, product in products)
    ]
    if len(fitting) < 2:
        return fitting
    # the class of the model that it was trained on decides, or else names that match without a prefix
    marks = [mark for word, mark in _TOWERS.items() if word in trained_on.lower()]
    marked = [prefix for prefix in fitting if any(mark in prefix.lower() for mark in marks)]
    return marked or [prefix for prefix in fitting if not prefix]


@dataclass(frozen=True)
class Target:
    """The tensor that one LoRA layer changes."""

    tensor: str
    pattern_name: str
    """The name by which peft looks up the layer's rank and alpha."""
    parameter: bool = False
    """Whether it is one of `target_parameters`."""


def tensors_of(
    module: str, place: str, layers: list[LoraKeys], adapter: Shapes, base: Shapes, parameters: list[str], called: str
) -> list[Target]:
    """Return what each layer of a module changes; `parameters` are those of it that are targets themselves."""
    candidates = [Target(place + name[len(module) :], name, True) for name in parameters]
    packed = f"{place.removesuffix('.out_proj')}.in_proj_weight" in base
    if packed and (not candidates or place.endswith(".out_proj")):
        raise UnsupportedAdapterError(
            f"'{called}' changes '{place}' of a packed attention through peft's nn.MultiheadAttention, which applies "
            "the change of out_proj twice, or not at all before it is merged",
            MERGE,
        )
    if not candidates:
        if len(layers) > 1 or f"{place}.weight" not in base:
            raise BaseMismatchError(f"'{called}' changes '{place}.weight', which its base lacks", OTHER_BASE)
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


def require_targeted(modules: Iterable[str], raw: Mapping[str, Any], called: str) -> None:
    """Refuse factors of a module that the configuration does not target."""
    try:
        targets = _Targets(raw)
        missed = [module for module in modules if not targets.include(module)]
    except (*BROKEN, TypeError) as error:
        raise AdapterError(
            f"what '{called}' targets cannot be read from its configuration: {error}", "save the adapter again"
        ) from error
    if missed:
        raise AdapterError(
            f"'{called}' holds factors of '{missed[0]}' ({len(missed)} in all), which are none of its targets",
            "save the adapter again with peft, which would leave them out",
        )


class _Targets:
    """The modules that a configuration targets; its lists are read once."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        targets = raw.get("target_modules")
        # old files have no targets, and names do not show which layers are linear
        self._all = targets is None or (isinstance(targets, str) and targets.lower() == "all-linear")
        self._targets = _Names(() if targets is None else targets)
        self._excluded = _Names(raw.get("exclude_modules") or ())
        self._saved = Patterns(map(str, raw.get("modules_to_save") or ()), inside=True)
        paths = (str(target).rpartition(".")[0] for target in raw.get("target_parameters") or ())
        self._parameters = frozenset(paths)  # empty for a parameter of any module
        layers, named = raw.get("layers_to_transform"), raw.get("layers_pattern")
        self._layers = None if layers in (None, []) else frozenset([layers] if isinstance(layers, int) else layers)
        # the number of the outermost list that fits; older releases took the innermost one
        patterns = [named] if isinstance(named, str) else list(named or ())
        ways = [rf"(?:^|.*{lazy}\.){one}\.(\d+)\." for one in patterns for lazy in ("?", "")]
        self._ways = [re.compile(way) for way in ways or (r".*?\.[^.]*\.(\d+)\.", r".*\.[^.]*\.(\d+)\.")]

    def include(self, module: str) -> bool:
        if "" in self._parameters or not self._parameters.isdisjoint(endings(module)) or self._all:
            return True
        if self._excluded.match(module) or self._saved.first(module) is not None:
            return False
        return self._targets.match(module) and self._in_layers(module)

    def _in_layers(self, module: str) -> bool:
        if self._layers is None or self._targets.expression is not None or module in self._targets.names:
            return True
        found = (match for way in self._ways if (match := way.match(module)))
        return any(int(match[1]) in self._layers for match in found)


class _Names:
    """A text as an expression for whole names, or a list of whole names and their ends."""

    def __init__(self, given: Any) -> None:
        self.expression = re.compile(given) if isinstance(given, str) else None
        self.names = frozenset() if isinstance(given, str) else frozenset(map(str, given))

    def match(self, module: str) -> bool:
        if self.expression is not None:
            return self.expression.fullmatch(module) is not None
        return not self.names.isdisjoint(endings(module))
