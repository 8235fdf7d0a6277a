"""Lists the numbers of a comparison, draws the samples of its data sets, and measures methods on one draw.

Knows neither the log nor the order in which draws are measured.
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
from hf_bico.alignment.methods.base import Carrier, Method, Trainer
from hf_bico.alignment.objectives.base import Heads
from hf_bico.alignment.statistics import Kind
from hf_bico.data.dataset import DataSet, Samples
from hf_bico.data.digests import content_digest
from hf_bico.data.draw import (
    EVALUATION_SPLITS,
    CalibrationDraw,
    Unlabelled,
    calibration_split,
    draw_from,
    evaluation_samples,
    open_data,
)
from hf_bico.data.sampling import draw_order
from hf_bico.errors import DataUnknownError, SampleCountError, UsageError
from hf_bico.experiments.compare.cells import (
    ALL,
    LOSS,
    LOSS_PER_BYTE,
    STANDARD,
    Cell,
    CellKey,
    is_polished,
    plain_row,
    polish_steps,
    read_row,
    row_method,
    split_method,
)
from hf_bico.hub.client import Hub
from hf_bico.models.checkpoints import digest_of
from hf_bico.models.families.live import ImageModel
from hf_bico.models.inference import Batched, PreparedSamples, prepare_alike
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.evaluate import HeldOutEvaluation
from hf_bico.porting.heads import make_heads, source_head, tuned_target_head
from hf_bico.porting.model_pair import ModelPair
from hf_bico.porting.plan import Plan
from hf_bico.porting.prepare import training_samples, with_unlabelled
from hf_bico.porting.reading import require_readable
from hf_bico.porting.scoring import TargetScorer, make_scorer
from hf_bico.porting.task_vector import TaskVector
from hf_bico.porting.transfer import UNTOUCHED, TransferResult, transfer, with_polish, with_readout
from hf_bico.reports.record import EvaluationRecord
from hf_bico.runtime.environment import Stopwatch
from hf_bico.settings import BRIEF, METHODS, PROBE, Settings

USUAL_SIZES = (10, 20, 50, 100)
USUAL_SEEDS = 3
BY_LOSS = ("language-modelling", "text-to-text")
"""The objectives that are measured by a loss."""


@dataclass(frozen=True)
class Draw:
    """The size of a draw, in all or of each class, and its seed."""

    n: int | None
    per_class: int | None
    seed: int

    @classmethod
    def of(cls, key: CellKey) -> Draw | None:
        return None if key.seed is None else cls(key.n, key.per_class, key.seed)


@dataclass(frozen=True)
class Grid:
    """The methods to compare, the numbers of samples in all or of each class, and the seeds of the draws.

    A method may have an alpha of its own, as in "bico@1"; without one it has that of the settings.
    """

    methods: tuple[str, ...]
    sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    per_class: bool
    settings: Settings
    own_head: bool = False
    """Whether the fine-tuned source is a classifier, measured by its own head where the others are by a probe."""
    per_byte: bool = False
    """Whether losses are of a byte: those of the tokens of two tokenizers are not comparable."""

    @classmethod
    def of(
        cls,
        methods: Sequence[str],
        n: int | Sequence[int] | None,
        per_class: int | Sequence[int] | None,
        seeds: int | Sequence[int],
        settings: Settings,
        training: Sequence[int] = (),
        polishing: Sequence[int] = (),
    ) -> Grid:
        """Parse arguments as users write them: one number or several, "all" methods, a number of seeds or a list.

        `training` are the steps of train and distill, `polishing` those of a polish, a row each.
        """
        given = (("-n", n), ("-k", per_class), ("--seeds", seeds))
        for option, numbers in (*given, ("--train-steps", training), ("--polish-steps", polishing)):
            for number in [numbers] if isinstance(numbers, int | float | str) else numbers or ():
                if type(number) is not int:
                    raise UsageError(f"{option} is {number!r}", "give a whole number, or several")
        if n is not None and per_class is not None:
            raise UsageError("-n and -k were both given", "choose the number of samples in all, or per class")
        sizes = per_class if per_class is not None else USUAL_SIZES if n is None else n
        counted = range(settings.seed, settings.seed + seeds) if isinstance(seeds, int) else seeds
        names = [methods] if isinstance(methods, str) else methods
        rows = [row for name in names for row in _rows_of(str(name), settings)]
        if settings.polish:
            rows += [f"{row}+polish" for row in rows if _is_a(row, Carrier) and not is_polished(row)]
        training, polishing = training or (settings.brief_steps,), polishing or (settings.polish_steps,)
        return cls(
            tuple(dict.fromkeys(one for row in rows for one in _with_steps(row, training, polishing))),
            (sizes,) if isinstance(sizes, int) else tuple(dict.fromkeys(sizes)),
            tuple(dict.fromkeys(counted)),
            per_class is not None,
            settings,
        )

    def __post_init__(self) -> None:
        size = "-k" if self.per_class else "-n"
        for option, values in (("--methods", self.methods), (size, self.sizes), ("--seeds", self.seeds)):
            if not values:
                raise UsageError(f"{option} leaves nothing to compare", "give at least one")
        for draw in self.draws():
            self.settings_of(draw)  # refuses wrong sizes

    def draw(self, size: int, seed: int) -> Draw:
        return Draw(None, size, seed) if self.per_class else Draw(size, None, seed)

    def draws(self) -> list[Draw]:
        return [self.draw(size, seed) for size in self.sizes for seed in self.seeds]

    def settings_of(self, draw: Draw | None) -> Settings:
        """Return the settings of one draw, without variants: those are cells of their own."""
        settings = replace(self.settings, readout=False, control=False, polish=False)
        return settings if draw is None else replace(settings, **vars(draw))

    def chooses_alpha(self, row: str) -> bool:
        """Return True if the samples choose how much this row adds, or hold it back."""
        name, alpha = split_method(row)
        return alpha is None and self.settings.finds_alpha and _is_a(name, Carrier)

    def may_hold_back(self, row: str) -> bool:
        """Return True if the samples may speak against all of this row."""
        name, _ = split_method(row)
        return self.chooses_alpha(row) or name in (*BRIEF, "readout")

    def cells(self, data: str, names: Sequence[str]) -> Iterator[list[CellKey]]:
        """Yield the numbers of one data set in the order of measuring; each list differs in the protocols only."""
        for draw in (None, *self.draws()):
            for name in names:
                for variant in self._variants(CellKey(data, name)):
                    if keys := self._keys(variant, draw):
                        yield keys

    def _variants(self, key: CellKey) -> list[CellKey]:
        """Return the plain key and the requested variants that a method or reference can have."""
        variants = [key]
        if is_polished(key.method) or key.method == "readout":
            return variants
        if self.settings.control and _is_a(key.method, Aligner):
            variants.append(replace(key, control=True))
        if self.settings.readout and (row_method(key.method) is not None or key.method == "target"):
            variants.append(replace(key, readout=True))
        return variants

    @property
    def loss_protocol(self) -> str:
        return LOSS_PER_BYTE if self.per_byte else LOSS

    def _keys(self, key: CellKey, draw: Draw | None) -> list[CellKey]:
        """Return the numbers of a variant that depend on this draw, as any probe, or on no draw if it is None."""
        if key.method == "source" and self.own_head:
            return [key] if draw is None else []
        pairs_by_samples = self.settings.layers == "similarity" and _is_a(key.method, Carrier)
        uses_draw = takes_samples(key.method) or key.readout or pairs_by_samples or self.chooses_alpha(key.method)
        uses_draw = uses_draw or is_polished(key.method)
        protocols: list[str | None] = []
        if self.settings.evaluation != PROBE and uses_draw == (draw is not None):
            protocols.append(self.loss_protocol if self.settings.objective in BY_LOSS else None)
        if self.settings.evaluation != "zero-shot" and draw is not None:
            protocols.append(PROBE)
        key = key if draw is None else replace(key, **vars(draw))
        return [replace(key, protocol=protocol) for protocol in protocols]


def standard_rows(settings: Settings) -> tuple[str, ...]:
    """Return the rows that answer whether to port, to polish or to train: of the paper, ours, and training."""
    default = settings.resolved.method, *settings.tried_too
    readout = ("readout",) if settings.objective == "zero-shot" else ()
    return ("naive@1", "theseus@1", *default, *(f"{name}+polish" for name in default), *readout, *BRIEF)


def _rows_of(name: str, settings: Settings) -> Sequence[str]:
    """Return the rows that a name stands for."""
    return tuple(METHODS) if name == ALL else standard_rows(settings) if name == STANDARD else (read_row(name),)


def _with_steps(row: str, training: Sequence[int], polishing: Sequence[int]) -> list[str]:
    """Return a row for each number of steps, where it trains briefly and does not say for how long."""
    name, number = split_method(row)
    if name in BRIEF and number is None:
        return [read_row(f"{name}@{steps}") for steps in training]
    if is_polished(row) and polish_steps(row) is None:
        return [read_row(f"{row}@{steps}") for steps in polishing]
    return [row]


def takes_samples(row: str) -> bool:
    """Return True if a method reads the calibration samples, whatever its alpha."""
    info = row_method(row)
    return info is not None and info.uses_samples and info.trains_on != "split"


def _is_a(row: str, kind: type[Method]) -> bool:
    info = row_method(row)
    return info is not None and issubclass(method_class(info.name), kind)


def row_settings(row: str, settings: Settings) -> Settings:
    """Return the settings of a row's method; those of a reference are as they are."""
    name, number = split_method(row)
    if name not in METHODS:
        return settings
    settings = replace(settings, method=name, polish=is_polished(row))
    if is_polished(row):
        settings = replace(settings, polish_steps=polish_steps(row) or settings.polish_steps)
    if name in BRIEF:
        return replace(settings, train_steps=None if number is None else int(number))
    return settings if number is None else replace(settings, alpha=number, bold=False)


