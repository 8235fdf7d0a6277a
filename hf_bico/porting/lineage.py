"""Resolves source, base, target and data set of a port, pins every repo, and warns about suspicious inputs.

Asks the Hub and reads small files, and weights only where a folder holds two models; imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from hf_bico.errors import (
    AccessError,
    BaseMismatchError,
    BaseUnknownError,
    DataUnknownError,
    EmptyRepoError,
    HubUnavailableError,
    LineageError,
    NotCachedError,
    RepoNotFoundError,
    UnsupportedModelError,
    WrongRepoTypeError,
)
from hf_bico.hub.client import Hub, HubRepo, RepoFiles, fetch_small_files, locate
from hf_bico.hub.references import LOCAL, HubReference, RepoName, cached_repo, hub_reference, parse
from hf_bico.hub.repo_metadata import RepoMetadata, base_of, data_of, read_metadata
from hf_bico.models.adapters.adapter import Adapter, is_peft_model
from hf_bico.models.checkpoints import WEIGHT_FILES, FileCheckpoint, holds_layout, is_adapter
from hf_bico.models.configurations import brief, config_differences, difference_notices, other_function
from hf_bico.models.families.pretrained import PROCESSOR_FILES
from hf_bico.models.layout import Layout
from hf_bico.models.model import Model, ModelReference, OpenedRepo
from hf_bico.porting.base_proposals import open_copies, proposed_bases
from hf_bico.porting.identity import BASE, FINE_TUNED, is_opened_twice
from hf_bico.reports.record import EvaluationRecord
from hf_bico.settings import GENERATED
from hf_bico.utils.files import expanded, read_object

ENOUGH_MEASURED = 50
"""With fewer samples, an accuracy near chance says too little."""
SAME_ENERGY, SAME_ROUNDED = 1e-6, 5e-4
"""Largest relative distance of the energies of one model in two layouts, the second if only one is in half precision:
on the small worlds of three seeds rounding moved them by up to 1.3e-4, and fine-tuning by 2.6e-3 and more."""
_MOST_PARENTS = 4
ASK_FOR_BASE = "name the model that was fine-tuned with --base"
_NO_REPO = (RepoNotFoundError, WrongRepoTypeError, EmptyRepoError)
_PREPARED_BY = (
    *("mean", "std", "interpolation", "resize_mode", "fill_color"),  # open_clip
    *("image_mean", "image_std", "do_normalize", "do_rescale", "rescale_factor", "resample"),
    *("do_resize", "size", "do_center_crop", "crop_size", "do_pad", "pad_size"),
)
"""The fields of either library that change the images which a model is given."""


@dataclass(frozen=True)
class Lineage:
    """The three models of a port, and the data set to calibrate on."""

    source: Model | Adapter
    base: Model
    target: Model
    data: Any = None
    """A reference, or rows passed from Python."""
    data_repo: HubRepo | None = None
    no_data: LineageError | None = None
    """Why no data set is known."""
    notices: tuple[str, ...] = ()
    """Sentences for the user, such as that a quantised base was replaced."""
    other_function: BaseMismatchError | None = None
    """Why the fine-tuned model computes something else than its base would with the same weights."""
    unlabelled: Any = None
    """More samples without labels: a reference, or rows passed from Python."""
    unlabelled_repo: HubRepo | None = None
    data_by_card: bool = False
    """Whether the data set is the one that the source's card names."""

    @property
    def models(self) -> tuple[Model | Adapter, Model, Model]:
        return self.source, self.base, self.target

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Layouts of base and target."""
        return self.base.layout, self.target.layout

    @property
    def reads(self) -> str:
        """What the models read: images or texts."""
        return self.base.layout.reads

    @property
    def writes_data(self) -> bool:
        """Whether the fine-tuned source writes the samples itself."""
        return isinstance(self.data, str) and self.data == GENERATED

    @property
    def class_names(self) -> Sequence[str]:
        """Class names that the source's configuration gives; empty if there are none."""
        return self.source.origin.class_names

    @property
    def _hub_repos(self) -> list[HubRepo]:
        repos = [model.place.repo for model in self.models if model.place is not None]
        return [repo for repo in (*repos, self.data_repo, self.unlabelled_repo) if repo is not None]

    @property
    def repos(self) -> list[RepoName]:
        """Type and id of each Hub repo, and LOCAL if a model or the data set is local."""
        return [*((repo.type, repo.id) for repo in self._hub_repos), *([LOCAL] if self._is_local else [])]

    @property
    def restricted(self) -> list[str]:
        """Names of the inputs that are private, gated, or on this machine only."""
        return [*(repo.id for repo in self._hub_repos if repo.restricted), *([LOCAL[1]] if self._is_local else [])]

    def require_same_function(self, force: bool) -> None:
        """Refuse, without `force`, a fine-tuned model that computes something else than its base."""
        if self.other_function is not None and not force:
            raise self.other_function

    @property
    def _is_local(self) -> bool:
        models = any(model.place is None or model.place.repo is None for model in self.models)
        data = ((self.data, self.data_repo), (self.unlabelled, self.unlabelled_repo))
        given_rows = any(given is not None and repo is None for given, repo in data)
        return models or (given_rows and not (self.writes_data and self.unlabelled is None))


