"""Evaluates models: one model on a data set (`evaluate_model`), or several on the same held-out samples.

Measures by a model's own objective or by a linear probe; does not know how a change was made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch

from hf_bico.alignment.objectives.base import Classifier, Head, OwnHead
from hf_bico.alignment.objectives.classification import ClassHead
from hf_bico.arguments import EvaluateOptions, settings_of, takes
from hf_bico.data.dataset import DataSet, Samples
from hf_bico.data.draw import calibration_samples, evaluation_split, open_data
from hf_bico.data.notices import class_notices
from hf_bico.errors import (
    BaseMismatchError,
    DataNotFoundError,
    DataUnknownError,
    LineageError,
    SampleCountError,
    UsageError,
)
from hf_bico.hub.client import Hub, RepoFiles, locate
from hf_bico.hub.references import hub_reference
from hf_bico.hub.repo_metadata import data_of, read_metadata
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.checkpoints import DELTA_FILE, is_adapter
from hf_bico.models.configurations import config_differences, other_function
from hf_bico.models.deltas import Deltas
from hf_bico.models.families.live import LiveModel
from hf_bico.models.families.text_models import TextModel
from hf_bico.models.inference import (
    MOST_KEPT,
    Batched,
    CachedSamples,
    PreparedSamples,
    ReportedSamples,
    probe_accuracy,
    probe_predictions,
)
from hf_bico.models.metrics import ACCURACY, Metric
from hf_bico.models.model import Model, ModelReference
from hf_bico.models.tokenization import require_known, unknown_notices
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.heads import class_order_notice, own_head
from hf_bico.porting.planner import with_model_defaults
from hf_bico.porting.reading import require_prepared
from hf_bico.porting.special_tokens import LANGUAGE, require_no_chats, require_unneeded, special_token_notices
from hf_bico.porting.task_vector import TaskVector
from hf_bico.reports.record import EvaluationRecord, Record, read_any
from hf_bico.runtime.environment import (
    choose_device,
    choose_dtype,
    enough_memory,
    exact_float32,
    keep_bfloat16_off_onednn,
)
from hf_bico.runtime.library_errors import translate_errors
from hf_bico.runtime.output import RECORD_FILE
from hf_bico.settings import DEFAULT_MEASURED, DEFAULT_SAMPLES, PROBE, Settings
from hf_bico.utils.progress import ShownProgress, callback_of


@dataclass(frozen=True)
class Evaluation(EvaluationRecord):
    """The measurement of one model, and what its reader should know."""

    notices: tuple[str, ...] = ()


@torch.inference_mode(False)
@enough_memory()
@exact_float32()
@translate_errors()
@takes("split", "data", "objective", "evaluation")
def evaluate_model(
    model: ModelReference,
    data: Any = None,
    *,
    base: ModelReference | None = None,
    eval_samples: int | None = None,
    n: int | None = None,
    probe: int | None = None,
    metric: str | None = None,
    trust_remote_code: bool = False,
    token: str | None = None,
    allow_pickle: bool = False,
    progress: ShownProgress = None,
    **options: Unpack[EvaluateOptions],
) -> Evaluation:
    """Evaluate a model on a split of a data set; `base` completes a task vector or a part of a model.

    A port, or a model whose card names its data set, is evaluated on that unless `data` is given, but never on the
    samples that it was calibrated on.

    The split is the requested one, else test, else validation, else train; all of it unless `eval_samples`, or `n`
    for short, is given: then the samples that a port with the same number and seed is evaluated on, but that it
    leaves out those that it is calibrated on. A CLIP is evaluated zero-shot, a classifier by its own head, a language
    model by its loss; or any model by a linear probe fitted to `probe` samples of the training split (100 if only
    `evaluation="probe"` is given). No sample is used for both. `progress` is as in `port`.

    Of predicted classes, `metric` names a metric of the `evaluate` library instead of the accuracy: a local script, or
    with `trust_remote_code` one on the Hub.

    >>> hf_bico.evaluate_model("user/vit-b16-plus-eurosat", progress=True).value  # doctest: +SKIP
    """
    settings = settings_of(evaluate_model, {**options, "n": _measured_on(eval_samples, n)})
    probe = _require_probe(probe, settings)
    if trust_remote_code and metric is None:
        raise UsageError("--trust-remote-code works only with --metric", "name a metric, or leave it out")
    scored = Metric.named(metric or ACCURACY, trust_remote_code)
    hub = Hub(token)
    place = locate(model, "the model", hub) if isinstance(model, str | Path) else None
    record = None if place is None else _port_record(place)
    if record is not None and record.data is not None and record.data.special_tokens is False:
        settings = replace(settings, special_tokens=False)
    data = _known_data(place, record) if data is None else data
    whole, vector, name, holder = _open(place or model, base, hub, allow_pickle)
    require_unneeded(settings, [whole.layout])
    settings = with_model_defaults(settings, whole.layout, whole.layout) if probe is None else settings
    known_names = holder.origin.class_names or whole.origin.class_names or None
    open_with = partial(open_data, data, hub=hub, known_names=known_names, reads=whole.layout.reads)
    training: Samples | None = None
    if probe is None:
        measured = open_with(settings, measure=True)
        probe = DEFAULT_SAMPLES if settings.evaluation == PROBE and measured.labelled else None
    if probe is None:
        if settings.objective == "classification" and not measured.labelled:
            raise DataNotFoundError(f"'{measured.name}' has no labels", "use data with labels (--label-column)")
        split = evaluation_split(measured, settings.split)
        used = _calibrated_on(record, measured, split)
        unused = [index for index in _order(measured, split, settings) if index not in used]
        count = len(unused) if settings.n is None else settings.n
        samples = measured.samples(split, measured.usable_rows(split, unused, count))
    else:
        measured, split, training, samples = _probe_samples(open_with, settings, probe)
    if settings.memory is not None or settings.device_map is not None:
        raise UsageError("memory and device_map are of ports", "leave them out, or use a smaller batch_size")
    live = whole.load(choose_device(settings.device), choose_dtype(settings.dtype))
    keep_bfloat16_off_onednn(live.module)
    live.max_length, live.special_tokens = settings.max_length, settings.special_tokens
    changes = None if vector is None else vector.renamed(whole.layout.own_names)
    require_prepared([live], split, samples)
    notices = class_notices(measured, samples)
    result = partial(Evaluation, name, measured.name, split, len(samples))
    reported = ReportedSamples(samples, partial(callback_of(progress), "evaluate"))
    if scored.averages:
        notices.append(f"The metric '{scored.name}' is the mean over the classes (average='macro').")
    with changes.applied_to(live.module) if changes is not None else nullcontext():
        notices += _reading_notices(name, live, samples, settings)
        if training is not None:
            value = scored(probe_predictions(live, training, reported, settings.batch), samples.labels)
            return result(scored.name, value, PROBE, trained_on=len(training), notices=tuple(notices))
        head = own_head(whole, holder, live, measured, settings)
        if settings.objective == "classification":
            notices += class_order_notice(holder.origin.head_names, measured.class_names, measured.sorts_classes)
        if metric is None:
            return result(head.metric, head.measure(live, reported, settings.batch), notices=tuple(notices))
        if not isinstance(head, Classifier):
            cause = f"--metric scores predicted classes, and this model is measured by its {head.metric}"
            raise UsageError(cause, "leave --metric out")
        value = scored(head.predictions(live, reported, settings.batch), samples.labels)
        return result(scored.name, value, notices=tuple(notices))


def _reading_notices(name: str, live: LiveModel, samples: Samples, settings: Settings) -> list[str]:
    """Refuse texts that a model's tokenizer does not know; return notices about how it reads them."""
    if not isinstance(live, TextModel) or not len(samples):
        return []
    items, _ = next(samples.batches(DEFAULT_MEASURED))
    require_no_chats(settings, items)
    notices = unknown_notices(require_known(live.tokenizer, items, name), name)
    if settings.objective != LANGUAGE:
        return notices
    return [*notices, *special_token_notices([(name, live)], items, settings.special_tokens)]


