"""Applies a method to the target: the change of its weights, how much of it is added, and a report of energies.

Does not evaluate. With alpha "auto" the calibration samples choose how much is added, step by step, and veto a change
that they do not speak for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_bico.alignment.methods.base import Carrier, Method, SiteDelta, Trainer, TransportedSite
from hf_bico.alignment.methods.training import Trained, TrainingTask
from hf_bico.alignment.objectives.base import Head, LossBatch
from hf_bico.alignment.readout import Readout
from hf_bico.alignment.scaling import (
    SCALES,
    SHOWN_SCALES,
    CurvePoint,
    Estimate,
    SampleScores,
    choose_scale,
    curve,
    outlook,
    passes_veto,
)
from hf_bico.alignment.transport import assemble_changes, changed_part
from hf_bico.data.dataset import Samples
from hf_bico.errors import UnsuitableMethodError
from hf_bico.models.checkpoints import digest_of
from hf_bico.models.deltas import Deltas
from hf_bico.models.families.base import TEXT_TOWER
from hf_bico.models.families.live import ImageModel, LiveModel
from hf_bico.models.layout import SitePair, Slot
from hf_bico.models.low_rank import energy
from hf_bico.models.weight_distance import WeightDistance
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.scoring import TargetScorer, make_scorer
from hf_bico.reports.record import LeftRecord, SiteRecord, SourceLeadRecord
from hf_bico.reports.results import Report
from hf_bico.settings import allowed_errors

FINGERPRINTED = 64
"""Number of samples whose content identifies a training task; rows and labels count for all samples."""


@dataclass(frozen=True)
class Scaling:
    """How the samples chose: alpha of every step, the curve that it was chosen from, and what they say of the whole.

    `gain` is the mean gain of the samples with the whole change: the outlook.
    """

    alphas: tuple[float, ...]
    curve: tuple[CurvePoint, ...]
    gain: Estimate

    @property
    def held_back(self) -> bool:
        """Whether nothing is added: no step helps clearly, or the samples do not speak for all of them together."""
        return not any(self.alphas) or not passes_veto(self.gain)


@dataclass(frozen=True)
class TransferResult:
    """`changes` of the target's tensors, as its files name them; with a readout, `unread` are those without it.

    `scaling` is there if the samples chose alpha.
    """

    changes: Deltas
    report: Report
    trained: Trained | None = None
    readout: Readout | None = None
    unread: Deltas | None = None
    scaling: Scaling | None = None

    @property
    def held_back(self) -> bool:
        return self.scaling is not None and self.scaling.held_back


UNTOUCHED = TransferResult(Deltas({}), Report((), ()))
"""The target without any change."""


def transfer(
    method: Method,
    calibration: Calibration,
    whole_split: Samples | None = None,
    alphas: Sequence[float] | None = None,
    scorer: TargetScorer | None = None,
) -> TransferResult:
    """Carry the task vector, or train the target, on `whole_split` if the method trains on all of it.

    `alphas` are those of each step, instead of what the samples would choose by the `scorer`, by default a new one.
    """
    if isinstance(method, Trainer):
        result = _train(method, calibration, whole_split)
    elif isinstance(method, Carrier):
        result = _carry(method, calibration, alphas, scorer)
    else:
        raise TypeError(f"{type(method).__name__} neither carries nor trains")
    if not calibration.settings.readout:
        return result
    with calibration.watch("readout"):
        return with_readout(result, calibration)


def _carry(
    method: Carrier, calibration: Calibration, alphas: Sequence[float] | None, scorer: TargetScorer | None
) -> TransferResult:
    models, settings = calibration.models, method.settings
    report = partial(
        energy_report, models.vector, pairs=models.pairs, left=models.planned.left, distances=models.planned.distances
    )
    if not settings.finds_alpha:
        carried = calibration.carry(method)
        return TransferResult(models.gather_changes(carried, float(settings.alpha)), report(carried))
    if alphas is not None:
        given = iter(alphas)
        carried = calibration.carry(method, lambda change, so_far: next(given))
        return TransferResult(models.gather_changes(carried, alpha=1.0), report(carried))
    errors = allowed_errors(len(calibration.drawn_samples), settings.bold)
    chooser = _StepChooser(scorer or make_scorer(calibration), errors)
    carried = calibration.carry(method, chooser.choose)
    changes = models.gather_changes(carried, alpha=1.0)
    return TransferResult(changes, report(carried), scaling=chooser.scaling(changes))


@dataclass(frozen=True)
class _StepChooser:
    """Chooses alpha of each step by the samples, and remembers what was tried."""

    scorer: TargetScorer
    errors: int
    alphas: list[float] = field(default_factory=list)
    tried: list[dict[float, SampleScores]] = field(default_factory=list)

    def choose(self, change: Deltas, so_far: Deltas) -> float:
        """Return how much of a step to add to the steps before it."""
        self.tried.append(self.scorer.scores(change, SCALES, so_far))
        self.alphas.append(choose_scale(self.tried[-1], self.errors))
        return self.alphas[-1]

    def scaling(self, changes: Deltas) -> Scaling:
        """Return what was chosen; of several steps, also how all of them together do at other scales."""
        first, last = self.tried[0][0.0], self.tried[-1][self.alphas[-1]]
        if len(self.tried) == 1:
            points = curve(self.tried[0])
        else:
            points = [point for step, tried in enumerate(self.tried, start=1) for point in curve(tried, step)]
            if any(self.alphas):
                points += curve({0.0: first, 1.0: last, **self.scorer.scores(changes, SHOWN_SCALES)})
        return Scaling(tuple(self.alphas), tuple(points), outlook(first, last))


@dataclass(frozen=True)
class Judgement:
    """What the samples say of a change: the gain to expect, in accuracy or loss, and whether the source is better."""

    gain: Estimate
    unit: str
    lead: SourceLeadRecord | None = None


def judge(scorer: TargetScorer, calibration: Calibration, changes: Deltas) -> Judgement:
    """Judge finished changes by the samples."""
    seen = scorer.scores(changes, (0.0, 1.0))
    before, after = seen[0.0], seen[1.0]
    unit = "loss" if before.accuracies is None else "accuracy"
    return Judgement(outlook(before, after), unit, _source_lead(calibration, before))


def _source_lead(calibration: Calibration, before: SampleScores) -> SourceLeadRecord | None:
    """Compare the fine-tuned source with the target by the data set's labels, where all are known."""
    labels = torch.tensor(calibration.drawn_samples.labels)
    if before.predictions is None or not calibration.knows_labels or len(labels) < 2:
        return None
    of_source = calibration.predictions[:: 1 + calibration.copies].argmax(-1)
    right = [(predicted.cpu() == labels).double() for predicted in (of_source, before.predictions)]
    error = Estimate.of(right[0] - right[1]).error or 0.0
    return SourceLeadRecord(float(right[0].mean()), float(right[1].mean()), error)


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
    vector: Deltas,
    carried: Mapping[str, TransportedSite],
    pairs: Iterable[SitePair],
    left: Mapping[str, str],
    distances: Mapping[str, WeightDistance] | None = None,
) -> Report:
    """Report the task vector's energy: by site, how much of it lies in unseen directions, and what stayed behind.

    `distances` of the two bases' weights, where they have the same shape, are reported with it.
    """
    energies = {name: vector.energy(name) for name in vector}
    total = sum(energies.values()) or 1.0  # an empty change
    sites = []
    for pair in pairs:
        result = carried[pair.target.name]
        changed = [slot for slot in pair.source.slots if slot.tensor in vector]
        r_in, r_out = result.input_map, result.output_map
        apart = (distances or {}).get(pair.target.name)
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
                distance=None if apart is None else apart.distance,
                cosine=None if apart is None else apart.cosine,
            )
        )
    stayed = [LeftRecord(name, reason, energies[name] / total) for name, reason in left.items() if name in energies]
    return Report(tuple(sites), tuple(stayed))