def resolve(
    source: ModelReference,
    to: ModelReference,
    *,
    base: ModelReference | None = None,
    data: Any = None,
    unlabelled: Any = None,
    hub: Hub | None = None,
    allow_pickle: bool = False,
) -> Lineage:
    """Find base and data set where they are not named, pin every repo, and check that all can be read."""
    hub = hub or Hub()
    place = locate(source, "the fine-tuned model", hub) if isinstance(source, str | Path) else None
    origin = RepoMetadata() if place is None else read_metadata(place.folder, place.name)
    name = type(source).__name__ if place is None else place.name
    start: ModelReference | RepoFiles = base if base is not None else base_of_source(place or source, hub)
    notices: list[str] = []
    if isinstance(start, str | Path | RepoFiles):
        given = start if isinstance(start, RepoFiles) else locate(start, "the base", hub)
        if base is not None and place is not None:
            notices += _other_base_named(origin, place, given)
        start = _unquantised(given, hub, notices)
    if place is not None and is_adapter(place.sizes) and any(holds_layout(place.sizes, name) for name in WEIGHT_FILES):
        notices.append(f"{place.name} holds a whole model beside its adapter: the adapter was taken.")
    target = locate(to, "the target", hub) if isinstance(to, str | Path) else to
    data_repo, no_data, by_card = None, None, data is None
    if data is None:
        data, data_repo, no_data = _named_data(origin, name, hub)
    else:
        data, data_repo = _given_data(data, "the data set", hub)
    unlabelled, unlabelled_repo = _given_data(unlabelled, "the unlabelled data", hub)

    tuned, first = open_tuned_and_base(place or source, start, hub, allow_pickle)
    last = Model.open(target, "the target", first.family.library, hub, allow_pickle)
    notices += [model.notice for model in (tuned, first, last) if model.notice]
    found = config_differences(tuned, first) if isinstance(tuned, Model) else []
    notices += [*difference_notices(found, tuned.name), *_other_preparation(tuned, first)]
    notices += [sentence for sentence, model in ((BASE, first), (FINE_TUNED, tuned)) if is_opened_twice(last, model)]
    repos = [model.place.repo for model in (tuned, first, last) if model.place is not None]
    repos += [data_repo, unlabelled_repo]
    notices += [f"'{repo.requested.id}' is now '{repo.id}'." for repo in repos if repo and repo.renamed]
    refusal = other_function(found, tuned.name, first.name)
    return Lineage(
        tuned,
        first,
        last,
        data,
        data_repo,
        no_data,
        tuple(dict.fromkeys(notices)),
        refusal,
        unlabelled=unlabelled,
        unlabelled_repo=unlabelled_repo,
        data_by_card=by_card and data is not None,
    )


