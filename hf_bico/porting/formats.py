"""Written as full model, adapter or delta.

A full model on disk: the target's files, with the changed tensors overwritten in place.

The forms in which a change of a model is written: the whole model, a PEFT adapter, or the change alone.

Says what each form keeps of the change, and writes it. Knows models and adapters; not where the change came from.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_bico.errors import NonFiniteWeightsError, OutputError
from hf_bico.models.adapters.writing import BaseName, Fitted, kept_of, write_adapter
from hf_bico.models.checkpoints import Checkpoint, FileCheckpoint, tensor_offsets
from hf_bico.models.deltas import Deltas, add_delta
from hf_bico.models.layout import Site
from hf_bico.models.low_rank import Change, energy, is_finite
from hf_bico.models.model import Model
from hf_bico.porting.heads import HeadForm, JoinedCheckpoint
from hf_bico.porting.task_vector import TaskVector, fit_to


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


@dataclass(frozen=True, repr=False)
class WrittenChange:
    """A change as it will be written."""

    format: str
    rank: int | float | None
    """What was asked for, of an adapter."""
    vector: TaskVector
    changes: Deltas
    """What the model that is read back has changed by."""
    rounding_lost: float | None = None
    """The share of the change that rounding to half precision takes away: of an adapter, when it is loaded so."""
    fitted: Fitted | None = None
    own_names: Mapping[str, str] = field(default_factory=dict)
    """The names in the loaded model of tensors that have others in its files."""
    head: HeadForm | None = None
    """A classification head that is written with a model or an adapter."""

    def __repr__(self) -> str:
        return self.format if self.fitted is None else f"{self.format}: {self.fitted!r}"

    @property
    def energy_kept(self) -> float | None:
        """The share of the change that an adapter of this rank holds."""
        return None if self.fitted is None else self.fitted.energy_kept

    @property
    def replaced(self) -> list[str]:
        """Of an adapter, the tensors that peft loads in place of the base's: they are not taken back with it."""
        return [] if self.fitted is None else self.fitted.routes.in_place

    def held(self, site: Site) -> tuple[int | None, float] | None:
        """Of an adapter, the rank at which a site's weight is held (None: exactly), and the share of its energy."""
        name = self.own_names.get(site.weight.tensor, site.weight.tensor)
        if self.fitted is None or name not in self.fitted.asked:
            return None
        asked, held = self.fitted.asked.change(name), self.fitted.changes.change(name)
        kept = 1.0 if held is asked else kept_of(site.weight.view(asked), site.weight.view(held))
        return self.fitted.ranks.get(name), kept


def written_change(
    vector: TaskVector,
    target: Model,
    format: str,
    rank: int | float | None = None,
    module: nn.Module | None = None,
    device: torch.device | None = None,
    everything: bool = False,
    head: HeadForm | None = None,
) -> WrittenChange:
    """Bring a change of `target` into a form; `module` is the target where it is loaded already."""
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
    """What is lost of tensors that are saved as they will be, where the model is loaded in its own half precision."""
    exact = [name for name in fitted.routes.exact if name in fitted.changes]
    places = fitted.changes.places_in(target.shapes, "the target")
    starts = {name: target.tensor(places[name]) for name in exact}
    whole = sum(fitted.asked.energy(name) for name in fitted.asked)
    if not whole or not any(start.dtype.itemsize < 4 for start in starts.values()):
        return None
    return sum(_rounded_off(start, fitted.changes.change(name), name) for name, start in starts.items()) / whole


def _rounded_off(start: Tensor, change: Change, name: str) -> float:
    """The energy that rounding the sum to the weight's own dtype takes away, or adds."""
    wide = torch.promote_types(start.dtype, torch.float32)
    return energy(add_delta(start.to(wide), change, name) - add_delta(start, change, name).to(wide))


def as_stored(vector: Deltas, target: Checkpoint) -> tuple[Deltas, float | None]:
    """The change that is left once the sum is rounded to the target's own dtype, and the share that is lost.

    The share is None where the target is stored in full precision.
    """
    stored, lost, total = {}, 0.0, 0.0
    places = vector.places_in(target.shapes, "the target")
    halved = any(target.tensor(place).dtype.itemsize < 4 for place in places.values())
    for name, place in places.items():
        delta = vector[name]  # dense: so is what is written
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
    """Write the weights, and what the target's library needs beside them; returns the files that hold the change."""
    if form.format == "delta":
        return [form.vector.save(folder)]
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
        (folder / file.name).write_bytes(file.read_bytes())
    written = write_full(checkpoint, form.vector, folder)
    if form.head is not None:
        form.head.add_to_model(target, folder)
    return written
