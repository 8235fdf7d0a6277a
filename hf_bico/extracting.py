"""Extract: a fine-tuned model's change of its base, as a PEFT adapter."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from hf_bico.alignment.transport import changed_part
from hf_bico.errors import EmptyTaskVectorError
from hf_bico.forms import make_form
from hf_bico.hub.client import Hub, locate
from hf_bico.making import Course, Making, make_record
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.layout import Site
from hf_bico.models.model import Model, ModelReference, require_same_family
from hf_bico.plausibility import implausible
from hf_bico.recording import source_record, tensor_notices, typed_reference
from hf_bico.reports.record import PartOfSum
from hf_bico.resolving import base_of_source, open_source
from hf_bico.runtime.environment import Stopwatch, choose_device
from hf_bico.runtime.library_errors import last_net
from hf_bico.settings import require_rank
from hf_bico.task_vector import TaskVector
from hf_bico.utils.progress import Progress, silent


@last_net()
def extract(
    fine_tuned: ModelReference,
    base: ModelReference | None = None,
    *,
    rank: int | float | None = None,
    everything: bool = False,
    device: str = "auto",
    token: str | None = None,
    allow_pickle: bool = False,
    progress: Progress = silent,
) -> Making:
    """A fine-tuned model's change of its base as a PEFT adapter.

    `rank` is a whole number, or a share of each layer's energy such as 0.95; None is exact. `everything` holds what is
    no linear layer too. The base may be left out where the fine-tuned model's card names it.

    >>> hf_bico.extract("user/vit-b16-eurosat", rank=16).save("vit-b16-eurosat-lora")  # doctest: +SKIP
    """
    require_rank(rank)
    course, hub = Course(datetime.now(UTC), Stopwatch(progress)), Hub(token)
    watch = course.watch
    with watch("download"):
        source, start = _source_and_base(fine_tuned, base, hub, allow_pickle)
    with watch("read"):
        vector = TaskVector.over(source, start)
        if not len(vector):
            raise EmptyTaskVectorError(
                "the fine-tuned model does not differ from its base", "check that --base is not the model itself"
            )
        doubt = implausible(vector, _changed_sites(vector, start), start.checkpoint)
    with watch("fit"):
        form = make_form(vector, start, "adapter", rank, device=choose_device(device), everything=everything)
    words = [typed_reference(source), "--base", typed_reference(start)]
    words += ["--rank", str(rank)] if rank is not None else []
    words += ["--everything"] if everything else []
    known = all(model.folder is not None for model in (source, start))
    parts = [PartOfSum(source_record(source, start))]
    record = make_record("extract", parts, start, form, course, words if known else None)
    notices = [] if doubt is None else [f"Is {start.name} its base? {doubt.cause[:1].upper()}{doubt.cause[1:]}."]
    notices += [*tensor_notices(vector.overlap), *record.notices]
    return Making(vector, start, form, replace(record, notices=notices))


def _changed_sites(vector: TaskVector, base: Model) -> list[Site]:
    """Those of the base's sites whose weights the vector changes."""
    return [site for site in base.layout.sites if changed_part(vector, site.weight) is not None]


def _source_and_base(
    fine_tuned: ModelReference, base: ModelReference | None, hub: Hub, allow_pickle: bool
) -> tuple[Model | Adapter, Model]:
    """The fine-tuned model or adapter, and the model that it was made from, both on this machine."""
    place = locate(fine_tuned, "the fine-tuned model", hub) if isinstance(fine_tuned, str | Path) else None
    source = open_source(fine_tuned, place, "transformers", hub, allow_pickle)
    library = source.library if isinstance(source, Adapter) else source.family.library
    start = base_of_source(fine_tuned, place, hub) if base is None else base
    opened = Model.open(start, "the base", library, hub, allow_pickle)
    if isinstance(source, Model):
        require_same_family(source, opened)
    return source.fetched(beside=False), opened.fetched()
