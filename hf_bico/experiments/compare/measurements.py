"""Which numbers, on which data, measured.

The grid: which numbers a comparison asks for. Knows methods and settings by name; measures nothing.

What a comparison is about: a data set with its draws, and the rows that every model is measured on.

One draw of samples of one data set, and what every method makes of it, measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hf_bico.alignment.methods import make_method, method_class
from hf_bico.alignment.methods.aligned import Aligner
from hf_bico.alignment.methods.base import Carrier, Trainer
from hf_bico.alignment.objectives.base import Heads
from hf_bico.alignment.statistics import Kind
from hf_bico.data.dataset import DataSet, Samples
from hf_bico.data.draw import (
    EVALUATION_SPLITS,
    CalibrationDraw,
    calibration_split,
    draw_from,
    evaluation_samples,
    open_data,
)
from hf_bico.errors import DataUnknownError, SampleCountError, UsageError
from hf_bico.experiments.compare.cells import LOSS, Cell, CellKey
from hf_bico.hub.client import Hub
from hf_bico.models.checkpoints import digest_of
from hf_bico.models.families.live import ImageModel
from hf_bico.models.inference import Batched, Prepared
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.evaluate import HeldOutEvaluation
from hf_bico.porting.heads import make_heads, tuned_target_head
from hf_bico.porting.model_pair import ModelPair, similar_blocks
from hf_bico.porting.plan import Plan
from hf_bico.porting.prepare import require_readable, training_samples
from hf_bico.porting.task_vector import TaskVector
from hf_bico.porting.transfer import UNTOUCHED, TransferResult, transfer, with_readout
from hf_bico.reports.record import EvaluationRecord
from hf_bico.runtime.environment import Stopwatch
from hf_bico.settings import METHODS, PROBE, Settings

USUAL_SIZES = (10, 20, 50, 100)
USUAL_SEEDS = 3
BY_LOSS = ("language-modelling", "text-to-text")
"""The objectives whose own measure is a loss."""


@dataclass(frozen=True)
class Draw:
    """So many calibration samples, in all or of each class, drawn by a seed."""

    size: int
    seed: int


@dataclass(frozen=True)
class Variant:
    """A method as it is, with the two models' samples mispaired, or with the readout corrected."""

    control: bool = False
    readout: bool = False


PLAIN = Variant()


