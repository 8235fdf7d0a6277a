"""Zero-shot accuracy: of a live model on samples, and of a model and a data set by reference."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from hf_bico.checkpoints import DELTA_FILE, is_adapter
from hf_bico.data.calibration import Samples, evaluation_split, open_data
from hf_bico.environment import choose_device, choose_dtype, halving_batches
from hf_bico.errors import DataNotFoundError, DataUnknownError, LineageError
from hf_bico.families import LiveModel
from hf_bico.hub.client import Hub
from hf_bico.hub.references import HubReference, hub_reference
from hf_bico.hub.repos import Place, locate
from hf_bico.lineage import data_of, read_origin
from hf_bico.models import Model, ModelReference
from hf_bico.objectives import ZeroShotHead, zero_shot_head
from hf_bico.record import RECORD_FILE, EvaluationRecord, Record, read_any
from hf_bico.settings import Settings
from hf_bico.statistics import exact_float32
from hf_bico.task_vector import TaskVector


def zero_shot_accuracy(model: LiveModel, head: ZeroShotHead, samples: Samples, batch_size: int) -> float:
    """The share of samples whose most likely class is their label."""

    def count_right(size: int) -> int:
        right = 0
        for images, labels in samples.batches(size):
            logits = head.logits(model.image_features(model.pixels(images)))
            right += int((logits.argmax(-1).cpu() == torch.tensor(labels)).sum())
        return right

    with torch.no_grad(), model.quiet():
        return halving_batches(batch_size, count_right) / len(samples)


@torch.inference_mode(False)
@exact_float32()
def evaluate_model(
    model: ModelReference,
    data: Any = None,
    *,
    base: ModelReference | None = None,
    n: int | None = None,
    token: str | None = None,
    allow_pickle: bool = False,
    **options: Any,
) -> EvaluationRecord:
    """The accuracy of a model on a split of a data set; `base` completes a task vector or a part of a model.

    A port, or a model whose card names its data set, is measured on that unless `data` is given.

    The split is the one asked for, else test, else validation, else train; all of it unless `n` is given.
    """
    settings = Settings.of({"n": n, **options})
    hub = Hub(token)
    data = _known_data(model, hub) if data is None else data
    whole, vector, name = _open(model, base, hub, allow_pickle)
    samples_from = open_data(data, settings, hub, known_names=whole.origin.class_names or None, measure=True)
    split = evaluation_split(samples_from, settings.split)
    order = samples_from.order(split, settings.seed)
    if not order:
        raise DataNotFoundError(
            f"split '{split}' of '{samples_from.name}' has no labels", "choose another with --split"
        )
    samples = samples_from.samples(split, order[: settings.n])
    live = whole.load(choose_device(settings.device), choose_dtype(settings.dtype))
    with vector.applied_to(live.module) if vector is not None else nullcontext():
        head = zero_shot_head(live, samples_from.class_names, settings.templates)
        value = zero_shot_accuracy(live, head, samples, settings.batch_size)
    return EvaluationRecord(name, samples_from.name, split, len(samples), "accuracy", value)


def _known_data(model: ModelReference, hub: Hub) -> Any:
    """The data set that a port was calibrated for, or that a model's card names."""
    if not isinstance(model, str | Path):
        raise DataUnknownError("no data was given", "name a data set")
    place = locate(model, "the model", hub)
    if RECORD_FILE in place.sizes:
        place.fetch([RECORD_FILE])
        record = read_any(place.folder)
        data = record.data if isinstance(record, Record) else None
        if data is not None and data.commit is not None:
            return HubReference(data.id, data.commit)
    named = data_of(read_origin(place.folder, place.name), place.name)
    if isinstance(named, LineageError):
        cause = named.cause.replace("no calibration data was given", "no data to measure on was given")
        raise type(named)(cause, named.remedy)
    return hub_reference(named)


def _open(
    model: ModelReference, base: ModelReference | None, hub: Hub, allow_pickle: bool
) -> tuple[Model, TaskVector | None, str]:
    """The whole model to load, what to add to it, and the name of the result; all of it on this machine."""

    def opened(reference: ModelReference | Place, what: str, library: str = "transformers") -> Model:
        return Model.open(reference, what, library, hub, allow_pickle).fetched()

    place = locate(model, "the model", hub) if isinstance(model, str | Path) else None
    if place is not None and DELTA_FILE in place.sizes:
        place.fetch([DELTA_FILE])
        vector = TaskVector.load(place.folder / DELTA_FILE)
        return vector.base_model(base, hub, allow_pickle), vector, place.name
    if place is not None and is_adapter(place.sizes):
        vector = TaskVector.from_adapter(place, base, token=hub.token, allow_pickle=allow_pickle)
        whole = vector.base_model()
        vector.require_made_for(whole)
        return whole, vector, place.name
    tuned = opened(place or model, "the model")
    if base is None:
        return tuned, None, tuned.name
    whole = opened(base, "the base", tuned.family.library)
    return whole, TaskVector.from_models(tuned.checkpoint, whole.checkpoint), tuned.name
