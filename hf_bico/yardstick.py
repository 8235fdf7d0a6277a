"""The yardstick: held-out samples and ways to measure on them, the same for every model that is compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from hf_bico.alignment.objectives.base import Head, OwnHead
from hf_bico.models.deltas import Deltas
from hf_bico.models.families.live import ImageModel, LiveModel
from hf_bico.models.inference import Batched, Prepared, Read, probe_accuracy
from hf_bico.reports.record import EvaluationRecord
from hf_bico.rounds import Round
from hf_bico.settings import PROBE

MOST_KEPT = 2**29
"""Bytes of images, as they are and as the target takes them, that are kept so that they are read and prepared once."""


@dataclass(frozen=True)
class Yardstick:
    """Samples of one split of a data set; a linear probe, where one is asked for, is fitted to `probed_on`.

    `evaluation` is "zero-shot", by what the heads themselves ask, "probe" or "both", as in the settings.
    """

    data: str
    split: str
    samples: Batched
    probed_on: Batched
    evaluation: str
    batch_size: int

    def measure(self, name: str, model: LiveModel, head: Head) -> list[EvaluationRecord]:
        """What a model reaches, by every protocol that is asked for and makes sense."""
        found = []
        if self.evaluation != PROBE and not isinstance(head, OwnHead):
            value = head.measure(model, self.samples, self.batch_size)
            found.append(self._record(name, head.metric, value))
        if self.evaluation != "zero-shot":
            value = probe_accuracy(model, self.probed_on, self.samples, self.batch_size)
            found.append(self._record(name, "accuracy", value, PROBE, len(self.probed_on)))
        return found

    def read_once(self) -> Yardstick:
        """The same, its images read once; as it is where they take too much memory."""
        return replace(self, samples=Read.of(self.samples, self.batch_size, MOST_KEPT))

    def prepared_by(self, model: LiveModel) -> Yardstick:
        """The same for this model alone, its images prepared once; as it is where they take too much memory."""
        if not isinstance(model, ImageModel) or model.layout.image_size is None:
            return self
        if len(self.samples) * 3 * prod(model.layout.image_size) * model.dtype.itemsize > MOST_KEPT:
            return self
        return replace(self, samples=Prepared.by(model, self.samples, self.batch_size))

    def measure_target(
        self, name: str, round: Round, changes: Deltas, head: Head | None = None
    ) -> list[EvaluationRecord]:
        """What the target reaches with these changes, and with this head if it is another."""
        target = round.bench.target
        with changes.renamed(round.bench.planned.lineage.target.layout.own_names).applied_to(target.module):
            return self.measure(name, target, head or round.heads.target)

    def measure_source(self, name: str, round: Round) -> list[EvaluationRecord]:
        """What the fine-tuned source reaches."""
        source = round.bench.source
        with round.bench.tuning.applied_to(source.module):
            return self.measure(name, source, round.heads.tuned)

    def measure_base(self, name: str, round: Round) -> list[EvaluationRecord]:
        """What the source reached before it was fine-tuned."""
        return self.measure(name, round.bench.source, round.heads.source)

    def _record(
        self, name: str, metric: str, value: float, protocol: str | None = None, trained_on: int | None = None
    ) -> EvaluationRecord:
        return EvaluationRecord(name, self.data, self.split, len(self.samples), metric, value, protocol, trained_on)
