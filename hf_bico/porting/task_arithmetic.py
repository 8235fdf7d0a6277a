"""Task arithmetic: `apply` adds a weighted sum of task vectors to a model, `extract` turns a change into an adapter.

Needs no calibration and runs no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from hf_bico.alignment.transport import changed_part
from hf_bico.errors import (
    BaseMismatchError,
    EmptyTaskVectorError,
    HubUnavailableError,
    LineageError,
    NotCachedError,
    RepoError,
    UsageError,
)
from hf_bico.hub.client import Hub, locate
from hf_bico.hub.references import is_hub_id
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.checkpoints import DELTA_FILE, is_adapter
from hf_bico.models.configurations import config_differences, difference_notices
from hf_bico.models.deltas import finite_number
from hf_bico.models.model import Model, ModelReference, refuse_foreign, require_same_family
from hf_bico.porting.formats import WrittenChange, format_change, require_format
from hf_bico.porting.lineage import base_of_source, find_base, open_tuned_and_base
from hf_bico.porting.plausibility import implausible
from hf_bico.porting.recording import allowing, origin_notices, source_record, tensor_notices, typed_reference
from hf_bico.porting.result import ChangeResult, make_change_record
from hf_bico.porting.task_vector import SEVERAL, TaskVector, recorded_base
from hf_bico.reports.record import ModelRecord, Summand
from hf_bico.runtime.environment import Stopwatch, choose_device
from hf_bico.runtime.library_errors import translate_errors
from hf_bico.settings import require_rank
from hf_bico.utils.files import sha256_of
from hf_bico.utils.progress import ShownProgress, callback_of
from hf_bico.utils.text import typed_path

VectorReference: TypeAlias = str | Path | TaskVector
_NO_BASE = (LineageError, BaseMismatchError, HubUnavailableError, NotCachedError)


@translate_errors()
def apply(
    vectors: VectorReference | Sequence[VectorReference],
    to: ModelReference | None = None,
    *,
    weights: Sequence[float] | None = None,
    alpha: float = 1.0,
    format: str = "full",
    rank: int | float | None = None,
    device: str = "auto",
    token: str | None = None,
    allow_pickle: bool = False,
    progress: ShownProgress = None,
) -> ChangeResult:
    """Add alpha times the weighted sum of adapters or task vectors to `to`; by default the model they were made for.

    This can rescale a port without calibrating again.

    >>> hf_bico.apply(["user/lora-a", "user/lora-b"], weights=[0.7, 0.3]).save("merged")  # doctest: +SKIP
    """
    named = list(vectors) if isinstance(vectors, Sequence) and not isinstance(vectors, str) else [vectors]
    shares, alpha = _numbers(named, [1.0] * len(named) if weights is None else list(weights), alpha)
    require_format(format, rank)
    started, watch, hub = datetime.now(UTC), Stopwatch(callback_of(progress)), Hub(token)
    with watch("download"):
        target, parts = _open_all(named, to, hub, allow_pickle)
    with watch("sum"):
        first, *others = (share * _placed(part.vector, target) for share, part in zip(shares, parts, strict=True))
        total = alpha * sum(others, start=first)
        # everything: the sum holds all tensors that its parts hold
        form = format_change(total, target, format, rank, device=choose_device(device), everything=True)
    opened = [*(part.opened for part in parts if part.opened is not None), target]
    sources = [Summand(part.record, share) for share, part in zip(shares, parts, strict=True)]
    typed = target.folder is not None and not any(isinstance(name, TaskVector) for name in named)
    record = make_change_record(
        "apply",
        sources,
        target,
        form,
        alpha=alpha,
        started=started,
        seconds=sum(watch.seconds.values()),
        command=[*_command(named, sources, target, alpha, form), *allowing(opened)] if typed else None,
        notices=[
            *origin_notices(opened),
            *(one for part in parts for one in (*part.other_base(target), *tensor_notices(part.vector.overlap))),
        ],
    )
    return ChangeResult(total, target, form, record)


@dataclass(frozen=True)
class _Part:
    """One summand, and what is known about the model that it was made for."""

    vector: TaskVector
    record: ModelRecord
    named_base: str | None = None
    """Name of the base in an adapter's configuration."""
    opened: Adapter | None = None

    def other_base(self, target: Model) -> list[str]:
        """Return a notice if it is known to be made for other weights."""
        meant = self.vector.about.get("base_sha256")
        if SEVERAL in self.vector.about:
            other = True
        elif meant is not None:
            other = bool(target.sha256) and meant != target.sha256
        else:
            other = is_hub_id(self.named_base or "") and target.commit is not None and self.named_base != target.name
        replaces = "; what it holds whole replaces the model's own" if self.record.kind == "adapter" else ""
        notice = f"{self.record.id} was made for other weights than those of {target.name}{replaces}."
        return [notice] if other else []


