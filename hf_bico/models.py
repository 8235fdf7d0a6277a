"""Models as the pipeline sees them: a repo or a loaded module, its family, layout and checkpoint.

Opening one reads names, shapes and configuration only; weights are fetched and read, and torch imported, when it is
loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hf_bico.checkpoints import (
    DELTA_FILE,
    Checkpoint,
    FileCheckpoint,
    HeaderCheckpoint,
    MemoryCheckpoint,
    WeightFiles,
    find_weights,
    sha256_of,
)
from hf_bico.errors import BrokenWeightsError, PickledWeightsError, RepoError, WeightsNotFoundError
from hf_bico.families import FAMILIES, Family, LiveModel, family_of
from hf_bico.hub.client import Downloaded, Hub, is_offline
from hf_bico.hub.repos import Place, at_hub, locate
from hf_bico.lineage import ADAPTER_CONFIG, Origin, read_origin
from hf_bico.sites import Layout

if TYPE_CHECKING:
    import torch
    from torch import nn

ModelReference: TypeAlias = "str | Path | nn.Module"
"""What names a model: a Hub id, a folder, or the loaded model itself."""


@dataclass(frozen=True)
class Model:
    """A model that is known but not loaded."""

    name: str
    checkpoint: Checkpoint
    family: Family
    layout: Layout
    place: Place | None = None
    """Where its files are; None for a loaded module."""
    weights: WeightFiles | None = None
    module: Any = None
    notice: str | None = None
    """What a reader of the result should know about how its weights were found."""
    pickled: bool = False
    """Whether its weights had to be read from pickles."""

    @classmethod
    def open(
        cls,
        reference: ModelReference | Place,
        what: str,
        library: str = "transformers",
        hub: Hub | None = None,
        allow_pickle: bool = False,
    ) -> Model:
        """Open a model by reference; `what` says its part ("the target") in errors.

        `library` decides between the layouts of a repo that holds two.
        """
        if isinstance(reference, str | Path):
            reference = locate(reference, what, hub)
        if isinstance(reference, Place):
            return _open_place(reference, what, library, allow_pickle)
        checkpoint = MemoryCheckpoint.of(reference)
        family = family_of(checkpoint.shapes, what)
        return cls(type(reference).__name__, checkpoint, family, family.wrap(reference).layout, module=reference)

    @property
    def folder(self) -> Path | None:
        """Where its files are, once they are fetched."""
        return None if self.place is None else self.place.folder

    @property
    def commit(self) -> str | None:
        return None if self.place is None else self.place.commit

    @cached_property
    def origin(self) -> Origin:
        """What its own card and configuration say about it."""
        return Origin() if self.place is None else read_origin(self.place.folder, self.place.name)

    def needed(self, beside: bool = True) -> list[str]:
        """The weight files, and `beside` them those to load the model with and to write another one like it."""
        if self.place is None or self.weights is None:
            return []
        index = () if self.weights.index is None else (self.weights.index,)
        sides = self.family.side_names if beside else (self.family.config_file,)
        return [name for name in (*sides, *index, *self.weights.names) if name in self.place.sizes]

    def fetched(self, downloaded: Downloaded | None = None, beside: bool = True) -> Model:
        """The same model with its files on this machine."""
        if self.place is None or self.weights is None:
            return self
        self.place.fetch(self.needed(beside), downloaded)
        return replace(self, checkpoint=_on_disk(self.place, self.weights))

    def load(self, device: torch.device, dtype: torch.dtype) -> LiveModel:
        """The live model; a module that the caller loaded is used where and as it is."""
        if self.folder is None:
            return self.family.wrap(self.module)
        live = self.family.load(self.folder, device, dtype)
        if [(site.name, site.shape) for site in live.layout.sites] != [(s.name, s.shape) for s in self.layout.sites]:
            raise BrokenWeightsError(
                f"'{self.name}' holds other layers than its configuration says", "copy or download the model again"
            )
        return live

    @cached_property
    def sha256(self) -> dict[str, str]:
        """The digests of the weight files, by name; empty for a loaded module."""
        return sha256_of(self.checkpoint.files) if isinstance(self.checkpoint, FileCheckpoint) else {}


def fetch_checkpoint(place: Place, library: str = "transformers", allow_pickle: bool = False) -> FileCheckpoint:
    """The weights of a repo on this machine, of whatever kind of model they are."""
    found = _find_weights(place, library, allow_pickle)
    weights = found.weights
    found.place.fetch([*weights.names, *([weights.index] if weights.index else [])])
    return _on_disk(found.place, weights)


def _open_place(place: Place, what: str, library: str, allow_pickle: bool) -> Model:
    called = f"{what} '{place.name}'"
    if DELTA_FILE in place.sizes:
        raise RepoError(
            f"{called} is a task vector, not a model",
            "measure it with 'hf-bico eval VECTOR --base TARGET', or apply it from Python with TaskVector.load",
        )
    if ADAPTER_CONFIG in place.sizes:
        raise RepoError(
            f"{called} is a PEFT adapter, which this version does not read",
            "merge it into its base with PeftModel.merge_and_unload() and save the result",
        )
    found = _find_weights(place, library, allow_pickle)
    place, weights = found.place, found.weights
    checkpoint = _on_disk(place, weights) if _is_here(place, weights) else _headers(place, weights)
    family = family_of(checkpoint.shapes, called)
    try:
        layout = family.layout(checkpoint.shapes, family.read_config(place.folder))
    except KeyError as error:
        raise BrokenWeightsError(f"{called} lacks the tensor {error}", "copy or download the model again") from error
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise RepoError(
            f"the {family.config_file} of {called} does not describe a model: {error}", "copy or download it again"
        ) from error
    return Model(place.name, checkpoint, family, layout, place, weights, notice=found.notice, pickled=found.pickled)


@dataclass(frozen=True)
class _Found:
    """Safetensors, and how they were come by."""

    place: Place
    weights: WeightFiles
    notice: str | None = None
    pickled: bool = False


def _find_weights(place: Place, library: str, allow_pickle: bool) -> _Found:
    """Safetensors: the repo's own, else of the Hub's conversion, else made from pickles where that is allowed."""
    try:
        return _Found(place, find_weights(place.folder, place.sizes, library, place.name))
    except (PickledWeightsError, WeightsNotFoundError) as error:
        if isinstance(error, WeightsNotFoundError) and not is_offline():
            raise  # offline, pickles that were never fetched are not seen
        repo = place.repo
        converted = None if repo is None else repo.hub.conversion(repo)
        if converted is not None:
            found = at_hub(converted)
            notice = f"The safetensors of {place.name} are those of the Hub's pull request {converted.asked.revision}."
            return _Found(found, find_weights(found.folder, found.sizes, library, found.name), notice)
        if not allow_pickle or isinstance(error, WeightsNotFoundError):
            raise
    return _without_pickles(place, library)


def _without_pickles(place: Place, library: str) -> _Found:
    from hf_bico.conversion import convert, pickled_files

    layout, pickles = pickled_files(place.folder, place.sizes, library)
    beside = [name for family in FAMILIES for name in family.side_names if name in place.sizes]
    place.fetch([*pickles, *beside])
    folder = convert(place.folder, pickles, layout, [*beside, "README.md"])
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    notice = f"The weights of {place.name} are pickled: tensors alone were read from {', '.join(pickles)}."
    weights = find_weights(folder, sizes, layout, place.name)
    return _Found(replace(place, folder=folder, sizes=sizes), weights, notice, pickled=True)


def _is_here(place: Place, weights: WeightFiles) -> bool:
    return all((place.folder / name).is_file() for name in weights.names)


def _on_disk(place: Place, weights: WeightFiles) -> FileCheckpoint:
    index = None if weights.index is None else place.folder / weights.index
    return FileCheckpoint([place.folder / name for name in weights.names], index)


def _headers(place: Place, weights: WeightFiles) -> HeaderCheckpoint:
    """What the Hub tells of the weights by Range requests."""
    if place.repo is None:
        raise BrokenWeightsError(f"'{place.name}' lacks '{weights.names[0]}'", "copy or download the model again")
    shapes = {name: shape for header in place.repo.headers(weights.names) for name, shape in header.items()}
    return HeaderCheckpoint(shapes, sum(place.sizes[name] for name in weights.names))
