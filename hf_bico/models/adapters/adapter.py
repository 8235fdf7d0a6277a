"""An adapter by reference: configuration, names and shapes are known, tensors are fetched and read on access."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from hf_bico.errors import AdapterError, BaseMismatchError, PickledWeightsError
from hf_bico.hub.client import RepoFiles
from hf_bico.hub.repo_metadata import ADAPTER_CONFIG
from hf_bico.models.adapters.config import LORA, PEFT_PREFIX, AdapterConfig, parse_adapter_config, read_adapter_config
from hf_bico.models.adapters.lora import AdapterChanges, changes_of
from hf_bico.models.checkpoints import (
    ADAPTER_FILE,
    ADAPTER_PICKLE,
    Checkpoint,
    MemoryCheckpoint,
    RenamedCheckpoint,
    WeightFiles,
)
from hf_bico.models.conversion import sizes_in
from hf_bico.models.model import CARD, Model, OpenedRepo, open_weights
from hf_bico.models.pickles import convert
from hf_bico.models.wrapped_names import clean_names
from hf_bico.utils.files import call_folder

if TYPE_CHECKING:
    from torch import nn

    from hf_bico.models.deltas import Deltas


Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Adapter(OpenedRepo):
    """A PEFT adapter that is known but not read."""

    config: AdapterConfig

    @classmethod
    def open(cls, place: RepoFiles, allow_pickle: bool = False) -> Adapter:
        """Read its configuration, and the names and shapes of its tensors; refuse what cannot be read exactly."""
        config = read_adapter_config(place.folder, place.name)
        notice, pickled = None, ADAPTER_FILE not in place.sizes
        own_files = (place.folder / (ADAPTER_PICKLE if pickled else ADAPTER_FILE),)
        if pickled:
            if not allow_pickle:
                raise PickledWeightsError(
                    f"'{place.name}' holds only pickled weights ({ADAPTER_PICKLE}), which can run code when loaded",
                    "--allow-pickle loads tensors and nothing else from them; or save the adapter again as safetensors",
                )
            place.fetch([ADAPTER_PICKLE, ADAPTER_CONFIG])
            folder = convert(place.folder, [ADAPTER_PICKLE], ADAPTER_FILE, [ADAPTER_CONFIG, CARD])
            call_folder(folder, place.name)
            place = replace(place, folder=folder, sizes=sizes_in(folder))
            notice = f"The weights of {place.name} are pickled: tensors alone were read from {ADAPTER_PICKLE}."
        weights = WeightFiles((ADAPTER_FILE,))
        checkpoint: Checkpoint = open_weights(place, weights)
        names = clean_names(checkpoint.shapes, _are_peft_names, f"'{place.name}'")
        return cls(
            name=place.name,
            checkpoint=RenamedCheckpoint(checkpoint, names) if names else checkpoint,
            place=place,
            weights=weights,
            notice=notice,
            pickled=pickled,
            own_files=own_files,
            renamed=names,
            config=config,
        )

    @classmethod
    def of(cls, module: nn.Module) -> Adapter:
        """Take the active adapter of a loaded PeftModel."""
        from peft.utils import get_peft_model_state_dict

        model: Any = module
        name = type(model).__name__
        _require_plain(model, name)
        raw = json.dumps(model.peft_config[model.active_adapter].to_dict(), default=list)
        tensors = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
        checkpoint = MemoryCheckpoint({key: tensor.detach() for key, tensor in tensors.items()})
        return cls(name=name, checkpoint=checkpoint, config=parse_adapter_config(json.loads(raw), name))

    @property
    def side_names(self) -> tuple[str, ...]:
        return (ADAPTER_CONFIG,)

    @property
    def low_rank(self) -> bool:
        """Whether its changes are products of factors, and stay so."""
        return self.config.kind == LORA

    @property
    def library(self) -> str:
        """The library of its base, for repos that have the base in two layouts."""
        names = (name.removeprefix(PEFT_PREFIX) for name in self.checkpoint.shapes)
        return "open_clip" if any(".resblocks." in f".{name}" for name in names) else "transformers"

    def changes(self, base: Model) -> AdapterChanges | None:
        """Map the base's tensors to their changes, by names and shapes; None where only peft can tell."""
        if not self.low_rank:
            return None
        own = base.layout.own_names
        read = partial(changes_of, self.checkpoint, self.config, called=self.name)
        try:
            changes = read(base.as_loaded, is_transposed=base.is_transposed)
        except BaseMismatchError:
            if not own:
                raise
            # trained with a release of transformers that named its layers as the base's files do
            return read(base.checkpoint, is_transposed=lambda tensor: base.is_transposed(own.get(tensor, tensor)))
        return replace(changes, base=base.checkpoint, names=_as_stored(changes.names, base))

    def deltas(self, base: Model) -> Deltas:
        """Return the changes of the base: as factors for a LoRA, otherwise as peft computes them."""
        import torch

        from hf_bico.models.adapters.other_types import by_base_names, changes_by_peft
        from hf_bico.models.deltas import Deltas

        changes = self.changes(base)
        if changes is not None:
            return Deltas(changes, changes.overlap)
        if self.folder is None:
            raise AdapterError(f"'{self.name}' is not a folder", "save the adapter first")
        live = base.load(torch.device("cpu"), torch.float32)
        module = live.module if base.folder is not None else copy.deepcopy(live.module)
        computed = changes_by_peft(self.folder, self.checkpoint, self.config, module, self.name)
        return Deltas(_as_stored(by_base_names(computed, base.as_loaded), base))


def _are_peft_names(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    return all(name.startswith(PEFT_PREFIX) for name in shapes)


def _require_plain(model: Any, name: str) -> None:
    """Refuse a loaded adapter that is merged, rescaled, switched off, or one of several."""
    active = list(model.active_adapters)
    scaled = (layer for layer in model.modules() if isinstance(getattr(layer, "scaling", None), dict))
    layers = [layer for layer in scaled if active and active[0] in layer.scaling]
    marks = [getattr(layer, mark, False) for layer in layers for mark in ("merged", "disable_adapters")]
    reasons = {
        f"has {len(active)} active adapters": len(active) != 1,
        "has its adapter merged, or switched off": any(marks),
        "has its adapter rescaled": any(_is_rescaled(layer, active[0]) for layer in layers),
    }
    for reason, true in reasons.items():
        if true:
            raise AdapterError(f"the loaded {name} {reason}", "save the adapter, and name its folder")


def _is_rescaled(layer: Any, adapter: str) -> bool:
    rank, alpha = getattr(layer, "r", {}).get(adapter), getattr(layer, "lora_alpha", {}).get(adapter)
    if not rank or alpha is None:
        return False
    plain = (alpha / rank, alpha / rank**0.5)
    return all(abs(layer.scaling[adapter] - scaling) > 1e-6 * abs(scaling) for scaling in plain)


def _as_stored(changes: Mapping[str, Found], base: Model) -> dict[str, Found]:
    """Rename the changes to the names in the base's files."""
    stored = {own: name for name, own in base.layout.own_names.items()}
    return {stored.get(name, name): change for name, change in changes.items()}


def is_peft_model(module: object) -> bool:
    """Tell whether a loaded model contains an adapter, without importing peft."""
    return hasattr(module, "peft_config") and hasattr(module, "get_base_model")
