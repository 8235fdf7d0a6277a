"""A round: one draw of samples as the two models see it, and how methods carry the task vector by it.

Its statistics are collected once, whatever the number of methods that read them, within the memory that there is, and
shared out over the processes that do the job. Neither measures nor writes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_bico.alignment.calibration_pass import Shown, Side, collect, show
from hf_bico.alignment.memory import MemoryPlan, solved_together
from hf_bico.alignment.methods.base import Carrier, MethodInputs, TransportedSite
from hf_bico.alignment.objectives.base import Classifier, Head, Heads, LikelyLabels, LossBatch
from hf_bico.alignment.objectives.clip import ZeroShotHead
from hf_bico.alignment.readout import Readout, solve_readout
from hf_bico.alignment.statistics import OF_EXPECTED_LOSSES, OF_INPUTS, OF_TARGET, Kind, Statistics, TaskLossTotals
from hf_bico.alignment.transport import descent_along, joined, site_delta
from hf_bico.data.augmentation import AugmentedSamples
from hf_bico.data.dataset import Samples
from hf_bico.data.draw import CalibrationDraw
from hf_bico.errors import DataUnknownError, UnsuitableMethodError, UsageError
from hf_bico.models.deltas import Deltas
from hf_bico.models.families.live import LiveModel
from hf_bico.models.hooks import Pass
from hf_bico.models.inference import logits_of
from hf_bico.models.layout import SitePair, descent_sites
from hf_bico.porting.model_pair import ModelPair
from hf_bico.runtime.environment import Stopwatch, halving_batches, prefetch
from hf_bico.settings import Settings

Result = TypeVar("Result")


def require_enough_to_mispair(samples: int) -> None:
    """Four wrong pairings, in which no sample meets itself, need five samples."""
    if samples < 5:
        raise UsageError(f"{samples} samples cannot be mispaired in four ways, as --control does", "use at least -n 5")


class Calibration:
    """One draw of calibration samples, with altered copies of each if asked for, as the two models see it; or none.

    As a control, `mispaired` gives the source other samples than the target, in two ways, and takes the statistics of
    one from those of the other: what any pairing shows, such as the means, goes too. Input and output maps are found
    from different wrong pairings, or they would still agree with each other.

    Its statistics are kept for other methods, unless it `keeps` none: then each sum goes when its map is found. Where
    it `foretells`, a method that looks at gradients anyway is told what its change does to the target's loss.
    """

    def __init__(
        self,
        models: ModelPair,
        drawn: CalibrationDraw | None,
        heads: Heads | None,
        watch: Stopwatch,
        settings: Settings,
        *,
        mispaired: bool = False,
        keeps: bool = True,
        forecasts: bool = False,
    ) -> None:
        self.models = models
        self._heads = heads
        self.watch = watch
        self.settings = settings
        self.copies = 0 if drawn is None else models.copies(settings, len(drawn.samples))
        self.mispaired = mispaired
        self.keeps = keeps
        self.forecasts = forecasts
        self.task: TaskLossTotals | None = None
        """How the target does on the samples, where that is foretold from."""
        self.batch_size: int | None = None
        """That of the last pass over the samples."""
        self._drawn = drawn
        self._seen = Statistics()
        self._fits: dict[frozenset[Kind], MemoryPlan] = {}

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
    def samples(self) -> Samples | AugmentedSamples:
        """What the target sees."""
        return self._copied(self.drawn_samples)

    def _copied(self, samples: Samples) -> Samples | AugmentedSamples:
        return AugmentedSamples(samples, self.copies, self.settings.seed) if self.copies else samples

    @cached_property
    def predictions(self) -> Tensor:
        """The fine-tuned source's logits on the samples."""
        head = self.heads.tuned
        if not isinstance(head, Classifier):
            raise no_predictions(self.settings.method)
        with self.models.tuning.applied_to(self.models.source.module):
            return logits_of(self.models.source, head, self.samples, self.settings.batch)

    def see(self, kinds: Collection[Kind]) -> Statistics:
        """The statistics at the two pretrained models; what was not seen yet is collected in one pass."""
        missing = set(kinds) - self._seen.kinds
        if missing:
            self._seen.update(self.collected(missing, self.models.pairs))
        return self._seen

    def carry(self, method: Carrier) -> dict[str, TransportedSite]:
        """The task vector at every pair of sites, in the target's coordinates."""
        parts = list[dict[str, TransportedSite]]()
        passes = self._passes_of(method)
        for step in range(method.steps):
            found: dict[str, TransportedSite] = {}
            for pairs in passes:
                seen = self._along(step / method.steps, parts, method, pairs) if step else self._start(method, pairs)
                self.task = self.task or seen.task
                seen.settle_descents()
                if len(passes) > 1:  # memory is short: what batches took must not lie between what maps take
                    torch.cuda.empty_cache()
                found |= self._carried(method, pairs, seen)
            parts.append(self.models.team.gathered(found))
        return joined(parts)

    def _carried(
        self, method: Carrier, pairs: Sequence[SitePair], statistics: Statistics
    ) -> dict[str, TransportedSite]:
        """This process's part of the pairs, some at a time; sums that nobody else reads are let go of on the way."""
        models, found = self.models, dict[str, TransportedSite]()
        groups = solved_together(pairs) if method.by_site else [list(pairs)]
        own = models.team.share(groups) if method.by_site else groups
        if statistics is not self._seen:
            statistics.drop(pair for group in groups if group not in own for pair in group)
        for group in own:
            with self.watch("align"):
                method.prepare(group, MethodInputs(*models.pretrained, statistics))
            descents = {pair.target.name: statistics.descents.get(pair.target.name) for pair in group}
            if statistics is not self._seen:
                statistics.drop(group)
            with self.watch("transport"):
                for pair in group:
                    delta = site_delta(models.vector, pair.source).scaled(1 / method.steps)
                    carried = models.settled(pair, method.carry(pair, delta))
                    descent = descents.pop(pair.target.name)
                    along = None if descent is None else descent_along(carried.delta, descent)
                    found[pair.target.name] = replace(carried, descent=along)
        return found

    def _kinds_of(self, method: Carrier) -> frozenset[Kind]:
        """The statistics that a method needs at the start, and what foretelling adds to them."""
        extra = {Kind.DESCENT} if self.forecasts and method.differentiates else set()
        return method.kinds | extra

    def _passes_of(self, method: Carrier) -> list[list[SitePair]]:
        """The pairs that each pass over the samples adds up: all of them, or as many as there is memory for."""
        if not method.by_site:
            return [self.models.pairs]
        groups, counts = solved_together(self.models.pairs), self.memory_plan(self._kinds_of(method)).groups
        starts = [sum(counts[:number]) for number in range(len(counts))]
        return [
            [pair for group in groups[start : start + count] for pair in group]
            for start, count in zip(starts, counts, strict=True)
        ]

    def _start(self, method: Carrier, pairs: Sequence[SitePair]) -> Statistics:
        """The statistics of some pairs at the pretrained models; kept if they are of all, and others read them."""
        kinds = self._kinds_of(method)
        if self.keeps and len(pairs) == len(self.models.pairs):
            return self.see(kinds)
        return self.collected(kinds, pairs) if kinds else Statistics()

    def _along(
        self, share: float, parts: Sequence[dict[str, TransportedSite]], method: Carrier, pairs: Sequence[SitePair]
    ) -> Statistics:
        """The statistics with a share of the task vector in the source, and what became of it in the target.

        In the same batches as at the start, so that one number repeats the whole path.
        """
        models = self.models
        so_far = models.gathered(joined(parts), alpha=1.0).renamed(models.planned.lineage.target.layout.own_names)
        with ExitStack() as stack:
            stack.enter_context((share * models.tuning).applied_to(models.source.module))
            stack.enter_context(so_far.applied_to(models.target.module))
            return self.collected(method.kinds, pairs, self.memory_plan(self._kinds_of(method)))

    def readout(self, changes: Deltas) -> Readout:
        """The correction of the final projection of the target with these changes.

        From altered copies too where they were asked for, and not only the method's habit: so it is the same step for
        every method, and for the target itself.
        """
        target, head = self.models.target, self.heads.target
        if not isinstance(head, ZeroShotHead):
            raise no_predictions("--readout")
        samples, wanted = self.samples, self.predictions
        if not self.settings.augment:
            samples, wanted = self.drawn_samples, wanted[:: 1 + self.copies]
        with changes.applied_to(target.module), torch.no_grad():
            hidden, weight = self._hidden(samples), target.weight("proj")
        origins = samples.origins if isinstance(samples, AugmentedSamples) else range(len(samples))
        return solve_readout(hidden, weight, head, wanted, origins)

    def _hidden(self, samples: Samples | AugmentedSamples) -> Tensor:
        """What the target's final projection reads."""
        model = self.models.target
        projection = model.layout.site("proj")

        def run(size: int) -> Tensor:
            rows = []
            for some, _ in samples.batches(size):
                with model.observed([projection]) as trace:
                    model.features(some)
                rows.append(trace.inputs[projection.input])
            return torch.cat(rows)

        return halving_batches(self.settings.batch, run)

    def memory_plan(self, kinds: Collection[Kind]) -> MemoryPlan:
        """How the statistics are collected within the memory that there is: found once, the same in every process."""
        asked = frozenset(kinds)
        if asked not in self._fits:
            self._fits[asked] = self.models.team.agreed(self.models.memory_plan(asked, self.samples, self.settings))
        return self._fits[asked]

    def collected(
        self, kinds: Collection[Kind], pairs: Sequence[SitePair], fitted: MemoryPlan | None = None
    ) -> Statistics:
        """The statistics of some pairs, from a pass of their own."""
        models, fitted = self.models, fitted or self.memory_plan(kinds)

        def collected(turn: int, some: Collection[Kind]) -> Statistics:
            def run(size: int, thrifty: bool = fitted.checkpointing) -> Statistics:
                self.batch_size = size
                passes = self._passes(size, set(some), turn)
                sides, sums_on = self._sides(thrifty, fitted.lean), models.device
                return collect(pairs, *sides, passes, some, sums_on, fitted.at_once, descent_sites(models.pairs))

            leaner = None if fitted.checkpointing else partial(run, thrifty=True)
            found = halving_batches(fitted.batch_size, run, leaner)
            models.team.add_up(found.tensors)
            found.require_finite()
            return found

        with self.watch("calibrate"):
            if not self.mispaired:
                return collected(0, kinds)
            require_enough_to_mispair(len(self.drawn_samples))
            found = Statistics()
            for turn, some in ((1, OF_INPUTS & set(kinds)), (3, set(kinds) - OF_INPUTS - OF_TARGET)):
                if some:
                    found.update(collected(turn, some).less(collected(turn + 1, some)))
            if own := OF_TARGET & set(kinds):  # which has no pairs
                found.update(collected(0, own))
            return found

    def _sides(self, checkpointing: bool = False, lean: bool = False) -> tuple[Side, Side]:
        """Both pretrained models."""
        asked = ((self.models.source, self.heads.source), (self.models.target, self.heads.target))
        source, target = (
            Side(model, model.layout.tokens, checkpointing, lean, head.looks_inside, stays=not model.visits)
            for model, head in asked
        )
        return source, target

    def shown(self, kind: Kind, pairs: Sequence[SitePair], begin: Callable[[], tuple[Result, Shown]]) -> Result:
        """Hand on the rows that some pairs show at the two pretrained models, without any gradient.

        `begin` gives what is made of them, and what takes them; where memory runs out it is called anew.
        """

        def run(size: int) -> Result:
            found, take = begin()
            show(pairs, *self._sides(), self._passes(size, {kind}, 0), {kind}, take)
            return found

        return halving_batches(self.settings.batch, run)

    def _passes(self, size: int, kinds: set[Kind], turn: int) -> Iterator[tuple[Pass, Pass]]:
        """For each batch of this process's samples, a pass of the source's and of the target's pretrained model.

        The source sees the samples from number `turn` on.
        """
        drawn = self.drawn_samples
        own = self.models.team.share(tuple(range(len(drawn))))
        mine = self._copied(drawn.some(own))
        both: Iterator[tuple[Any, Any]] = ((batch, batch) for batch in mine.batches(size))
        if turn:
            both = zip(self._copied(drawn.rotated(turn).some(own)).batches(size), mine.batches(size), strict=True)
        models = (self.models.source, self.models.target)
        batches = (
            [(model.ready(some), labels) for model, (some, labels) in zip(models, one, strict=True)] for one in both
        )
        likely = [self._likely(kinds, number) for number in (turn, 0)]  # now: it runs a model
        first = own[0] * (1 + self.copies) if own else 0
        return self._asking(prefetch(batches), likely, range(first, first + len(mine)))

    def _asking(
        self, batches: Iterator[Sequence[Any]], likely: Sequence[LikelyLabels | None], places: range
    ) -> Iterator[tuple[Pass, Pass]]:
        """The passes of these batches, whose samples are at these places among all that are asked about."""
        sides = (_asked(self.models.source, self.heads.source), _asked(self.models.target, self.heads.target))
        done = places.start
        for both in batches:
            self.watch.progress("calibrate", done - places.start, len(places))
            here = slice(done, done + len(both[0][1]))
            questions = [
                LossBatch(batch[0], batch[1], None if found is None else found[here], here.start)
                for batch, found in zip(both, likely, strict=True)
            ]
            yield sides[0](questions[0]), sides[1](questions[1])
            done = here.stop

    def _likely(self, kinds: set[Kind], turn: int) -> LikelyLabels | None:
        """What the fine-tuned source predicts for the samples from number `turn` on, where that is asked for."""
        if not OF_EXPECTED_LOSSES & kinds:
            return None
        return LikelyLabels.of(self.predictions.roll(-turn * (1 + self.copies), 0))


def _asked(model: LiveModel, head: Head) -> Callable[[LossBatch], Pass]:
    """What makes a pass of a question."""
    return lambda question: lambda: head.losses(model, question)


def _no_data() -> DataUnknownError:
    return DataUnknownError("no calibration data was given", "name it with --data")


def no_predictions(what: str) -> UnsuitableMethodError:
    """The error for what needs an objective that predicts classes."""
    return UnsuitableMethodError(
        f"{what} needs an objective that predicts classes, such as zero-shot", "use --method bico, without --readout"
    )
