"""A round: one draw of samples as the two models see it, and how methods carry the task vector by it.

Its statistics are collected once, whatever the number of methods that read them. Neither measures nor writes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property

import torch
from torch import Tensor

from hf_bico.bench import Bench
from hf_bico.data.augmenting import Copies
from hf_bico.data.calibration import Drawn
from hf_bico.data.dataset import Samples
from hf_bico.deltas import Deltas
from hf_bico.environment import Stopwatch, halving_batches
from hf_bico.errors import DataUnknownError, UnsuitableMethodError, UsageError
from hf_bico.families import LiveModel
from hf_bico.measuring import logits_of
from hf_bico.methods import Carried, Carrier, Seen
from hf_bico.objectives import Classifier, Head, Heads, LikelyLabels, Question, ZeroShotHead
from hf_bico.readout import Readout, solve_readout
from hf_bico.settings import Settings
from hf_bico.statistics import OF_EXPECTED_LOSSES, OF_INPUTS, Kind, Pass, Side, Statistics, collect
from hf_bico.transport import joined, site_delta


def require_enough_to_mispair(samples: int) -> None:
    """Four wrong pairings, in which no sample meets itself, need five samples."""
    if samples < 5:
        raise UsageError(f"{samples} samples cannot be mispaired in four ways, as --control does", "use at least -n 5")


class Round:
    """One draw of calibration samples, with altered copies of each if asked for, as the two models see it; or none.

    As a control, `mispaired` gives the source other samples than the target, in two ways, and takes the statistics of
    one from those of the other: what any pairing shows, such as the means, goes too. Input and output maps are found
    from different wrong pairings, or they would still agree with each other.
    """

    def __init__(
        self,
        bench: Bench,
        drawn: Drawn | None,
        heads: Heads | None,
        watch: Stopwatch,
        settings: Settings,
        *,
        mispaired: bool = False,
    ) -> None:
        self.bench = bench
        self._heads = heads
        self.watch = watch
        self.settings = settings
        self.copies = 0 if drawn is None else bench.copies(settings, len(drawn.samples))
        self.mispaired = mispaired
        self._drawn = drawn
        self._seen = Statistics()

    @property
    def heads(self) -> Heads:
        """How the models are asked; without samples there is nothing to ask."""
        if self._heads is None:
            raise _no_data()
        return self._heads

    @property
    def drawn_samples(self) -> Samples:
        """The samples without altered copies."""
        if self._drawn is None:
            raise _no_data()
        return self._drawn.samples

    @property
    def class_names(self) -> tuple[str, ...]:
        return () if self._drawn is None else self._drawn.data.class_names

    @cached_property
    def samples(self) -> Samples | Copies:
        """What the target sees."""
        return self._copied(self.drawn_samples)

    def _copied(self, samples: Samples) -> Samples | Copies:
        return Copies(samples, self.copies, self.settings.seed) if self.copies else samples

    @cached_property
    def predictions(self) -> Tensor:
        """The fine-tuned source's logits on the samples."""
        head = self.heads.tuned
        if not isinstance(head, Classifier):
            raise no_predictions(self.settings.method)
        with self.bench.tuning.applied_to(self.bench.source.module):
            return logits_of(self.bench.source, head, self.samples, self.settings.batch_size)

    def see(self, kinds: Collection[Kind]) -> Statistics:
        """The statistics at the two pretrained models; what was not seen yet is collected in one pass."""
        missing = set(kinds) - self._seen.kinds
        if missing:
            self._seen.update(self._collected(missing))
        return self._seen

    def carry(self, method: Carrier) -> dict[str, Carried]:
        """The task vector at every pair of sites, in the target's coordinates."""
        bench, parts = self.bench, list[dict[str, Carried]]()
        for step in range(method.steps):
            statistics = self._along(step / method.steps, parts, method.kinds) if step else self.see(method.kinds)
            with self.watch("align"):
                method.prepare(bench.pairs, Seen(*bench.pretrained, statistics))
            with self.watch("transport"):
                parts.append(
                    {
                        pair.target.name: method.carry(
                            pair, site_delta(bench.vector, pair.source).scaled(1 / method.steps)
                        )
                        for pair in bench.pairs
                    }
                )
        return joined(parts)

    def _along(self, share: float, parts: Sequence[dict[str, Carried]], kinds: Collection[Kind]) -> Statistics:
        """The statistics with a share of the task vector in the source, and what became of it in the target."""
        bench = self.bench
        so_far = bench.gathered(joined(parts), alpha=1.0).renamed(bench.planned.lineage.target.layout.own_names)
        with ExitStack() as stack:
            stack.enter_context((share * bench.tuning).applied_to(bench.source.module))
            stack.enter_context(so_far.applied_to(bench.target.module))
            return self._collected(kinds)

    def readout(self, changes: Deltas) -> Readout:
        """The correction of the final projection of the target with these changes.

        From altered copies too where they were asked for, and not only the method's habit: so it is the same step for
        every method, and for the target itself.
        """
        target, head = self.bench.target, self.heads.target
        if not isinstance(head, ZeroShotHead):
            raise no_predictions("--readout")
        samples, wanted = self.samples, self.predictions
        if not self.settings.augment:
            samples, wanted = self.drawn_samples, wanted[:: 1 + self.copies]
        with changes.applied_to(target.module), torch.no_grad():
            hidden, weight = self._hidden(samples), target.weight("proj")
        origins = samples.origins if isinstance(samples, Copies) else range(len(samples))
        return solve_readout(hidden, weight, head, wanted, origins)

    def _hidden(self, samples: Samples | Copies) -> Tensor:
        """What the target's final projection reads."""
        model = self.bench.target
        projection = model.layout.site("proj")

        def run(size: int) -> Tensor:
            rows = []
            for some, _ in samples.batches(size):
                with model.observed([projection]) as trace:
                    model.features(some)
                rows.append(trace.inputs[projection.input])
            return torch.cat(rows)

        return halving_batches(self.settings.batch_size, run)

    def _collected(self, kinds: Collection[Kind]) -> Statistics:
        bench = self.bench
        source, target = (Side(model, model.layout.tokens) for model in (bench.source, bench.target))

        def collected(turn: int, some: Collection[Kind]) -> Statistics:
            def run(size: int) -> Statistics:
                return collect(bench.pairs, source, target, self._passes(size, set(some), turn), some)

            return halving_batches(self.settings.batch_size, run)

        with self.watch("calibrate"):
            if not self.mispaired:
                return collected(0, kinds)
            require_enough_to_mispair(len(self.drawn_samples))
            found = Statistics()
            for turn, some in ((1, OF_INPUTS & set(kinds)), (3, set(kinds) - OF_INPUTS)):
                if some:
                    found.update(collected(turn, some).less(collected(turn + 1, some)))
            return found

    def _passes(self, size: int, kinds: set[Kind], turn: int) -> Iterator[tuple[Pass, Pass]]:
        """For each batch, a pass of the source's and of the target's pretrained model.

        The source sees the samples from number `turn` on.
        """
        sides = (_asked(self.bench.source, self.heads.source), _asked(self.bench.target, self.heads.target))
        turned = self._copied(self.drawn_samples.rotated(turn)) if turn else self.samples
        sources, targets = turned.batches(size), self.samples.batches(size)
        likely = [self._likely(kinds, number) for number in (turn, 0)]
        done = 0
        for batches in zip(sources, targets, strict=True):
            self.watch.progress("calibrate", done, len(self.samples))
            here = slice(done, done + len(batches[0][1]))
            questions = [
                Question(*batch, None if found is None else found[here], here.start)
                for batch, found in zip(batches, likely, strict=True)
            ]
            yield sides[0](questions[0]), sides[1](questions[1])
            done = here.stop

    def _likely(self, kinds: set[Kind], turn: int) -> LikelyLabels | None:
        """What the fine-tuned source predicts for the samples from number `turn` on, where that is asked for."""
        if not OF_EXPECTED_LOSSES & kinds:
            return None
        return LikelyLabels.of(self.predictions.roll(-turn * (1 + self.copies), 0))


def _asked(model: LiveModel, head: Head) -> Callable[[Question], Pass]:
    """What makes a pass of a question."""
    return lambda question: lambda: head.losses(model, question)


def _no_data() -> DataUnknownError:
    return DataUnknownError("no calibration data was given", "name it with --data")


def no_predictions(what: str) -> UnsuitableMethodError:
    """The error for what needs an objective that predicts classes."""
    return UnsuitableMethodError(
        f"{what} needs an objective that predicts classes, such as zero-shot", "use --method bico, without --readout"
    )
