"""Writes a change of a model as a full model, a PEFT adapter, or the change alone, and says what each format keeps.

Does not know where the change came from.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_bico.errors import NonFiniteWeightsError, OutputError, UsageError
from hf_bico.models.adapters.writing import BaseName, Fitted, kept_of, write_adapter
from hf_bico.models.checkpoints import Checkpoint, FileCheckpoint, tensor_offsets
from hf_bico.models.deltas import Deltas, add_delta
from hf_bico.models.layout import Site
from hf_bico.models.low_rank import Change, energy, is_finite
from hf_bico.models.model import Model
from hf_bico.porting.task_vector import TaskVector, fit_to
from hf_bico.porting.written_heads import JoinedCheckpoint, SentenceHead, WrittenHead
from hf_bico.settings import FORMATS, require_rank


def write_full(target: FileCheckpoint, vector: Deltas, folder: Path) -> list[Path]:
    """Copy the target's files and overwrite the changed tensors in place.

    Headers, order and all other tensors stay the target's, bit for bit, and memory holds one tensor at a time.
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


@dataclass(frozen=True, repr=False)
class WrittenChange:
    """A change as it will be written."""

    format: str
    rank: int | float | None
    """The requested rank of an adapter."""
    vector: TaskVector
    changes: Deltas
    """The change that is left when the files are read back."""
    rounding_lost: float | None = None
    """The share of the change that rounding to half precision takes away; for an adapter, if it is loaded so."""
    fitted: Fitted | None = None
    own_names: Mapping[str, str] = field(default_factory=dict)
    """Names in the loaded model of tensors that are named differently in its files."""
    head: WrittenHead | SentenceHead | None = None

    def __repr__(self) -> str:
        return self.format if self.fitted is None else f"{self.format}: {self.fitted!r}"

    @property
    def energy_kept(self) -> float | None:
        """The share of the change's energy that an adapter of this rank holds."""
        return None if self.fitted is None else self.fitted.energy_kept

    @property
    def replaced(self) -> list[str]:
        """Tensors of an adapter that peft loads in place of the base's, and does not restore when it unloads it."""
        return [] if self.fitted is None else self.fitted.routes.in_place

    def held(self, site: Site) -> tuple[int | None, float] | None:
        """Return the rank at which an adapter holds a site's weight (None: exactly), and the share of its energy."""
        name = self.own_names.get(site.weight.tensor, site.weight.tensor)
        if self.fitted is None or name not in self.fitted.vector:
            return None
        exact, held = self.fitted.vector.change(name), self.fitted.changes.change(name)
        kept = 1.0 if held is exact else kept_of(site.weight.view(exact), site.weight.view(held))
        return self.fitted.ranks.get(name), kept


def require_format(format: str, rank: int | float | None) -> None:
    """Refuse a format that does not exist, and a rank for one that has none."""
    if format not in FORMATS:
        raise UsageError(f"there is no format '{format}'", f"use one of: {', '.join(FORMATS)}")
    if require_rank(rank) is not None and format != "adapter":
        raise UsageError(f"a rank was given for the format '{format}'", "give it with the format 'adapter'")


def format_change(
    vector: TaskVector,
    target: Model,
    format: str,
    rank: int | float | None = None,
    module: nn.Module | None = None,
    device: torch.device | None = None,
    everything: bool = False,
    head: WrittenHead | SentenceHead | None = None,
) -> WrittenChange:
    """Bring a change of `target` into a format; `module` is the target if it is loaded already."""
    if format == "adapter":
        model = head.skeleton(target) if head is not None else target.skeleton() if module is None else module
        over = target if head is None else head.over(target, model)
        fitted = fit_to(vector, over, model, rank, everything, device)
        lost = _lost_where_exact(fitted, over.as_loaded)
        return WrittenChange(format, rank, vector, fitted.changes, lost, fitted, over.layout.own_names, head)
    if format == "delta":
        return WrittenChange(format, None, vector, vector, head=head)
    stored, lost = as_stored(vector, target.checkpoint)
    return WrittenChange(format, None, vector, stored, lost, head=head)


def _lost_where_exact(fitted: Fitted, target: Checkpoint) -> float | None:
    """Return the share that is lost of tensors stored in full, if the model is loaded in its own half precision."""
    exact = [name for name in fitted.routes.exact if name in fitted.changes]
    places = fitted.changes.places_in(target.shapes, "the target")
    starts = {name: target.tensor(places[name]) for name in exact}
    whole = sum(fitted.vector.energy(name) for name in fitted.vector)
    if not whole or not any(start.dtype.itemsize < 4 for start in starts.values()):
        return None
    return sum(_rounded_off(start, fitted.changes.change(name), name) for name, start in starts.items()) / whole


def _rounded_off(start: Tensor, change: Change, name: str) -> float:
    """Return the energy that rounding the sum to the weight's own dtype takes away, or adds."""
    wide = torch.promote_types(start.dtype, torch.float32)
    return energy(add_delta(start.to(wide), change, name) - add_delta(start, change, name).to(wide))


def as_stored(vector: Deltas, target: Checkpoint) -> tuple[Deltas, float | None]:
    """Return the change once the sum is rounded to the target's dtype, and the share lost: None in full precision."""
    stored, lost, total = {}, 0.0, 0.0
    places = vector.places_in(target.shapes, "the target")
    halved = any(target.tensor(place).dtype.itemsize < 4 for place in places.values())
    for name, place in places.items():
        delta = vector[name]  # dense, as it is written
        start = target.tensor(place).to(delta.device)
        changed = add_delta(start, delta, name)
        if not is_finite(changed):
            raise NonFiniteWeightsError(
                f"the change takes '{name}' beyond what {start.dtype} holds", "add less of it with --alpha"
            )
        stored[name] = changed.to(delta.dtype) - start.to(delta.dtype)
        if halved:
            lost += _rounded_off(start, delta, name)
            total += energy(delta)
    return Deltas(stored), lost / total if halved and total else None


def write_change(form: WrittenChange, target: Model, folder: Path) -> list[Path]:
    """Write the weights, and the files that the target's library needs; return the files that hold the change."""
    if form.format == "delta":
        return [form.vector.write(folder)]
    if form.fitted is not None:
        named = BaseName(target.name, target.commit)
        model = target.skeleton() if form.head is None else form.head.skeleton(target)
        base = target.as_loaded
        if form.head is not None:
            base = JoinedCheckpoint(form.head.over(target, model).as_loaded, form.head.tensors)
        written = write_adapter(form.fitted, model, base, named, folder)
        if form.head is not None:
            form.head.add_to_adapter(folder)
        return written
    checkpoint, origin = target.checkpoint, target.folder
    if origin is None or not isinstance(checkpoint, FileCheckpoint):
        raise OutputError(
            "a target that was passed as a loaded model has no files to write a full model from",
            "save with format='adapter' or 'delta', or save the model with its own library",
        )
    for file in target.family.side_files(origin):
        place = folder / file.relative_to(origin)
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(file.read_bytes())
    written = write_full(checkpoint, form.vector, folder)
    if form.head is not None:
        form.head.add_to_model(target, folder)
    return written
