"""Write a task vector as a PEFT adapter of a given rank that peft loads, runs and merges exactly.

Looks at the classes of a model's modules for how peft can hold each change. What is worked around here is pinned by
tests of peft itself.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_bico.errors import AdapterError, EmptyTaskVectorError
from hf_bico.hub.repo_metadata import ADAPTER_CONFIG
from hf_bico.models.adapters.config import PEFT_PREFIX
from hf_bico.models.checkpoints import ADAPTER_FILE, Checkpoint, save_tensors
from hf_bico.models.deltas import Deltas, add_delta
from hf_bico.models.low_rank import Change, Factors, energy, is_zero, total, truncated
from hf_bico.models.name_matching import align_names
from hf_bico.settings import require_rank

NOT_LINEAR = "no linear layer"
TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}
"""peft's task by the end of a class's name."""
_CLASSES = {
    "SEQ_CLS": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "TOKEN_CLS": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "QUESTION_ANS": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "CAUSAL_LM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "SEQ_2_SEQ_LM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}
_HEADS = {"SEQ_CLS": ("classifier", "score"), "TOKEN_CLS": ("classifier", "score"), "QUESTION_ANS": ("qa_outputs",)}
"""The modules that peft saves whole, asked or not, when a model of that task is loaded."""


def peft_task(model: nn.Module) -> str | None:
    """Return peft's task type of a model, if transformers' auto class for that task loads it.

    None if a head that peft would save cannot be told from other modules by the end of its name.
    """
    name = type(model).__name__
    task = next((task for ending, task in TASKS.items() if name.endswith(ending)), None)
    if task is None:
        return None
    from transformers.models.auto import modeling_auto

    if name not in getattr(modeling_auto, _CLASSES[task]).values():
        return None
    modules = dict(model.named_modules())
    return task if all(_is_unique_ending(head, modules) for head in _HEADS.get(task, ()) if head in modules) else None


@dataclass
class Routes:
    """How peft holds each changed tensor; all names are the module's own."""

    lora: dict[str, bool] = field(default_factory=dict)
    """Linear layers that get factors, and whether their weight is stored as (in, out)."""
    parameters: list[str] = field(default_factory=list)
    """Matrices without a layer of their own, which get factors by `target_parameters`."""
    whole: dict[str, list[str]] = field(default_factory=dict)
    """Modules that are saved in full, with the names of their tensors."""
    replaced: list[str] = field(default_factory=list)
    """Single tensors that are saved in full, which peft loads in place of the base's."""
    bias: str = "none"
    """The changes of LoRA layers' biases: "none", by "lora_bias", or "replaced"."""
    left: list[str] = field(default_factory=list)
    """Changed tensors that the adapter does not hold."""
    joined: list[str] = field(default_factory=list)
    """Tensors in `left` that the loaded model does not have: it joins or splits them."""
    origin: dict[str, str] = field(default_factory=dict)
    """The name in the task vector of each changed tensor."""

    @property
    def low_rank(self) -> dict[str, str]:
        """Tensors held as factors: the module's name by the task vector's."""
        names = [*(f"{module}.weight" for module in self.lora), *self.parameters]
        return {self.origin[name]: name for name in names if name in self.origin}

    @property
    def in_place(self) -> list[str]:
        """Tensors loaded in place of the base's."""
        biases = [f"{module}.bias" for module in self.lora] if self.bias == "replaced" else []
        return [*self.replaced, *(name for name in biases if name in self.origin)]

    @property
    def exact(self) -> list[str]:
        """Tensors saved in full, by the task vector's names."""
        names = [*(name for names in self.whole.values() for name in names), *self.in_place]
        return [self.origin[name] for name in names if name in self.origin]


def find_routes(model: nn.Module, changed: Iterable[str], sites: Collection[str], everything: bool = False) -> Routes:
    """Choose the routes of a model's changed tensors; the model may be a skeleton.

    Linear layers and the `sites` are always held; other tensors (norms, embeddings) only with `everything`.
    """
    from hf_bico.models.families.modules import tied_names  # imports transformers, which a task vector does not need

    modules = dict(model.named_modules())
    places = align_names(changed, model.state_dict())
    # tensors that the library joins or splits when it loads the model
    joined = [name for name in changed if name not in places]
    origin = {**{place: name for name, place in places.items()}, **{name: name for name in joined}}
    routes = Routes(left=[*joined], joined=joined, origin=origin, whole=_heads(model, modules))
    wanted = {places[name] for name in sites if name in places}
    # peft would change a tied tensor in one place only, or untie the two
    tied = {name.rpartition(".")[0] for name in tied_names(model)}
    heads = tuple(f"{head}." for head in routes.whole)
    attention: dict[str, list[str]] = {}
    for name in places.values():
        if name.startswith(heads):
            continue
        owner, _, parameter = name.rpartition(".")
        packed = _packed_attention(owner, modules)
        if packed is not None:
            attention.setdefault(packed, []).append(name)
        elif _is_linear(modules[owner]) and parameter in ("weight", "bias") and owner not in tied:
            routes.lora[owner] = _is_transposed(modules[owner])
        elif not everything and name not in wanted:
            routes.left.append(name)
        elif owner in tied:
            routes.replaced.append(name)
        else:
            _save(name, modules, routes)
    _choose_bias(routes, modules)
    for path, names in attention.items():
        _route_attention(path, names, modules, model, routes)
    _require_target(routes, modules)
    return routes


