"""One draw of samples of one data set, and what every method makes of it, measured."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hf_bico.alignment.methods import METHODS
from hf_bico.alignment.methods.aligned import Aligner
from hf_bico.alignment.methods.base import Carrier, Trainer
from hf_bico.alignment.objectives.base import Heads
from hf_bico.alignment.statistics import Kind
from hf_bico.comparing.grid import Draw, Grid, Variant, takes_samples
from hf_bico.comparing.subjects import Subject
from hf_bico.comparison.cells import LOSS, Cell, CellKey
from hf_bico.data.draw import Drawn
from hf_bico.porting.calibration import Round
from hf_bico.porting.evaluate import Yardstick
from hf_bico.porting.heads import heads_of, tuned_target_head
from hf_bico.porting.model_pair import Bench, similar_blocks
from hf_bico.porting.task_vector import TaskVector
from hf_bico.porting.transfer import UNTOUCHED, Outcome, outcome_of, with_readout
from hf_bico.reports.record import EvaluationRecord
from hf_bico.runtime.environment import Stopwatch
from hf_bico.settings import PROBE, Settings


@dataclass
class DrawnRounds:
    """The rounds of one draw, or those without samples.

    `names` are the methods whose numbers of this draw are not all known: their statistics are collected together.
    """

    bench: Bench
    grid: Grid
    subject: Subject
    draw: Draw | None
    names: Collection[str]
    tuned: TaskVector | None
    checkpoint: str
    _rounds: dict[tuple[int, bool], Round] = field(default_factory=dict)
    _outcomes: dict[tuple[str, bool], Outcome] = field(default_factory=dict)

    def measured(self, name: str, variant: Variant, keys: Sequence[CellKey]) -> Iterator[Cell]:
        """These numbers of one method or reference."""
        by_protocol = {key.protocol: key for key in keys}
        evaluation = "both" if len(keys) > 1 else PROBE if PROBE in by_protocol else "zero-shot"
        probed_on = self.subject.samples if self._drawn is None else self._drawn.samples
        yardstick = Yardstick(
            *(self.subject.name, self.subject.split, self.subject.prepared, probed_on),
            *(evaluation, self._settings.batch),
        )
        for record in self._records(yardstick, name, variant):
            protocol = LOSS if record.metric == LOSS else record.protocol
            yield by_protocol[protocol].measured(record.value)

    def _records(self, yardstick: Yardstick, name: str, variant: Variant) -> list[EvaluationRecord]:
        round = self._round(name, variant.control)
        if name == "source":  # the samples are prepared for the target
            return replace(yardstick, samples=self.subject.samples).measure_source(name, round)
        if name == "base":
            return replace(yardstick, samples=self.subject.samples).measure_base(name, round)
        if name == "target fine-tuned" and self.tuned is not None:
            target = self.bench.target
            with self.tuned.renamed(self.bench.planned.lineage.target.layout.own_names).applied_to(target.module):
                head = tuned_target_head(self.bench, self.subject.data.class_names, round.heads.target)
                return yardstick.measure(name, target, head)
        outcome = UNTOUCHED if name == "target" else self._outcome(name, variant.control)
        outcome = with_readout(outcome, round) if variant.readout else outcome
        return yardstick.measure_target(name, round, outcome.changes)

    def _outcome(self, name: str, mispaired: bool) -> Outcome:
        """What a method makes of the target; statistics are collected once for all methods that share the round."""
        if (name, mispaired) not in self._outcomes:
            round = self._round(name, mispaired)
            kinds = self._kinds(round) if takes_samples(name) else set()
            if kinds and round.fit(kinds).passes == 1:  # else each method collects its own, some pairs at a time
                round.see(kinds)
            # what takes no samples is the same in every draw
            settings = self._settings if takes_samples(name) else self.grid.settings_of(None)
            method = METHODS[name](replace(settings, method=name, checkpoint=self.checkpoint))
            whole = None
            if isinstance(method, Trainer) and method.whole_split:
                whole = self.subject.training_samples(settings.seed)
            self._outcomes[name, mispaired] = outcome_of(method, round, whole)
        return self._outcomes[name, mispaired]

    def _kinds(self, round: Round) -> set[Kind]:
        sharing = (METHODS[name] for name in self.names if self._round(name, round.mispaired) is round)
        pairing = Aligner if round.mispaired else Carrier
        return {kind for method in sharing if issubclass(method, pairing) for kind in method.kinds}

    def _round(self, name: str, mispaired: bool) -> Round:
        """That of a method: those with the same number of altered copies share one."""
        settings = replace(self._settings, method=name) if name in METHODS else self._settings
        copies = 0 if self._drawn is None else self.bench.copies(settings, len(self._drawn.samples))
        if (copies, mispaired) not in self._rounds:
            self._rounds[copies, mispaired] = Round(
                *(self._matched, self._drawn, self._heads, Stopwatch(), settings), mispaired=mispaired
            )
        return self._rounds[copies, mispaired]

    @cached_property
    def _settings(self) -> Settings:
        return self.grid.settings_of(self.draw)

    @cached_property
    def _drawn(self) -> Drawn | None:
        return None if self.draw is None else self.subject.draws[self.draw]

    @cached_property
    def _heads(self) -> Heads:
        return self.subject.heads or heads_of(self.bench, self.subject.data.class_names, self._drawn)

    @cached_property
    def _matched(self) -> Bench:
        if self._settings.layers != "similarity" or self._drawn is None:
            return self.bench
        return self.bench.matched(similar_blocks(self.bench, self._drawn.samples))