def open_tuned_and_base(
    source: ModelReference | RepoFiles, base: ModelReference | RepoFiles, hub: Hub, allow_pickle: bool
) -> tuple[Model | Adapter, Model]:
    """Open a fine-tuned model, an adapter or the state dict of a model, and its base, in the same layout."""
    shared = _shared_library(source, base)
    if isinstance(source, Mapping):
        start = Model.open(base, "the base", shared, hub, allow_pickle)
        return Model.of_state_dict(source, start), start
    tuned = open_source(source, shared, hub, allow_pickle)
    library = tuned.library if isinstance(tuned, Adapter) else tuned.family.library
    return tuned, Model.open(base, "the base", library, hub, allow_pickle)


def open_source(source: ModelReference | RepoFiles, library: str, hub: Hub, allow_pickle: bool) -> Model | Adapter:
    """Open a fine-tuned model or an adapter."""
    if isinstance(source, RepoFiles) and is_adapter(source.sizes):
        return Adapter.open(source, allow_pickle)
    if not isinstance(source, str | Path | RepoFiles | Mapping) and is_peft_model(source):
        return Adapter.of(source)
    return Model.open(source, "the fine-tuned model", library, hub, allow_pickle)


def _shared_library(*places: object) -> str:
    """Return the library whose layout all of these repos share, transformers by default."""
    known = [place for place in places if isinstance(place, RepoFiles)]
    shared = (library for library in WEIGHT_FILES if all(holds_layout(place.sizes, library) for place in known))
    return next(shared, "transformers")


def base_of_source(source: ModelReference | RepoFiles, hub: Hub) -> ModelReference | RepoFiles:
    """Return the base that a fine-tuned model or adapter names, or that a PeftModel was loaded over."""
    if isinstance(source, RepoFiles):
        return find_base(source, hub)
    loaded = None
    if not isinstance(source, str | Path | Mapping) and is_peft_model(source):
        loaded = Adapter.of(source)
    named = None if loaded is None else loaded.config.raw.get("base_model_name_or_path")
    if not named:
        raise BaseUnknownError(f"the base of a loaded {type(source).__name__} is not known", "name it with --base")
    return str(named)


def find_base(place: RepoFiles, hub: Hub) -> RepoFiles:
    """Locate the base that a repo names: a Hub id or, only for a local adapter, as in peft, a folder."""
    origin = read_metadata(place.folder, place.name)
    if place.repo is None and cached_repo(place.folder) is None and origin.adapter_base:
        named = expanded(origin.adapter_base)
        for folder in (named, place.folder.absolute().parent / named):
            if os.path.isdir(folder):  # False, where pathlib raises, for what may not be read
                return locate(folder, "the base", hub)
        if hub_reference(origin.adapter_base) is None and not origin.bases:
            cause = f"'{place.name}' names the base '{origin.adapter_base}', and no folder of that name is here"
            raise _unknown_base(place, origin.adapter_base, cause, hub)
    if origin.adapter_base and hub_reference(origin.adapter_base) is None and not origin.bases:
        cause = f"'{place.name}' names the base '{origin.adapter_base}', a folder where it was trained"
        raise _unknown_base(place, origin.adapter_base, cause, hub)
    return _named_base(origin, place, hub)


def _unknown_base(place: RepoFiles, named: str, cause: str, hub: Hub) -> BaseUnknownError:
    """Make the error for a fine-tune whose base cannot be had, with what it may be: nothing is taken for it."""
    remedy, proposed = ASK_FOR_BASE, proposed_bases(place, named, hub)
    if proposed:
        remedy += f"; by its name and the sizes of its layers it may be {' or '.join(proposed)}"
    return BaseUnknownError(cause, remedy, f"--base {proposed[0]}" if proposed else "")


