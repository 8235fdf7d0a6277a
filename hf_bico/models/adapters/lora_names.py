"""Match the tensor names of a LoRA with the tensors of its base that they change.

Knows the spellings of old and new releases of peft, and its rules for targets: factors of a module that is not targeted
are silently ignored by peft, and refused here. Works on names and shapes; no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from hf_bico.errors import AdapterError, BaseMismatchError, UnsupportedAdapterError
from hf_bico.models.adapters.config import MERGE, PEFT_PREFIX
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
            raise AdapterError(f"'{called}' holds several adapters: {', '.join(sorted(adapters))}", "save them apart")
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
                    f"'{called}' holds '{name}', which is no part of a plain LoRA", "merge it into its base with peft"
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
        raise AdapterError(f"'{called}' holds the same twice, as '{found[place]}' and '{name}'", "save it again")
    found[place] = name


def without_wrappers(name: str) -> str:
    """Return a name as it is in the bare model: peft inserts `base_layer` where it wraps.

    >>> without_wrappers("visual.base_layer.mlp.c_fc.base_layer.bias")
    'visual.mlp.c_fc.bias'
    """
    return ".".join(part for part in name.split(".") if part != "base_layer")


def parameters_of(module: str, targets: Iterable[str]) -> list[str]:
    """Return the full names of a module's own parameters that are among `target_parameters`.

    peft takes a target for every parameter whose name equals it, or ends with it after a dot.

    >>> parameters_of("visual", ["proj", "attn.in_proj_weight"])
    ['visual.proj']
    """
    split = (target.rpartition(".") for target in targets)
    names = (name for path, _, name in split if not path or f".{module}".endswith(f".{path}"))
    return list(dict.fromkeys(f"{module}.{name}" for name in names))


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
            f"the layers of '{called}' ('{names[0]}' and so on) could be of several parts of its base, or of none",
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
    module: str, place: str, layers: list[LoraKeys], adapter: Shapes, base: Shapes, targets: Iterable[str], called: str
) -> list[Target]:
    """Return what each layer of a module changes."""
    parameters = {name: place + name[len(module) :] for name in parameters_of(module, targets)}
    candidates = [Target(tensor, name, True) for name, tensor in parameters.items() if tensor in base]
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
        missed = [module for module in modules if not _is_targeted(module, raw)]
    except (re.error, TypeError, OverflowError, RecursionError) as error:
        raise AdapterError(
            f"what '{called}' targets cannot be read from its configuration: {error}", "save the adapter again"
        ) from error
    if missed:
        raise AdapterError(
            f"'{called}' holds factors of '{missed[0]}' ({len(missed)} in all), which are none of its targets",
            "save the adapter again with peft, which would leave them out",
        )


def _is_targeted(module: str, raw: Mapping[str, Any]) -> bool:
    if parameters_of(module, [str(target) for target in raw.get("target_parameters") or ()]):
        return True
    targets = raw.get("target_modules")
    if targets is None or (isinstance(targets, str) and targets.lower() == "all-linear"):
        return True  # old files have no targets, and names do not show which layers are linear
    if raw.get("exclude_modules") and _matches(module, raw["exclude_modules"]):
        return False
    if any(re.match(rf"(^|.*\.){saved}($|\..*)", module) for saved in raw.get("modules_to_save") or ()):
        return False
    return _matches(module, targets) and _in_layers(module, raw, exact=module in targets)


def _matches(module: str, targets: Any) -> bool:
    """Match a text as an expression for whole names, a list as whole names or their ends."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _in_layers(module: str, raw: Mapping[str, Any], exact: bool) -> bool:
    layers, patterns = raw.get("layers_to_transform"), raw.get("layers_pattern")
    if layers in (None, []) or exact or isinstance(raw.get("target_modules"), str):
        return True
    named = [patterns] if isinstance(patterns, str) else list(patterns or ())
    # the number of the outermost list that fits; older releases took the innermost one
    ways = [[rf"(?:^|.*?\.){one}\.(\d+)\.", rf"(?:^|.*\.){one}\.(\d+)\."] for one in named]
    ways = ways or [[r".*?\.[^.]*\.(\d+)\.", r".*\.[^.]*\.(\d+)\."]]
    found = {int(match[1]) for way in ways for one in way if (match := re.match(one, module))}
    return bool(found & set([layers] if isinstance(layers, int) else layers))
