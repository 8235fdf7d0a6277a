"""Applies a method to the target: the change of its weights, how much of it is added, and a report of energies.

Does not evaluate. With alpha "auto" the calibration samples choose how much is added, step by step, and veto a change
that they do not speak for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from hf_bico.alignment.methods.base import Carrier, Method, Trainer, TransportedSite
from hf_bico.alignment.methods.brief import BriefTrainer
from hf_bico.alignment.methods.training import Trained
from hf_bico.alignment.methods.untouched import ReadoutAlone
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
from hf_bico.alignment.transport import changed_part
from hf_bico.data.dataset import Samples
from hf_bico.errors import UnsuitableMethodError
from hf_bico.models.deltas import Deltas
from hf_bico.models.layout import SitePair, Slot
from hf_bico.models.low_rank import energy
from hf_bico.models.weight_distance import WeightDistance
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.heads import TargetHead, target_head
from hf_bico.porting.model_pair import ModelPair
from hf_bico.porting.polish import Polished, polish, readout_change
from hf_bico.porting.scoring import TargetScorer, make_scorer
from hf_bico.porting.training_tasks import (
    SOURCE,
    BriefLesson,
    factor_rank,
    fresh_factors,
    stored_changes,
    trained_parameters,
    training_task,
)
from hf_bico.reports.record import LeftRecord, SiteRecord, SourceLeadRecord
from hf_bico.reports.results import Report
from hf_bico.settings import Settings, allowed_errors


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

    `scaling` is there if the samples chose alpha, `head` if a classifier was trained with one. With a polish,
    `unpolished` are the changes without it. `dropped` means that samples left out gain by no training step, or by no
    readout, where nothing else would be written.
    """

    changes: Deltas
    report: Report
    trained: Trained | None = None
    readout: Readout | None = None
    unread: Deltas | None = None
    scaling: Scaling | None = None
    head: TargetHead | None = None
    polished: Polished | None = None
    unpolished: Deltas | None = None
    dropped: bool = False

    @property
    def held_back(self) -> bool:
        """Whether the samples speak against all of it. A polish that helped has passed the veto of those left out."""
        if self.dropped or self.scaling is None:
            return self.dropped
        return self.scaling.held_back and not (self.polished is not None and self.polished.helped)


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
    elif isinstance(method, ReadoutAlone):
        result = with_readout(UNTOUCHED, calibration)
        return replace(result, unread=None, dropped=result.readout is None or not result.readout.accepted)
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
    readout = calibration.readout(result.changes)
    changes = result.changes
    if readout.accepted:
        changes = changes + readout_change(calibration.models, readout)
    return replace(result, changes=changes, readout=readout, unread=result.changes)


def with_polish(result: TransferResult, method: Method, calibration: Calibration) -> TransferResult:
    """Polish a port; one that does not help samples left out leaves it as it was."""
    carried = result.changes if result.unread is None else result.unread
    alone = result.held_back
    carried = UNTOUCHED.changes if alone else carried
    rank = factor_rank(calibration.models, method.settings.rank, _as_adapter(method, calibration.models))
    polished = replace(polish(carried, calibration, method.settings, rank), alone=alone)
    kept = polished.changes if polished.helped else carried
    return replace(
        result,
        changes=kept,
        report=UNTOUCHED.report if alone and polished.helped else result.report,
        readout=polished.readout if polished.helped else None,
        unread=None,
        polished=polished,
        unpolished=carried,
        head=polished.head if polished.helped else None,
    )


def _as_adapter(method: Method, models: ModelPair) -> bool:
    return output_format(method, models, models.settings) == "adapter"


def output_format(method: Method, models: ModelPair, settings: Settings) -> str:
    """Return the format in which a result is written: as asked for, else an adapter of what came as one."""
    usual = models.planned.format if method.keeps_factors else "full"
    return settings.format or ("adapter" if settings.rank is not None else usual)


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
                mispaired_in=None if r_in is None else r_in.mispaired,
                mispaired_out=None if r_out is None else r_out.mispaired,
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
    models = calibration.models
    if isinstance(method, BriefTrainer):
        return _train_briefly(method, calibration)
    samples = whole_split if method.whole_split else calibration.drawn_samples
    if not samples:
        raise UnsuitableMethodError(
            f"{method.settings.method} trains on the data set's own labels, and they are not there or not to be used",
            "use data with labels, or --method fewshot",
        )
    task = training_task(models.target, calibration.heads.target, samples)
    with models.target.quiet(), calibration.watch("train"):
        trained = method.train(task, calibration.watch.progress)
    alpha = 1.0 if method.settings.finds_alpha else float(method.settings.alpha)
    return TransferResult(alpha * stored_changes(models, trained.changes), Report((), ()), trained)


def _train_briefly(method: BriefTrainer, calibration: Calibration) -> TransferResult:
    """Train the target on the calibration samples: its weights, or as a LoRA where that is what will be written."""
    models, settings = calibration.models, method.settings
    head = target_head(calibration, UNTOUCHED.changes) if method.toward == SOURCE else None
    lesson = BriefLesson(calibration, calibration.heads.target if head is None else head.head, method.toward)
    rank = factor_rank(models, settings.rank, _as_adapter(method, models))
    parameters, start = trained_parameters(models.target), None
    if rank is not None:
        factors = fresh_factors(models, rank, settings.seed)
        parameters, start = {name: parameters[name] for name in factors}, factors
    with models.target.quiet(), lesson.asking_source(), calibration.watch("train"):
        trained = method.train(lesson.task(parameters, start), calibration.watch.progress)
    changes = stored_changes(models, trained.changes if trained.steps else {})
    return TransferResult(changes, Report((), ()), trained, head=head, dropped=not trained.steps)
