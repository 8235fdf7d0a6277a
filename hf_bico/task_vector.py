"""TaskVector: what fine-tuning changed, taken from two models, saved and loaded, pulled and pushed.

The arithmetic is that of `deltas`; here is how a task vector comes in and goes out.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hf_bico.cards.card import CARD_FILE
from hf_bico.cards.vector_card import render_vector_card
from hf_bico.checkpoints import (
    DELTA_FILE,
    WEIGHT_FILES,
    Checkpoint,
    FileCheckpoint,
    MemoryCheckpoint,
    Overlap,
    expanded,
    open_safetensors,
    save_tensors,
    sha256_of,
)
from hf_bico.deltas import Deltas, Difference, Lazy
from hf_bico.errors import BaseUnknownError, RecordError
from hf_bico.hub.client import Hub
from hf_bico.hub.repos import Place, locate
from hf_bico.models import fetch_checkpoint
from hf_bico.planning import find_base
from hf_bico.pushing import Pushed, PushOptions, RepoName, push_folder

_FORMAT = "hf-bico task vector"
_SCHEMA = 1

ModelLike = str | Path | nn.Module | Checkpoint
"""A Hub id, a model folder, a loaded model, or an opened checkpoint."""


class TaskVector(Deltas):
    """Named changes of weights over one base model; `about` says which, as far as it is known.

    >>> import torch
    >>> from hf_bico.checkpoints import MemoryCheckpoint
    >>> base = {"w": torch.zeros(2), "same": torch.ones(2)}
    >>> tuned = {"w": torch.ones(2), "same": torch.ones(2)}
    >>> tau = TaskVector.from_models(MemoryCheckpoint(tuned), base=MemoryCheckpoint(base))
    >>> list(tau), (0.5 * tau + tau)["w"]
    (['w'], tensor([1.5000, 1.5000]))
    """

    def __init__(
        self, deltas: Mapping[str, Tensor], overlap: Overlap | None = None, about: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(deltas, overlap)
        self.about = dict(about or {})

    @classmethod
    def from_models(cls, fine_tuned: ModelLike, base: ModelLike | None = None, token: str | None = None) -> TaskVector:
        """Fine-tuned minus base, tensor by tensor; tensors that are equal in both do not appear.

        The base may be left out where the fine-tuned model's card names it. The names are the base's. A fine-tuned
        model that holds only a part of its base (a vision tower) or spells its names with another prefix is lined up
        with it; what one side lacks is in `overlap`.
        """
        hub = Hub(token)
        tuned = locate(fine_tuned, "the fine-tuned model", hub) if isinstance(fine_tuned, str | Path) else fine_tuned
        if base is None:
            if not isinstance(tuned, Place):
                raise BaseUnknownError("the base of a loaded model is not known", "pass base=")
            start: Place | nn.Module | Checkpoint = find_base(tuned, hub)
        else:
            start = locate(base, "the base", hub) if isinstance(base, str | Path) else base
        tuned_checkpoint, about = _opened(tuned, "source")
        start_checkpoint, more = _opened(start, "base", about.get("library", "transformers"))
        difference = Difference.between(tuned_checkpoint, start_checkpoint)
        return cls(difference, difference.overlap, {**about, **more})

    @classmethod
    def load(cls, path: str | Path, token: str | None = None) -> TaskVector:
        """Read back what was saved or pushed: a Hub id, a folder with `task_vector.safetensors`, or that file."""
        file = expanded(path)
        if not file.is_file():
            place = locate(path, "the task vector", Hub(token))
            if DELTA_FILE not in place.sizes:
                raise RecordError(
                    f"there is no task vector in '{place.name}'", f"name a repo or folder that holds {DELTA_FILE}"
                )
            place.fetch([DELTA_FILE])
            file = place.folder / DELTA_FILE
        with open_safetensors(file, "pt") as reader:
            header = json.loads((reader.metadata() or {}).get("hf_bico", "{}"))
        if header.pop("format", None) != _FORMAT or header.pop("schema", None) != _SCHEMA:
            raise RecordError(f"'{file.name}' is not a task vector of schema {_SCHEMA}", "save it again with this tool")
        return cls(Lazy(FileCheckpoint([file])), about=header)

    def save(self, folder: str | Path, **about: Any) -> Path:
        """Write the lossless delta format into `folder`; `about` goes into its metadata."""
        file = expanded(folder) / DELTA_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        header = json.dumps({"format": _FORMAT, "schema": _SCHEMA, **self.about, **about}, sort_keys=True)
        # one metadata entry: safetensors does not promise an order of several
        save_tensors(self, file, {"hf_bico": header})
        return file

    def push_to_hub(self, repo_id: str, *, token: str | None = None, **options: Any) -> Pushed:
        """Push the delta format with a short card, as one commit; the options are those of `PushOptions`.

        private, create_pr, revision, message, overwrite, force.
        """
        wanted = PushOptions(**options)
        parts = [part for part in ("source", "base") if self.about.get(f"{part}_commit")]
        made_from: list[RepoName] = [("model", str(self.about[part])) for part in parts]
        with tempfile.TemporaryDirectory() as scratch:
            folder = self.save(Path(scratch) / "task-vector").parent
            card = render_vector_card(self.about, len(self), repo_id)
            (folder / CARD_FILE).write_text(card, encoding="utf-8")
            return push_folder(folder, repo_id, wanted, Hub(token), made_from)


def _opened(
    model: Place | nn.Module | Checkpoint, part: str, library: str = "transformers"
) -> tuple[Checkpoint, dict[str, Any]]:
    """A model's weights on this machine, and what to remember of a repo."""
    if isinstance(model, nn.Module):
        return MemoryCheckpoint.of(model), {}
    if not isinstance(model, Place):
        return model, {}
    checkpoint = fetch_checkpoint(model, library)
    about: dict[str, Any] = {part: model.name, f"{part}_sha256": sha256_of(checkpoint.files)}
    if model.commit is not None:
        about[f"{part}_commit"] = model.commit
    names = {file.name for file in checkpoint.files}
    layouts = [layout for layout, name in WEIGHT_FILES.items() if name in names]
    return checkpoint, {**about, "library": layouts[0]} if layouts else about
