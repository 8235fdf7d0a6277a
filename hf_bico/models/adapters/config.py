"""Read `adapter_config.json`: the kind of adapter, and whether its meaning is known; refuse anything else by name.

Regular expressions in it may never end: they are tried in a sandbox first, by the engine that will match them. Reads
one small file; no torch, no peft.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_bico.errors import AdapterError, UnsupportedAdapterError
from hf_bico.hub.repo_metadata import ADAPTER_CONFIG
from hf_bico.models.sandbox import Sandbox
from hf_bico.utils.files import read_object

LORA = "LORA"
PEFT_PREFIX = "base_model.model."
BY_PEFT = (
    *("ADALORA", "LOHA", "LOKR", "VERA", "PVERA", "FOURIERFT", "WAVEFT", "VBLORA", "RANDLORA", "SHIRA", "C3A"),
    *("GRALORA", "DELORA"),
)
"""Kinds whose layers only add to the weight, by peft's own `get_delta_weight`."""

MERGE = "merge it with PeftModel.merge_and_unload(), save the model, and port that with --base"

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
        raise AdapterError(f"{ADAPTER_CONFIG} of '{name}' says no peft_type", "save the adapter again with peft")
    called = f"'{name}' is an adapter of the type {kind}"
    if any(word in kind for word in ("PROMPT", "PREFIX", "P_TUNING", "CPT", "CARTRIDGE")):
        raise UnsupportedAdapterError(f"{called}, which changes no weights", "train a LoRA instead")
    if kind in BY_PEFT:
        return AdapterConfig(kind, base_class=_base_class(raw), raw=raw)
    if kind != LORA:
        raise UnsupportedAdapterError(f"{called}, which is no sum of weights", MERGE)
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
            raise UnsupportedAdapterError(f"'{name}' is a LoRA with '{field_name}', which is not known here", MERGE)


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


EXPRESSION_SECONDS = 5.0
"""The limit for all names of a model: real adapters take milliseconds."""
_PLAIN = re.compile(r"[\w.\- ]*")
_MATCH = """
import re

def answer(question):
    expressions, names = question
    for expression in expressions:
        try:
            pattern = re.compile(expression)
        except (re.error, OverflowError, RecursionError):
            continue  # reported when it is used
        for name in names:
            pattern.match(name), pattern.fullmatch(name)
"""


def require_quick(raw: Mapping[str, Any], names: Iterable[str], called: str) -> None:
    """Refuse a configuration whose expressions take too long to match these names."""
    expressions = _expressions(raw)
    if not expressions:
        return
    with Sandbox(_MATCH, "-I", "-S") as sandbox:  # isolated: none of the user's packages or settings are loaded
        try:
            sandbox.ask([expressions, list(names)], EXPRESSION_SECONDS)
            return
        except TimeoutError:
            problem = f"cannot be matched within {EXPRESSION_SECONDS:g} seconds"
        except (EOFError, OSError, ValueError):
            problem = "cannot be matched"
    raise AdapterError(
        f"an expression in the configuration of '{called}' {problem}", "list the names of the modules there instead"
    )


def _expressions(raw: Mapping[str, Any]) -> list[str]:
    """List what peft, or this tool after it, matches with names; without names that are no expressions."""
    layers = _texts(raw.get("layers_pattern"))
    return [
        *(text for name in ("target_modules", "exclude_modules") for text in _texts(raw.get(name), lists=False)),
        *(rf"(?:^|.*\.){text}\.(\d+)\." for text in layers),
        *(rf"(?:^|.*?\.){text}\.(\d+)\." for text in layers),
        *(rf".*\.{text}\.(\d+)\." for text in layers),
        *(rf"(^|.*\.){text}($|\..*)" for text in _texts(raw.get("modules_to_save"))),
        *(rf"(.*\.)?({text})$" for name in ("rank_pattern", "alpha_pattern") for text in _texts(raw.get(name))),
    ]


def _texts(value: Any, *, lists: bool = True) -> list[str]:
    """Return the expressions in a text, a list of texts or the keys of a mapping."""
    values = [value] if isinstance(value, str) else list(value) if lists and isinstance(value, list | dict) else []
    return [text for text in values if isinstance(text, str) and _PLAIN.fullmatch(text) is None]
