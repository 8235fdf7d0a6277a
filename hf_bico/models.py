"""Models as the pipeline sees them: a folder or a loaded module, its family, layout and checkpoint.

Opening one reads names, shapes and configuration only; weights are read, and torch imported, when it is loaded.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hf_bico.checkpoints import DELTA_FILE, Checkpoint, FileCheckpoint, MemoryCheckpoint, expanded, sha256_of
from hf_bico.errors import BrokenWeightsError, RepoError, RepoNotFoundError
from hf_bico.families import Family, LiveModel, family_of
from hf_bico.sites import Layout

if TYPE_CHECKING:
    import torch
    from torch import nn

ModelReference: TypeAlias = "str | Path | nn.Module"
"""What names a model: a folder, or the loaded model itself."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


@dataclass(frozen=True)
class Model:
    """A model that is known but not loaded."""

    name: str
    checkpoint: Checkpoint
    family: Family
    layout: Layout
    folder: Path | None = None
    module: Any = None

    @classmethod
    def open(cls, reference: ModelReference, what: str, library: str = "transformers") -> Model:
        """Open a model by reference; `what` says its part ("the target") in errors.

        `library` decides between the layouts of a folder that holds two.
        """
        if not isinstance(reference, str | Path):
            checkpoint: Checkpoint = MemoryCheckpoint.of(reference)
            name = type(reference).__name__
            family = family_of(checkpoint.shapes, what)
            return cls(name, checkpoint, family, family.wrap(reference).layout, module=reference)
        folder = find_folder(reference, what)
        if (folder / DELTA_FILE).is_file():
            raise RepoError(
                f"{what} '{folder.name}' is a task vector, not a model",
                "measure it with 'hf-bico eval FOLDER --base TARGET', or apply it from Python with TaskVector.load",
            )
        if (folder / "adapter_config.json").is_file():
            raise RepoError(
                f"{what} '{folder.name}' is a PEFT adapter, which this version does not read",
                "merge it into its base with PeftModel.merge_and_unload() and save the result",
            )
        checkpoint = FileCheckpoint.in_folder(folder, library)
        family = family_of(checkpoint.shapes, f"{what} '{folder.name}'")
        try:
            layout = family.layout(checkpoint.shapes, family.read_config(folder))
        except KeyError as error:
            raise BrokenWeightsError(
                f"{what} '{folder.name}' lacks the tensor {error}", "copy or download the folder again"
            ) from error
        return cls(folder.name, checkpoint, family, layout, folder)

    def load(self, device: torch.device, dtype: torch.dtype) -> LiveModel:
        """The live model; a module that the caller loaded is used where and as it is."""
        if self.folder is None:
            return self.family.wrap(self.module)
        live = self.family.load(self.folder, device, dtype)
        if [(site.name, site.shape) for site in live.layout.sites] != [(s.name, s.shape) for s in self.layout.sites]:
            raise BrokenWeightsError(
                f"'{self.name}' holds other layers than its configuration says", "copy or download the folder again"
            )
        return live

    @cached_property
    def sha256(self) -> dict[str, str]:
        """The digests of the weight files, by name; empty for a loaded module."""
        return sha256_of(self.checkpoint.files) if isinstance(self.checkpoint, FileCheckpoint) else {}


def find_folder(reference: str | Path, what: str) -> Path:
    """The folder of a repo reference."""
    text = str(reference).removeprefix("local-dir:")
    if not text:
        raise RepoNotFoundError(f"{what}: the reference is empty", "name a folder")
    folder = expanded(text)
    # os.path answers for names that are too long, where pathlib raises
    if os.path.isdir(folder):
        return folder.resolve()
    if os.path.isfile(folder):
        raise RepoNotFoundError(f"{what}: '{text}' is a file", f"name its folder, '{folder.parent}'")
    hub_id = text.removeprefix("hf-hub:")
    if _HUB_ID.fullmatch(hub_id) and not folder.parent.is_dir():
        raise RepoNotFoundError(
            f"{what}: there is no folder '{text}', and Hub ids are not resolved by this version",
            f"run 'hf download {hub_id.partition('@')[0]} --local-dir FOLDER' and name that folder",
        )
    near = get_close_matches(folder.name, [path.name for path in folder.parent.glob("*") if path.is_dir()], n=1)
    hint = f"did you mean '{folder.parent / near[0]}'?" if near else "check the path"
    raise RepoNotFoundError(f"{what}: there is no folder '{text}'", hint)