def _named_base(origin: RepoMetadata, place: RepoFiles, hub: Hub) -> RepoFiles:
    name = place.name
    try:
        base = base_of(origin, name)
    except BaseUnknownError as error:
        raise _unknown_base(place, origin.named_as, error.cause, hub) from error
    try:
        # a card names a Hub repo, even where a local folder has the same name
        return fetch_small_files(hub.repo(_reference(base), "the base"))
    except (*_NO_REPO, AccessError, HubUnavailableError, NotCachedError) as error:
        cause = f"'{name}' names the base '{base}' in its {origin.bases_from}: {error.cause}"
        if isinstance(error, _NO_REPO):
            raise _unknown_base(place, base, cause, hub) from error
        if not isinstance(error, AccessError):
            raise type(error)(cause, f"{error.remedy}; or name a folder with --base") from error
        copies = open_copies(base, hub)
        also = f"; or name a copy of it with --base, such as {copies[0]}" if copies else ""
        raise type(error)(cause, f"{error.remedy}{also}", f"--base {copies[0]}" if copies else "") from error


def _other_base_named(origin: RepoMetadata, place: RepoFiles, start: RepoFiles) -> list[str]:
    """Return a notice if the source names another base than the given one, both being repos or both folders."""
    named = origin.adapter_base if place.repo is None else ""
    folders = [folder for folder in (expanded(named), place.folder.absolute().parent / named) if os.path.isdir(folder)]
    if named and folders and start.repo is None:
        named, other = Path(named).name, not any(os.path.samefile(folder, start.folder) for folder in folders)
    elif start.repo is not None and len(origin.bases) == 1:
        reference, named = hub_reference(origin.bases[0]), origin.bases[0]
        given = {start.repo.id.lower(), start.repo.requested.id.lower()}
        other = reference is not None and reference.id.lower() not in given
    else:
        return []
    return [f"{place.name} names the base {named}, and {start.name} was given: is it the same model?"] if other else []


def _reference(name: str) -> HubReference:
    reference = hub_reference(name)
    if reference is None:
        raise RepoNotFoundError(f"'{name}' is not an id of the Hub", "use OWNER/NAME")
    return reference


def _given_data(data: Any, what: str, hub: Hub) -> tuple[Any, HubRepo | None]:
    """Parse a reference to a data set, and pin it if it is on the Hub; rows stay as they are."""
    if isinstance(data, str) and data == GENERATED and what == "the data set":  # a folder of that name is ./generated
        return data, None
    if isinstance(data, str | Path):
        data = parse(data, what, files=True)
    return data, hub.repo(data, what, "dataset") if isinstance(data, HubReference) else None


def _named_data(
    origin: RepoMetadata, name: str, hub: Hub
) -> tuple[HubReference | None, HubRepo | None, LineageError | None]:
    data = data_of(origin, name)
    if isinstance(data, LineageError):
        return None, None, data
    try:
        reference = _reference(data)
        return reference, hub.repo(reference, "the data set", "dataset"), None
    except _NO_REPO as error:
        cause = f"the card of '{name}' names the data set '{data}': {error.cause}"
        return None, None, DataUnknownError(cause, "name a data set with --data")


def _unquantised(place: RepoFiles, hub: Hub, notices: list[str]) -> RepoFiles:
    """Return the base, or the model that it was quantised from; add a notice if the base is a fine-tune itself."""
    for _ in range(_MOST_PARENTS):
        origin = read_metadata(place.folder, place.name)
        if not origin.quantized:
            if origin.bases and origin.bases_from == "card":
                notices.append(
                    f"The base {place.name} was itself made from {', '.join(origin.bases)}: what it learnt over that "
                    "is not carried."
                )
            return place
        if len(origin.bases) != 1:
            break
        parent = _named_base(origin, place, hub)
        notices.append(f"The base {place.name} is quantised: its parent {parent.name} is used.")
        place = parent
    proposed = proposed_bases(place, place.name, hub)
    may_be = f"; by its name it may be {' or '.join(proposed)}" if proposed else ""
    raise UnsupportedModelError(
        f"the base '{place.name}' is quantised, and its card does not name the one model that it was made from",
        f"name the unquantised model with --base{may_be}",
        f"--base {proposed[0]}" if proposed else "",
    )