@dataclass(frozen=True)
class Grid:
    """Methods, each with so many samples in all or of each class, drawn by each of the seeds."""

    methods: tuple[str, ...]
    sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    per_class: bool
    settings: Settings

    @classmethod
    def of(
        cls,
        methods: Sequence[str],
        n: int | Sequence[int] | None,
        per_class: int | Sequence[int] | None,
        seeds: int | Sequence[int],
        settings: Settings,
    ) -> Grid:
        """What was asked for, as it may be written: one number or several, "all" methods, so many seeds or which."""
        for option, given in (("-n", n), ("-k", per_class), ("--seeds", seeds)):
            numbers = [given] if isinstance(given, int | float | str) else given or ()
            for number in numbers:
                if type(number) is not int:
                    raise UsageError(f"{option} is {number!r}", "give a whole number, or several")
        if n is not None and per_class is not None:
            raise UsageError("-n and -k were both given", "choose the number of samples in all, or per class")
        sizes = per_class if per_class is not None else USUAL_SIZES if n is None else n
        counted = range(settings.seed, settings.seed + seeds) if isinstance(seeds, int) else seeds
        names = [methods] if isinstance(methods, str) else methods
        return cls(
            tuple(dict.fromkeys(one for name in names for one in (METHODS if name == "all" else [name]))),
            (sizes,) if isinstance(sizes, int) else tuple(dict.fromkeys(sizes)),
            tuple(dict.fromkeys(counted)),
            per_class is not None,
            settings,
        )

    def __post_init__(self) -> None:
        for name in self.methods:
            if name not in METHODS:
                raise UsageError(f"there is no method '{name}'", f"use some of: all, {', '.join(METHODS)}")
        size = "-k" if self.per_class else "-n"
        for option, values in (("--methods", self.methods), (size, self.sizes), ("--seeds", self.seeds)):
            if not values:
                raise UsageError(f"{option} leaves nothing to compare", "give at least one")
        for draw in self.draws():
            self.settings_of(draw)  # refuses sizes that are none

    def draws(self) -> list[Draw]:
        return [Draw(size, seed) for size in self.sizes for seed in self.seeds]

    @property
    def largest(self) -> Draw:
        return Draw(max(self.sizes), self.settings.seed)

    def settings_of(self, draw: Draw | None) -> Settings:
        """Those of one draw; variants are cells of their own."""
        settings = replace(self.settings, readout=False, control=False)
        if draw is None:
            return settings
        n, per_class = (None, draw.size) if self.per_class else (draw.size, None)
        return replace(settings, n=n, per_class=per_class, seed=draw.seed)

    def variants(self, name: str) -> list[Variant]:
        """Those of a method or reference that were asked for and make sense."""
        found = [PLAIN]
        if self.settings.control and name in METHODS and issubclass(method_class(name), Aligner):
            found.append(Variant(control=True))
        if self.settings.readout and (name in METHODS or name == "target"):
            found.append(Variant(readout=True))
        return found

    def keys(self, data: str, name: str, variant: Variant, draw: Draw | None) -> list[CellKey]:
        """The numbers of one method or reference that depend on this draw; without one, those that depend on none.

        A probe depends on the draw, whatever is probed.
        """
        of_draw = takes_samples(name) or variant.readout or self._pairs_by_samples(name)
        protocols: list[str | None] = []
        if self.settings.evaluation != PROBE and of_draw == (draw is not None):
            protocols.append(LOSS if self.settings.objective in BY_LOSS else None)
        if self.settings.evaluation != "zero-shot" and draw is not None:
            protocols.append(PROBE)
        size, seed = (None, None) if draw is None else (draw.size, draw.seed)
        n, per_class = (None, size) if self.per_class else (size, None)
        return [
            CellKey(data, name, n, per_class, seed, variant.control, variant.readout, protocol)
            for protocol in protocols
        ]

    def _pairs_by_samples(self, name: str) -> bool:
        """Whether the samples say which blocks are paired, and a method carries between these."""
        return self.settings.layers == "similarity" and name in METHODS and issubclass(method_class(name), Carrier)

    def cells(self, data: str, names: Sequence[str]) -> Iterator[tuple[Draw | None, str, Variant, list[CellKey]]]:
        """Everything about one data set, in the order in which it is measured."""
        for draw in (None, *self.draws()):
            for name in names:
                for variant in self.variants(name):
                    keys = self.keys(data, name, variant, draw)
                    if keys:
                        yield draw, name, variant, keys


def takes_samples(name: str) -> bool:
    """Whether what a method does depends on the calibration samples; references do nothing."""
    info = METHODS.get(name)
    return info is not None and info.uses_samples and info.trains_on != "split"


LEFT_ROWS = "rows that no draw took (without a test split, other sizes and seeds leave others)"


@dataclass(frozen=True)
class ComparedDataset:
    """One data set, with the held-out rows `samples` of `split`, which the target's images are `prepared` from once.

    `heads` are None where they depend on the draw.
    """

    data: DataSet
    heads: Heads | None
    draws: Mapping[Draw, CalibrationDraw]
    split: str
    samples: Samples
    prepared: Batched

    @property
    def name(self) -> str:
        return self.data.name

    def training_samples(self, seed: int) -> Samples:
        """All of the split that was drawn from, but for what is measured on, in the order that the seed gives."""
        drawn = next(iter(self.draws.values()))
        drawn = replace(drawn, data=self.data, strategy=replace(drawn.strategy, seed=seed))
        return training_samples(drawn, self.split, self.samples)

    def about(self) -> dict[str, Any]:
        """What the numbers depend on, as plain data."""
        return {
            "commit": None if self.data.repo is None else self.data.repo.commit,
            "config": self.data.config,
            "class names": digest(self.data.class_names),
            "split": self.split,
            LEFT_ROWS: digest([self.samples.indices, self.samples.labels]),
            **({"images": digest_of([self.prepared.images])} if isinstance(self.prepared, Prepared) else {}),
        }


def digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, default=str).encode(), digest_size=8).hexdigest()


def opened(plans: Sequence[Plan], grid: Grid, hub: Hub) -> list[DataSet]:
    """The data sets; of large ones, as much as the largest draw needs."""
    found = [_opened(planned, grid, grid.largest, hub) for planned in plans]
    if len({data.name for data in found}) < len(found):
        raise UsageError("two of the data sets have one name", "rename a folder")
    return found


def _opened(planned: Plan, grid: Grid, draw: Draw, hub: Hub, measured: bool = True) -> DataSet:
    lineage = planned.lineage
    if lineage.data is None:
        raise lineage.no_data or DataUnknownError("no data was given", "name it with --data")
    names = lineage.source.origin.class_names or None
    settings = replace(grid.settings_of(draw), evaluate=measured)
    return open_data(lineage.data, settings, hub, known_names=names, reads=lineage.base.layout.reads)


def drawn_from(planned: Plan, data: DataSet, grid: Grid, hub: Hub) -> dict[Draw, CalibrationDraw]:
    """All draws; from a large data set each reads rows of its own, as a port does, unless those may be measured on."""
    split = calibration_split(data, grid.settings.split)
    apart = split in data.parts and any(name != split and data.can_measure_on(name) for name in EVALUATION_SPLITS)
    return {
        draw: draw_from(_opened(planned, grid, draw, hub, measured=False) if apart else data, grid.settings_of(draw))
        for draw in grid.draws()
    }