def _measured_on(eval_samples: int | None, n: int | None) -> int | None:
    """Return the number of samples to evaluate on, which has two names; None for all."""
    if eval_samples is None:
        return n
    if n not in (None, eval_samples):
        raise UsageError(f"eval_samples is {eval_samples} and n is {n}, which is the same here", "give one of the two")
    return Settings(eval_samples=eval_samples).eval_samples


def _require_probe(probe: Any, settings: Settings) -> int | None:
    """Return the number of samples that the probe is fitted to; None without a probe."""
    if settings.evaluation == "both":
        raise UsageError("evaluation is 'both'", "choose one, zero-shot or probe, and measure twice")
    if probe is None:
        return DEFAULT_SAMPLES if settings.evaluation == "probe" else None
    if type(probe) is not int or probe < 1:
        raise UsageError(f"--probe is {probe}", "use a whole number of at least 1")
    return probe


def _order(data: DataSet, split: str, settings: Settings) -> list[int]:
    order = data.order(split, settings.seed)
    if not order:
        raise DataNotFoundError(f"split '{split}' of '{data.name}' has no labels", "choose another with --split")
    return order


def _probe_samples(
    open_with: Callable[..., DataSet], settings: Settings, probe: int
) -> tuple[DataSet, str, Samples, Samples]:
    """Return data set and split to evaluate on, the samples to fit the probe to, and those to evaluate on.

    Of a large data set only some rows are read, different ones for each purpose, so it is opened for each.
    """
    # a probe has no text side: classes that are numbers need no names
    settings = replace(settings, objective=probe_accuracy, per_class=None, sampling="random", labels="dataset")

    def open_split(n: int | None) -> tuple[DataSet, str, list[int]]:
        measured = open_with(replace(settings, n=n), measure=True)
        split = evaluation_split(measured, settings.split)
        return measured, split, _order(measured, split, settings)

    measured, split, order = open_split(settings.n)
    if split != "train":
        of_training = replace(settings, n=probe, split=None, evaluate=False)
        try:
            data = open_with(of_training)
            training = calibration_samples(data, "train", of_training) if "train" in data.splits else None
        except SampleCountError as error:
            raise SampleCountError(error.cause, error.remedy.replace("-n", "--probe")) from error
        if training is not None:
            return measured, split, training, measured.samples(split, order[: settings.n])
    if settings.n is not None:
        measured, split, order = open_split(probe + settings.n)
    if len(order) <= probe:
        raise SampleCountError(
            f"--probe is {probe} and split '{split}' of '{measured.name}', to be measured on too, has {len(order)} "
            "samples with labels",
            f"use --probe {len(order) - 1} or less" if len(order) > 1 else "use a data set with more samples",
        )
    rest = order[probe:][: settings.n]
    return measured, split, measured.samples(split, order[:probe]), measured.samples(split, rest)


