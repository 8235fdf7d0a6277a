"""Keep a training in a file, so that an interrupted one goes on where it stopped.

Knows the file and what identifies a training; not how anything is trained.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_bico.alignment.methods.training import TrainingTask
from hf_bico.errors import OutputError, UsageError

CHECKPOINT_FILE = "training.safetensors"
CHECKPOINT_ENTRY = "hf_bico_training"
"""The file of a checkpoint, and the JSON in its header: identity, recipe, and how far the training is."""

_REMEDY = "name another folder with --checkpoint, or remove that file to train from the beginning"


@dataclass(frozen=True)
class SavedTraining:
    """Checkpoint of one training: a single file, replaced atomically."""

    file: Path
    identity: str
    recipe: dict[str, Any]

    @classmethod
    def of(cls, training_task: TrainingTask, checkpoint: str, recipe: Mapping[str, Any]) -> SavedTraining:
        """Return the checkpoint of this task and recipe, and create its folder."""
        folder = Path(checkpoint)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"no checkpoint can be written into '{folder}': {error.strerror}",
                "name another folder with --checkpoint",
            ) from error
        return cls(folder / CHECKPOINT_FILE, training_task.identity, {**recipe, "samples": training_task.size})

    def load(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return how far the training was, and its tensors; None if nothing was saved."""
        if not self.file.exists():
            return None
        try:
            with safe_open(self.file, framework="pt") as file:
                about = json.loads(file.metadata()[CHECKPOINT_ENTRY])
                self._require_same(about["identity"], about["recipe"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
            raise self.broken(error) from error
        return about, tensors

    def broken(self, error: Exception) -> UsageError:
        """Return the error for a checkpoint that cannot be followed."""
        return UsageError(f"the checkpoint '{self.file}' is broken: {error}", _REMEDY)

    def save(self, tensors: dict[str, Tensor], **progress: Any) -> None:
        """Write a new checkpoint, then replace the last one."""
        about = {"identity": self.identity, "recipe": self.recipe, **progress}
        part = self.file.with_suffix(".part")
        try:
            save_file(tensors, part, metadata={CHECKPOINT_ENTRY: json.dumps(about)})
            with part.open("r+b") as written:
                os.fsync(written.fileno())
            part.replace(self.file)
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"the checkpoint '{self.file}' cannot be written: {error}",
                "free some space, or name another folder with --checkpoint",
            ) from error
        finally:
            part.unlink(missing_ok=True)

    def _require_same(self, identity: str, recipe: dict[str, Any]) -> None:
        other = [
            f"{name} is {recipe.get(name)} there and {value} here"
            for name, value in self.recipe.items()
            if recipe.get(name) != value
        ]
        if identity != self.identity:
            other.append("its models, samples or settings differ")
        if other:
            raise UsageError(f"the checkpoint '{self.file}' belongs to another training: {other[0]}", _REMEDY)


def remove_checkpoint(folder: Path) -> None:
    """Remove a training's checkpoint, and its folder if that is then empty."""
    file = folder / CHECKPOINT_FILE
    if file.is_file():
        file.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
