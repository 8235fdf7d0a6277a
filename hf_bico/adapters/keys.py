"""The names of an adapter's tensors, in the spellings of old and new releases of peft, read as what they change.

Works on names alone: no tensors, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from hf_bico.errors import AdapterError, UnsupportedAdapterError

_LORA = re.compile(
    r"(?!.*\.lora_A\.(?:[^.]+\.)?bias$)"  # there is none in a plain LoRA
    r"(?P<module>.*)\.(?P<part>lora_A|lora_B)(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?\.(?P<kind>weight|bias)"
)
_EMBEDDING = re.compile(r"(?P<module>.*)\.(?P<part>lora_embedding_[AB])(?:\.(?P<adapter>[^.]+))?")
_SAVED = re.compile(r"(?P<module>.*)\.modules_to_save\.(?:(?P<adapter>[^.]+)\.)?(?P<rest>.+)")
_ORIGINAL = re.compile(r"(^|\.)original_module\.")
_FOREIGN = re.compile(r"(^|\.)(lora_|token_adapter|trainable_tokens)")


@dataclass
class LoraKeys:
    """The tensors of one LoRA layer, by their names in the file."""

    a: str = ""
    b: str = ""
    b_bias: str | None = None
    embedding: bool = False


@dataclass
class AdapterKeys:
    """What an adapter's tensors are: LoRA layers by module, and whole tensors that stand in for the base's own."""

    lora: dict[str, list[LoraKeys]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    """The name in the file of each tensor that replaces the base's, by its name in the model."""


def read_keys(names: Iterable[str], called: str) -> AdapterKeys:
    """Sort a LoRA's tensors.

    >>> keys = read_keys(["base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.default.weight"], "x")
    >>> keys.lora["q"][0].b
    'base_model.model.q.lora_B.default.weight'
    """
    found = AdapterKeys()
    layers: dict[str, LoraKeys] = {}
    copies: dict[str, str] = {}
    adapters: set[str] = set()
    for name in sorted(names):
        own = name.removeprefix("base_model.model.")
        lora, saved = _LORA.fullmatch(own) or _EMBEDDING.fullmatch(own), _SAVED.fullmatch(own)
        match = lora or saved
        if match is not None and match["adapter"]:
            adapters.add(match["adapter"])
        if len(adapters) > 1:
            raise AdapterError(f"'{called}' holds several adapters: {', '.join(sorted(adapters))}", "save them apart")
        if lora is not None:
            _sort(layers.setdefault(lora["module"], LoraKeys()), lora, name, called)
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


def _sort(layer: LoraKeys, match: re.Match[str], name: str, called: str) -> None:
    part = match["part"]
    layer.embedding = part.startswith("lora_embedding")
    bias = not layer.embedding and match["kind"] == "bias"
    _set(vars(layer), part[-1].lower() + ("_bias" if bias else ""), name, called)


def _set(found: dict[str, str], place: str, name: str, called: str) -> None:
    """Note under which name a tensor is in the file, where it may be once."""
    if found.get(place):
        raise AdapterError(f"'{called}' holds the same twice, as '{found[place]}' and '{name}'", "save it again")
    found[place] = name


def without_wrappers(name: str) -> str:
    """A module's or tensor's name in the bare model: peft puts `base_layer` in where it wraps.

    >>> without_wrappers("visual.base_layer.mlp.c_fc.base_layer.bias")
    'visual.mlp.c_fc.bias'
    """
    return ".".join(part for part in name.split(".") if part != "base_layer")


def parameters_of(module: str, targets: Collection[str]) -> list[str]:
    """The full names of the module's own parameters that are among a LoRA's `target_parameters`.

    peft takes a target for every parameter whose name it is, or ends with after a dot.

    >>> parameters_of("visual", ["proj", "attn.in_proj_weight"])
    ['visual.proj']
    """
    found = []
    for target in targets:
        path, _, parameter = target.rpartition(".")
        if not path or path == module or module.endswith(f".{path}"):
            found.append(f"{module}.{parameter}")
    return list(dict.fromkeys(found))
