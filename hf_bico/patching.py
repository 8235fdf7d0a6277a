"""A full model on disk: the target's files, with the changed tensors overwritten in place."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from hf_bico.models.checkpoints import FileCheckpoint, tensor_offsets
from hf_bico.models.deltas import Deltas, add_delta


def write_full(target: FileCheckpoint, vector: Deltas, folder: Path) -> list[Path]:
    """Copies of the target's files with the changed tensors overwritten in place.

    Headers, order and every other tensor are the target's, bit for bit, and memory holds one tensor at a time.
    """
    written = [Path(shutil.copyfile(file, folder / file.name)) for file in target.files]
    for file, copy in zip(target.files, written, strict=True):
        offsets = tensor_offsets(file)
        with copy.open("r+b") as stream:
            for name in offsets.keys() & vector.keys():
                changed = add_delta(target.tensor(name), vector[name], name)
                stream.seek(offsets[name])
                stream.write(changed.contiguous().flatten().view(torch.uint8).numpy().data)
    if target.index is not None:
        shutil.copyfile(target.index, folder / target.index.name)
    return written
