"""A task vector as a PEFT adapter: fitted to a rank, and written so that peft gives the same outputs from it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_bico.adapters.routes import Routes, find_routes, task_of
from hf_bico.checkpoints import ADAPTER_FILE, Checkpoint, save_tensors
from hf_bico.deltas import Deltas, add_delta
from hf_bico.errors import EmptyTaskVectorError
from hf_bico.factors import Change, Factors, energy, is_zero, total, truncated
from hf_bico.hub.repo_metadata import ADAPTER_CONFIG
from hf_bico.overlaps import align_names
from hf_bico.settings import require_rank

_PREFIX = "base_model.model."
_NOISE = 1e-13
"""A share of energy below this is the rounding of its own sums."""


@dataclass(frozen=True, repr=False)
class Fitted:
    """What an adapter of a rank holds of a task vector."""

    changes: Deltas
    """What peft will add, by the names of the loaded model."""
    routes: Routes
    asked: Deltas
    """The task vector itself."""

    def __repr__(self) -> str:
        return f"{len(self.changes)} of {len(self.asked)} tensors, {self.energy_kept:.2%} of the energy kept"

    @cached_property
    def kept(self) -> dict[str, float]:
        """The share of each tensor's energy that the adapter holds."""
        return {name: kept_of(change, self._held(name)) for name, change in self.asked.changes()}

    @cached_property
    def energy_kept(self) -> float:
        """The share of the whole task vector's energy that it holds."""
        energies = {name: self.asked.energy(name) for name in self.asked}
        held, whole = sum(energies[name] * self.kept[name] for name in energies), sum(energies.values())
        return held / whole if whole else 1.0

    @cached_property
    def ranks(self) -> dict[str, int]:
        """The rank of each tensor that is held as factors."""
        held = ((name, self.changes.change(name)) for name in self.routes.low_rank)
        return {name: change.rank for name, change in held if isinstance(change, Factors)}

    def _held(self, name: str) -> Change | None:
        return self.changes.change(name) if name in self.changes else None


def kept_of(asked: Change, held: Change | None) -> float:
    """The share of a change's energy that is held."""
    if held is None:
        return 0.0
    if held is asked or is_zero(asked):
        return 1.0
    lost = energy(total([asked.to("cpu"), -1.0 * held.to("cpu")])) / energy(asked)
    return max(0.0, 1.0 - lost) if lost > _NOISE else 1.0


def fit(
    vector: Deltas,
    model: nn.Module,
    sites: Collection[str],
    rank: int | float | None = None,
    everything: bool = False,
    device: torch.device | None = None,
) -> Fitted:
    """Choose how peft shall hold each change, and bring those that it holds as factors to the rank, on `device`."""
    require_rank(rank)
    routes = find_routes(model, vector, sites, everything)
    low_rank, left = routes.low_rank, {routes.origin[name] for name in routes.left}
    held: dict[str, Change] = {}
    for name, change in vector.changes():
        if name in low_rank:
            held[name] = truncated(change if device is None else change.to(device), rank).to("cpu", torch.float32)
        elif name not in left:
            held[name] = change
    if not held:
        raise EmptyTaskVectorError(
            "the task vector changes no linear layer, which is what an adapter holds",
            "ask for everything (--everything), or save it as a delta",
        )
    return Fitted(Deltas(held), routes, vector)


@dataclass(frozen=True)
class BaseName:
    """How the adapter's configuration shall name its base."""

    id: str
    revision: str | None = None


def write_adapter(fitted: Fitted, model: nn.Module, base: Checkpoint, named: BaseName, folder: Path) -> list[Path]:
    """Write `adapter_model.safetensors` and `adapter_config.json`; returns their paths.

    `base` holds the weights of `model`, which may be a skeleton, under the task vector's names or its own.
    """
    tensors = {**_factors(fitted, model), **_as_they_will_be(fitted, model, base)}
    weights, config = folder / ADAPTER_FILE, folder / ADAPTER_CONFIG
    save_tensors({_PREFIX + name: tensor for name, tensor in sorted(tensors.items())}, weights, {"format": "pt"})
    content = _config(fitted, model, named, tensors)
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return [weights, config]


