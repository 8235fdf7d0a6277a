"""Applies a method to the target: the change of its weights, a report of energies, and a forecast.

Does not evaluate. The forecast needs the calibration pass only: to first order, the calibration loss changes by the sum
over sites of <gradient, tau_B>. MLP sites are left out, because they hold most weights and add little. The gain is
bounded by the target's error, and energy in directions that calibration did not see counts as lost.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from torch import Tensor

from hf_bico.alignment.methods.base import Carrier, Method, SiteDelta, SiteLossChange, Trainer, TransportedSite
from hf_bico.alignment.methods.training import Trained, TrainingTask
from hf_bico.alignment.objectives.base import Head, LossBatch
from hf_bico.alignment.readout import Readout
from hf_bico.alignment.statistics import TaskLossTotals
from hf_bico.alignment.transport import assemble_changes, changed_part
from hf_bico.data.dataset import Samples
from hf_bico.errors import UnsuitableMethodError
from hf_bico.models.checkpoints import digest_of
from hf_bico.models.deltas import Deltas
from hf_bico.models.families.base import TEXT_TOWER
from hf_bico.models.families.live import ImageModel, LiveModel
from hf_bico.models.layout import SitePair, Slot
from hf_bico.models.low_rank import energy
from hf_bico.porting.calibration import Calibration
from hf_bico.reports.record import ForecastRecord, LeftRecord, SiteRecord
from hf_bico.reports.results import Report

DOUBTFUL = 0.1
"""A port with an outlook below this is called doubtful."""
FINGERPRINTED = 64
"""Number of samples whose content identifies a training task; rows and labels count for all samples."""


@dataclass(frozen=True)
class TransferResult:
    """`changes` of the target's tensors, as its files name them; with a readout, `unread` are those without it."""

    changes: Deltas
    report: Report
    trained: Trained | None = None
    readout: Readout | None = None
    unread: Deltas | None = None
    forecast: ForecastRecord | None = None


UNTOUCHED = TransferResult(Deltas({}), Report((), ()))
"""The target without any change."""


def transfer(method: Method, calibration: Calibration, whole_split: Samples | None = None) -> TransferResult:
    """Carry the task vector, or train the target, on `whole_split` if the method trains on all of it."""
    models = calibration.models
    if isinstance(method, Trainer):
        result = _train(method, calibration, whole_split)
    elif isinstance(method, Carrier):
        carried = calibration.carry(method)
        report = energy_report(models.vector, carried, models.pairs, models.planned.left)
        changes = models.gather_changes(carried, calibration.settings.alpha)
        result = TransferResult(changes, report, forecast=_forecast(carried, report, calibration))
    else:
        raise TypeError(f"{type(method).__name__} neither carries nor trains")
    return with_readout(result, calibration) if calibration.settings.readout else result


def with_readout(result: TransferResult, calibration: Calibration) -> TransferResult:
    """Correct the final projection towards the fine-tuned source's predictions."""
    target = calibration.models.lineage.target
    site = target.layout.site("proj")
    readout = calibration.readout(result.changes)
    correction = assemble_changes(
        {site.name: TransportedSite(SiteDelta(readout.change))}, [SitePair(site, site)], target.checkpoint, alpha=1.0
    )
    changes = result.changes + correction if readout.accepted else result.changes
    return replace(result, changes=changes, readout=readout, unread=result.changes)


def energy_report(
    vector: Deltas, carried: Mapping[str, TransportedSite], pairs: Iterable[SitePair], left: Mapping[str, str]
) -> Report:
    """Report the task vector's energy: by site, how much of it lies in unseen directions, and what stayed behind."""
    energies = {name: vector.energy(name) for name in vector}
    total = sum(energies.values()) or 1.0  # an empty change
    sites = []
    for pair in pairs:
        result = carried[pair.target.name]
        changed = [slot for slot in pair.source.slots if slot.tensor in vector]
        r_in, r_out = result.input_map, result.output_map
        sites.append(
            SiteRecord(
                name=pair.target.name,
                role=pair.target.label,
                source=pair.source.name,
                shape_source=pair.source.shape,
                shape_target=pair.target.shape,
                energy=sum(energies[s.tensor] if s.rows is None else _energy(vector, s) for s in changed) / total,
                rank_in=None if r_in is None else r_in.rank,
                rank_out=None if r_out is None else r_out.rank,
                score_in=None if r_in is None else r_in.score,
                score_out=None if r_out is None else r_out.score,
                unseen=result.unseen,
            )
        )
    stayed = [LeftRecord(name, reason, energies[name] / total) for name, reason in left.items() if name in energies]
    return Report(tuple(sites), tuple(stayed))


