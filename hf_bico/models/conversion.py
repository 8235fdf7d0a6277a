"""Write weights once more, in a folder of the cache, where libraries cannot read them as they are.

Pickles become safetensors, and tensors get other names. A folder is found again by the digests of what it was made of.
Knows files and tensors; no kind of model.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_bico.errors import OutputError
from hf_bico.models.checkpoints import WeightFiles
from hf_bico.utils.files import read_object, sha256_of


def converted_folder(
    folder: Path, names: Iterable[str], made: Any, beside: Sequence[str], write: Callable[[Path], None]
) -> Path:
    """Return the folder into which `write` puts these weights, with copies of the files `beside` them.

    `made` says what is made of them: the same files and the same `made` give one folder.
    """
    from huggingface_hub import constants

    from hf_bico.runtime.output import atomic_folder, locked_folder, require_writable

    sides = [name for name in dict.fromkeys(beside) if (folder / name).is_file()]
    digests = {name: sha256_of([folder / name])[Path(name).name] for name in (*names, *sides)}
    key = hashlib.sha256(json.dumps([made, digests], sort_keys=True).encode()).hexdigest()
    converted = Path(constants.HF_HOME) / "hf-bico" / "converted" / key
    if converted.is_dir():  # maybe in a cache that may only be read
        return converted
    try:
        require_writable(converted)
    except OutputError as error:
        raise OutputError(error.cause, "set HF_HOME to another folder") from error
    with locked_folder(converted, waits=True):
        if converted.is_dir():  # by another process
            return converted
        with atomic_folder(converted) as scratch:
            write(scratch)
            for name in sides:
                (scratch / name).parent.mkdir(exist_ok=True)
                (scratch / name).write_bytes((folder / name).read_bytes())
    return converted


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the bytes of each file of a folder, by name."""
    return {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}


def copy_renamed(
    folder: Path, weights: WeightFiles, copies: WeightFiles, names: Mapping[str, str], beside: Sequence[str]
) -> Path:
    """Copy safetensors to a folder of the cache, as the files `copies`; `names` maps old tensor names to new ones."""

    def write(scratch: Path) -> None:
        for name, copy in zip(weights.names, copies.names, strict=True):
            _copy_renamed(folder / name, scratch / copy, names)
        if weights.index is not None:
            index = read_object(folder / weights.index)
            index["weight_map"] = {names.get(name, name): file for name, file in index["weight_map"].items()}
            (scratch / weights.index).write_text(json.dumps(index, indent=2), encoding="utf-8")

    files = (*weights.names, *(() if weights.index is None else (weights.index,)))
    return converted_folder(folder, files, [copies.names, dict(names)], beside, write)


def _copy_renamed(file: Path, copy: Path, names: Mapping[str, str]) -> None:
    """Copy a safetensors file with another header: the bytes of the tensors are not read as numbers."""
    with file.open("rb") as stream, copy.open("wb") as output:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        renamed = {names.get(name, name): entry for name, entry in header.items()}
        renamed["__metadata__"] = {"format": "pt", **header.get("__metadata__", {})}  # without it, some do not load
        content = json.dumps(renamed).encode()
        content += b" " * (-len(content) % 8)  # safetensors aligns the tensors so
        output.write(len(content).to_bytes(8, "little") + content)
        shutil.copyfileobj(stream, output)