def _open_all(
    named: Sequence[VectorReference], to: ModelReference | None, hub: Hub, allow_pickle: bool
) -> tuple[Model, list[_Part]]:
    """Open the model, by default the one that the first vector was made for, and all summands."""
    target = None if to is None or not named else _open_target(to, named[0], hub, allow_pickle)
    parts: list[_Part] = []
    for reference in named:
        part = _open_part(reference, target, hub, allow_pickle)
        if target is None:
            try:
                target = part.vector.base_model(None, hub, allow_pickle)
            except _NO_BASE as error:
                raise type(error)(error.cause, "name the model to change with --to") from error
        elif to is None and part.other_base(target):
            raise BaseMismatchError(
                f"'{part.record.id}' was made for another model than '{parts[0].record.id}'",
                "name the model to change with --to",
            )
        parts.append(part)
    if target is None:
        raise UsageError("no task vector was given", "name at least one")
    return target, parts


def _open_target(to: ModelReference, first: VectorReference, hub: Hub, allow_pickle: bool) -> Model:
    """Open the model, in the first summand's layout if it has two."""
    place = locate(first, "the task vector", hub) if isinstance(first, str | Path) else None
    library = "transformers"
    if place is not None and is_adapter(place.sizes):
        library = Adapter.open(place, allow_pickle).library
    elif isinstance(first, TaskVector):
        library = str(first.about.get("library", library))
    return Model.open(to, "the model", library, hub, allow_pickle).fetched()


def _command(
    named: Sequence[VectorReference], parts: Sequence[Summand], target: Model, alpha: float, form: WrittenChange
) -> list[str]:
    """Return the command line that does the same, with Hub ids as they were given and names of folders."""
    typed = [str(name) if part.model.commit else part.model.id for name, part in zip(named, parts, strict=True)]
    words = [*map(typed_path, typed), "--to", typed_reference(target)]
    if any(part.weight != 1.0 for part in parts):
        words += ["--weights", ",".join(f"{part.weight!r}" for part in parts)]
    words += ["--alpha", f"{alpha!r}"] if alpha != 1.0 else []
    words += ["--format", form.format] if form.format != "full" else []
    return [*words, "--rank", str(form.rank)] if form.rank is not None else words


def _numbers(vectors: Sequence[Any], weights: Sequence[Any], alpha: Any) -> tuple[list[float], float]:
    """Return one weight for each vector, and alpha; refuse what is no finite number."""
    if len(vectors) != len(weights):
        raise UsageError(
            f"there are {len(vectors)} task vectors and {len(weights)} weights", "give one weight for each"
        )
    numbers = []
    for value in (*weights, alpha):
        number = finite_number(value)
        if number is None:
            raise UsageError(f"a weight or alpha is {value!r}", "use finite numbers")
        numbers.append(number)
    return numbers[:-1], numbers[-1]


def _open_part(reference: VectorReference, target: Model | None, hub: Hub, allow_pickle: bool) -> _Part:
    """Open an adapter over the model to change, or a task vector."""
    if isinstance(reference, TaskVector):
        return _Part(reference, ModelRecord("a task vector", kind="delta"))
    if not isinstance(reference, str | Path):
        raise UsageError(
            f"a loaded {type(reference).__name__} is not a task vector", "name an adapter or a task vector"
        )
    place = locate(reference, "the task vector", hub)
    if is_adapter(place.sizes):
        try:
            adapter = Adapter.open(place, allow_pickle).fetched()
            base = target or Model.open(find_base(place, hub), "the base", adapter.library, hub, allow_pickle).fetched()
            vector = TaskVector.over(adapter, base)
            vector.about |= recorded_base(place)
            return _Part(vector, source_record(adapter, None), adapter.origin.adapter_base or None, adapter)
        except _NO_BASE as error:
            raise type(error)(error.cause, "name the model that it was trained on with --to") from error
    if DELTA_FILE not in place.sizes:
        refuse_foreign(place)
        raise RepoError(
            f"'{place.name}' is neither an adapter nor a task vector",
            "take a full model's change first: 'hf-bico extract MODEL --base BASE -o FOLDER'",
        )
    place.fetch([DELTA_FILE])
    record = ModelRecord(place.name, place.commit, sha256_of([place.folder / DELTA_FILE]), kind="delta")
    return _Part(TaskVector.load(place.folder / DELTA_FILE), record)


