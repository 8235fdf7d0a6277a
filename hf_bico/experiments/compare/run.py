"""Compares methods on the user's models: every method, number of samples and seed, on the same held-out samples.

Models are loaded once, and one calibration pass serves all methods that read its statistics. Every number is logged as
it comes, so that an interrupted comparison can be resumed. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import torch

from hf_bico.alignment.methods import make_method
from hf_bico.alignment.methods.base import Trainer
from hf_bico.alignment.methods.saved_training import remove_checkpoint
from hf_bico.arguments import CompareOptions, settings_of, takes
from hf_bico.errors import UnsuitableMethodError, UsageError
from hf_bico.experiments.compare.cells import CellKey, Refusal, row_method, split_method
from hf_bico.experiments.compare.comparison import Comparison
from hf_bico.experiments.compare.log import CellLog
from hf_bico.experiments.compare.measurements import (
    BY_LOSS,
    USUAL_SEEDS,
    ComparedDataset,
    Draw,
    DrawMeasurements,
    Grid,
    about_unlabelled,
    choose_samples,
    digest,
    draw_samples,
    open_data_sets,
    prepare_data_set,
)
from hf_bico.hub.client import Hub
from hf_bico.models.checkpoints import digest_of
from hf_bico.models.model import Model, ModelReference
from hf_bico.porting.calibration import require_enough_to_mispair
from hf_bico.porting.head_plan import has_usable_head
from hf_bico.porting.model_pair import ModelPair
from hf_bico.porting.plan import Plan
from hf_bico.porting.planner import plan_port, with_blocks, with_model_defaults
from hf_bico.porting.prepare import require_device_map, require_projection, require_tokenizers
from hf_bico.porting.special_tokens import require_unneeded
from hf_bico.porting.task_vector import FineTune, stored_tensors
from hf_bico.runtime.environment import Stopwatch, choose_device, enough_memory, exact_float32, installed_versions
from hf_bico.runtime.library_errors import translate_errors
from hf_bico.settings import (
    DEFAULT_MEASURED,
    DEFAULT_UNLABELLED,
    FINETUNE_STEPS,
    OPTIONS,
    PROBE,
    Settings,
    usual_methods,
)
from hf_bico.utils import __version__
from hf_bico.utils.files import expanded
from hf_bico.utils.progress import Progress, ShownProgress, callback_of

OnNumber = Callable[[Comparison], None]
"""Called with the numbers so far, after every number."""
_VARIANTS = ("readout", "polish", "polish_on", "control")
"""The options that add variants of the methods."""
CHECKPOINT_PREFIX = "training-"
"""Prefix of the folders with checkpoints of an interrupted fine-tuning."""


@torch.inference_mode(False)
@enough_memory()
@exact_float32()
@translate_errors()
@takes(*("split", "data", "limits", "aligning", "tower", "force", "training", "measuring"), *_VARIANTS)
def compare(
    source: ModelReference,
    to: ModelReference,
    *,
    base: ModelReference | None = None,
    data: Any = None,
    unlabelled: Any = None,
    methods: Sequence[str] | None = None,
    n: int | Sequence[int] | None = None,
    per_class: int | Sequence[int] | None = None,
    seeds: int | Sequence[int] = USUAL_SEEDS,
    train_steps: int | Sequence[int] | None = None,
    polish_steps: int | Sequence[int] | None = None,
    fine_tuned: ModelReference | None = None,
    with_base: bool = False,
    folder: str | Path | None = None,
    overwrite: bool = False,
    token: str | None = None,
    allow_pickle: bool = False,
    progress: ShownProgress = None,
    shown: OnNumber = lambda comparison: None,
    **options: Unpack[CompareOptions],
) -> Comparison:
    """Measure methods side by side: each with `n` samples (or `per_class` of each class), several draws each.

    `data` is one data set or a list of their names; `unlabelled` is a data set of more samples, whose labels are not
    read: each draw takes its own, without what is measured on. `seeds` is how many draws, counted from the option
    `seed`, or a list. `methods` are names, or "all": "bico" is the method as `port` runs it, which adds as much as the
    samples clearly speak for, or nothing; "bico@1" is the method at alpha 1. "standard" stands for those that answer
    whether to port, to polish or to train; `train_steps` and `polish_steps` may be lists, with a row for each number.
    The references are the untouched target, the fine-tuned source, `fine_tuned` (the target fine-tuned directly) if
    given, and the source's base if `with_base` is set or losses are measured. With a `folder`, every number is kept
    there as it comes, an interrupted comparison is resumed, and the finished one is written as comparison.csv, .json,
    .md and .png. The other options are those of `hf_bico.Settings`; `readout`, `control` and `polish` add these
    variants of the methods.

    >>> hf_bico.compare("user/vit-b16-eurosat", to="laion/ViT-B-16-plus", n=[10, 100]).table()  # doctest: +SKIP
    """
    if "method" in options:
        raise UsageError("'method' is an option of a port", "give 'methods', a list")
    training, polishing = _as_list(train_steps), _as_list(polish_steps)
    one = {"train_steps": training[0]} if len(training) == 1 else {}
    settings, hub, report = settings_of(compare, {**options, **one}), Hub(token), callback_of(progress)
    if settings.own_objective:
        raise UsageError("methods are compared by an objective of the models' own", "leave the objective out")
    several = isinstance(data, list | tuple) and bool(data) and all(isinstance(one, str | Path) for one in data)
    plans = [
        plan_port(source, to, base=base, data=one, unlabelled=unlabelled, hub=hub, allow_pickle=allow_pickle)
        for one in (data if several else [data])
    ]
    if any(planned.lineage.writes_data for planned in plans):
        raise UsageError(
            "generated texts are for a port: methods are compared on samples that are measured on too",
            "name a data set; a folder called generated is ./generated",
        )
    settings = with_model_defaults(settings, *plans[0].lineage.layouts)
    if settings.objective == "classification":  # a probe works for any model
        settings = replace(settings, evaluation=PROBE)
    rows = _usual_rows(settings) if methods is None else methods
    grid = Grid.of(rows, n, per_class, seeds, settings, training=training, polishing=polishing)
    if settings.objective == "classification":
        plans[0].with_fitted_head(settings.probe).require_head()
        grid = replace(grid, own_head=has_usable_head(plans[0].lineage))
    with ExitStack() as stack:
        output = expanded(folder) if folder is not None else Path(stack.enter_context(TemporaryDirectory()))
        work = _Work.of(plans, grid, hub, report)
        work.with_base = with_base
        if fine_tuned is not None:
            target = work.models.lineage.target
            work.tuned = FineTune.over(target, fine_tuned, "the fine-tuned target", hub, allow_pickle)
        log = stack.enter_context(CellLog.open(output, work.identity, overwrite))
        if work.tuned is not None:
            log.add_reference("fine_tuned", {"id": work.tuned.name, "sha256": work.tuned.sha256})
        for _ in work.measure(log):
            report("compare", len(log.chosen(work.keys)), len(work.keys))
            shown(work.comparison(log))
        comparison = work.comparison(log)
        if folder is not None:
            comparison.save(output)
            for checkpoint in output.glob(f"{CHECKPOINT_PREFIX}*"):  # its numbers are in the log
                remove_checkpoint(checkpoint)
    return comparison


def _as_list(given: Any) -> list[Any]:
    """Return one number or several as a list."""
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]


def _usual_rows(settings: Settings) -> Sequence[str]:
    """Return what is compared by default; with a number for alpha, every method has that."""
    rows = usual_methods()
    return rows if settings.finds_alpha else list(dict.fromkeys(split_method(row)[0] for row in rows))


@dataclass
class _Work:
    """Models, samples and settings that all numbers of a comparison share."""

    models: ModelPair
    grid: Grid
    data_sets: list[ComparedDataset]
    tuned: FineTune | None = None
    with_base: bool = False

    @classmethod
    def of(cls, plans: Sequence[Plan], grid: Grid, hub: Hub, progress: Progress) -> _Work:
        """Draw all samples, then download and load the models."""
        settings, watch = grid.settings, Stopwatch(progress)
        first = with_blocks(plans[0], settings.layers)
        device = choose_device(settings.device)
        for planned in plans:
            planned.lineage.require_same_function(settings.force)
        require_projection(first, settings)
        require_device_map(settings, device)
        require_unneeded(settings, first.lineage.layouts)
        with watch("sample"):
            data_sets = open_data_sets(plans, grid, hub)
            draws = [draw_samples(*one, grid, hub) for one in zip(plans, data_sets, strict=True)]
            if settings.control:
                require_enough_to_mispair(min(len(drawn.samples) for some in draws for drawn in some.values()))
            require_tokenizers(first.lineage, (drawn for some in draws for drawn in some.values()), settings)
        with watch("download"):
            first = first.fetched(watch.progress)
        models = ModelPair.open(first, settings, device, watch)
        models.use_common_length()
        if settings.objective == "zero-shot":  # methods that predict classes use the vision tower only
            models = models.of_towers(("",), "zero-shot")
        chosen = [choose_samples(some, models) for some in draws]
        grid = replace(grid, per_byte=models.pairing is not None)
        return cls(models, grid, [prepare_data_set(*one, models, hub) for one in zip(data_sets, chosen, strict=True)])

    @cached_property
    def refusals(self) -> tuple[Refusal, ...]:
        """Refusals of the methods that cannot carry between these models."""
        planned, refusals = self.models.planned, []
        pseudo = any(drawn.labels != "dataset" for data in self.data_sets for drawn in data.draws.values())
        for name in dict.fromkeys(split_method(row)[0] for row in self.grid.methods):
            method = make_method(name, self.grid.settings)
            try:
                method.require(*planned.lineage.layouts, planned.pairs)
            except UnsuitableMethodError as error:
                refusals.append(Refusal(name, error.cause))
            if method.needs_predictions and not self.grid.settings.predicts:
                refusals.append(Refusal(name, "it needs an objective that predicts classes"))
            if name == "readout" and not self._has_readout:
                refusals.append(Refusal(name, "it corrects the final projection of a CLIP's vision tower"))
            if name == "train" and pseudo and self.grid.settings.predicts:
                refusals.append(Refusal(name, "it trains on the data set's own labels, and there are none"))
            if isinstance(method, Trainer) and method.whole_split and pseudo:
                refusals.append(Refusal(name, "it trains on the data set's own labels, not on pseudo-labels"))
        return tuple(refusals)

    @property
    def _has_readout(self) -> bool:
        sites = self.models.lineage.target.layout.main_sites
        return self.grid.settings.objective == "zero-shot" and any(site.role == "proj" for site in sites)

    @cached_property
    def names(self) -> list[str]:
        """References, then methods."""
        refused = {refusal.method for refusal in self.refusals}
        by_loss = self.grid.settings.objective in BY_LOSS and self.grid.settings.evaluation != PROBE
        references = ["target", *(["base"] if by_loss or self.with_base else []), "source"]
        references += ["target fine-tuned"] if self.tuned is not None else []
        return [*references, *(row for row in self.grid.methods if split_method(row)[0] not in refused)]

    @cached_property
    def keys(self) -> list[CellKey]:
        """All requested numbers."""
        return [key for data in self.data_sets for keys in self.grid.cells(data.name, self.names) for key in keys]

    def measure(self, log: CellLog) -> Iterator[None]:
        """Measure the numbers that the log does not contain, and yield after each that is added."""
        for data in self.data_sets:
            cells = ([key for key in keys if not log.has(key)] for keys in self.grid.cells(data.name, self.names))
            for draw, group in groupby(filter(None, cells), key=lambda keys: Draw.of(keys[0])):
                missing = list(group)
                measurements = DrawMeasurements(
                    models=self.models,
                    grid=self.grid,
                    data=data,
                    draw=draw,
                    names=dict.fromkeys(keys[0].method for keys in missing if row_method(keys[0].method) is not None),
                    tuned=None if self.tuned is None else self.tuned.vector,
                    checkpoint=str(log.folder / f"{CHECKPOINT_PREFIX}{digest([data.name, self.identity])}"),
                )
                for keys in missing:
                    for cell in measurements.measure(keys):
                        log.add(cell)
                        yield

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What all numbers depend on, without method, number of samples and seed."""
        lineage = self.models.lineage
        source = lineage.source.sha256 or digest_of(stored_tensors(self.models.vector))
        models = {"base": lineage.base, "target": lineage.target}
        return {
            "hf_bico": __version__,
            "source": {"id": lineage.source.name, "sha256": source},
            **{part: {"id": model.name, "sha256": _weights(model)} for part, model in models.items()},
            "data": {data.name: data.about() for data in self.data_sets},
            **({} if self.unlabelled is None else {"unlabelled": self.unlabelled}),
            "settings": _identifying(self.grid.settings),
        }

    @cached_property
    def unlabelled(self) -> dict[str, Any] | None:
        """What identifies the unlabelled data, which all draws take samples from; None if there is none."""
        drawn = next(iter(self.data_sets[0].draws.values()))
        return None if drawn.unlabelled is None else about_unlabelled(drawn.unlabelled, self.grid.settings)

    def comparison(self, log: CellLog) -> Comparison:
        """Return the requested numbers that are known."""
        lineage, usual = self.models.lineage, _decisive(Settings())
        about = {
            "hf_bico": __version__,
            "base": lineage.base.name,
            "commits": {model.name: model.commit for model in lineage.models if model.commit is not None},
            **({} if self.unlabelled is None else {"unlabelled": self.unlabelled}),
            "evaluation": {one.name: {"split": one.split, "samples": len(one.samples)} for one in self.data_sets},
            "seeds": list(self.grid.seeds),
            "settings": {name: value for name, value in _decisive(self.grid.settings).items() if value != usual[name]},
            "versions": installed_versions(),
        }
        return Comparison(
            source=lineage.source.name,
            target=lineage.target.name,
            cells=log.chosen(self.keys),
            refusals=self.refusals,
            about=about,
            methods=self.grid.methods,
            data_sets=tuple(data.name for data in self.data_sets),
        )


