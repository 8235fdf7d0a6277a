"""TaskVector: what fine-tuning changed, taken from two models, saved and loaded, pulled and pushed.

The arithmetic is that of `deltas`; here is how a task vector comes in and goes out.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

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
from hf_bico.hub.references import LOCAL, RepoName, cached_repo
from hf_bico.hub.repos import Place, locate
from hf_bico.models import fetch_checkpoint
from hf_bico.push_checks import PushOptions, require_pushable
from hf_bico.pushing import Pushed, push_folder
from hf_bico.resolving import find_base

_FORMAT = "hf-bico task vector"
_SCHEMA = 1
MADE_FROM = "made_from"

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
    def from_models(
        cls,
        fine_tuned: ModelLike,
        base: ModelLike | None = None,
        *,
        token: str | None = None,
        allow_pickle: bool = False,
    ) -> TaskVector:
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
        tuned_checkpoint, about = _opened(tuned, "source", "transformers", allow_pickle)
        start_checkpoint, more = _opened(start, "base", about.get("library", "transformers"), allow_pickle)
        difference = Difference.between(tuned_checkpoint, start_checkpoint)
        made_from = [name for known in (about, more) for name in known.pop(MADE_FROM, ())]
        return cls(difference, difference.overlap, {**about, **more, MADE_FROM: made_from})

    @classmethod
    def load(cls, path: str | Path, token: str | None = None) -> TaskVector:
        """Read back what was saved or pushed: a Hub id, a folder with `task_vector.safetensors`, or that file."""
        file, place = expanded(path), None
        cached = cached_repo(file.parent) if file.is_file() else None
        if not file.is_file():
            place = locate(path, "the task vector", Hub(token))
            if DELTA_FILE not in place.sizes:
                raise RecordError(
                    f"there is no task vector in '{place.name}'", f"name a repo or folder that holds {DELTA_FILE}"
                )
            place.fetch([DELTA_FILE])
            file = place.folder / DELTA_FILE
        with open_safetensors(file, "pt") as reader:
            about = _read_header((reader.metadata() or {}).get("hf_bico", "{}"), file.name)
        origin = place.repo.id if place is not None and place.repo is not None else cached.id if cached else None
        about[MADE_FROM] = [*(about.get(MADE_FROM) or [list(LOCAL)]), *([["model", origin]] if origin else [])]
        return cls(Lazy(FileCheckpoint([file])), about=about)

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
        wanted, hub = PushOptions(**options), Hub(token)
        whole = require_pushable(repo_id, replace(wanted, overwrite=True), hub)
        with tempfile.TemporaryDirectory() as scratch:
            folder = self.save(Path(scratch) / "task-vector").parent
            card = render_vector_card(self.about, len(self), whole)
            (folder / CARD_FILE).write_text(card, encoding="utf-8")
            return push_folder(folder, whole, wanted, hub, made_from=self.made_from, kept=False)

    @property
    def made_from(self) -> list[RepoName]:
        """The Hub repos behind it, whose privacy it inherits."""
        named = [(str(type), str(name)) for type, name in self.about.get(MADE_FROM) or ()]
        return list(dict.fromkeys(named)) or [LOCAL]

    def _combined(self, terms: tuple[tuple[float, Mapping[str, Tensor]], ...], overlap: Overlap, *others: Self) -> Self:
        vector = super()._combined(terms, overlap, *others)
        # over which base a sum lies is known if its parts agree
        parts = (self, *others)
        vector.about = {
            key: value for key, value in self.about.items() if all(value == o.about.get(key) for o in others)
        }
        vector.about[MADE_FROM] = [list(name) for part in parts for name in part.made_from]
        return vector


def _opened(
    model: Place | nn.Module | Checkpoint, part: str, library: str, allow_pickle: bool
) -> tuple[Checkpoint, dict[str, Any]]:
    """A model's weights on this machine, and what to remember of a repo."""
    if isinstance(model, nn.Module):
        return MemoryCheckpoint.of(model), {MADE_FROM: [list(LOCAL)]}
    if not isinstance(model, Place):
        return model, {MADE_FROM: [list(LOCAL)]}
    checkpoint = fetch_checkpoint(model, library, allow_pickle)
    about: dict[str, Any] = {part: model.name, f"{part}_sha256": sha256_of(checkpoint.files)}
    about[MADE_FROM] = [list(LOCAL)]
    if model.commit is not None:
        about |= {f"{part}_commit": model.commit, MADE_FROM: [["model", model.name]]}
    names = {file.name for file in checkpoint.files}
    layouts = [layout for layout, name in WEIGHT_FILES.items() if name in names]
    return checkpoint, {**about, "library": layouts[0]} if layouts else about


def _read_header(text: str, name: str) -> dict[str, Any]:
    """What the file says about itself."""
    try:
        header = json.loads(text)
    except ValueError:
        header = None
    known = isinstance(header, dict) and header.pop("format", None) == _FORMAT and header.pop("schema", None) == _SCHEMA
    repos = header.get(MADE_FROM, []) if known else []
    if not known or not isinstance(repos, list) or not all(isinstance(r, list) and len(r) == 2 for r in repos):
        raise RecordError(f"'{name}' is not a task vector of schema {_SCHEMA}", "save it again with this tool")
    about: dict[str, Any] = header
    return about