def _port_record(place: RepoFiles) -> Record | None:
    """Read the record of a model that is a port."""
    if RECORD_FILE not in place.sizes:
        return None
    place.fetch([RECORD_FILE])
    record = read_any(place.folder)
    return record if isinstance(record, Record) else None


def _known_data(place: RepoFiles | None, record: Record | None) -> Any:
    """Return the data set that a port was calibrated on, or that a model's card names."""
    if place is None:
        raise DataUnknownError("no data was given", "name a data set")
    if record is not None and record.data is not None:
        return place.recorded(record.data.id, record.data.commit)
    named = data_of(read_metadata(place.folder, place.name), place.name)
    if isinstance(named, LineageError):
        cause = named.cause.replace("no calibration data was given", "no data to measure on was given")
        raise type(named)(cause, named.remedy)
    return hub_reference(named)


def _calibrated_on(record: Record | None, data: DataSet, split: str) -> set[int]:
    """Return the rows of a split that a port was calibrated on; unknown for parts of a large data set."""
    if record is None or record.data is None or split in data.parts:
        return set()
    used = [some for some in (record.data, record.data.unlabelled) if some is not None and not some.parts]
    return {index for some in used if (some.id, some.split) == (data.name, split) for index in some.indices}


def _open(
    model: ModelReference | RepoFiles, base: ModelReference | None, hub: Hub, allow_pickle: bool
) -> tuple[Model, TaskVector | None, str, Model | Adapter]:
    """Download, and return the model to load, what to add to it, its name, and the repo that may store a head."""
    if isinstance(model, RepoFiles) and DELTA_FILE in model.sizes:
        model.fetch([DELTA_FILE])
        vector = TaskVector.load(model.folder / DELTA_FILE)
        whole = vector.base_model(base, hub, allow_pickle)
        return whole, vector, model.name, whole
    if isinstance(model, RepoFiles) and is_adapter(model.sizes):
        vector = TaskVector.from_adapter(model, base, token=hub.token, allow_pickle=allow_pickle)
        whole = vector.base_model()
        vector.require_made_for(whole)
        return whole, vector, model.name, Adapter.open(model, allow_pickle).fetched()
    if isinstance(model, Mapping) and base is not None:
        whole = Model.open(base, "the base", hub=hub, allow_pickle=allow_pickle).fetched()
        tuned = Model.of_state_dict(model, whole).fetched()
    else:
        tuned = Model.open(model, "the model", "transformers", hub, allow_pickle).fetched()
        if base is None:
            return tuned, None, tuned.name, tuned
        whole = Model.open(base, "the base", tuned.family.library, hub, allow_pickle).fetched()
    vector = TaskVector.from_models(tuned.checkpoint, whole.checkpoint)
    mismatch = other_function(config_differences(tuned, whole), tuned.name, whole.name)
    if mismatch is not None:
        raise BaseMismatchError(mismatch.cause, "name the model that was fine-tuned, or measure it without a base")
    return whole, vector, tuned.name, tuned


