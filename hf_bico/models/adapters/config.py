"""Read `adapter_config.json`: the kind of adapter, and whether its meaning is known; refuse anything else by name.

Reads one small file; no torch, no peft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_bico.errors import AdapterError, UnsupportedAdapterError
from hf_bico.hub.repo_metadata import ADAPTER_CONFIG
from hf_bico.models.adapters.patterns import Patterns, is_name
from hf_bico.utils.files import read_object

LORA = "LORA"
PEFT_PREFIX = "base_model.model."
BY_PEFT = (
    *("ADALORA", "LOHA", "LOKR", "VERA", "PVERA", "FOURIERFT", "WAVEFT", "VBLORA", "RANDLORA", "SHIRA", "C3A"),
    *("GRALORA", "DELORA"),
)
"""Kinds whose layers only add to the weight, by peft's own `get_delta_weight`."""

MERGE = "merge it with PeftModel.merge_and_unload(), save the model, and port that with --base"

_MOST_NAMES = 100_000
"""Above any list of layers: 60 blocks with three layers in each of 128 experts have 23,040."""
_MOST_BY_PEFT, _MOST_EXPRESSIONS_BY_PEFT = 5_000, 400
"""peft tries every entry with every module: more than layers in any dense model, and fewer than the expressions that
Python keeps compiled."""
# fields of a LoRA's configuration that the reader honours, or that matter only in training
_KNOWN_FIELDS = frozenset(
    (
        *("peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "task_type"),
        *("inference_mode", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
        # peft decides by the base's own layers: the file has the value of the last layer only
        *("fan_in_fan_out",),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters"),
        *("modules_to_save", "bias", "lora_bias", "lora_dropout", "init_lora_weights", "runtime_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size"),
    )
)
# initialisations (their beginnings) that change the base's own weights when the adapter is loaded
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class AdapterConfig:
    """The parts of an adapter's configuration that give its weights their meaning."""

    kind: str
    rank: int = 8
    alpha: float = 8.0
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    root_scaled: bool = False
    """rsLoRA: alpha over the square root of the rank."""
    lora_bias: bool = False
    target_parameters: tuple[str, ...] = ()
    base_class: str = ""
    """The class of the model that it was trained on, where the file says so."""
    raw: Mapping[str, Any] = field(default_factory=dict)


def read_adapter_config(folder: Path, name: str) -> AdapterConfig:
    """Read the configuration of an adapter; refuse by name what cannot be read exactly."""
    try:
        raw = read_object(folder / ADAPTER_CONFIG)
    except (OSError, ValueError) as error:
        raise AdapterError(f"{ADAPTER_CONFIG} of '{name}' cannot be read: {error}", "copy the file again") from error
    return parse_adapter_config(raw, name)


def parse_adapter_config(raw: Mapping[str, Any], name: str) -> AdapterConfig:
    """Parse an adapter's configuration; refuse by name what cannot be read exactly."""
    kind = raw.get("peft_type")
    if not isinstance(kind, str):
        raise AdapterError(f"{ADAPTER_CONFIG} of '{name}' has no peft_type", "save the adapter again with peft")
    called = f"'{name}' is an adapter of the type {kind}"
    if any(word in kind for word in ("PROMPT", "PREFIX", "P_TUNING", "CPT", "CARTRIDGE")):
        raise UnsupportedAdapterError(f"{called}, which changes no weights", "train a LoRA instead")
    if kind in (LORA, *BY_PEFT):
        _require_few(raw, kind, name)
    if kind in BY_PEFT:
        return AdapterConfig(kind, base_class=_base_class(raw), raw=raw)
    if kind != LORA:
        raise UnsupportedAdapterError(f"{called}, which is not added to the weights", MERGE)
    _require_known(raw, name)
    try:
        return AdapterConfig(
            LORA,
            rank=_count(raw.get("r", 8)),
            alpha=_number(raw.get("lora_alpha", 8)),
            rank_pattern={str(key): _count(value) for key, value in (raw.get("rank_pattern") or {}).items()},
            alpha_pattern={str(key): _number(value) for key, value in (raw.get("alpha_pattern") or {}).items()},
            root_scaled=bool(raw.get("use_rslora")),
            lora_bias=bool(raw.get("lora_bias")),
            target_parameters=tuple(str(parameter) for parameter in raw.get("target_parameters") or ()),
            base_class=_base_class(raw),
            raw=raw,
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise AdapterError(f"{ADAPTER_CONFIG} of '{name}' is not that of a LoRA: {error}", "save it again") from error


def _require_known(raw: Mapping[str, Any], name: str) -> None:
    """Refuse what plain W + s B A does not describe, and unknown fields."""
    if raw.get("use_dora"):
        raise UnsupportedAdapterError(f"'{name}' is a DoRA, which rescales the base's own weights", MERGE)
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise UnsupportedAdapterError(
            f"'{name}' was initialised by '{start}', which changes the base's own weights",
            "save it with path_initial_model_for_weight_conversion, or " + MERGE,
        )
    for field_name, value in raw.items():
        if field_name not in _KNOWN_FIELDS and value not in (None, False, [], {}, ""):
            raise UnsupportedAdapterError(
                f"'{name}' is a LoRA with '{field_name}', which this version does not know", MERGE
            )


def _require_few(raw: Mapping[str, Any], kind: str, name: str) -> None:
    """Refuse lists that would be matched for minutes."""
    sizes = {field_name: len(value) for field_name, value in raw.items() if isinstance(value, list | dict)}
    most = _MOST_NAMES if kind == LORA else _MOST_BY_PEFT
    crowded = [one for one in sizes if sizes[one] > most]
    expressions = [one for one in sizes if one.endswith("_pattern") or one == "modules_to_save"]
    if kind == "ADALORA":  # the ranks of all layers, which are looked up
        expressions = [one for one in expressions if one != "rank_pattern"]
    if kind != LORA and sum(sizes[one] for one in expressions) > _MOST_EXPRESSIONS_BY_PEFT:
        crowded += expressions
    if crowded:
        largest = max(crowded, key=lambda one: sizes[one])
        raise AdapterError(
            f"the configuration of '{name}' ({kind}) lists {sizes[largest]:,} names in '{largest}', more than can be "
            "matched in good time",
            MERGE,
        )


def _base_class(raw: Mapping[str, Any]) -> str:
    mapping = raw.get("auto_mapping")
    return str(mapping.get("base_model_class", "")) if isinstance(mapping, dict) else ""


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"a rank is {value!r}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e12:
        raise ValueError(f"an alpha is {value!r}")
    return float(value)


_FEW_LAYERS = 10
"""So many plain names in `layers_pattern` need no trial, although each is matched with every module."""


def expressions_of(raw: Mapping[str, Any]) -> list[str]:
    """List the expressions that peft, or this tool after it, matches with names one by one."""
    texts = _texts(raw.get("layers_pattern"))
    layers = [text for text in texts if len(texts) > _FEW_LAYERS or not is_name(text)]
    whole = [raw[name] for name in ("target_modules", "exclude_modules") if isinstance(raw.get(name), str)]
    by_ending = {name: Patterns(_texts(raw[name])) for name in raw if name.endswith("_pattern")}
    by_ending.pop("layers_pattern", None)
    return [
        *(text for text in whole if not is_name(text)),
        *(rf"(?:^|.*\.){text}\.(\d+)\." for text in layers),
        *(rf"(?:^|.*?\.){text}\.(\d+)\." for text in layers),
        *(rf".*\.{text}\.(\d+)\." for text in layers),
        *Patterns(_texts(raw.get("modules_to_save")), inside=True).expressions,
        *(expression for patterns in by_ending.values() for expression in patterns.expressions),
        # two types of adapters put no bracket round what they match
        *(rf".*\.{text}$" for name in by_ending for text in _texts(raw[name]) if not is_name(text)),
    ]


def _texts(value: Any) -> list[str]:
    """Return a text, the texts of a list, or the keys of a mapping."""
    values = [value] if isinstance(value, str) else value if isinstance(value, list | dict) else []
    return [text for text in values if isinstance(text, str)]