def subject_of(data: DataSet, draws: Mapping[Draw, CalibrationDraw], models: ModelPair) -> ComparedDataset:
    """The data set as these models see it; no row that any draw took is measured on."""
    heads = None if models.settings.objective == "classification" else make_heads(models, data.class_names, None)

    def settled_by(drawn: CalibrationDraw) -> CalibrationDraw:
        chosen = models.choose_samples(drawn)
        require_readable(models, chosen.split, chosen.samples)
        return models.pseudo_label(chosen, heads or make_heads(models, data.class_names, chosen))

    settled = {draw: settled_by(drawn) for draw, drawn in draws.items()}
    first = next(iter(settled.values()))
    used = sorted({index for drawn in settled.values() for index in drawn.samples.indices})
    everything = replace(first.samples, indices=tuple(used), labels=(0,) * len(used))
    split, samples = evaluation_samples(
        data, everything, first.split, models.settings.seed, models.settings.eval_samples
    )
    if split == first.split:  # half of it is for training
        samples = samples.first(max(1, len(data.splits[split]) // 2))
    if not len(samples):
        remedy = "draw fewer, or use data with a test split" if data.labelled else "use data with labels"
        raise SampleCountError(f"'{data.name}' has no labelled sample to measure on", remedy)
    if not data.labelled and models.settings.evaluation != "zero-shot":
        by_loss = models.settings.objective != "classification"
        other = ", or --evaluation zero-shot, which measures the loss" if by_loss else ""
        raise UsageError(
            f"a linear probe is fitted to labels, and '{data.name}' has none", f"use data with labels{other}"
        )
    require_readable(models, split, samples)
    prepared: Batched = samples
    if isinstance(models.target, ImageModel):
        prepared = Prepared.by(models.target, samples, models.settings.batch)
    return ComparedDataset(data, heads, settled, split, samples, prepared)


@dataclass
class DrawMeasurements:
    """The rounds of one draw, or those without samples.

    `names` are the methods whose numbers of this draw are not all known: their statistics are collected together.
    """

    models: ModelPair
    grid: Grid
    subject: ComparedDataset
    draw: Draw | None
    names: Collection[str]
    tuned: TaskVector | None
    checkpoint: str
    _rounds: dict[tuple[int, bool], Calibration] = field(default_factory=dict)
    _outcomes: dict[tuple[str, bool], TransferResult] = field(default_factory=dict)

    def measured(self, name: str, variant: Variant, keys: Sequence[CellKey]) -> Iterator[Cell]:
        """These numbers of one method or reference."""
        by_protocol = {key.protocol: key for key in keys}
        evaluation = "both" if len(keys) > 1 else PROBE if PROBE in by_protocol else "zero-shot"
        probed_on = self.subject.samples if self._drawn is None else self._drawn.samples
        evaluator = HeldOutEvaluation(
            *(self.subject.name, self.subject.split, self.subject.prepared, probed_on),
            *(evaluation, self._settings.batch),
        )
        for record in self._records(evaluator, name, variant):
            protocol = LOSS if record.metric == LOSS else record.protocol
            yield by_protocol[protocol].measured(record.value)

    def _records(self, evaluator: HeldOutEvaluation, name: str, variant: Variant) -> list[EvaluationRecord]:
        calibration = self._round(name, variant.control)
        if name == "source":  # the samples are prepared for the target
            return replace(evaluator, samples=self.subject.samples).measure_source(name, calibration)
        if name == "base":
            return replace(evaluator, samples=self.subject.samples).measure_base(name, calibration)
        if name == "target fine-tuned" and self.tuned is not None:
            with self.models.with_changes(self.tuned):
                head = tuned_target_head(self.models, self.subject.data.class_names, calibration.heads.target)
                return evaluator.measure(name, self.models.target, head)
        result = UNTOUCHED if name == "target" else self._result(name, variant.control)
        result = with_readout(result, calibration) if variant.readout else result
        return evaluator.measure_target(name, calibration, result.changes)

    def _result(self, name: str, mispaired: bool) -> TransferResult:
        """What a method makes of the target; statistics are collected once for all methods that share the round."""
        if (name, mispaired) not in self._outcomes:
            calibration = self._round(name, mispaired)
            kinds = self._kinds(calibration) if takes_samples(name) else set()
            if (
                kinds and calibration.memory_plan(kinds).passes == 1
            ):  # else each method collects its own, some pairs at a time
                calibration.statistics(kinds)
            # what takes no samples is the same in every draw
            settings = self._settings if takes_samples(name) else self.grid.settings_of(None)
            method = make_method(name, replace(settings, checkpoint=self.checkpoint))
            whole = None
            if isinstance(method, Trainer) and method.whole_split:
                whole = self.subject.training_samples(settings.seed)
            self._outcomes[name, mispaired] = transfer(method, calibration, whole)
        return self._outcomes[name, mispaired]

    def _kinds(self, calibration: Calibration) -> set[Kind]:
        sharing = (method_class(name) for name in self.names if self._round(name, calibration.mispaired) is calibration)
        pairing = Aligner if calibration.mispaired else Carrier
        return {kind for method in sharing if issubclass(method, pairing) for kind in method.kinds}

    def _round(self, name: str, mispaired: bool) -> Calibration:
        """That of a method: those with the same number of altered copies share one."""
        settings = replace(self._settings, method=name) if name in METHODS else self._settings
        copies = 0 if self._drawn is None else self.models.copies(settings, len(self._drawn.samples))
        if (copies, mispaired) not in self._rounds:
            self._rounds[copies, mispaired] = Calibration(
                *(self._matched, self._drawn, self._heads, Stopwatch(), settings), mispaired=mispaired
            )
        return self._rounds[copies, mispaired]

    @cached_property
    def _settings(self) -> Settings:
        return self.grid.settings_of(self.draw)

    @cached_property
    def _drawn(self) -> CalibrationDraw | None:
        return None if self.draw is None else self.subject.draws[self.draw]

    @cached_property
    def _heads(self) -> Heads:
        return self.subject.heads or make_heads(self.models, self.subject.data.class_names, self._drawn)

    @cached_property
    def _matched(self) -> ModelPair:
        if self._settings.layers != "similarity" or self._drawn is None:
            return self.models
        return self.models.with_blocks(similar_blocks(self.models, self._drawn.samples))
