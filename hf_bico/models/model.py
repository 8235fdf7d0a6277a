"""A model by reference: a repo, folder or loaded module with its family, layout and checkpoint.

Opening reads names, shapes and configuration only; weights are fetched and read, and torch is imported, when it is
loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from hf_bico.errors import (
    BaseMismatchError,
    BrokenWeightsError,
    PickledWeightsError,
    RepoError,
    UnsupportedModelError,
    WeightsNotFoundError,
)
from hf_bico.hub.client import DownloadCallback, Hub, RepoFiles, fetch_small_files, locate
from hf_bico.hub.references import LOCAL, RepoName
from hf_bico.hub.repo_metadata import RepoMetadata, head_names, read_metadata
from hf_bico.hub.retries import is_offline
from hf_bico.models.checkpoints import (
    DELTA_FILE,
    WEIGHT_FILES,
    Checkpoint,
    FileCheckpoint,
    HeaderCheckpoint,
    MemoryCheckpoint,
    RenamedCheckpoint,
    WeightFiles,
    find_weights,
    is_adapter,
    non_float_tensors,
    state_dict_checkpoint,
)
from hf_bico.models.conversion import copy_renamed, sizes_in
from hf_bico.models.families import all_families, family_of, unwrapped_names
from hf_bico.models.families.base import DeviceSpread, Family, require_dense
from hf_bico.models.families.live import LiveModel
from hf_bico.models.families.pooling import SENTENCE_FILES
from hf_bico.models.families.pretrained import PROCESSOR_FILES, require_within
from hf_bico.models.foreign_formats import refuse_format, refuse_pipeline, refuse_tensors
from hf_bico.models.layout import Layout
from hf_bico.models.pickles import convert, pickled_files
from hf_bico.utils.files import call_folder, sha256_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


CARD = "README.md"


@dataclass(frozen=True, kw_only=True)
class OpenedRepo:
    """A repo whose weights are known by name and shape, but not read."""

    name: str
    checkpoint: Checkpoint
    place: RepoFiles | None = None
    """The repo's files; None for a loaded module."""
    weights: WeightFiles | None = None
    notice: str | None = None
    """A remark for readers of the result about where its weights came from."""
    pickled: bool = False
    """Whether its weights had to be read from pickles."""
    own_files: tuple[Path, ...] = ()
    """The files in which its author keeps the weights, whatever was made of them to read them."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The names in the weight files that a training tool has changed, each with the model's own."""

    @property
    def folder(self) -> Path | None:
        """The folder of its files, once they are fetched."""
        return None if self.place is None else self.place.folder

    @property
    def commit(self) -> str | None:
        return None if self.place is None else self.place.commit

    @property
    def repo_name(self) -> RepoName:
        """(type, id) of its Hub repo, which decides whether a result may be public; LOCAL if it has none."""
        repo = None if self.place is None else self.place.repo
        return LOCAL if repo is None else (repo.type, repo.id)

    @cached_property
    def origin(self) -> RepoMetadata:
        """The contents of its card and configuration."""
        return RepoMetadata() if self.place is None else read_metadata(self.place.folder, self.place.name)

    @property
    def side_names(self) -> Sequence[str]:
        """The files beside the weights that may be needed, the configuration first."""
        return ()

    @property
    def config_names(self) -> Sequence[str]:
        """Those of them that say what the weights mean."""
        return self.side_names[:1]

    def needed(self, beside: bool = True) -> list[str]:
        """List the weight files with all files `beside` them, or with the configurations alone."""
        if self.place is None or self.weights is None:
            return []
        index = () if self.weights.index is None else (self.weights.index,)
        sides = self.side_names if beside else self.config_names
        return [name for name in (*sides, *index, *self.weights.names) if name in self.place.sizes]

    def fetched(self, downloaded: DownloadCallback | None = None, beside: bool = True) -> Self:
        """Download its files."""
        if self.place is None or self.weights is None:
            return self
        place = self.place
        place.fetch(self.needed(beside), downloaded)
        weights = self.loadable(self.weights)
        if self.renamed or weights != self.weights:
            beside_copy = [*self.side_names, CARD]
            folder = copy_renamed(place.folder, self.weights, weights, self.renamed, beside_copy)
            call_folder(folder, place.name)
            place = replace(place, folder=folder, sizes=sizes_in(folder))
        checkpoint = FileCheckpoint.of(place.folder, weights)
        return replace(self, place=place, weights=weights, checkpoint=checkpoint, renamed={})

    def loadable(self, weights: WeightFiles) -> WeightFiles:
        """Return the names that the weight files must have for the model's library to find them."""
        return weights

    @cached_property
    def sha256(self) -> dict[str, str]:
        """Digests of the author's weight files, by name; empty for a loaded module, and until they are here."""
        return sha256_of(self.own_files) if all(file.is_file() for file in self.own_files) else {}