LEFT_ROWS = "rows that no draw took (without a test split, other sizes and seeds leave others)"


@dataclass(frozen=True)
class ComparedDataset:
    """One data set with its draws, and the held-out `samples` of `split` that every model is measured on.

    `prepared` are the samples as the target reads them, images preprocessed once. `heads` are None where they depend
    on the draw.
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
        """Return the calibration split without the held-out samples, shuffled by the seed."""
        drawn = next(iter(self.draws.values()))
        drawn = replace(drawn, data=self.data, strategy=replace(drawn.strategy, seed=seed))
        return training_samples(drawn, self.split, self.samples)

    def about(self) -> dict[str, Any]:
        """Return what identifies the samples, as plain data."""
        return {
            "commit": None if self.data.repo is None else self.data.repo.commit,
            "config": self.data.config,
            "class names": digest(self.data.class_names),
            "split": self.split,
            LEFT_ROWS: digest([self.samples.indices, self.samples.labels]),
            **({"images": digest_of([self.prepared.images])} if isinstance(self.prepared, PreparedSamples) else {}),
        }


def about_unlabelled(unlabelled: Unlabelled, settings: Settings) -> dict[str, Any]:
    """Return what identifies the unlabelled data, whatever the draw, as plain data."""
    data, split = unlabelled.data, unlabelled.split
    about = {"id": data.name, "config": data.config, "split": split}
    if data.repo is not None:
        return {**about, "commit": data.repo.commit}
    size = len(data.splits[split])
    first = draw_order(size, settings.seed)[: settings.unlabelled_samples]
    return {**about, "rows": size, "content": content_digest(data.samples(split, first, labelled=False))}


def digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, default=str).encode(), digest_size=8).hexdigest()


def open_data_sets(plans: Sequence[Plan], grid: Grid, hub: Hub) -> list[DataSet]:
    """Open all data sets; of large ones, read as much as the largest draw needs."""
    largest = grid.draw(max(grid.sizes), grid.settings.seed)
    data_sets = [_open_data_set(planned, grid, largest, hub) for planned in plans]
    if len({data.name for data in data_sets}) < len(data_sets):
        raise UsageError("two of the data sets have one name", "rename a folder")
    return data_sets


def _open_data_set(planned: Plan, grid: Grid, draw: Draw, hub: Hub, measured: bool = True) -> DataSet:
    lineage = planned.lineage
    if lineage.data is None:
        raise lineage.no_data or DataUnknownError("no data was given", "name it with --data")
    settings = replace(grid.settings_of(draw), evaluate=measured)
    return open_data(lineage.data, settings, hub, known_names=lineage.class_names or None, reads=lineage.reads)


def draw_samples(planned: Plan, data: DataSet, grid: Grid, hub: Hub) -> dict[Draw, CalibrationDraw]:
    """Draw all calibration samples.

    As in a port, each draw reads its own rows of a large data set, unless the same split is measured on.
    """
    split = calibration_split(data, grid.settings.split)
    separate = split in data.parts and any(name != split and data.can_evaluate_on(name) for name in EVALUATION_SPLITS)
    draws = {}
    for draw in grid.draws():
        source = _open_data_set(planned, grid, draw, hub, measured=False) if separate else data
        draws[draw] = draw_from(source, grid.settings_of(draw))
    return draws


def choose_samples(draws: Mapping[Draw, CalibrationDraw], models: ModelPair) -> dict[Draw, CalibrationDraw]:
    """Return the draws with the samples that both models can read, and note in the models how these pair."""
    chosen = {draw: models.choose_samples(drawn) for draw, drawn in draws.items()}
    for drawn in chosen.values():
        reading = require_readable((models.source, models.target), drawn.split, drawn.samples)
        models.pairing = models.pairing or reading.pairing
    return chosen


def prepare_data_set(
    data: DataSet, chosen: Mapping[Draw, CalibrationDraw], models: ModelPair, hub: Hub
) -> ComparedDataset:
    """Finish the draws by these models, and choose held-out samples that no draw contains."""
    heads = None if models.settings.objective == "classification" else make_heads(models, data.class_names, None)
    draws = {
        draw: models.pseudo_label(drawn, heads or make_heads(models, data.class_names, drawn))
        for draw, drawn in chosen.items()
    }
    first, settings = next(iter(draws.values())), models.settings
    used = sorted({index for drawn in draws.values() for index in drawn.samples.indices})
    all_drawn = replace(first.samples, indices=tuple(used), labels=(0,) * len(used))
    split, samples = evaluation_samples(data, all_drawn, first.split, settings.seed, settings.eval_samples)
    if split == first.split:  # half of it is for training
        samples = samples.first(max(1, len(data.splits[split]) // 2))
    if not len(samples):
        remedy = "draw fewer, or use data with a test split" if data.labelled else "use data with labels"
        raise SampleCountError(f"'{data.name}' has no labelled sample to measure on", remedy)
    if not data.labelled and settings.evaluation != "zero-shot":
        by_loss = settings.objective != "classification"
        other = ", or --evaluation zero-shot, which measures the loss" if by_loss else ""
        raise UsageError(
            f"a linear probe is fitted to labels, and '{data.name}' has none", f"use data with labels{other}"
        )
    require_readable((models.source, models.target), split, samples)
    draws = {
        draw: with_unlabelled(drawn, samples, models, replace(settings, seed=draw.seed), hub)
        for draw, drawn in draws.items()
    }
    prepared: Batched = samples
    if isinstance(models.target, ImageModel):
        prepared = PreparedSamples.by(models.target, samples, settings.batch, "cpu")
    return ComparedDataset(data, heads, draws, split, samples, prepared)


@dataclass
class DrawMeasurements:
    """Measures methods and references on one draw, or without samples if `draw` is None.

    `names` are the methods that still need numbers of this draw: their statistics are collected together. Of a method
    that the samples hold back, every variant is the target as it is.
    """

    models: ModelPair
    grid: Grid
    data: ComparedDataset
    draw: Draw | None
    names: Collection[str]
    tuned: TaskVector | None
    checkpoint: str
    _calibrations: dict[tuple[int, bool], Calibration] = field(default_factory=dict)
    _results: dict[tuple[str, bool], TransferResult] = field(default_factory=dict)
    _scorers: dict[int, TargetScorer] = field(default_factory=dict)

    def measure(self, keys: Sequence[CellKey]) -> Iterator[Cell]:
        """Yield numbers that differ in their protocols only."""
        by_protocol = {key.protocol: key for key in keys}
        evaluation = "both" if len(keys) > 1 else PROBE if PROBE in by_protocol else "zero-shot"
        data, batch_size = self.data, self._settings.batch
        probed_on = data.samples if self._drawn is None else self._drawn.samples
        evaluator = HeldOutEvaluation(data.name, data.split, data.prepared, probed_on, evaluation, batch_size)
        name = keys[0].method
        held_back = self.grid.may_hold_back(name) and self._result(name, mispaired=False).held_back
        for record in self._records(evaluator, keys[0], held_back):
            protocol = self.grid.loss_protocol if record.metric == LOSS else record.protocol
            yield by_protocol[protocol].with_value(record.value, held_back)

    def _records(self, evaluator: HeldOutEvaluation, key: CellKey, held_back: bool) -> list[EvaluationRecord]:
        name = key.method
        if name == "source" and self.grid.own_head:
            return self._source_by_its_head(evaluator)
        calibration = self._calibration(name, key.control)
        if name in ("source", "base"):
            if not prepare_alike(self.models.source, self.models.target):  # the prepared samples are the target's
                evaluator = replace(evaluator, samples=self.data.samples)
            measure = evaluator.measure_source if name == "source" else evaluator.measure_base
            return measure(name, calibration)
        if name == "target fine-tuned" and self.tuned is not None:
            with self.models.with_changes(self.tuned):
                head = tuned_target_head(self.models, self.data.data.class_names, calibration.heads.target)
                return evaluator.measure(name, self.models.target, head)
        result = UNTOUCHED if name == "target" or held_back else self._result(name, key.control)
        result = with_readout(result, calibration) if key.readout and not held_back else result
        return evaluator.measure_target(name, calibration, result.changes)

    def _source_by_its_head(self, evaluator: HeldOutEvaluation) -> list[EvaluationRecord]:
        head = source_head(self.models, self.data.data.class_names)
        if head is None:
            raise ValueError("the fine-tuned source has no head of its own")
        with self.models.tuned_source():
            return replace(evaluator, samples=self.data.samples).measure("source", self.models.source, head)

    def _result(self, name: str, mispaired: bool) -> TransferResult:
        """Run a method once; statistics are collected for all methods that share the calibration.

        Mispaired samples would choose an alpha near 0, which is no control: it has that of the paired ones.
        """
        if (name, mispaired) not in self._results:
            calibration = self._calibration(name, mispaired)
            if is_polished(name):
                self._results[name, mispaired] = self._polished(name, calibration)
                return self._results[name, mispaired]
            kinds = self._kinds(calibration) if takes_samples(name) else set()
            # in several passes, each method collects its own statistics, some pairs at a time
            if kinds and calibration.memory_plan(kinds).passes == 1:
                calibration.statistics(kinds)
            # methods without samples give the same result in every draw
            settings = self._settings if takes_samples(name) else self.grid.settings_of(None)
            settings = row_settings(name, replace(settings, checkpoint=self._checkpoint(name)))
            method = make_method(settings.method, settings)
            training_samples = None
            if isinstance(method, Trainer) and method.whole_split:
                training_samples = self.data.training_samples(settings.seed)
            alphas, scorer = None, None
            if self.grid.chooses_alpha(name):
                scaling = self._result(name, mispaired=False).scaling if mispaired else None
                alphas = None if scaling is None else scaling.alphas
                scorer = None if mispaired else self._scorer(calibration)
            self._results[name, mispaired] = transfer(method, calibration, training_samples, alphas, scorer)
        return self._results[name, mispaired]

    def _polished(self, name: str, calibration: Calibration) -> TransferResult:
        """Polish what the same row without a polish carried."""
        settings = row_settings(name, replace(self._settings, checkpoint=self._checkpoint(name)))
        plain = self._result(plain_row(name), mispaired=False)
        return with_polish(plain, make_method(settings.method, settings), calibration)

    def _checkpoint(self, name: str) -> str:
        """Return the folder of a training's checkpoint: one for each draw, unless it trains on the whole split."""
        whole = self.draw is None or not takes_samples(name)
        return self.checkpoint if whole else f"{self.checkpoint}-{digest([name, vars(self.draw)])}"

    def _scorer(self, calibration: Calibration) -> TargetScorer:
        """Return the scorer of a calibration's samples, which its methods share."""
        if calibration.copies not in self._scorers:
            self._scorers[calibration.copies] = make_scorer(calibration)
        return self._scorers[calibration.copies]

    def _kinds(self, calibration: Calibration) -> set[Kind]:
        mispaired = calibration.mispaired
        sharing = [name for name in self.names if self._calibration(name, mispaired) is calibration]
        methods = (method_class(split_method(name)[0]) for name in sharing)
        readers = Aligner if mispaired else Carrier
        return {kind for method in methods if issubclass(method, readers) for kind in method.kinds}

    def _calibration(self, name: str, mispaired: bool) -> Calibration:
        """Return the calibration of a method; methods with the same number of augmented copies share one."""
        settings = row_settings(name, self._settings)
        copies = 0 if self._drawn is None else self.models.copies(settings, len(self._drawn.samples))
        if (copies, mispaired) not in self._calibrations:
            self._calibrations[copies, mispaired] = Calibration(
                self._matched, self._drawn, self._heads, Stopwatch(), settings, mispaired=mispaired
            )
        return self._calibrations[copies, mispaired]

    @cached_property
    def _settings(self) -> Settings:
        return self.grid.settings_of(self.draw)

    @cached_property
    def _drawn(self) -> CalibrationDraw | None:
        return None if self.draw is None else self.data.draws[self.draw]

    @cached_property
    def _heads(self) -> Heads:
        return self.data.heads or make_heads(self.models, self.data.data.class_names, self._drawn)

    @cached_property
    def _matched(self) -> ModelPair:
        if self._settings.layers != "similarity" or self._drawn is None:
            return self.models
        return self.models.with_similar_blocks(self._drawn.samples)
