"""The yardstick: held-out samples and ways to measure on them, the same for every model that is compared."""

from __future__ import annotations

from dataclasses import dataclass

from hf_bico.deltas import Deltas
from hf_bico.families import LiveModel
from hf_bico.measuring import Batched, probe_accuracy, zero_shot_accuracy
from hf_bico.objectives import ZeroShotHead
from hf_bico.record import PROBE, EvaluationRecord
from hf_bico.rounds import Round


@dataclass(frozen=True)
class Yardstick:
    """Samples of one split of a data set; a linear probe, where one is asked for, is fitted to `probed_on`.

    `evaluation` is "zero-shot", "probe" or "both", as in the settings.
    """

    data: str
    split: str
    samples: Batched
    probed_on: Batched
    evaluation: str
    batch_size: int

    def measure(self, name: str, model: LiveModel, head: ZeroShotHead | None) -> list[EvaluationRecord]:
        """What a model reaches, by every protocol that is asked for; zero-shot only with a head."""
        found = []
        if self.evaluation != PROBE and head is not None:
            found.append(self._record(name, zero_shot_accuracy(model, head, self.samples, self.batch_size)))
        if self.evaluation != "zero-shot":
            value = probe_accuracy(model, self.probed_on, self.samples, self.batch_size)
            found.append(self._record(name, value, PROBE, len(self.probed_on)))
        return found

    def measure_target(self, name: str, round: Round, changes: Deltas) -> list[EvaluationRecord]:
        """What the target reaches with these changes."""
        target = round.bench.target
        with changes.renamed(round.bench.planned.lineage.target.layout.own_names).applied_to(target.module):
            return self.measure(name, target, None if round.heads is None else round.heads.target)

    def measure_source(self, name: str, round: Round) -> list[EvaluationRecord]:
        """What the fine-tuned source reaches."""
        source = round.bench.source
        with round.bench.vector.applied_to(source.module):
            return self.measure(name, source, None if round.heads is None else round.heads.tuned)

    def _record(
        self, name: str, value: float, protocol: str | None = None, trained_on: int | None = None
    ) -> EvaluationRecord:
        return EvaluationRecord(name, self.data, self.split, len(self.samples), "accuracy", value, protocol, trained_on)