def open_weights(place: RepoFiles, weights: WeightFiles) -> FileCheckpoint | HeaderCheckpoint:
    """Read names and shapes of a repo's weights from its files, or from the Hub if they are not here."""
    if all((place.folder / name).is_file() for name in weights.names):
        return FileCheckpoint.of(place.folder, weights)
    if place.repo is None:
        raise BrokenWeightsError(f"'{place.name}' lacks '{weights.names[0]}'", "copy or download the model again")
    shapes = {name: shape for header in place.repo.headers(weights.names) for name, shape in header.items()}
    return HeaderCheckpoint(shapes, sum(place.sizes[name] for name in weights.names))


ModelReference: TypeAlias = "str | Path | nn.Module | Mapping[str, Tensor]"
"""A Hub id, a folder, or the loaded model itself; a fine-tune over a known base also as its state dict."""


@dataclass(frozen=True, kw_only=True)
class Model(OpenedRepo):
    """A model that is known but not loaded."""

    family: Family
    layout: Layout
    module: Any = None

    @classmethod
    def open(
        cls,
        reference: ModelReference | RepoFiles,
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
        if isinstance(reference, RepoFiles):
            return _open_place(reference, what, library, allow_pickle)
        if isinstance(reference, Mapping):
            raise UnsupportedModelError(
                f"{what} is a state dict, which does not say what model it is of",
                "load it into its model and pass that; a state dict can be what was fine-tuned, with --base",
            )
        checkpoint = MemoryCheckpoint.of(reference)
        config: Any = getattr(reference, "config", None)
        require_dense(what, checkpoint.shapes, config.to_dict() if hasattr(config, "to_dict") else {})
        family = family_of(checkpoint.shapes, what, reference)
        layout = family.wrap(reference).layout
        return cls(name=type(reference).__name__, checkpoint=checkpoint, family=family, layout=layout, module=reference)

    @classmethod
    def of_state_dict(cls, tensors: Mapping[str, Tensor], base: Model) -> Model:
        """Take a state dict as the weights of a fine-tuned `base`, under the model's own names."""
        checkpoint: Checkpoint = state_dict_checkpoint(tensors)
        names = {} if base.folder is None else unwrapped_names(checkpoint.shapes, base.folder, "the state dict")
        checkpoint = RenamedCheckpoint(checkpoint, names) if names else checkpoint
        return cls(name="a state dict", checkpoint=checkpoint, family=base.family, layout=base.layout)

    @cached_property
    def origin(self) -> RepoMetadata:
        """The contents of its card and configuration; of a loaded module, the names of its classes."""
        config = getattr(self.module, "config", None)
        return super().origin if self.place else RepoMetadata(head_names=head_names(getattr(config, "id2label", None)))

    def fetched(self, downloaded: DownloadCallback | None = None, beside: bool = True) -> Self:
        found = super().fetched(downloaded, beside)
        _require_floats(found.checkpoint, found.layout, f"'{found.name}'")
        return found

    def loadable(self, weights: WeightFiles) -> WeightFiles:
        if len(weights.names) > 1 or weights.index is not None or self.family.library != "transformers":
            return weights
        return WeightFiles((WEIGHT_FILES["transformers"],))  # it reads no single file of another name

    @property
    def side_names(self) -> Sequence[str]:
        return self.family.side_names

    @property
    def config_names(self) -> Sequence[str]:
        known = (self.family.config_file, *PROCESSOR_FILES, *SENTENCE_FILES)
        return [name for name in self.side_names if name in known]

    @property
    def config(self) -> Mapping[str, Any]:
        """Its configuration, as its file or the loaded module has it; empty without one."""
        if self.folder is None and self.module is None:
            return {}
        return self.family.config_of(self.module) if self.folder is None else self.family.read_config(self.folder)

    def filled(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a part of its configuration with the library's defaults; a loaded module has shown all that it has."""
        return self.family.filled(config) if config and self.folder is not None else config

    def load(self, device: torch.device, dtype: torch.dtype, spread: DeviceSpread | None = None) -> LiveModel:
        """Load the model; a module that the caller loaded is used as it is."""
        if self.folder is None:
            return self.family.wrap(self.module)
        if spread is not None and not self.family.can_be_spread:
            raise UnsupportedModelError(
                f"models of the family {self.family.name} are not spread over several devices", "leave --device-map out"
            )
        live = self.family.load(self.folder, device, dtype, spread)
        if [(site.name, site.shape) for site in live.layout.sites] != [(s.name, s.shape) for s in self.layout.sites]:
            raise BrokenWeightsError(
                f"'{self.name}' has other layers than its configuration says", "copy or download the model again"
            )
        return live

    def skeleton(self) -> nn.Module:
        """Build its modules without weights; a module that the caller loaded is returned itself."""
        return self.module if self.folder is None else self.family.skeleton(self.folder)

    @property
    def as_loaded(self) -> Checkpoint:
        """Its weights by their names in the loaded model."""
        names = self.layout.own_names
        return RenamedCheckpoint(self.checkpoint, names) if names else self.checkpoint

    def is_transposed(self, tensor: str) -> bool:
        """Tell whether a weight, by its name in the loaded model, is stored as (in, out)."""
        own = self.layout.own_names
        return any(slot.transposed for slot in self.layout.slots() if own.get(slot.tensor, slot.tensor) == tensor)


def require_same_family(tuned: Model, base: Model) -> None:
    """Refuse a base of another family than the fine-tuned model's."""
    if tuned.family.name != base.family.name:
        raise BaseMismatchError(
            f"the fine-tuned model is of the family {tuned.family.name} and the base of {base.family.name}",
            "name the base in the library that the fine-tuned model was saved with",
        )


def fetch_weights(place: RepoFiles, library: str = "transformers", allow_pickle: bool = False) -> OpenedRepo:
    """Open and download the weights of a repo, whatever its kind of model."""
    return opened_weights(place, f"'{place.name}'", library, allow_pickle).fetched()


def _open_place(place: RepoFiles, what: str, library: str, allow_pickle: bool) -> Model:
    called = f"{what} '{place.name}'"
    if DELTA_FILE in place.sizes:
        raise RepoError(
            f"{called} is a task vector, not a model",
            "measure it with 'hf-bico eval VECTOR --base TARGET', or apply it from Python with TaskVector.load",
        )
    if is_adapter(place.sizes):
        raise RepoError(
            f"{called} is a PEFT adapter, not a model",
            "merge it into its base first: 'hf-bico apply ADAPTER -o FOLDER'",
        )
    opened = opened_weights(place, called, library, allow_pickle)
    place, checkpoint = opened.place or place, opened.checkpoint
    family = family_of(checkpoint.shapes, called, place.folder)
    config = family.read_config(place.folder)
    require_dense(called, checkpoint.shapes, config)
    require_within(config, checkpoint.shapes, called)
    try:
        layout = family.layout(checkpoint.shapes, config)
    except KeyError as error:
        raise BrokenWeightsError(f"{called} lacks the tensor {error}", "copy or download the model again") from error
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise RepoError(
            f"the {family.config_file} of {called} does not describe a model: {error}", "copy or download it again"
        ) from error
    _require_floats(checkpoint, layout, called)
    return Model(**vars(opened), family=family, layout=layout)


def _require_floats(checkpoint: Checkpoint, layout: Layout, called: str) -> None:
    """Refuse sites whose weights are not stored as floats."""
    strange = {name: dtype for name, dtype in non_float_tensors(checkpoint).items() if name in layout.tensors}
    if strange:
        name = min(strange)
        raise UnsupportedModelError(
            f"'{name}' of {called} is kept as {strange[name]}, not as floating-point numbers",
            "name the model that it was made from, in float32, float16 or bfloat16",
        )


@dataclass(frozen=True)
class _FoundWeights:
    """Weight files, where they are, which ones are the author's, and what is to be said of them."""

    place: RepoFiles
    weights: WeightFiles
    own_files: tuple[Path, ...]
    notice: str | None = None
    pickled: bool = False

    @classmethod
    def of(cls, place: RepoFiles, library: str, notice: str | None = None) -> _FoundWeights:
        """Find the safetensors of a repo."""
        weights = find_weights(place.folder, place.sizes, library, place.name)
        return cls(place, weights, tuple(place.folder / name for name in weights.names), notice)


def opened_weights(place: RepoFiles, called: str, library: str, allow_pickle: bool) -> OpenedRepo:
    """Read names and shapes of a repo's weights, under the model's own names; refuse what is known to be no model."""
    refuse_pipeline(place.sizes, called)
    try:
        found = _find_weights(place, library, allow_pickle)
    except WeightsNotFoundError:
        refuse_format(place, called)
        raise
    checkpoint: Checkpoint = open_weights(found.place, found.weights)
    refuse_tensors(checkpoint.shapes, called)
    names = unwrapped_names(checkpoint.shapes, found.place.folder, called)
    return OpenedRepo(
        name=place.name,
        checkpoint=RenamedCheckpoint(checkpoint, names) if names else checkpoint,
        place=found.place,
        weights=found.weights,
        notice=found.notice,
        pickled=found.pickled,
        own_files=found.own_files,
        renamed=names,
    )


def refuse_foreign(place: RepoFiles) -> None:
    """Refuse a repo in a format that is known and cannot be read; what else it may be is the caller's to say."""
    called = f"'{place.name}'"
    refuse_pipeline(place.sizes, called)
    try:
        names = open_weights(place, find_weights(place.folder, place.sizes, "transformers", place.name)).shapes
    except WeightsNotFoundError:
        refuse_format(place, called)
    except (BrokenWeightsError, PickledWeightsError):
        pass
    else:
        refuse_tensors(names, called)


def _find_weights(place: RepoFiles, library: str, allow_pickle: bool) -> _FoundWeights:
    """Find safetensors: the repo's own, the Hub's conversion, or converted from pickles where allowed."""
    try:
        return _FoundWeights.of(place, library)
    except (PickledWeightsError, WeightsNotFoundError) as error:
        if isinstance(error, WeightsNotFoundError) and not is_offline():
            raise  # offline, pickles that were never fetched are not listed
        repo = place.repo
        converted = None if repo is None else repo.hub.conversion(repo)
        if converted is not None:
            notice = (
                f"The safetensors of {place.name} are those of the Hub's pull request {converted.requested.revision}."
            )
            return _FoundWeights.of(fetch_small_files(converted), library, notice)
        if not allow_pickle or isinstance(error, WeightsNotFoundError):
            raise
    return _without_pickles(place, library)


def _without_pickles(place: RepoFiles, library: str) -> _FoundWeights:
    layout, pickles = pickled_files(place.folder, place.sizes, library, place.name)
    sides = [name for family in all_families() for name in family.side_names]
    beside = [name for name in sides if name in place.sizes or (place.folder / name).is_file()]
    place.fetch([*pickles, *beside])
    renaming = partial(unwrapped_names, folder=place.folder, called=f"'{place.name}'")
    folder = convert(place.folder, pickles, WEIGHT_FILES[layout], [*beside, CARD], renaming)
    call_folder(folder, place.name)
    converted = _FoundWeights.of(replace(place, folder=folder, sizes=sizes_in(folder)), layout)
    notice = f"The weights of {place.name} are pickled: tensors alone were read from {', '.join(pickles)}."
    return replace(converted, own_files=tuple(place.folder / name for name in pickles), notice=notice, pickled=True)
