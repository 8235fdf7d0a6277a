"""What a method makes of the target: the change of its weights, and what is known about it. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hf_bico.alignment.methods.base import Carried, Carrier, Method, SiteDelta, Trainer
from hf_bico.alignment.methods.training import Trained
from hf_bico.alignment.readout import Readout
from hf_bico.alignment.transport import account, gather
from hf_bico.data.dataset import Samples
from hf_bico.errors import UnsuitableMethodError
from hf_bico.foresight import foresee
from hf_bico.lessons import lesson_of
from hf_bico.models.deltas import Deltas
from hf_bico.models.layout import SitePair
from hf_bico.reports.record import ForesightRecord
from hf_bico.reports.results import Report
from hf_bico.rounds import Round


@dataclass(frozen=True)
class Outcome:
    """`changes` of the target's tensors, as its files name them; with a readout, `unread` is what they were before."""

    changes: Deltas
    report: Report
    trained: Trained | None = None
    readout: Readout | None = None
    unread: Deltas | None = None
    foresight: ForesightRecord | None = None


UNTOUCHED = Outcome(Deltas({}), Report((), ()))
"""The target as it is."""


def outcome_of(method: Method, round: Round, whole_split: Samples | None = None) -> Outcome:
    """Carry the task vector, or train the target: on `whole_split` if that is what the method does."""
    bench = round.bench
    if isinstance(method, Trainer):
        outcome = _trained(method, round, whole_split)
    elif isinstance(method, Carrier):
        carried = round.carry(method)
        report = account(bench.vector, carried, bench.pairs, bench.planned.left)
        foresight = _foresight(carried, report, round)
        outcome = Outcome(bench.gathered(carried, round.settings.alpha), report, foresight=foresight)
    else:
        raise TypeError(f"{type(method).__name__} neither carries nor trains")
    return with_readout(outcome, round) if round.settings.readout else outcome


def _foresight(carried: Mapping[str, Carried], report: Report, round: Round) -> ForesightRecord | None:
    """Whether it will help, where the pass over the samples looked at that; samples of one class cannot tell."""
    descents = [one.descent for one in carried.values() if one.descent is not None]
    if round.task is None or not descents or _asks_one_class(round):
        return None
    return foresee(descents, round.task, len(round.samples), report.unseen_energy, round.settings.alpha)


def _asks_one_class(round: Round) -> bool:
    """Whether classes are the answers, and all samples have the same."""
    answered = round.settings.objective in ("zero-shot", "contrastive", "text-to-text")
    labels = set(round.drawn_samples.labels)
    return answered and len(labels) == 1 and labels != {-1}


def with_readout(outcome: Outcome, round: Round) -> Outcome:
    """The outcome with the final projection corrected towards the fine-tuned source's predictions."""
    target = round.bench.planned.lineage.target
    site = target.layout.site("proj")
    found = round.readout(outcome.changes.renamed(target.layout.own_names))
    correction = gather(
        {site.name: Carried(SiteDelta(found.change))}, [SitePair(site, site)], target.checkpoint, alpha=1.0
    )
    changes = outcome.changes + correction if found.accepted else outcome.changes
    return replace(outcome, changes=changes, readout=found, unread=outcome.changes)


def _trained(method: Trainer, round: Round, whole_split: Samples | None) -> Outcome:
    bench, target = round.bench, round.bench.planned.lineage.target
    samples = whole_split if method.whole_split else round.drawn_samples
    if not samples:
        raise UnsuitableMethodError(
            f"{method.settings.method} trains on the data set's own labels, and they are not there or not to be used",
            "use data with labels, or --method fewshot",
        )
    lesson = lesson_of(bench.target, round.heads.target, samples)
    with bench.target.quiet(), round.watch("train"):
        trained = method.train(lesson, round.watch.progress)
    stored = {own: file for file, own in target.layout.own_names.items()}
    changes = {stored.get(name, name): change.cpu() for name, change in trained.changes.items()}
    return Outcome(round.settings.alpha * Deltas(changes), Report((), ()), trained)