def _factors(fitted: Fitted, model: nn.Module) -> dict[str, Tensor]:
    """A and B of every layer and parameter; a layer whose bias alone changes has factors of zero."""
    routes = fitted.routes
    tensors: dict[str, Tensor] = {}
    for module, transposed in routes.lora.items():
        layer: Any = model.get_submodule(module)
        product = _change(fitted, f"{module}.weight")
        if not isinstance(product, Factors):
            product = Factors(torch.zeros(layer.weight.shape[0], 1), torch.zeros(1, layer.weight.shape[1]))
        tensors |= _layer(module, product.T if transposed else product)
        if routes.bias == "lora_bias":
            change = _change(fitted, f"{module}.bias")
            length = layer.bias.shape[0]
            bias = change.to("cpu", torch.float32) if isinstance(change, Tensor) else torch.zeros(length)
            tensors[f"{module}.lora_B.bias"] = bias
    for name in routes.parameters:
        product = _change(fitted, name)
        if isinstance(product, Factors):
            tensors |= _layer(name.rpartition(".")[0], product)
    return tensors


def _layer(module: str, product: Factors) -> dict[str, Tensor]:
    return {f"{module}.lora_A.weight": product.right, f"{module}.lora_B.weight": product.left}


def _change(fitted: Fitted, name: str) -> Change | None:
    own = fitted.routes.origin.get(name)
    return fitted.changes.change(own) if own is not None and own in fitted.changes else None


def _as_they_will_be(fitted: Fitted, model: nn.Module, base: Checkpoint) -> dict[str, Tensor]:
    """The tensors that are saved as they will be, unrounded where they change."""
    routes = fitted.routes
    names = [*(name for names in routes.whole.values() for name in names), *routes.replaced]
    places = align_names(model.state_dict(), base.shapes)

    def value(name: str) -> Tensor:
        start, change = base.tensor(places[name]), _change(fitted, name)
        if change is None:
            return start
        wide = torch.promote_types(start.dtype, torch.float32)  # peft rounds it to what the model is loaded in
        return add_delta(start.to(wide), change, name)

    tensors = {name: value(name) for name in names}
    if routes.bias == "replaced":
        biased = [module for module in routes.lora if f"{module}.bias" in routes.origin]
        tensors |= {f"{module}.base_layer.bias": value(f"{module}.bias") for module in biased}
    return tensors


def _config(fitted: Fitted, model: nn.Module, named: BaseName, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The configuration; alpha is the rank everywhere, so that what is written is what is added."""
    from peft import LoraConfig

    routes = fitted.routes
    ranks = {module: tensors[f"{module}.lora_A.weight"].shape[0] for module in routes.lora}
    ranks |= {name: tensors[f"{name.rpartition('.')[0]}.lora_A.weight"].shape[0] for name in routes.parameters}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    pattern = {f"^{re.escape(name)}": own for name, own in ranks.items() if own != rank}
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        rank_pattern=pattern,
        alpha_pattern=dict(pattern),
        target_modules=_targets(routes.lora, model),
        target_parameters=sorted(routes.parameters) or None,
        modules_to_save=sorted(routes.whole) or None,
        bias="lora_only" if routes.bias == "replaced" else "none",
        lora_bias=routes.bias == "lora_bias",
        fan_in_fan_out=bool(routes.lora) and all(routes.lora.values()),
        base_model_name_or_path=named.id,
        revision=named.revision,
        inference_mode=True,
        task_type=task_of(model),
        auto_mapping={"base_model_class": type(model).__name__, "parent_library": type(model).__module__},
    )
    content = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return {key: value for key, value in content.items() if value is not None or key == "task_type"}


def _targets(modules: Collection[str], model: nn.Module) -> list[str] | str:
    """The layers for peft: by their last names where those mean no other, else by an expression for whole names."""
    names = [name for name, _ in model.named_modules() if name]
    last = sorted({name.rpartition(".")[2] for name in modules})
    if {name for name in names if name.rpartition(".")[2] in last} == set(modules):
        return last
    spelled = [re.escape(name) for name in sorted(modules)]
    in_any_block = "|".join(dict.fromkeys(re.sub(r"\b\d+\b", r"\\d+", name) for name in spelled))
    if {name for name in names if re.fullmatch(in_any_block, name)} == set(modules):
        return in_any_block
    return "|".join(spelled)