def _heads(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """Return the heads that peft saves whole, changed or not, with the names of their tensors."""
    found = [head for head in _HEADS.get(peft_task(model) or "", ()) if head in modules]
    return {head: [f"{head}.{key}" for key in modules[head].state_dict()] for head in found}


def _is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_transposed(module)


def _packed_attention(owner: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the path of the packed attention that a tensor belongs to: peft mishandles its LoRA."""
    for path in (owner, owner.rpartition(".")[0]):
        module = modules[path]
        if isinstance(module, nn.MultiheadAttention) or getattr(module, "in_proj_weight", None) is not None:
            return path
    return None


def _choose_bias(routes: Routes, modules: Mapping[str, nn.Module]) -> None:
    """Use `lora_bias`, for which every LoRA layer must have a bias; save those without one whole."""
    if not any(f"{module}.bias" in routes.origin for module in routes.lora):
        return
    without = [module for module in routes.lora if modules[module].bias is None]
    # inside the blocks, saving them whole would be most of the model: the biases are replaced
    if any(part.isdigit() for module in without for part in module.split(".")):
        routes.bias = "replaced"
        return
    routes.bias = "lora_bias"
    for module in without:
        del routes.lora[module]
        _save(f"{module}.weight", modules, routes)


def _save(name: str, modules: Mapping[str, nn.Module], routes: Routes) -> None:
    """Save a tensor in full: with its module if peft finds that by name, otherwise on its own."""
    owner = name.rpartition(".")[0]
    if owner and not any(modules[owner].children()) and _is_unique_ending(owner, modules):
        routes.whole[owner] = [f"{owner}.{key}" for key in modules[owner].state_dict()]
    elif name not in routes.replaced:
        routes.replaced.append(name)


def _is_unique_ending(path: str, modules: Iterable[str]) -> bool:
    """Tell whether no other module's name ends in `path`: peft would save that one too."""
    return [name for name in modules if name.endswith(path)] == [path]


def _route_attention(
    path: str, names: list[str], modules: Mapping[str, nn.Module], model: nn.Module, routes: Routes
) -> None:
    """Hold a packed attention as factors if only q, k and v change; otherwise save it whole."""
    packed = f"{path}.in_proj_weight"
    ending = [name for name in model.state_dict() if name == packed or name.endswith(f".{packed}")]
    if names == [packed] and ending == [packed] and routes.bias != "lora_bias":
        routes.parameters.append(packed)
    elif _is_unique_ending(path, modules):
        routes.whole[path] = [f"{path}.{key}" for key in modules[path].state_dict()]
    else:
        routes.replaced += names


def _require_target(routes: Routes, modules: Mapping[str, nn.Module]) -> None:
    """Give factors of zero to the smallest layer if nothing else has any: peft reads no LoRA without a layer."""
    if routes.lora or routes.parameters:
        return
    inside = tuple(f"{path}." for path in routes.whole)
    changed = {name.rpartition(".")[0] for name in routes.replaced}
    free = [
        (sum(tensor.numel() for tensor in module.parameters()), name)
        for name, module in modules.items()
        if _is_linear(module)
        and name not in routes.whole
        and name not in changed
        and not name.startswith(inside)
        and _packed_attention(name, modules) is None
    ]
    if not free:
        raise AdapterError("the model has no linear layer that peft could adapt", "save the change as a delta")
    name = min(free)[1]
    routes.lora[name] = _is_transposed(modules[name])


_NOISE = 1e-13
"""A lower share of energy is rounding error."""


@dataclass(frozen=True, repr=False)
class Fitted:
    """An adapter's part of a task vector."""

    changes: Deltas
    """The changes that peft will add, by the names of the loaded model."""
    routes: Routes
    vector: Deltas

    def __repr__(self) -> str:
        return f"{len(self.changes)} of {len(self.vector)} tensors, {self.energy_kept:.2%} of the energy kept"

    @cached_property
    def kept(self) -> dict[str, float]:
        """The share of each tensor's energy that the adapter holds."""
        return {
            name: kept_of(change, self.changes.change(name)) if name in self.changes else 0.0
            for name, change in self.vector.changes()
        }

    @cached_property
    def energy_kept(self) -> float:
        """The share of the whole task vector's energy that it holds."""
        energies = {name: self.vector.energy(name) for name in self.vector}
        held, whole = sum(energies[name] * self.kept[name] for name in energies), sum(energies.values())
        return held / whole if whole else 1.0

    @cached_property
    def ranks(self) -> dict[str, int]:
        """The rank of each tensor that is held as factors."""
        held = ((name, self.changes.change(name)) for name in self.routes.low_rank)
        return {name: change.rank for name, change in held if isinstance(change, Factors)}


def kept_of(change: Change, held: Change) -> float:
    """Return the share of a change's energy that is held."""
    if held is change or is_zero(change):
        return 1.0
    lost = energy(total([change.to("cpu"), -1.0 * held.to("cpu")])) / energy(change)
    return max(0.0, 1.0 - lost) if lost > _NOISE else 1.0


def fit_adapter(
    vector: Deltas,
    model: nn.Module,
    sites: Collection[str],
    rank: int | float | None = None,
    everything: bool = False,
    device: torch.device | None = None,
) -> Fitted:
    """Choose how peft holds each change, and truncate those held as factors to the rank, on `device`."""
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
    """The base as the adapter's configuration names it."""

    id: str
    revision: str | None = None


def write_adapter(fitted: Fitted, model: nn.Module, base: Checkpoint, named: BaseName, folder: Path) -> list[Path]:
    """Write `adapter_model.safetensors` and `adapter_config.json`; return their paths.

    `base` holds the weights of `model`, which may be a skeleton, under the task vector's names or its own.
    """
    tensors = {**_factors(fitted, model), **_full_tensors(fitted, model, base)}
    weights, config = folder / ADAPTER_FILE, folder / ADAPTER_CONFIG
    save_tensors({PEFT_PREFIX + name: tensor for name, tensor in sorted(tensors.items())}, weights, {"format": "pt"})
    content = _config(fitted, model, named, tensors)
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return [weights, config]


def _factors(fitted: Fitted, model: nn.Module) -> dict[str, Tensor]:
    """Return A and B of every layer and parameter; a layer whose bias alone changes has factors of zero."""
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
            bias = change if isinstance(change, Tensor) else torch.zeros(layer.bias.shape[0])
            tensors[f"{module}.lora_B.bias"] = bias.to("cpu", torch.float32)
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


def _full_tensors(fitted: Fitted, model: nn.Module, base: Checkpoint) -> dict[str, Tensor]:
    """Return the tensors that are saved in full, unrounded where they change."""
    routes = fitted.routes
    names = [*(name for names in routes.whole.values() for name in names), *routes.replaced]
    places = align_names(model.state_dict(), base.shapes)

    def value(name: str) -> Tensor:
        start, change = base.tensor(places[name]), _change(fitted, name)
        if change is None:
            return start
        wide = torch.promote_types(start.dtype, torch.float32)  # peft rounds it to the dtype of the loaded model
        return add_delta(start.to(wide), change, name)

    tensors = {name: value(name) for name in names}
    if routes.bias == "replaced":
        biased = [module for module in routes.lora if f"{module}.bias" in routes.origin]
        tensors |= {f"{module}.base_layer.bias": value(f"{module}.bias") for module in biased}
    return tensors


def _config(fitted: Fitted, model: nn.Module, named: BaseName, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Make the configuration; alpha is the rank everywhere, so that what is written is what is added."""
    routes = fitted.routes
    ranks = {module: tensors[f"{module}.lora_A.weight"].shape[0] for module in routes.lora}
    ranks |= {name: tensors[f"{name.rpartition('.')[0]}.lora_A.weight"].shape[0] for name in routes.parameters}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    pattern = {f"^{re.escape(name)}": own for name, own in ranks.items() if own != rank}
    content = {
        "peft_type": "LORA",
        "peft_version": version("peft"),
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "target_modules": _targets(routes.lora, model),
        "target_parameters": sorted(routes.parameters) or None,
        "modules_to_save": sorted(routes.whole) or None,
        "bias": "lora_only" if routes.bias == "replaced" else "none",
        "lora_bias": routes.bias == "lora_bias",
        "fan_in_fan_out": bool(routes.lora) and all(routes.lora.values()),
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "base_model_name_or_path": named.id,
        "revision": named.revision,
        "inference_mode": True,
        "auto_mapping": {"base_model_class": type(model).__name__, "parent_library": type(model).__module__},
    }
    # written without peft, whose import takes seconds: it reads what is not there as its default
    return {key: value for key, value in content.items() if value is not None} | {"task_type": peft_task(model)}


def _targets(modules: Collection[str], model: nn.Module) -> list[str] | str:
    """Name the layers for peft: by their last names if those are unique, otherwise by an expression."""
    names = [name for name, _ in model.named_modules() if name]
    last = sorted({name.rpartition(".")[2] for name in modules})
    if {name for name in names if name.rpartition(".")[2] in last} == set(modules):
        return last
    spelled = [re.escape(name) for name in sorted(modules)]
    in_any_block = "|".join(dict.fromkeys(re.sub(r"\b\d+\b", r"\\d+", name) for name in spelled))
    if {name for name in names if re.fullmatch(in_any_block, name)} == set(modules):
        return in_any_block
    return "|".join(spelled)