def chance_notice(evaluation: Iterable[EvaluationRecord], classes: int) -> list[str]:
    """Return a notice if the fine-tuned source is at chance level: within two standard deviations of it, or below.

    Then source and labels do not belong together, and the labels enter every output-side map. The fine-tunes of the
    small worlds get 89% and more of ten classes right.
    """
    for entry in evaluation:
        if entry.model != "source" or entry.metric != "accuracy" or entry.n < ENOUGH_MEASURED or classes < 2:
            continue
        chance = 1 / classes
        if entry.value <= chance + 2 * sqrt(chance * (1 - chance) / entry.n):
            return [
                f"The fine-tuned source gets {entry.value:.1%} of {entry.n} samples right, as chance would of "
                f"{classes} classes: check that it was fine-tuned on these labels and on this base, and that the class "
                "names stand in the labels' order."
            ]
    return []


def lineage_warnings(lineage: Lineage) -> list[str]:
    """Return warnings from the downloaded files: two models in one folder, other preprocessing than the base's."""
    return [*filter(None, map(_two_models, lineage.models)), *_other_preparation(lineage.source, lineage.base)]


def _two_models(model: OpenedRepo) -> str | None:
    """Return a notice if a folder holds two models in the layouts of two libraries, judged by their energies."""
    from hf_bico.models.low_rank import energy

    if model.folder is None or not isinstance(model, Model):
        return None
    files = [model.folder / name for name in WEIGHT_FILES.values()]
    if not all(file.is_file() for file in files):
        return None
    checkpoints = [FileCheckpoint([file]) for file in files]
    first, second = (
        sum(energy(tensor) for tensor in map(checkpoint.tensor, checkpoint.shapes) if tensor.is_floating_point())
        for checkpoint in checkpoints
    )
    dtypes = {dtype for checkpoint in checkpoints for dtype in checkpoint.dtypes.values() if "F" in dtype}
    if abs(first - second) <= (SAME_ENERGY if len(dtypes) == 1 else SAME_ROUNDED) * max(first, second):
        return None
    used = model.family.library
    other = next(name for library, name in WEIGHT_FILES.items() if library != used)
    return f"{model.name} holds two different models: {WEIGHT_FILES[used]}, which was used, and {other}."


def _other_preparation(tuned: Model | Adapter, base: Model) -> list[str]:
    """Return a notice for each way in which the fine-tuned model prepares images otherwise than its base."""
    if not isinstance(tuned, Model) or _preparation(tuned) == _preparation(base):
        return []
    own, other = _preparation(tuned, filled=True), _preparation(base, filled=True)
    return [
        f"{tuned.name} prepares images with {name} {brief(own[name])} and its base with {brief(other[name])}, "
        "which is used for both."
        for name in _PREPARED_BY
        if name in own and name in other and not _is_alike(own[name], other[name])
    ]


def _preparation(model: Model, filled: bool = False) -> dict[str, Any]:
    """Return how a model's files say that images are prepared; empty if they do not, or are not here."""
    if model.folder is None:
        return {}
    try:
        if model.family.library == "open_clip":
            content = (model.filled(model.config) if filled else model.config).get("preprocess_cfg")
        else:
            content = read_object(model.folder / PROCESSOR_FILES[0])
    except (OSError, ValueError):
        return {}  # it has none, or loading the model reports it
    known = content.items() if isinstance(content, Mapping) else ()
    return {name: list(value) if isinstance(value, tuple) else value for name, value in known}


def _is_alike(one: Any, other: Any) -> bool:
    """Compare two values; a size may be one number, two, or numbers with names."""
    if type(one) is type(other) or not any(isinstance(value, list | dict) for value in (one, other)):
        return bool(one == other)
    sides = (value.values() if isinstance(value, dict) else value for value in (one, other))
    first, second = (set(map(str, side)) if isinstance(side, Iterable) else {str(side)} for side in sides)
    return first == second
