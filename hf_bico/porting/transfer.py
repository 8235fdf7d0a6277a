"""What a method makes of the target; forecast; energy account.

Whether a port will help, foretold from its one calibration pass. Knows sums and energies; measures nothing.

To first order, the calibration loss changes by the sum over sites of <gradient, tau_B>; sites of MLPs are left out,
which hold most of the weights and add little. How far that can go is bounded by what the target gets wrong, and what
lay where calibration saw nothing is as good as lost.

An objective as a lesson for the methods that train: a model learns what its head asks it about samples.

What a method makes of the target: the change of its weights, and what is known about it. Measures nothing.
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
from hf_bico.alignment.transport import changed_part, gather
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


def account(
    vector: Deltas, carried: Mapping[str, TransportedSite], pairs: Iterable[SitePair], left: Mapping[str, str]
) -> Report:
    """Where the task vector's energy went: into which sites, how much unseen, and what stayed behind."""
    energies = {name: vector.energy(name) for name in vector}
    total = sum(energies.values()) or 1.0  # of a change that is none
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


DOUBTFUL = 0.1
"""Below this outlook a port is called doubtful."""


def forecast(
    sites: Iterable[SiteLossChange], task: TaskLossTotals, samples: int, unseen: float | None, alpha: float
) -> ForecastRecord:
    """The outlook of a port: of changes that are added `alpha` times, to a target that does so well on its task.

    The loss is that of an answer, a sample or a token; where right and wrong cannot be told, of a sample.
    """
    found = list(sites)
    answers = task.answers or samples
    change = alpha * sum(site.change for site in found) / answers
    lengths = sqrt(sum(site.gradient for site in found) * sum(site.delta for site in found))
    agreement = -sum(site.change for site in found) / lengths if lengths else 0.0
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


LOOKED_AT = 64
"""So many samples are looked at to tell what they are from others; all of them by their rows and labels."""


def lesson_of(model: LiveModel, head: Head, samples: Samples) -> TrainingTask:
    """All of the model's tensors but a CLIP's text tower learn what the head asks about the samples.

    The model runs in evaluation mode, without dropout.
    """

    def some(numbers: Sequence[int]) -> Samples:
        return samples.some(numbers)

    def loss(numbers: Sequence[int]) -> Tensor:
        [(chosen, labels)] = some(numbers).batches(len(numbers))
        found = head.losses(model, LossBatch(chosen, labels)).task
        if found is None:
            raise ValueError("samples without labels give no loss")
        return found

    def right(numbers: Sequence[int]) -> float:
        return head.measure(model, some(numbers), len(numbers))

    layout = model.layout
    texts = {name for name, reason in layout.others.items() if reason == TEXT_TOWER}
    texts |= {slot.tensor for site in layout.sites if site.tower for slot in site.slots}
    parameters = {name: parameter for name, parameter in model.module.named_parameters() if name not in texts}
    looked_at = some(range(min(LOOKED_AT, len(samples)))).batches(LOOKED_AT)
    identity = {
        "weights": digest_of(parameters.values()),
        "classes": digest_of(head.tensors),
        "samples": digest_of(_as_read(model, chosen) for chosen, _ in looked_at),
        "rows": hashlib.blake2b(repr((samples.indices, samples.labels)).encode(), digest_size=16).hexdigest(),
    }
    measured = right if head.metric == "accuracy" else None
    return TrainingTask(parameters, loss, measured, len(samples), json.dumps(identity))


def _as_read(model: LiveModel, samples: Sequence[Any]) -> Tensor:
    """What the model is given of samples."""
    text = model.text_rows(samples)
    if text is not None:
        return text.ids
    return model.pixels(samples) if isinstance(model, ImageModel) else model.features(samples)


@dataclass(frozen=True)
class TransferResult:
    """`changes` of the target's tensors, as its files name them; with a readout, `unread` is what they were before."""

    changes: Deltas
    report: Report
    trained: Trained | None = None
    readout: Readout | None = None
    unread: Deltas | None = None
    foresight: ForecastRecord | None = None


UNTOUCHED = TransferResult(Deltas({}), Report((), ()))
"""The target as it is."""


def transfer(method: Method, calibration: Calibration, whole_split: Samples | None = None) -> TransferResult:
    """Carry the task vector, or train the target: on `whole_split` if that is what the method does."""
    models = calibration.models
    if isinstance(method, Trainer):
        result = _trained(method, calibration, whole_split)
    elif isinstance(method, Carrier):
        carried = calibration.carry(method)
        report = account(models.vector, carried, models.pairs, models.planned.left)
        foresight = _foresight(carried, report, calibration)
        result = TransferResult(models.gathered(carried, calibration.settings.alpha), report, foresight=foresight)
    else:
        raise TypeError(f"{type(method).__name__} neither carries nor trains")
    return with_readout(result, calibration) if calibration.settings.readout else result


def _foresight(
    carried: Mapping[str, TransportedSite], report: Report, calibration: Calibration
) -> ForecastRecord | None:
    """Whether it will help, where the pass over the samples looked at that; samples of one class cannot tell."""
    descents = [one.descent for one in carried.values() if one.descent is not None]
    if calibration.task is None or not descents or _asks_one_class(calibration):
        return None
    return forecast(
        descents, calibration.task, len(calibration.samples), report.unseen_energy, calibration.settings.alpha
    )


def _asks_one_class(calibration: Calibration) -> bool:
    """Whether classes are the answers, and all samples have the same."""
    answered = calibration.settings.objective in ("zero-shot", "contrastive", "text-to-text")
    labels = set(calibration.drawn_samples.labels)
    return answered and len(labels) == 1 and labels != {-1}


def with_readout(result: TransferResult, calibration: Calibration) -> TransferResult:
    """The outcome with the final projection corrected towards the fine-tuned source's predictions."""
    target = calibration.models.planned.lineage.target
    site = target.layout.site("proj")
    found = calibration.readout(result.changes.renamed(target.layout.own_names))
    correction = gather(
        {site.name: TransportedSite(SiteDelta(found.change))}, [SitePair(site, site)], target.checkpoint, alpha=1.0
    )
    changes = result.changes + correction if found.accepted else result.changes
    return replace(result, changes=changes, readout=found, unread=result.changes)


def _trained(method: Trainer, calibration: Calibration, whole_split: Samples | None) -> TransferResult:
    models, target = calibration.models, calibration.models.planned.lineage.target
    samples = whole_split if method.whole_split else calibration.drawn_samples
    if not samples:
        raise UnsuitableMethodError(
            f"{method.settings.method} trains on the data set's own labels, and they are not there or not to be used",
            "use data with labels, or --method fewshot",
        )
    training_task = lesson_of(models.target, calibration.heads.target, samples)
    with models.target.quiet(), calibration.watch("train"):
        trained = method.train(training_task, calibration.watch.progress)
    stored = {own: file for file, own in target.layout.own_names.items()}
    changes = {stored.get(name, name): change.cpu() for name, change in trained.changes.items()}
    return TransferResult(calibration.settings.alpha * Deltas(changes), Report((), ()), trained)
