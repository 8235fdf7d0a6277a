"""Collects the statistics of both models on one draw of samples, and carries the task vector by them.

Statistics are collected once for all methods, within the available memory, and shared by the processes of a job.
Neither evaluates nor writes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_bico.alignment.calibration_pass import RowConsumer, Side, collect, pass_rows
from hf_bico.alignment.memory import MemoryPlan, compared_sites, solved_together
from hf_bico.alignment.methods.base import Carrier, MethodInputs, TransportedSite
from hf_bico.alignment.objectives.base import Classifier, Heads, LikelyLabels, LossBatch
from hf_bico.alignment.objectives.clip import ZeroShotHead
from hf_bico.alignment.readout import Readout, ReadoutProblem
from hf_bico.alignment.statistics import OF_EXPECTED_LOSSES, OF_INPUTS, OF_TARGET, Kind, Statistics
from hf_bico.alignment.transport import joined, scaled, site_delta
from hf_bico.data.augmentation import AugmentedSamples
from hf_bico.data.dataset import Samples
from hf_bico.data.draw import CalibrationDraw
from hf_bico.errors import DataUnknownError, UnsuitableMethodError, UsageError
from hf_bico.models.deltas import Deltas
from hf_bico.models.families.live import LiveModel
from hf_bico.models.hooks import Pass
from hf_bico.models.inference import logits_of
from hf_bico.models.layout import SitePair
from hf_bico.porting.model_pair import ModelPair
from hf_bico.runtime.environment import Stopwatch, halving_batches, prefetch
from hf_bico.settings import Settings

T = TypeVar("T")
ChooseScale = Callable[[Deltas, Deltas], float]
"""Takes the change of one step and the changes of the steps before it, and returns how much of the step to add."""


def require_enough_to_mispair(samples: int) -> None:
    """Refuse too few samples for four wrong pairings in which no sample meets itself."""
    if samples < 5:
        raise UsageError(f"{samples} samples cannot be mispaired in four ways, as --control does", "use at least -n 5")


@dataclass(eq=False, repr=False)
class Calibration:
    """Both models on one draw of calibration samples, with augmented copies if requested; or without samples.

    `keeps` keeps the statistics for other methods; without it, each sum is dropped once its map is known.

    As a control, `mispaired` gives the source other samples than the target, in two ways, and subtracts the statistics
    of one from those of the other: this removes what any pairing shows, such as the means. Input and output maps come
    from different wrong pairings, or they would still agree with each other.
    """

    models: ModelPair
    _drawn: CalibrationDraw | None
    _heads: Heads | None
    watch: Stopwatch
    settings: Settings
    mispaired: bool = field(default=False, kw_only=True)
    keeps: bool = field(default=True, kw_only=True)
    compares: bool = field(default=False, kw_only=True)
    """Whether the scores at the start are compared with those of mispaired samples, in the same pass."""
    batch_size: int | None = field(default=None, init=False)
    """Batch size of the last pass over the samples."""
    _statistics: Statistics = field(default_factory=Statistics, init=False)
    _memory_plans: dict[frozenset[Kind], MemoryPlan] = field(default_factory=dict, init=False)

    @cached_property
    def copies(self) -> int:
        """Number of augmented copies of each sample."""
        return 0 if self._drawn is None else self.models.copies(self.settings, len(self._drawn.samples))

    @property
    def heads(self) -> Heads:
        return _required(self._heads)

    @property
    def drawn_samples(self) -> Samples:
        """The samples without augmented copies."""
        return _required(self._drawn).samples

    @property
    def unlabelled(self) -> Samples | None:
        """More samples without labels, if any were given."""
        return None if self._drawn is None or self._drawn.unlabelled is None else self._drawn.unlabelled.samples

    @property
    def judges(self) -> tuple[int, ...]:
        """The samples that judge what was learnt without them: those of the data, if others are of another data set."""
        mixed = self._drawn is not None and self._drawn.mixed
        return tuple(range(len(self.drawn_samples))) if mixed else ()

    @property
    def knows_labels(self) -> bool:
        """Whether the samples have labels of the data set's own."""
        return self._drawn is not None and self._drawn.labels == "dataset" and min(self.drawn_samples.labels) >= 0

    @property
    def class_names(self) -> tuple[str, ...]:
        return () if self._drawn is None else self._drawn.data.class_names

    @cached_property
    def samples(self) -> Samples | AugmentedSamples:
        """The samples with augmented copies, as the target reads them."""
        return self.augmented(self.drawn_samples)

    def augmented(self, samples: Samples) -> Samples | AugmentedSamples:
        """Return samples with as many augmented copies as this calibration uses."""
        return AugmentedSamples(samples, self.copies, self.settings.seed) if self.copies else samples

    @cached_property
    def predictions(self) -> Tensor:
        """The fine-tuned source's logits on the samples."""
        head = self.heads.tuned
        if not isinstance(head, Classifier):
            raise no_predictions(self.settings.method)
        with self.models.tuned_source():
            return logits_of(self.models.source, head, self.samples, self.settings.batch)

    @cached_property
    def all_predictions(self) -> Tensor:
        """The fine-tuned source's logits on the samples without augmented copies, then on those without labels."""
        own = self.predictions[:: 1 + self.copies]
        if self.unlabelled is None:
            return own
        head = self.heads.tuned
        if not isinstance(head, Classifier):
            raise no_predictions(self.settings.method)
        with self.models.tuned_source():
            more = logits_of(self.models.source, head, self.unlabelled, self.settings.batch)
        return torch.cat([own, more])

    def statistics(self, kinds: Collection[Kind]) -> Statistics:
        """Return the statistics at the two pretrained models; missing kinds are collected in one pass."""
        missing = set(kinds) - self._statistics.kinds
        if missing:
            self._statistics.update(self.collect_statistics(missing, self.models.pairs))
        return self._statistics

    def carry(self, method: Carrier, choose: ChooseScale | None = None) -> dict[str, TransportedSite]:
        """Carry the task vector at every pair of sites into the target's coordinates.

        `choose` says after each step how much of it is added; without it, each step is added as it is.
        """
        parts = list[dict[str, TransportedSite]]()
        passes = self._split_pairs(method)
        for share in method.schedule:
            so_far = self.models.gather_changes(joined(parts), alpha=1.0) if parts else Deltas({})
            carried: dict[str, TransportedSite] = {}
            for pairs in passes:
                statistics = self._statistics_at(share, so_far, method, pairs)
                if len(passes) > 1:  # memory is short: what batches took must not lie between what maps take
                    torch.cuda.empty_cache()
                carried |= self._carry_pairs(method, pairs, statistics)
            carried = self.models.team.gather(carried)
            if choose is not None:
                carried = scaled(carried, choose(self.models.gather_changes(carried, alpha=1.0), so_far))
            parts.append(carried)
        return joined(parts)

    def _carry_pairs(
        self, method: Carrier, pairs: Sequence[SitePair], statistics: Statistics
    ) -> dict[str, TransportedSite]:
        """Carry this process's share of the pairs, group by group, dropping sums that nobody else reads."""
        models, transported = self.models, dict[str, TransportedSite]()
        groups = solved_together(pairs) if method.by_site else [list(pairs)]
        own = models.team.share(groups) if method.by_site else groups
        if statistics is not self._statistics:
            statistics.drop(pair for group in groups if group not in own for pair in group)
        for group in own:
            with self.watch("align"):
                method.prepare(group, MethodInputs(*models.pretrained, statistics))
            if statistics is not self._statistics:
                statistics.drop(group)
            with self.watch("transport"):
                for pair in group:
                    delta = site_delta(models.vector, pair.source).scaled(method.part)
                    transported[pair.target.name] = models.in_assembly_precision(pair, method.carry(pair, delta))
        return transported

    def _split_pairs(self, method: Carrier) -> list[list[SitePair]]:
        """Return the pairs of each pass over the samples: all of them, or as many as fit into memory."""
        if not method.by_site:
            return [self.models.pairs]
        counts, groups = self.memory_plan(method.kinds).groups, iter(solved_together(self.models.pairs))
        return [[pair for group in islice(groups, count) for pair in group] for count in counts]

    def _statistics_at(self, share: float, so_far: Deltas, method: Carrier, pairs: Sequence[SitePair]) -> Statistics:
        """Collect statistics with a share of the task vector in the source, and its port so far in the target.

        At the pretrained models, those of all pairs are shared with other methods if they are kept.
        """
        models, kinds = self.models, method.kinds
        if share or len(so_far):
            with models.tuned_source(share) if share else nullcontext(), models.with_changes(so_far):
                # in the batches of the start, so that one recorded batch size repeats the whole path
                return self.collect_statistics(kinds, pairs, self.memory_plan(kinds))
        if self.keeps and len(pairs) == len(models.pairs):
            return self.statistics(kinds)
        return self.collect_statistics(kinds, pairs, compares=self.compares) if kinds else Statistics()

    def readout(self, changes: Deltas) -> Readout:
        """Solve for a correction of the final projection of the target with these changes.

        It reads augmented copies only if they were requested, not if they are just the method's default: so the step
        is the same for every method, and for the target itself.
        """
        return self.readout_problem(changes, with_copies=bool(self.settings.augment)).solve()

    def readout_problem(self, changes: Deltas, with_copies: bool = False) -> ReadoutProblem:
        """Run the target with these changes over all samples, those without labels too, up to its final projection."""
        target, head = self.models.target, self.heads.target
        if not isinstance(head, ZeroShotHead):
            raise no_predictions("the readout")
        parts: list[Samples | AugmentedSamples] = [self.samples if with_copies else self.drawn_samples]
        predictions, origins = self.all_predictions, list(range(len(self.drawn_samples)))
        if with_copies and isinstance(self.samples, AugmentedSamples):
            predictions = torch.cat([self.predictions, predictions[len(self.drawn_samples) :]])
            origins = list(self.samples.origins)
        if self.unlabelled is not None:
            parts.append(self.unlabelled)
            origins += range(len(self.drawn_samples), len(self.drawn_samples) + len(self.unlabelled))
        with self.models.with_changes(changes), torch.no_grad():
            hidden = torch.cat([self._hidden(samples) for samples in parts])
            return ReadoutProblem(hidden, target.weight("proj").clone(), head, predictions, tuple(origins), self.judges)

    def _hidden(self, samples: Samples | AugmentedSamples) -> Tensor:
        """Return the inputs of the target's final projection."""
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
        """Plan the memory for these kinds, once, and the same in every process."""
        needed = frozenset(kinds)
        if needed not in self._memory_plans:
            memory = self.models.memory_plan(needed, self.samples, self.settings)
            self._memory_plans[needed] = self.models.team.broadcast(memory)
        return self._memory_plans[needed]

    def collect_statistics(
        self,
        kinds: Collection[Kind],
        pairs: Sequence[SitePair],
        memory: MemoryPlan | None = None,
        compares: bool = False,
    ) -> Statistics:
        """Collect statistics of some pairs in a pass of their own, some with those of mispaired rows beside them."""
        memory = memory or self.memory_plan(kinds)
        with self.watch("calibrate"):
            if not self.mispaired:
                return self._run_pass(kinds, pairs, memory, compares=compares)
            require_enough_to_mispair(len(self.drawn_samples))
            statistics = Statistics()
            for shift, some in ((1, OF_INPUTS & set(kinds)), (3, set(kinds) - OF_INPUTS - OF_TARGET)):
                if some:
                    first, second = (self._run_pass(some, pairs, memory, number) for number in (shift, shift + 1))
                    statistics.update(first.less(second))
            if own := OF_TARGET & set(kinds):  # these have no pairs
                statistics.update(self._run_pass(own, pairs, memory))
            return statistics

    def _run_pass(
        self,
        kinds: Collection[Kind],
        pairs: Sequence[SitePair],
        memory: MemoryPlan,
        shift: int = 0,
        compares: bool = False,
    ) -> Statistics:
        """Run both models over the samples, of which the source reads those from number `shift` on."""
        models = self.models
        compared = compared_sites(models.pairs) if compares else ()

        def run(size: int, checkpointing: bool = memory.checkpointing) -> Statistics:
            self.batch_size = size
            passes = self._passes(size, set(kinds), shift)
            sides = self._sides(checkpointing, memory.lean)
            return collect(pairs, *sides, passes, kinds, models.device, memory.at_once, compared)

        leaner = None if memory.checkpointing else partial(run, checkpointing=True)
        statistics = halving_batches(memory.batch_size, run, leaner)
        models.team.all_reduce(statistics.tensors)
        statistics.require_finite()
        return statistics

    def _sides(self, checkpointing: bool = False, lean: bool = False) -> tuple[Side, Side]:
        def side(model: LiveModel) -> Side:
            return Side(model, model.layout.tokens, checkpointing, lean, stays=not model.swapped)

        return side(self.models.source), side(self.models.target)

    def show_rows(self, kind: Kind, pairs: Sequence[SitePair], begin: Callable[[], tuple[T, RowConsumer]]) -> T:
        """Hand on the rows of some pairs at the two pretrained models, without any gradient.

        `begin` returns a result and the function that adds rows to it; it is called again when memory runs out.
        """

        def run(size: int) -> T:
            result, take = begin()
            pass_rows(pairs, *self._sides(), self._passes(size, {kind}, 0), {kind}, take)
            return result

        return halving_batches(self.settings.batch, run)

    def _passes(self, size: int, kinds: set[Kind], shift: int) -> Iterator[tuple[Pass, Pass]]:
        """Yield, for each batch of this process's samples, a pass of the source and one of the target."""
        drawn = self.drawn_samples
        own = self.models.team.share(tuple(range(len(drawn))))
        mine = self.augmented(drawn.select(own))
        both: Iterator[tuple[Any, Any]] = ((batch, batch) for batch in mine.batches(size))
        if shift:
            both = zip(self.augmented(drawn.rotated(shift).select(own)).batches(size), mine.batches(size), strict=True)
        batches = (
            list(zip(self.models.ready(first, second), (own, others), strict=True))
            for (first, own), (second, others) in both
        )
        likely = [self._likely_labels(kinds, number) for number in (shift, 0)]  # before prefetching: it runs a model
        first = own[0] * (1 + self.copies) if own else 0
        return self._losses(prefetch(batches), likely, range(first, first + len(mine)))

    def _losses(
        self, batches: Iterator[Sequence[Any]], likely: Sequence[LikelyLabels | None], numbers: range
    ) -> Iterator[tuple[Pass, Pass]]:
        """Yield both models' losses of these batches, whose samples have these numbers among all samples."""
        models, heads, done = self.models, self.heads, numbers.start
        for both in batches:
            self.watch.progress("calibrate", done - numbers.start, len(numbers))
            here = slice(done, done + len(both[0][1]))
            first, second = (
                LossBatch(items, labels, None if predicted is None else predicted[here], here.start)
                for (items, labels), predicted in zip(both, likely, strict=True)
            )
            yield (
                partial(heads.source.losses, models.source, first),
                partial(heads.target.losses, models.target, second),
            )
            done = here.stop

    def _likely_labels(self, kinds: set[Kind], shift: int) -> LikelyLabels | None:
        """Return the fine-tuned source's predictions for the samples from number `shift` on, if `kinds` need them."""
        if not OF_EXPECTED_LOSSES & kinds:
            return None
        return LikelyLabels.of(self.predictions.roll(-shift * (1 + self.copies), 0))


def _required(value: T | None) -> T:
    """Return what exists only with samples, or refuse to do without."""
    if value is None:
        raise DataUnknownError("no calibration data was given", "name it with --data")
    return value


def no_predictions(what: str) -> UnsuitableMethodError:
    """Return the error for a method or option that needs an objective that predicts classes."""
    return UnsuitableMethodError(
        f"{what} needs an objective that predicts classes, such as zero-shot", "use --method bico, without --readout"
    )
