"""Pickled weights, made safetensors: only tensors are read from them, and no code runs.

Knows files and tensors; whether that may be done at all is decided by who calls.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_bico.checkpoints import save_tensors, weight_map
from hf_bico.errors import BrokenWeightsError, WeightsNotFoundError
from hf_bico.utils.files import folder_name, sha256_of

if TYPE_CHECKING:
    from torch import Tensor

_PICKLES = {
    "transformers": ("pytorch_model.bin",),
    "open_clip": ("open_clip_pytorch_model.bin", "open_clip_pytorch_model.pt"),
}
# what torch's reader says about a file that is broken, or holds more than tensors
_UNREADABLE = (
    *(pickle.UnpicklingError, zipfile.BadZipFile, ArithmeticError, AssertionError, AttributeError, EOFError),
    *(LookupError, OSError, RuntimeError, TypeError, ValueError),
)
_WRAPPERS = ("state_dict", "model")


def pickled_files(folder: Path, names: Mapping[str, int], library: str) -> tuple[str, list[str]]:
    """The library whose layout the pickles have, and their names; `folder` holds the index of shards, if any."""
    for layout in dict.fromkeys((library, *_PICKLES)):
        for name in _PICKLES[layout]:
            if name in names:
                return layout, [name]
            index = f"{name}.index.json"
            if index in names:
                return layout, _pickled_shards(folder / index, names)
    raise WeightsNotFoundError(
        f"none of the pickles of '{folder_name(folder)}' is a whole model",
        f"looked for {', '.join(name for files in _PICKLES.values() for name in files)}; save it as safetensors",
    )


def _pickled_shards(index: Path, names: Mapping[str, int]) -> list[str]:
    shards = sorted(set(weight_map(index, folder_name(index.parent)).values()))
    missing = [shard for shard in shards if shard not in names]
    if missing or not shards:
        raise BrokenWeightsError(
            f"the index '{index.name}' names the shard '{missing[0] if missing else ''}', which is not there",
            "use a repo that holds all shards",
        )
    return shards


def convert(folder: Path, names: Sequence[str], file_name: str, beside: Sequence[str]) -> Path:
    """A folder with the same weights as one file of safetensors, and the files `beside` it; kept in the cache."""
    from huggingface_hub import constants

    from hf_bico.runtime.output import claimed, whole_folder

    sides = [name for name in beside if (folder / name).is_file()]
    digests = sha256_of(folder / name for name in (*names, *sides))
    key = hashlib.sha256(json.dumps([file_name, digests], sort_keys=True).encode()).hexdigest()
    converted = Path(constants.HF_HOME) / "hf-bico" / "converted" / key
    with claimed(converted, waits=True):
        if converted.is_dir():
            return converted
        tensors = {key: value for name in names for key, value in _tensors(folder / name).items()}
        with whole_folder(converted) as scratch:
            # safetensors keeps no two names for one memory
            save_tensors(
                {key: value.clone() for key, value in tensors.items()},
                scratch / file_name,
                {"format": "pt"},
            )
            for name in sides:
                (scratch / name).write_bytes((folder / name).read_bytes())
    return converted


def _tensors(file: Path) -> dict[str, Tensor]:
    import torch

    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise BrokenWeightsError(
            f"'{file.name}' cannot be read as tensors alone: {' '.join(str(error).split())[:200]}",
            "load it in the library that made it and save it as safetensors",
        ) from error
    for wrapper in _WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    entries = content.items() if isinstance(content, dict) else ()
    found = {str(key): value for key, value in entries if isinstance(value, torch.Tensor)}
    if not found:
        raise BrokenWeightsError(f"there are no tensors in '{file.name}'", "name a repo that holds a model's weights")
    return found