def _decisive(settings: Settings) -> dict[str, Any]:
    """Return the settings that change a number, as plain data."""
    values = {name: getattr(settings, name) for name, option in OPTIONS.items() if option.decisive}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _identifying(settings: Settings) -> dict[str, Any]:
    """Return the settings that change a number, as logs had them before some of them could be chosen."""
    values = _decisive(settings)
    added: dict[str, Any] = {"eval_samples": DEFAULT_MEASURED, "bold": False, "special_tokens": True}
    added |= {"probe": False, "polish_on": "source", "chosen rate": None, "unlabelled_samples": DEFAULT_UNLABELLED}
    for name in ("polish", "polish_steps"):  # rows of their own
        del values[name]
    values["chosen rate"] = settings.learning_rate  # of train, distill and a polish
    values |= {"learning_rate": settings.rate, "train_steps": settings.train_steps or FINETUNE_STEPS}
    if not settings.finds_alpha:  # else rows differ in their steps
        values["path_steps"] = settings.steps
    return {name: value for name, value in values.items() if name not in added or value != added[name]}


def _weights(model: Model) -> Any:
    """Identify a model's weights: by the hashes of its files, or by the tensors of a loaded module."""
    return model.sha256 or digest_of(model.checkpoint.tensor(name) for name in model.checkpoint.shapes)