def _energy(vector: Deltas, slot: Slot) -> float:
    change = changed_part(vector, slot)
    return 0.0 if change is None else energy(change)


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
    alpha = 1.0 if method.settings.finds_alpha else float(method.settings.alpha)
    return TransferResult(alpha * Deltas(changes), Report((), ()), trained)


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

    parameters = trained_parameters(model)
    first = samples.first(FINGERPRINTED).batches(FINGERPRINTED)
    identity = {
        "weights": digest_of(parameters.values()),
        "classes": digest_of(head.tensors),
        "samples": digest_of(_model_inputs(model, items) for items, _ in first),
        "rows": hashlib.blake2b(repr((samples.indices, samples.labels)).encode(), digest_size=16).hexdigest(),
    }
    measured = accuracy if head.metric == "accuracy" else None
    return TrainingTask(parameters, loss, measured, len(samples), json.dumps(identity))


def trained_parameters(model: LiveModel) -> dict[str, nn.Parameter]:
    """Return all parameters of a model, except those of a CLIP's text tower."""
    layout = model.layout
    texts = {name for name, reason in layout.others.items() if reason == TEXT_TOWER}
    texts |= {slot.tensor for site in layout.sites if site.tower for slot in site.slots}
    return {name: parameter for name, parameter in model.module.named_parameters() if name not in texts}


def _model_inputs(model: LiveModel, samples: Sequence[Any]) -> Tensor:
    text = model.text_rows(samples)
    if text is not None:
        return text.ids
    return model.pixels(samples) if isinstance(model, ImageModel) else model.features(samples)
