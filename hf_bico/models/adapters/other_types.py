"""Compute the changes of adapters other than LoRA by peft itself, on a loaded copy of the base."""

from __future__ import annotations

import re
import warnings
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_bico.errors import AdapterError, UnsupportedAdapterError
from hf_bico.models.adapters.config import MERGE, PEFT_PREFIX, AdapterConfig, expressions_of
from hf_bico.models.adapters.lora import require_finite, require_floats
from hf_bico.models.adapters.lora_names import without_wrappers
from hf_bico.models.adapters.patterns import require_quick
from hf_bico.models.checkpoints import LIBRARY_ERRORS, Checkpoint
from hf_bico.models.name_matching import align_names
from hf_bico.runtime.turns import library_turn

_MOST = 2**17
"""Some adapters set a rank beyond any layer's to mean all of it, but none above this."""
_NO_SIZE = re.compile("seed|key|version")
_INDICES = "_indices"
"""The end of the names of SHiRA's tensors that hold positions in a weight."""
_REFUSALS = (*LIBRARY_ERRORS, re.error)


def changes_by_peft(
    folder: Path, adapter: Checkpoint, config: AdapterConfig, module: nn.Module, called: str
) -> dict[str, Tensor]:
    """Compute the dense change of every weight by its name in `module`, a copy of the base that may be changed."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    require_floats(adapter, called, counting=_INDICES)
    require_quick(expressions_of(config.raw), [name for name, _ in module.named_modules()], called)
    _require_small(config, adapter, called)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    tensors = {name: adapter.tensor(name) for name in adapter.shapes}
    model = _loaded(folder, tensors, module, config, called)
    changes: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, layer in list(model.base_model.model.named_modules()):
            if not isinstance(layer, BaseTunerLayer):
                continue
            if isinstance(model.base_model.model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
                raise UnsupportedAdapterError(
                    f"'{called}' changes '{name}' of a packed attention, which has no effect before it is merged", MERGE
                )
            delta = _delta(layer, config, called)
            place = f"{without_wrappers(name)}.weight"
            if place not in before or before[place].shape != delta.shape:
                raise UnsupportedAdapterError(f"'{called}' ({config.kind}) changes '{name}' by no plain sum", MERGE)
            changes[place] = delta.float()
    whole = {without_wrappers(name.removeprefix(PEFT_PREFIX)): value for name, value in tensors.items()}
    changes |= {name: value.float() - before[name].float() for name, value in whole.items() if name in before}
    for name, change in changes.items():
        require_finite(change, name, called)
    return changes


def _require_small(config: AdapterConfig, adapter: Checkpoint, called: str) -> None:
    """Refuse sizes that the adapter's own tensors cannot have, before peft allocates memory for them."""
    most = max(sum(prod(shape) for shape in adapter.shapes.values()), _MOST)
    for name, value in config.raw.items():
        if type(value) in (int, float) and abs(value) > most and not _NO_SIZE.search(name):
            raise AdapterError(
                f"the configuration of '{called}' ({config.kind}) says {name} {value:.3g}, and its tensors are smaller",
                "save the adapter again with peft",
            )


def _loaded(folder: Path, tensors: dict[str, Tensor], module: nn.Module, config: AdapterConfig, called: str) -> Any:
    """Load the adapter into the base; every tensor must find its place."""
    import peft
    from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict

    remedy = "name the model that it was trained on with --base, or " + MERGE
    try:
        with library_turn(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the same is checked below
            settings = peft.PeftConfig.from_pretrained(str(folder))
            _require_known(settings, config, called)
            settings.inference_mode = True
            model = peft.PeftModel(module, settings)
            set_peft_model_state_dict(model, dict(tensors))
            read = get_peft_model_state_dict(model, save_embedding_layers=False)
    except _REFUSALS as error:
        reason = " ".join(str(error).split())[:300]  # peft lists all targets
        raise AdapterError(f"peft cannot read '{called}' ({config.kind}) over its base: {reason}", remedy) from error
    lost = [name for name in tensors if name not in read] + [name for name in read if name not in tensors]
    if lost:
        raise AdapterError(f"'{lost[0]}' of '{called}' ({config.kind}) does not fit the layers of its base", remedy)
    return model


def _require_known(settings: Any, config: AdapterConfig, called: str) -> None:
    """Refuse fields that the installed peft does not know: it would ignore them."""
    for name, value in config.raw.items():
        if not hasattr(settings, name) and value not in (None, False, [], {}, ""):
            raise UnsupportedAdapterError(
                f"'{called}' ({config.kind}) has '{name}', which this version does not know", MERGE
            )


def _delta(layer: Any, config: AdapterConfig, called: str) -> Tensor:
    if not hasattr(layer, "get_delta_weight"):
        raise UnsupportedAdapterError(f"peft offers no change of weights for '{called}' ({config.kind})", MERGE)
    try:
        delta: Tensor = layer.get_delta_weight("default")
    except _REFUSALS as error:
        raise AdapterError(f"peft cannot compute the change of '{called}' ({config.kind}): {error}", MERGE) from error
    return delta.to_dense() if delta.is_sparse else delta


def by_base_names(changes: dict[str, Tensor], base: Checkpoint) -> dict[str, Tensor]:
    """Rename the changes to the names in the base's files, which may have another prefix."""
    places = align_names(changes, base.shapes)
    lost = [name for name in changes if name not in places]
    if lost:
        raise UnsupportedAdapterError(f"an adapter changes '{lost[0]}', which the files of its base lack", MERGE)
    return {places[name]: change for name, change in changes.items()}
