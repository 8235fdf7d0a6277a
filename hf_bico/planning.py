"""The plan: what a port would carry and leave behind, and what it needs, from metadata alone.

Resolves the lineage and matches the sites by names, shapes and configurations; no weights, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hf_bico.checkpoints import WEIGHT_FILES, FileCheckpoint, HeaderCheckpoint, holds_layout, overlap
from hf_bico.errors import (
    BaseMismatchError,
    BaseUnknownError,
    DataUnknownError,
    EmptyRepoError,
    LineageError,
    ModelError,
    NotCachedError,
    RepoNotFoundError,
    UnsupportedModelError,
    UsageError,
    WrongRepoTypeError,
)
from hf_bico.hub.client import Hub, HubRepo, is_offline
from hf_bico.hub.references import LOCAL, HubReference, hub_reference, is_hub_id, parse
from hf_bico.hub.repos import Place, at_hub, locate
from hf_bico.lineage import Origin, base_of, data_of, read_origin
from hf_bico.matching import blocks_by_index, pair_sites
from hf_bico.models import Model, ModelReference
from hf_bico.progress import Progress, silent
from hf_bico.sites import Layout, SitePair

UNMATCHED = "no counterpart in the target"
_MOST_PARENTS = 4
_NO_REPO = (RepoNotFoundError, WrongRepoTypeError, EmptyRepoError)


@dataclass(frozen=True)
class Lineage:
    """The three models of a port, and the data set to calibrate on."""

    source: Model
    base: Model
    target: Model
    data: Any = None
    """A reference, or rows that were passed."""
    data_repo: HubRepo | None = None
    no_data: LineageError | None = None
    """Why no data set is known."""
    notices: tuple[str, ...] = ()
    """What was found out on the way and should be known."""

    @property
    def models(self) -> tuple[Model, Model, Model]:
        return self.source, self.base, self.target

    @property
    def _hub_repos(self) -> list[HubRepo]:
        repos = [model.place.repo for model in self.models if model.place is not None]
        return [repo for repo in (*repos, self.data_repo) if repo is not None]

    @property
    def repos(self) -> list[tuple[str, str]]:
        """Type and id of the Hub repos among them, and a word for what is none."""
        return [*((repo.type, repo.id) for repo in self._hub_repos), *([LOCAL] if self._is_local else [])]

    @property
    def restricted(self) -> list[str]:
        """What is private or gated among them, or on this machine only."""
        return [*(repo.id for repo in self._hub_repos if repo.restricted), *([LOCAL[1]] if self._is_local else [])]

    @property
    def _is_local(self) -> bool:
        models = any(model.place is None or model.place.repo is None for model in self.models)
        return models or (self.data is not None and self.data_repo is None)


@dataclass(frozen=True)
class Plan:
    """What would be done."""

    lineage: Lineage
    blocks: tuple[int, ...]
    """The source block of each target block."""
    pairs: tuple[SitePair, ...]
    left: dict[str, str]
    """Source tensors that stay behind, by name, with the reason."""
    missing: tuple[str, ...]
    """Tensors of the base that the fine-tuned model lacks."""
    extra: tuple[str, ...]
    """Tensors of the fine-tuned model that the base lacks."""

    @property
    def memory_bytes(self) -> int:
        """Both models in float32, the float64 covariances and maps, and the ported vector: an estimate.

        Activations of a batch come on top; they depend on the batch size.
        """
        models = 4 * (_elements(self.lineage.base) + _elements(self.lineage.target))
        inputs = {(p.source.input, p.target.input): (p.source.shape[1], p.target.shape[1]) for p in self.pairs}
        outputs = [(pair.source.shape[0], pair.target.shape[0]) for pair in self.pairs]
        covariances = sum(a * b for a, b in [*inputs.values(), *outputs])
        carried = 4 * sum(pair.target.shape[0] * pair.target.shape[1] for pair in self.pairs)
        # each covariance stands beside the map made from it
        return models + 2 * 8 * covariances + carried

    @property
    def download_bytes(self) -> int:
        """What is not on this machine yet of the three models; the data set's samples come on top."""
        source, base, target = self.lineage.models
        places = {(model.name, model.commit): (model.place, model.needed()) for model in (base, target)}
        places.setdefault((source.name, source.commit), (source.place, source.needed(beside=False)))
        return sum(place.to_download(names) for place, names in places.values() if place is not None)

    def fetched(self, progress: Progress = silent) -> Plan:
        """The same plan with the models' files on this machine."""
        total, done = self.download_bytes, 0

        def downloaded(count: int) -> None:
            nonlocal done
            done += count
            progress("download", done, total)

        if total:
            progress("download", 0, total)
        source, base, target = self.lineage.models
        local = replace(
            self.lineage,
            source=source.fetched(downloaded, beside=False),
            base=base.fetched(downloaded),
            target=target.fetched(downloaded),
        )
        return replace(self, lineage=local)

    def with_target_id(self, repo_id: str, hub: Hub) -> Plan:
        """The plan with a local target known by its Hub id, which must hold the same weights."""
        target, found = self.lineage.target, hub_reference(repo_id)
        if target.place is None or target.place.repo is not None or found is None or not is_hub_id(found.id):
            raise UsageError(f"--target-id is '{repo_id}'", "give the OWNER/NAME of a target that is a folder")
        if is_offline():
            raise NotCachedError(f"whether the target is '{repo_id}' cannot be checked offline", "unset HF_HUB_OFFLINE")
        repo = hub.repo(found, "the target's id")
        if any(repo.sha256.get(name) != digest for name, digest in target.sha256.items()):
            raise BaseMismatchError(
                f"the weights of the folder '{target.place.folder.name}' are not those of '{repo.id}' on the Hub",
                "give the id, or OWNER/NAME@REVISION, that the folder was downloaded from",
            )
        named = replace(target, name=repo.id, place=replace(target.place, name=repo.id, repo=repo))
        return replace(self, lineage=replace(self.lineage, target=named))

    @property
    def output_bytes(self) -> int:
        """Size of the written model; a full port is as large as its target."""
        checkpoint = self.lineage.target.checkpoint
        if isinstance(checkpoint, FileCheckpoint | HeaderCheckpoint):
            return checkpoint.size
        return 4 * _elements(self.lineage.target)

    @property
    def fits(self) -> bool:
        return self.memory_bytes < machine_memory()

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        lineage = self.lineage
        return {
            "source": {"kind": "adapter" if lineage.source.origin.adapter else "full", **_about(lineage.source)},
            "base": _about(lineage.base),
            "target": _about(lineage.target),
            "data": None if lineage.data_repo is None else _named(lineage.data_repo.id, lineage.data_repo.commit),
            "notices": list(lineage.notices),
            "families": {"source": lineage.base.family.name, "target": lineage.target.family.name},
            "layers": list(self.blocks),
            "sites": [
                {
                    "name": pair.target.name,
                    "role": pair.target.role,
                    "source": pair.source.name,
                    "shape_source": list(pair.source.shape),
                    "shape_target": list(pair.target.shape),
                }
                for pair in self.pairs
            ],
            "left": [{"name": name, "reason": reason} for name, reason in self.left.items()],
            "missing": list(self.missing),
            "extra": list(self.extra),
            "tokens": {"source": asdict(lineage.base.layout.tokens), "target": asdict(lineage.target.layout.tokens)},
            "download_bytes": self.download_bytes,
            "memory_bytes": self.memory_bytes,
            "machine_bytes": machine_memory(),
            "output_bytes": self.output_bytes,
            "fits": self.fits,
        }