def _energy(vector: Deltas, slot: Slot) -> float:
    change = changed_part(vector, slot)
    return 0.0 if change is None else energy(change)


def forecast(
    sites: Iterable[SiteLossChange], task: TaskLossTotals, samples: int, unseen: float | None, alpha: float
) -> ForecastRecord:
    """Forecast whether changes, scaled by `alpha`, help a target with this loss on the calibration samples.

    Losses are per answer, which is a sample or a token; per sample if answers are neither right nor wrong.
    """
    changes = list(sites)
    answers = task.answers or samples
    total = sum(site.change for site in changes)
    change = alpha * total / answers
    lengths = sqrt(sum(site.gradient for site in changes) * sum(site.delta for site in changes))
    agreement = -total / lengths if lengths else 0.0
    headroom = task.wrong / task.answers if task.answers else None
    gain = -change if headroom is None else min(-change, headroom)
    outlook = gain * (1 - (unseen or 0.0)) if gain > 0 else gain
    return ForecastRecord(
        outlook=outlook,
        helps=outlook >= DOUBTFUL,
        loss=None if task.loss is None else task.loss / answers,
        first_order=change,
        agreement=agreement if alpha >= 0 else -agreement,
        headroom=headroom,
        unseen=unseen,
    )


def _forecast(
    carried: Mapping[str, TransportedSite], report: Report, calibration: Calibration
) -> ForecastRecord | None:
    """Forecast if the calibration pass summed gradients; samples of a single class say nothing."""
    settings = calibration.settings
    descents = [one.descent for one in carried.values() if one.descent is not None]
    if calibration.task is None or not descents:
        return None
    labels = set(calibration.drawn_samples.labels)
    if settings.objective in ("zero-shot", "contrastive", "text-to-text") and len(labels) == 1 and labels != {-1}:
        return None
    return forecast(descents, calibration.task, len(calibration.samples), report.unseen_energy, settings.alpha)


def _train(method: Trainer, calibration: Calibration, whole_split: Samples | None) -> TransferResult:
    models, target = calibration.models, calibration.models.lineage.target
    samples = whole_split if method.whole_split else calibration.drawn_samples
    if not samples:
        raise UnsuitableMethodError(
            f"{method.settings.method} trains on the data set's own labels, and they are not there or not to be used",
            "use data with labels, or --method fewshot",
        )
    task = training_task(models.target, calibration.heads.target, samples)
    with models.target.quiet(), calibration.watch("train"):
        trained = method.train(task, calibration.watch.progress)
    stored = {own: file for file, own in target.layout.own_names.items()}
    changes = {stored.get(name, name): change.cpu() for name, change in trained.changes.items()}
    return TransferResult(calibration.settings.alpha * Deltas(changes), Report((), ()), trained)


def training_task(model: LiveModel, head: Head, samples: Samples) -> TrainingTask:
    """Train all tensors of a model, except a CLIP's text tower, on the head's loss; without dropout."""

    def loss(numbers: Sequence[int]) -> Tensor:
        [(items, labels)] = samples.select(numbers).batches(len(numbers))
        value = head.losses(model, LossBatch(items, labels)).task
        if value is None:
            raise ValueError("samples without labels give no loss")
        return value

    def accuracy(numbers: Sequence[int]) -> float:
        return head.measure(model, samples.select(numbers), len(numbers))

    layout = model.layout
    texts = {name for name, reason in layout.others.items() if reason == TEXT_TOWER}
    texts |= {slot.tensor for site in layout.sites if site.tower for slot in site.slots}
    parameters = {name: parameter for name, parameter in model.module.named_parameters() if name not in texts}
    first = samples.first(FINGERPRINTED).batches(FINGERPRINTED)
    identity = {
        "weights": digest_of(parameters.values()),
        "classes": digest_of(head.tensors),
        "samples": digest_of(_model_inputs(model, items) for items, _ in first),
        "rows": hashlib.blake2b(repr((samples.indices, samples.labels)).encode(), digest_size=16).hexdigest(),
    }
    measured = accuracy if head.metric == "accuracy" else None
    return TrainingTask(parameters, loss, measured, len(samples), json.dumps(identity))


def _model_inputs(model: LiveModel, samples: Sequence[Any]) -> Tensor:
    text = model.text_rows(samples)
    if text is not None:
        return text.ids
    return model.pixels(samples) if isinstance(model, ImageModel) else model.features(samples)
