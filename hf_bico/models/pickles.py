"""Read pickled weights, tensors alone, and convert them to safetensors.

Finds the one file that holds a whole model, whatever a training tool calls it, and the section of it that holds the
weights. Nothing that a pickle names is ever run.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_bico.errors import BrokenWeightsError, WeightsNotFoundError
from hf_bico.models.checkpoints import LIBRARY_ERRORS, listed, pickle_names, save_tensors, weight_map
from hf_bico.models.conversion import converted_folder
from hf_bico.utils.files import folder_name

if TYPE_CHECKING:
    from torch import Tensor

_WHOLE_MODELS = {
    "transformers": ("pytorch_model.bin",),
    "open_clip": ("open_clip_pytorch_model.bin", "open_clip_pytorch_model.pt"),
}
_CONFIGS = {"transformers": "config.json", "open_clip": "open_clip_config.json"}
_UNREADABLE = (*LIBRARY_ERRORS, pickle.UnpicklingError, zipfile.BadZipFile, EOFError)
_SECTIONS = ("state_dict", "model_state_dict", "model_state", "model", "module")
"""Where training tools keep the weights beside their own state: Lightning and open_clip, plain loops, DeepSpeed."""
_DEEPEST = 3
_OTHER_OBJECT = re.compile(r"Unsupported global: GLOBAL (\S+)")
"""What torch says of an object that it does not know; of those that could run commands it says otherwise."""

_PLAIN_NAME = re.compile(r"\w[\w.-]*", re.ASCII)

Renaming = Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, str]]
"""From names and shapes to the names that are to be others."""


def pickled_files(folder: Path, names: Mapping[str, int], library: str, called: str) -> tuple[str, list[str]]:
    """Return the library whose layout the pickles have, and their names; `folder` holds the index, if any.

    A file that is named as no library does it is taken if it is the only one.
    """
    for layout in dict.fromkeys((library, *_WHOLE_MODELS)):
        for name in _WHOLE_MODELS[layout]:
            if name in names:
                return layout, [name]
            index = f"{name}.index.json"
            if index in names:
                return layout, _shards(folder / index, names)
    found = pickle_names(names)
    if len(found) == 1:
        configured = [layout for layout, file in _CONFIGS.items() if file in names]
        return library if library in configured or not configured else configured[0], found
    raise WeightsNotFoundError(
        f"'{called}' holds several pickles ({listed(found)}), and none has the name of a whole model",
        "keep only the right one, in a folder with the model's configuration, or call it pytorch_model.bin",
    )


def _shards(index: Path, names: Mapping[str, int]) -> list[str]:
    shards = sorted(set(weight_map(index, folder_name(index.parent)).values()))
    missing = [shard for shard in shards if shard not in names]
    if missing or not shards:
        raise BrokenWeightsError(
            f"the index '{index.name}' names the shard '{missing[0] if missing else ''}', which is not there",
            "use a repo that holds all shards",
        )
    return shards


def convert(
    folder: Path, names: Sequence[str], file_name: str, beside: Sequence[str], renaming: Renaming | None = None
) -> Path:
    """Write the same weights as one safetensors file, with the files `beside` it, into a cached folder."""

    def write(scratch: Path) -> None:
        # clones: safetensors refuses tensors that share memory
        tensors = {key: value.clone() for name in names for key, value in _tensors(folder / name).items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        others = {} if renaming is None else renaming(shapes)
        renamed = {others.get(name, name): tensor for name, tensor in tensors.items()}
        save_tensors(renamed, scratch / file_name, {"format": "pt"})

    return converted_folder(folder, names, file_name, beside, write)


def _tensors(file: Path) -> dict[str, Tensor]:
    import torch

    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise _unreadable(file, error) from error
    sections = list(content) if isinstance(content, dict) else []
    for _ in range(_DEEPEST):
        inner = [content[name] for name in _SECTIONS if isinstance(content, dict) and name in content]
        content = next((section for section in inner if isinstance(section, dict)), content)
    entries = content.items() if isinstance(content, dict) else ()
    found = {str(key): value for key, value in entries if isinstance(value, torch.Tensor)}
    if not found:
        holds = f" (it holds {listed([str(name)[:40] for name in sections])})" if sections else ""
        raise BrokenWeightsError(
            f"there are no tensors in '{file.name}'{holds}", "name a repo that holds a model's weights"
        )
    return found


def _unreadable(file: Path, error: BaseException) -> BrokenWeightsError:
    """Make the error for a pickle that torch does not read as tensors alone."""
    other = _OTHER_OBJECT.search(str(error))
    if other is None:
        return BrokenWeightsError(
            f"'{file.name}' cannot be read as tensors alone: {' '.join(str(error).split())[:200]}",
            "load it in the library that made it and save it as safetensors",
        )
    texts = _names_in(file)
    section = next((f"['{name}']" for name in _SECTIONS if name in texts), "")
    section = ".state_dict()" if other[1].startswith("torch.nn.") and "state_dict" not in texts else section
    name = file.name if _PLAIN_NAME.fullmatch(file.name) else "FILE"  # a stranger's text in a line to copy
    loaded = f"torch.load('{name}', map_location='cpu', weights_only=False){section}"
    tensors = f"{{k: v.clone().contiguous() for k, v in {loaded}.items() if torch.is_tensor(v)}}"
    line = f"import torch; from safetensors.torch import save_file; save_file({tensors}, 'model.safetensors')"
    return BrokenWeightsError(
        f"'{file.name}' cannot be read as tensors alone: it also holds objects of '{other[1][:100]}'",
        f'if you trust who made it, convert it (this runs what is in the file): python -c "{line}"; then name the '
        "folder of model.safetensors, with the model's configuration in it",
    )


def _names_in(file: Path) -> set[str]:
    """Return the texts of a pickle, its sections' names among them, without loading an object."""
    import pickletools

    try:
        with zipfile.ZipFile(file) as archive:
            data = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            return {text for _, text, _ in pickletools.genops(archive.read(data)) if isinstance(text, str)}
    except (*_UNREADABLE, StopIteration):
        return set()
