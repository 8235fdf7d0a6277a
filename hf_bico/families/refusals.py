"""Kinds of models that no family can carry, refused by name. Reads names and configurations; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_bico.errors import UnsupportedModelError
from hf_bico.families.base import Shapes

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""How configurations count experts."""


def require_dense(called: str, shapes: Shapes, config: Mapping[str, Any]) -> None:
    """Refuse quantised weights, and mixtures of experts."""
    if config.get("quantization_config"):
        raise UnsupportedModelError(
            f"the weights of {called} are quantised, and not kept as its layers multiply by them",
            "name the model that it was quantised from",
        )
    if any(".experts." in f".{name}" for name in shapes) or _counts_experts(config):
        raise UnsupportedModelError(
            f"{called} is a mixture of experts, whose experts see different tokens in the two models: "
            "their rows do not pair",
            "use a dense model of the same family",
        )


def _counts_experts(config: Mapping[str, Any]) -> bool:
    """Whether a configuration, or that of its text part, names more than no expert."""
    parts = [config, config.get("text_config")]
    counts = [part.get(key) for part in parts if isinstance(part, Mapping) for key in _EXPERTS]
    return any(type(count) is int and count > 0 for count in counts)