def _placed(vector: TaskVector, target: Model) -> TaskVector:
    """Rename a vector to the target's tensors, which exist in the same shapes: from here on it is over the target."""
    shapes = target.checkpoint.shapes
    places = vector.places_in(shapes, f"'{target.name}'")
    for name, change in vector.changes():
        if tuple(change.shape) != tuple(shapes[places[name]]):
            raise BaseMismatchError(
                f"'{name}' is {tuple(change.shape)} in the task vector and {tuple(shapes[places[name]])} in "
                f"'{target.name}'",
                "apply the task vector to the model that it was made for",
            )
    about = {key: value for key, value in vector.about.items() if key != SEVERAL and not key.startswith("base")}
    about |= {"base": target.name, "library": target.family.library}
    about |= {} if target.commit is None else {"base_commit": target.commit}
    return TaskVector(vector.renamed(places), vector.overlap, about, target)


@translate_errors()
def extract(
    fine_tuned: ModelReference,
    base: ModelReference | None = None,
    *,
    rank: int | float | None = None,
    everything: bool = False,
    device: str = "auto",
    token: str | None = None,
    allow_pickle: bool = False,
    progress: ShownProgress = None,
) -> ChangeResult:
    """Turn a fine-tuned model's change of its base into a PEFT adapter.

    `rank` is a whole number, or a share of each layer's energy such as 0.95; None is exact. `everything` also holds
    tensors that are not of linear layers. The base may be left out if the fine-tuned model's card names it.

    >>> hf_bico.extract("user/vit-b16-eurosat", rank=16).save("vit-b16-eurosat-lora")  # doctest: +SKIP
    """
    require_rank(rank)
    started, watch, hub = datetime.now(UTC), Stopwatch(callback_of(progress)), Hub(token)
    with watch("download"):
        source, start = _source_and_base(fine_tuned, base, hub, allow_pickle)
    with watch("read"):
        vector = TaskVector.over(source, start)
        if not len(vector):
            raise EmptyTaskVectorError(
                "the fine-tuned model does not differ from its base", "check that --base is not the model itself"
            )
        changed = [site for site in start.layout.sites if changed_part(vector, site.weight) is not None]
        doubt = implausible(vector, changed, start.checkpoint)
    with watch("fit"):
        form = format_change(vector, start, "adapter", rank, device=choose_device(device), everything=everything)
    command: list[str] | None = None
    if source.folder is not None and start.folder is not None:
        command = [typed_reference(source), "--base", typed_reference(start)]
        command += ["--rank", str(rank)] if rank is not None else []
        command += ["--everything"] if everything else []
        command += allowing((source, start))
    notices = origin_notices((source, start))
    notices += [] if doubt is None else [f"Is {start.name} its base? {doubt.cause[:1].upper()}{doubt.cause[1:]}."]
    notices += difference_notices(config_differences(source, start), source.name) if isinstance(source, Model) else []
    record = make_change_record(
        "extract",
        [Summand(source_record(source, start))],
        start,
        form,
        started=started,
        seconds=sum(watch.seconds.values()),
        command=command,
        notices=[*notices, *tensor_notices(vector.overlap)],
    )
    return ChangeResult(vector, start, form, record)


def _source_and_base(
    fine_tuned: ModelReference, base: ModelReference | None, hub: Hub, allow_pickle: bool
) -> tuple[Model | Adapter, Model]:
    """Open and download the fine-tuned model or adapter, and its base."""
    tuned = locate(fine_tuned, "the fine-tuned model", hub) if isinstance(fine_tuned, str | Path) else fine_tuned
    source, opened = open_tuned_and_base(tuned, base_of_source(tuned, hub) if base is None else base, hub, allow_pickle)
    if isinstance(source, Model):
        require_same_family(source, opened)
    return source.fetched(beside=False), opened.fetched()