def plan(
    source: ModelReference,
    to: ModelReference,
    *,
    base: ModelReference | None = None,
    data: Any = None,
    target_id: str | None = None,
    hub: Hub | None = None,
    allow_pickle: bool = False,
) -> Plan:
    """What `port` would do with these models; resolves and opens them, but reads no weight.

    >>> hf_bico.plan("user/vit-b16-eurosat", to="laion/ViT-B-16-plus").pairs  # doctest: +SKIP
    """
    hub = hub or Hub()
    planned = make_plan(resolve(source, to, base=base, data=data, hub=hub, allow_pickle=allow_pickle))
    return planned if target_id is None else planned.with_target_id(target_id, hub)


def resolve(
    source: ModelReference,
    to: ModelReference,
    *,
    base: ModelReference | None = None,
    data: Any = None,
    hub: Hub | None = None,
    allow_pickle: bool = False,
) -> Lineage:
    """Find the base and the data set that were not named, pin every repo, and make sure that all can be read."""
    hub = hub or Hub()
    place = locate(source, "the fine-tuned model", hub) if isinstance(source, str | Path) else None
    origin = Origin() if place is None else read_origin(place.folder, place.name)
    name = type(source).__name__ if place is None else place.name
    start: ModelReference | Place = base if base is not None else _named_base(origin, name, hub)
    notices: list[str] = []
    if isinstance(start, str | Path | Place):
        start = _unquantised(start, hub, notices)
    target = locate(to, "the target", hub) if isinstance(to, str | Path) else to
    data_repo, no_data = None, None
    if data is None:
        data, data_repo, no_data = _named_data(origin, name, hub)
    elif isinstance(data, str | Path):
        data = parse(data, "the data set", files=True)
        data_repo = hub.repo(data, "the data set", "dataset") if isinstance(data, HubReference) else None

    library = _shared_library(place, start)
    tuned = Model.open(place or source, "the fine-tuned model", library, hub, allow_pickle)
    first = Model.open(start, "the base", tuned.family.library, hub, allow_pickle)
    last = Model.open(target, "the target", first.family.library, hub, allow_pickle)
    notices += [model.notice for model in (tuned, first, last) if model.notice]
    if last.commit is not None and (last.name, last.commit) == (first.name, first.commit):
        notices.append("The target is the base itself.")
    repos = [model.place.repo for model in (tuned, first, last) if model.place is not None]
    notices += [f"'{repo.asked.id}' is now '{repo.id}'." for repo in (*repos, data_repo) if repo and repo.renamed]
    return Lineage(tuned, first, last, data, data_repo, no_data, tuple(dict.fromkeys(notices)))


