"""Takes task vectors from models or adapters, and loads, saves and pushes them.

The arithmetic is that of `models.deltas`; nothing here runs a model.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from hf_bico.alignment.transport import changed_part
from hf_bico.errors import AdapterError, BaseMismatchError, BaseUnknownError, EmptyTaskVectorError, RecordError
from hf_bico.hub.client import Hub, HubRepo, RepoFiles, locate
from hf_bico.hub.push import Pushed, PushOptions, require_pushable
from hf_bico.hub.references import LOCAL, HubReference, RepoName, cached_repo, recorded_repo
from hf_bico.hub.repo_metadata import ADAPTER_CONFIG
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.adapters.writing import BaseName, Fitted, fit_adapter, write_adapter
from hf_bico.models.checkpoints import (
    ADAPTER_FILE,
    DELTA_FILE,
    WEIGHT_FILES,
    Checkpoint,
    MemoryCheckpoint,
    digest_of,
    is_adapter,
    state_dict_checkpoint,
)
from hf_bico.models.configurations import config_differences, other_function
from hf_bico.models.deltas import MADE_FROM, Deltas, Difference, Terms, read_delta, write_delta
from hf_bico.models.low_rank import Change, Factors, energy, inner_product
from hf_bico.models.model import Model, ModelReference, fetch_weights, refuse_foreign
from hf_bico.models.name_matching import Overlap, align_names
from hf_bico.porting.lineage import base_of_source, find_base, open_source
from hf_bico.porting.publish import push_folder
from hf_bico.reports.model_cards import CARD_FILE
from hf_bico.reports.model_cards.change_card import render_vector_card
from hf_bico.reports.record import read_any
from hf_bico.runtime.library_errors import translate_errors
from hf_bico.runtime.output import RECORD_FILE, atomic_folder, require_apart
from hf_bico.utils.files import expanded

ModelLike = str | Path | nn.Module | Checkpoint | Mapping[str, Tensor]
"""A Hub id, a model folder, a loaded model, its state dict, or an opened checkpoint."""
OTHER = "other"
"""The role of tensors that are of no site, such as norms and embeddings."""
SEVERAL = "several_bases"
"""Key in `about` of a sum whose parts were made for different weights, as older releases wrote it."""


class TaskVector(Deltas):
    """Named changes of weights over one base model; `about` says which, as far as known.

    A LoRA's changes stay low-rank, in sums too; as a mapping, a vector gives dense tensors. Vectors that are known to
    be made for different weights have no sum; what is known of the base does not count when two are compared.

    >>> import torch
    >>> from hf_bico.models.checkpoints import MemoryCheckpoint
    >>> base = {"w": torch.zeros(2), "same": torch.ones(2)}
    >>> tuned = {"w": torch.ones(2), "same": torch.ones(2)}
    >>> tau = TaskVector.from_models(MemoryCheckpoint(tuned), base=MemoryCheckpoint(base))
    >>> list(tau), (0.5 * tau + tau)["w"]
    (['w'], tensor([1.5000, 1.5000]))
    """

    def __init__(
        self,
        deltas: Mapping[str, Change],
        overlap: Overlap | None = None,
        about: Mapping[str, Any] | None = None,
        base: Model | RepoFiles | nn.Module | None = None,
    ) -> None:
        super().__init__(deltas, overlap)
        self.about = dict(about or {})
        self._base = base

    def __repr__(self) -> str:
        base = f" over {self.about['base']}" if self.about.get("base") else ""
        return f"{super().__repr__()}{base}"

    def norm(self) -> float:
        """Return the Frobenius norm over all tensors; low-rank changes are not multiplied out.

        >>> TaskVector({"w": torch.full((2, 2), 3.0)}).norm()
        6.0
        """
        return sqrt(sum(energy(change) for _, change in self.changes()))

    @translate_errors()
    def cosine(self, other: TaskVector) -> float:
        """Return the cosine with another task vector of the same model; what only one of them changes counts as 0.

        >>> one = TaskVector({"w": torch.tensor([1.0, 0.0])})
        >>> one.cosine(TaskVector({"w": torch.tensor([3.0, 4.0])}))
        0.6
        """
        self._require_summand(other)
        both = self.norm() * other.norm()
        if not both:
            raise EmptyTaskVectorError("a task vector of zeros has no direction", "compare vectors that change weights")
        shared = (name for name in self if name in other)
        return sum(inner_product(self.change(name), other.change(name)) for name in shared) / both

    @translate_errors()
    def by_role(self, base: ModelReference | None = None, *, token: str | None = None) -> dict[str, float]:
        """Return the share of the squared norm in each role, such as "mlp.up", the largest first; the rest is "other".

        The roles are those of the model that the vector was made for, of which no weight is read; `base` is needed only
        if the vector does not know it.

        >>> hf_bico.TaskVector.from_models("user/vit-b16-eurosat").by_role()  # doctest: +SKIP
        {'mlp.down': 0.31, 'mlp.up': 0.28, 'attn.v': 0.12, ...}
        """
        known = base if base is not None else self._base if self._base is not None else self._named_base()
        library = str(self.about.get("library", "transformers"))
        model = known if isinstance(known, Model) else Model.open(known, "the base", library, Hub(token))
        whole = sum(energy(change) for _, change in self.changes())
        if not whole:
            raise EmptyTaskVectorError("a task vector of zeros has no roles", "take one that changes weights")
        names = {own: stored for stored, own in model.layout.own_names.items()}
        vector = self.renamed(names)
        sums: dict[str, float] = {}
        for site in model.layout.sites:
            parts = (changed_part(vector, slot) for slot in site.slots)
            sums[site.role] = sums.get(site.role, 0.0) + sum(energy(part) for part in parts if part is not None)
        sums[OTHER] = max(0.0, whole - sum(sums.values()))
        ordered = sorted(sums.items(), key=lambda pair: -pair[1])
        return {role: value / whole for role, value in ordered if value > 1e-12 * whole}

    def __copy__(self) -> Self:
        return self._combined(self.terms, self.overlap)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what a saved file holds: no open file, no token, and its base by name alone."""
        return type(self), (dict(self.changes()), self.overlap, self._known)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        changes = {name: copy.deepcopy(change, memo) for name, change in self.changes()}
        return type(self)(changes, self.overlap, copy.deepcopy(self.about, memo), self._base)

    def _apply(self, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Apply under the module's own names, which in transformers may differ from those in its files."""
        places = align_names(self, model.state_dict())
        if not hasattr(model, "base_model_prefix") or len(places) == len(self):
            return super()._apply(model)
        from hf_bico.models.families.modules import stored_names

        shapes = {name: tuple(self.change(name).shape) for name in self}
        names = {stored: own for own, stored in stored_names(model, shapes).items()}
        return Deltas._apply(self.renamed(names), model)

    @classmethod
    @translate_errors()
    def from_models(
        cls,
        fine_tuned: ModelLike,
        base: ModelLike | None = None,
        *,
        token: str | None = None,
        allow_pickle: bool = False,
    ) -> TaskVector:
        """Subtract the base from a fine-tuned model, tensor by tensor; equal tensors do not appear.

        The base may be left out if the fine-tuned model's card names it. The names are the base's. A fine-tuned model
        that holds only a part of its base (a vision tower), or has another prefix in its names, is matched with it;
        tensors that one side lacks are in `overlap`.
        """
        hub = Hub(token)
        tuned = locate(fine_tuned, "the fine-tuned model", hub) if isinstance(fine_tuned, str | Path) else fine_tuned
        if base is None:
            if not isinstance(tuned, RepoFiles):
                raise BaseUnknownError("the base of a loaded model is not known", "pass base=")
            start: RepoFiles | nn.Module | Checkpoint | Mapping[str, Tensor] = find_base(tuned, hub)
        else:
            start = locate(base, "the base", hub) if isinstance(base, str | Path) else base
        tuned_checkpoint, about = _open_weights(tuned, "source", "transformers", allow_pickle)
        start_checkpoint, more = _open_weights(start, "base", about.get("library", "transformers"), allow_pickle)
        difference = Difference.between(tuned_checkpoint, start_checkpoint)
        about = about | more | {MADE_FROM: [*about[MADE_FROM], *more[MADE_FROM]]}
        return cls(difference, difference.overlap, about, start if isinstance(start, RepoFiles | nn.Module) else None)

    @classmethod
    @translate_errors()
    def from_adapter(
        cls,
        adapter: str | Path | RepoFiles | nn.Module,
        base: ModelReference | None = None,
        *,
        token: str | None = None,
        allow_pickle: bool = False,
    ) -> TaskVector:
        """Read what a PEFT adapter changes of its base, without merging: a LoRA's changes stay low-rank.

        The adapter is a Hub id, a folder, or a loaded PeftModel. The base may be left out if the adapter names it.
        """
        hub = Hub(token)
        if isinstance(adapter, nn.Module):
            known = base_of_source(adapter, hub) if base is None else base
            return cls.over(Adapter.of(adapter), Model.open(known, "the base", hub=hub).fetched())
        place = adapter if isinstance(adapter, RepoFiles) else locate(adapter, "the adapter", hub)
        if not is_adapter(place.sizes):
            refuse_foreign(place)
            raise AdapterError(f"'{place.name}' holds no PEFT adapter", "take its task vector with from_models")
        source = Adapter.open(place, allow_pickle)
        start = find_base(place, hub) if base is None else base
        over = Model.open(start, "the base", source.library, hub, allow_pickle)
        vector = cls.over(source.fetched(), over.fetched())
        vector.about |= recorded_base(place)
        return vector

    @classmethod
    def over(cls, source: Model | Adapter, base: Model, device: torch.device | None = None) -> TaskVector:
        """Take the change of a downloaded model or adapter over its base; subtract on `device`, else on the CPU."""
        changes: Deltas | Difference
        if isinstance(source, Adapter):
            changes = source.deltas(base)
        else:
            changes = Difference.between(source.checkpoint, base.checkpoint, device)
        about: dict[str, Any] = {"library": base.family.library}
        for part, model in (("source", source), ("base", base)):
            about |= {part: model.name, **({f"{part}_commit": model.commit} if model.commit else {})}
        about[MADE_FROM] = [list(model.repo_name) for model in (source, base)]
        return cls(changes, changes.overlap, about, base)

    @classmethod
    @translate_errors()
    def load(cls, path: str | Path, token: str | None = None) -> TaskVector:
        """Load a saved or pushed vector: a Hub id, a folder with `task_vector.safetensors`, or that file."""
        file = expanded(path)
        repo: HubReference | HubRepo | None = cached_repo(file.parent)
        if not file.is_file():
            place = locate(path, "the task vector", Hub(token))
            if DELTA_FILE not in place.sizes:
                raise RecordError(
                    f"there is no task vector in '{place.name}'", f"name a repo or folder that holds {DELTA_FILE}"
                )
            place.fetch([DELTA_FILE])
            file, repo = place.folder / DELTA_FILE, place.repo
        changes, about = read_delta(file)
        about[MADE_FROM] = [*(about.get(MADE_FROM) or [list(LOCAL)]), *([["model", repo.id]] if repo else [])]
        return cls(changes, about=about)

    @translate_errors()
    def save(self, folder: str | Path, overwrite: bool = False, **about: Any) -> Path:
        """Write the lossless delta format as a new folder, and return its file; `about` goes into its metadata.

        With `overwrite`, a folder that hf-bico wrote, or that holds such a file alone, is replaced.
        """
        place = expanded(folder)
        require_apart(place, self._base.folder if isinstance(self._base, Model | RepoFiles) else None)
        with atomic_folder(place, overwrite, [DELTA_FILE]) as scratch:
            self.write(scratch, **about)
        return place / DELTA_FILE

    def write(self, folder: Path, **about: Any) -> Path:
        """Write the lossless delta format into an existing folder."""
        write_delta(self, {**self._known, **about}, folder / DELTA_FILE)
        return folder / DELTA_FILE

    @translate_errors()
    def save_adapter(
        self,
        folder: str | Path,
        rank: int | float | None = None,
        *,
        base: str | Path | nn.Module | None = None,
        everything: bool = False,
        overwrite: bool = False,
        device: str = "auto",
        token: str | None = None,
        allow_pickle: bool = False,
    ) -> Fitted:
        """Write a PEFT adapter as a new folder, and return what it holds: `energy_kept`, `kept`, `ranks`.

        Linear layers become factors of `rank`: a whole number, or a share of each layer's energy such as 0.95; None
        keeps a LoRA's rank, and anything else exactly. With `everything`, other tensors are stored in full. `base` is
        needed only if the vector does not know its base. With `overwrite`, a folder that hf-bico wrote, or that holds
        an adapter's two files alone, is replaced.

        >>> TaskVector.from_models("user/vit-b16-eurosat").save_adapter("out", rank=16)  # doctest: +SKIP
        """
        from hf_bico.runtime.environment import choose_device

        place = expanded(folder)
        with atomic_folder(place, overwrite, [ADAPTER_CONFIG, ADAPTER_FILE]) as scratch:
            over = self.base_model(base, Hub(token), allow_pickle)
            require_apart(place, over.folder)
            skeleton = over.skeleton()
            fitted = fit_to(self, over, skeleton, rank, everything, choose_device(device))
            write_adapter(fitted, skeleton, over.as_loaded, BaseName(over.name, over.commit), scratch)
        return fitted

    @translate_errors()
    def base_model(
        self, base: ModelReference | None = None, hub: Hub | None = None, allow_pickle: bool = False
    ) -> Model:
        """Open and download the base: the given one, else the one that the vector knows."""
        known = base if base is not None else self._base if self._base is not None else self._named_base()
        if isinstance(known, Model):
            return known
        library = str(self.about.get("library", "transformers"))
        model = Model.open(known, "the base", library, hub, allow_pickle).fetched()
        self.require_made_for(model)
        return model

    def require_made_for(self, model: Model) -> None:
        """Refuse a model that is known to have other weights than those that the vector was made for."""
        if SEVERAL in self.about:
            raise BaseMismatchError(
                "the task vector is a sum of vectors that were made for different models",
                "add them to a model with hf_bico.apply, or 'hf-bico apply VECTORS --to MODEL'",
            )
        if model.sha256 and self.about.get("base_sha256", model.sha256) != model.sha256:
            raise BaseMismatchError(
                f"the task vector was made for other weights than those of '{model.name}'",
                "name the model that it was made for with --base",
            )

    def _named_base(self) -> str:
        """Return the Hub model that the vector was made for, as its file says."""
        name, commit = self.about.get("base"), self.about.get("base_commit")
        if not name or not commit:
            raise BaseUnknownError("this task vector lies over a local model", "name that model with --base")
        return recorded_repo(str(name), str(commit))

    @translate_errors()
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
        """Type and id of the Hub repos behind it, whose privacy it inherits."""
        named = [(str(type), str(name)) for type, name in self.about.get(MADE_FROM) or ()]
        return list(dict.fromkeys(named)) or [LOCAL]

    def _require_summand(self, other: Self) -> None:
        super()._require_summand(other)
        both = (self, other)
        differ = any(SEVERAL in part.about for part in both)
        if not differ and self._base_key != other._base_key:
            known, others = (part._base_sha256 for part in both)
            differ = bool(known and others) and known != others
        if differ:
            names = " and of ".join(f"'{part.about.get('base', 'several models')}'" for part in both)
            raise BaseMismatchError(
                f"the task vectors were made for different weights, of {names}",
                "add them to one model with hf_bico.apply([...], to=MODEL)",
            )

    @property
    def _known(self) -> dict[str, Any]:
        """`about`, with the digests of the base's files."""
        digests = self._base_sha256
        return {**self.about, "base_sha256": digests} if digests else self.about

    @property
    def _base_sha256(self) -> Any:
        """Digests of its base's files, by name; computed if the files are here, empty if they are not known."""
        known = self.about.get("base_sha256")
        return self._base.sha256 if not known and isinstance(self._base, Model) else known

    def _combined(self, terms: Terms, overlap: Overlap, *others: Self) -> Self:
        vector = super()._combined(terms, overlap, *others)
        # the base of a sum is known if its parts agree
        parts = (self, *others)
        vector.about = {
            key: value for key, value in self.about.items() if all(value == o.about.get(key) for o in others)
        }
        vector.about[MADE_FROM] = [list(name) for part in parts for name in part.made_from]
        meant = [part.about["base_sha256"] for part in parts if part.about.get("base_sha256")]
        vector.about |= {"base_sha256": meant[0]} if meant else {}
        if all(part._base_key == self._base_key for part in others):
            vector._base = self._base
        return vector

    @property
    def _base_key(self) -> tuple[object, ...]:
        """What identifies its base: the folder of its files, the loaded module, or the repo's commit."""
        if isinstance(self._base, Model | RepoFiles) and self._base.folder is not None:
            return (self._base.folder,)
        if self._base is not None:
            return (id(self._base.module if isinstance(self._base, Model) else self._base),)
        return (self.about.get("base"), self.about.get("base_commit"), str(self.about.get("base_sha256")))


def recorded_base(place: RepoFiles) -> dict[str, Any]:
    """Read for which weights an adapter was made, from the record that this tool wrote next to it."""
    if RECORD_FILE not in place.sizes:
        return {}
    place.fetch([RECORD_FILE])
    digests = read_any(place.folder).target.sha256
    return {"base_sha256": digests} if digests else {}


def fit_to(
    vector: Deltas,
    base: Model,
    module: nn.Module,
    rank: int | float | None,
    everything: bool,
    device: torch.device | None,
) -> Fitted:
    """Fit a vector to a rank for peft, which knows only the names of the loaded model."""
    names = base.layout.own_names
    sites = {names.get(tensor, tensor) for tensor in base.layout.tensors}
    changes = vector.renamed(names)
    changes.places_in(base.as_loaded.shapes, f"'{base.name}'")
    return fit_adapter(changes, module, sites, rank, everything, device)


def _open_weights(
    model: RepoFiles | nn.Module | Checkpoint | Mapping[str, Tensor], part: str, library: str, allow_pickle: bool
) -> tuple[Checkpoint, dict[str, Any]]:
    """Download a model's weights; return them with what `about` says of its repo."""
    about: dict[str, Any] = {MADE_FROM: [list(LOCAL)]}
    if not isinstance(model, RepoFiles):
        if isinstance(model, nn.Module):
            return MemoryCheckpoint.of(model), about
        return state_dict_checkpoint(model) if isinstance(model, Mapping) else model, about
    opened = fetch_weights(model, library, allow_pickle)
    about |= {part: model.name, f"{part}_sha256": opened.sha256}
    if model.commit is not None:
        about |= {f"{part}_commit": model.commit, MADE_FROM: [["model", model.name]]}
    names = () if opened.weights is None else opened.weights.names
    layouts = [layout for layout, name in WEIGHT_FILES.items() if name in names]
    return opened.checkpoint, {**about, "library": layouts[0]} if layouts else about


@dataclass(frozen=True)
class FineTune:
    """A further fine-tuned model over a known base; `sha256` is of its files, or of its change."""

    name: str
    vector: TaskVector
    sha256: Any

    @classmethod
    def over(cls, base: Model, reference: ModelReference, what: str, hub: Hub, allow_pickle: bool) -> FineTune:
        """Open and download a model or adapter; `what` names it in errors."""
        source = locate(reference, what, hub) if isinstance(reference, str | Path) else reference
        if isinstance(source, Mapping):
            tuned: Model | Adapter = Model.of_state_dict(source, base)
        else:
            tuned = open_source(source, base.family.library, hub, allow_pickle).fetched()
        try:
            vector = TaskVector.over(tuned, base)
            found = config_differences(tuned, base) if isinstance(tuned, Model) else []
            if (mismatch := other_function(found, tuned.name, base.name)) is not None:
                raise mismatch
        except BaseMismatchError as error:
            raise BaseMismatchError(
                f"{what} '{tuned.name}' is not a fine-tune of '{base.name}': {error.cause}",
                f"name one of '{base.name}'",
            ) from error
        return cls(tuned.name, vector, tuned.sha256 or digest_of(stored_tensors(vector)))


def stored_tensors(vector: Deltas) -> Iterator[Tensor]:
    """Yield every tensor that a change is made of, factors one by one."""
    for _, change in vector.changes():
        yield from (change.left, change.right) if isinstance(change, Factors) else (change,)