@dataclass(frozen=True)
class HeldOutEvaluation:
    """Evaluates several models on the same held-out samples; a linear probe is fitted to `probed_on`."""

    data: str
    split: str
    samples: Batched
    probed_on: Batched
    evaluation: str
    """ "zero-shot", for the heads' own metric, "probe" or "both", as in the settings."""
    batch_size: int
    report: Callable[[int, int], None] = lambda taken, of: None
    """Called with the samples that a model was measured on so far, and their number."""

    def measure(self, name: str, model: LiveModel, head: Head) -> list[EvaluationRecord]:
        """Evaluate a model by every requested protocol."""
        record, records = partial(EvaluationRecord, name, self.data, self.split, len(self.samples)), []
        samples = ReportedSamples(self.samples, self.report)
        if self.evaluation != PROBE and not isinstance(head, OwnHead):
            records.append(record(head.metric, head.measure(model, samples, self.batch_size), per=head.per))
        if self.evaluation != "zero-shot":
            value = probe_accuracy(model, self.probed_on, samples, self.batch_size)
            records.append(record("accuracy", value, PROBE, trained_on=len(self.probed_on)))
        return records

    def read_once(self) -> HeldOutEvaluation:
        """Read the images once, unless they take too much memory."""
        return replace(self, samples=CachedSamples.of(self.samples, self.batch_size, MOST_KEPT))

    def prepared_by(self, model: LiveModel) -> HeldOutEvaluation:
        """Preprocess the images once, for this model and those that prepare alike, unless they take too much memory."""
        return replace(self, samples=PreparedSamples.if_small(model, self.samples, self.batch_size))

    def measure_target(
        self, name: str, calibration: Calibration, changes: Deltas, head: Head | None = None
    ) -> list[EvaluationRecord]:
        """Evaluate the target with these changes, and with this head if it is another."""
        models = calibration.models
        with models.with_changes(changes):
            return self.measure(name, models.target, head or calibration.heads.target)

    def measure_source(self, name: str, calibration: Calibration) -> list[EvaluationRecord]:
        """Evaluate the fine-tuned source."""
        head = calibration.heads.tuned
        fitted_to = head.fitted_to if isinstance(head, ClassHead) else None
        with calibration.models.tuned_source():
            measured = self.measure(name, calibration.models.source, head)
        # without a head of its own, the source is measured with one that was fitted
        return [entry if entry.protocol else replace(entry, trained_on=fitted_to) for entry in measured]

    def measure_base(self, name: str, calibration: Calibration) -> list[EvaluationRecord]:
        """Evaluate the source before it was fine-tuned."""
        return self.measure(name, calibration.models.source, calibration.heads.source)