def _shared_library(*places: object) -> str:
    """The library in whose layout all of these repos hold weights; transformers where there is no such."""
    known = [place for place in places if isinstance(place, Place)]
    shared = (library for library in WEIGHT_FILES if all(holds_layout(place.sizes, library) for place in known))
    return next(shared, "transformers")


def find_base(place: Place, hub: Hub) -> Place:
    """The base that a repo names, where it is found."""
    return _named_base(read_origin(place.folder, place.name), place.name, hub)


def _named_base(origin: Origin, name: str, hub: Hub) -> Place:
    base = base_of(origin, name)
    try:
        # what a card names is on the Hub, whatever folders there are here
        return at_hub(hub.repo(_reference(base), "the base"))
    except _NO_REPO as error:
        raise BaseUnknownError(
            f"'{name}' names the base '{base}' in its {origin.bases_from}: {error.cause}",
            "name the model that was fine-tuned with --base",
        ) from error


def _reference(name: str) -> HubReference:
    found = hub_reference(name)
    if found is None:
        raise RepoNotFoundError(f"'{name}' is not an id of the Hub", "use OWNER/NAME")
    return found


def _named_data(origin: Origin, name: str, hub: Hub) -> tuple[HubReference | None, HubRepo | None, LineageError | None]:
    data = data_of(origin, name)
    if isinstance(data, LineageError):
        return None, None, data
    try:
        reference = _reference(data)
        return reference, hub.repo(reference, "the data set", "dataset"), None
    except _NO_REPO as error:
        cause = f"the card of '{name}' names the data set '{data}': {error.cause}"
        return None, None, DataUnknownError(cause, "name a data set with --data")


def _unquantised(start: str | Path | Place, hub: Hub, notices: list[str]) -> Place:
    """The base, or the model that it was quantised from; a base that was fine-tuned itself is noticed."""
    place = start if isinstance(start, Place) else locate(start, "the base", hub)
    for _ in range(_MOST_PARENTS):
        origin = read_origin(place.folder, place.name)
        if not origin.quantized:
            if origin.bases and origin.bases_from == "card":
                notices.append(
                    f"The base {place.name} was itself made from {', '.join(origin.bases)}: what it learnt over that "
                    "is not carried."
                )
            return place
        if len(origin.bases) != 1:
            break
        parent = _named_base(origin, place.name, hub)
        notices.append(f"The base {place.name} is quantised: its parent {parent.name} is used.")
        place = parent
    raise UnsupportedModelError(
        f"the base '{place.name}' is quantised, and its card does not name the one model that it was made from",
        "name the unquantised model with --base",
    )


def make_plan(lineage: Lineage) -> Plan:
    """Match blocks and sites, and say what stays behind."""
    tuned, base, target = lineage.source, lineage.base, lineage.target
    if tuned.family.name != base.family.name:
        raise BaseMismatchError(
            f"the fine-tuned model is of the family {tuned.family.name} and the base of {base.family.name}",
            "name the base in the library that the fine-tuned model was saved with",
        )
    shared = overlap(tuned.checkpoint.shapes, base.checkpoint.shapes)
    _require_blocks(base.layout, shared.missing)
    blocks = blocks_by_index(base.layout.blocks, target.layout.blocks)
    pairs = pair_sites(base.layout, target.layout, blocks)
    if not pairs:
        raise ModelError("the two models have no site in common", "choose a target of a matching kind")
    carried = {slot.tensor for pair in pairs for slot in pair.source.slots}
    left = {slot.tensor: UNMATCHED for slot in base.layout.slots() if slot.tensor not in carried}
    left.update(base.layout.others)
    return Plan(lineage, tuple(blocks), tuple(pairs), left, shared.missing, shared.extra)


def _about(model: Model) -> dict[str, str]:
    known = {"license": model.origin.license, "pipeline": model.origin.pipeline}
    return {**_named(model.name, model.commit), **{key: value for key, value in known.items() if value}}


def _named(name: str, commit: str | None) -> dict[str, str]:
    return {"id": name} if commit is None else {"id": name, "commit": commit}


def machine_memory() -> int:
    """Bytes of main memory."""
    import psutil

    return int(psutil.virtual_memory().total)


def _require_blocks(base: Layout, missing: Sequence[str]) -> None:
    lacking = set(missing)
    for site in base.sites:
        if site.block is not None and site.weight.tensor in lacking:
            raise BaseMismatchError(
                f"the fine-tuned model has no '{site.weight.tensor}', which the base has",
                "name the model that was fine-tuned with --base",
            )


def _elements(model: Model) -> int:
    total = 0
    for shape in model.checkpoint.shapes.values():
        size = 1
        for extent in shape:
            size *= extent
        total += size
    return total
