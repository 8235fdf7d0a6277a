"""Reproduces a table of the paper, and estimates beforehand what that takes.

Fine-tunes the models that are not given, then compares methods on every task. All tables share one folder, in which
every model and number is kept as it comes, so that an interrupted run can be resumed. Prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Unpack

import torch

from hf_bico.alignment.methods.finetuning import training_recipe
from hf_bico.alignment.methods.saved_training import remove_checkpoint
from hf_bico.arguments import ReproduceOptions, settings_of, takes
from hf_bico.data.draw import open_data
from hf_bico.errors import ClassNamesError, OutputExistsError, RecordError, SampleCountError, UsageError
from hf_bico.experiments.compare.cells import Refusal
from hf_bico.experiments.compare.comparison import Comparison
from hf_bico.experiments.compare.measurements import takes_samples
from hf_bico.experiments.compare.run import compare
from hf_bico.experiments.diagnose.findings import BACKWARD, FORWARD
from hf_bico.experiments.reproduce.paper import PaperTable, PaperTask, table, task
from hf_bico.experiments.reproduce.reproduction import Reproduction
from hf_bico.hub.client import Hub, locate
from hf_bico.hub.references import parse
from hf_bico.models.model import Model
from hf_bico.porting.lineage import open_source
from hf_bico.porting.port import port
from hf_bico.reports.record import read_record
from hf_bico.runtime.environment import choose_device, exact_float32
from hf_bico.runtime.library_errors import translate_errors
from hf_bico.runtime.output import RECORD_FILE, locked_folder
from hf_bico.settings import METHODS, PROBE, Settings
from hf_bico.utils.files import expanded
from hf_bico.utils.progress import Progress, ShownProgress, callback_of, silent
from hf_bico.utils.text import did_you_mean, size_text

LITERAL: dict[str, Any] = {"completion": "svd", "labels": "dataset", "alpha": 1.0}
"""The paper's settings where they differ from our defaults."""
RUN_SETTINGS = ("max_download", "batch_size", "memory", "device", "dtype", "eval_samples", "max_length", "seed")
RECIPE_SETTINGS = ("learning_rate", "weight_decay", "train_steps", "train_batch", "warmup")
MOST_DOWNLOAD = "20GB"
"""Default limit for one data set: fine-tuning reads the whole training split."""
OnPartNumber = Callable[[str, Comparison], None]
"""Called after every number, with the task (and the sampling, where there are several) and the numbers so far."""


@dataclass(frozen=True)
class Job:
    """The tasks of a table to reproduce, and the models and data sets to use for them.

    `sources`, `targets` and `data` map names of tasks to what the caller has given: fine-tuned models, which are
    otherwise trained first, and other copies of the data sets.
    """

    table: PaperTable
    tasks: tuple[PaperTask, ...]
    folder: Path
    sources: Mapping[str, str]
    targets: Mapping[str, str]
    data: Mapping[str, str]
    seeds: int | Sequence[int] = 1
    train_target: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        tasks: Sequence[str] | None,
        folder: Path | str,
        *,
        source_of: Mapping[str, str] | None = None,
        target_of: Mapping[str, str] | None = None,
        data_of: Mapping[str, str] | None = None,
        seeds: int | Sequence[int] | None = None,
        train_target: bool = False,
    ) -> Job:
        """Check what the caller has given against the table."""
        paper = table(name)
        sources, targets, data = (
            {_task_name(one, paper, f"--{option}-of"): value for one, value in (given or {}).items()}
            for option, given in (("source", source_of), ("target", target_of), ("data", data_of))
        )
        named = paper.tasks if tasks is None else [_task_name(one, paper, "--tasks") for one in tasks]
        chosen = [one for one in paper.tasks if one in named]
        if not chosen:
            raise UsageError("--tasks leaves nothing to reproduce", f"name some of: {', '.join(paper.tasks)}")
        if (train_target or targets) and not paper.has("target fine-tuned"):
            option = "--train-target" if train_target else "--target-of"
            raise UsageError(f"table {paper.name} has no line of the fine-tuned target", f"leave {option} out")
        seeds = paper.seeds if seeds is None else seeds
        if not seeds or (isinstance(seeds, int) and seeds < 1):
            raise UsageError(f"--seeds is {seeds}", "give at least one draw of the samples")
        return cls(paper, tuple(map(task, chosen)), expanded(folder), sources, targets, data, seeds, train_target)

    @property
    def task_names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.tasks)

    def data_of(self, of: PaperTask) -> str:
        return self.data.get(of.name, of.data)

    def tuned_folder(self, model: str, of: PaperTask) -> Path:
        """Return the folder of a model that is fine-tuned here; tables share it."""
        return self.folder / "fine-tuned" / f"{model.rpartition('/')[2]}-{of.name}"

    def source_of(self, of: PaperTask) -> str | Path:
        return self.sources.get(of.name) or self.tuned_folder(self.table.source, of)

    def target_of(self, of: PaperTask) -> str | Path | None:
        """Return the fine-tuned target, if there is one and the table has a line for it."""
        if not self.table.has("target fine-tuned"):
            return None
        given = self.targets.get(of.name)
        own = self.tuned_folder(self.table.target, of)
        return given or (own if self.train_target or (own / RECORD_FILE).is_file() else None)

    def given_models(self) -> Iterator[tuple[str, str]]:
        """Yield the fine-tuned models that were given for its tasks, and what errors call them."""
        for role, given in (("the fine-tuned source", self.sources), ("the fine-tuned target", self.targets)):
            yield from ((given[name], role) for name in self.task_names if name in given)

    def trainings(self, of: PaperTask) -> list[str]:
        """Return the models that must still be fine-tuned on a task."""
        needed = [] if of.name in self.sources else [self.table.source]
        needed += [self.table.target] if self.train_target and of.name not in self.targets else []
        return [model for model in dict.fromkeys(needed) if not (self.tuned_folder(model, of) / RECORD_FILE).is_file()]

    @property
    def results(self) -> Path:
        return self.folder / f"table-{self.table.name}"

    def comparisons(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each sampling with the methods and sizes to compare together."""
        size = "per_class" if self.table.is_per_class else "n"
        for sampling in self.table.samplings:
            rows = [row for row in self.table.rows if row.sampling in (None, sampling)]
            unsized = [row.method for row in rows if row.method in METHODS and row.n is None and row.per_class is None]
            by_methods: dict[tuple[str, ...], list[int]] = {}
            for number in self.table.sizes:
                with_it = [row.method for row in rows if number in (row.n, row.per_class) and row.method in METHODS]
                by_methods.setdefault(tuple(dict.fromkeys([*unsized, *with_it])), []).append(number)
            for methods, numbers in by_methods.items():
                yield sampling, {"methods": methods, size: numbers, "sampling": sampling}


def _task_name(written: str, paper: PaperTable, option: str) -> str:
    """Return the task that an option names, in whatever capitals; refuse one that the table does not have."""
    name = written.strip().lower()
    if name not in paper.tasks:
        remedy = did_you_mean(name, paper.tasks, f"its tasks are: {', '.join(paper.tasks)}")
        raise UsageError(f"{option} names '{written}', and table {paper.name} has no such task", remedy)
    return name


@translate_errors()
@takes(*RUN_SETTINGS, *RECIPE_SETTINGS)
def reproduce(
    name: str,
    tasks: Sequence[str] | None = None,
    *,
    seeds: int | Sequence[int] | None = None,
    source_of: Mapping[str, str] | None = None,
    target_of: Mapping[str, str] | None = None,
    data_of: Mapping[str, str] | None = None,
    train_target: bool = False,
    folder: str | Path = "reproduced",
    token: str | None = None,
    allow_pickle: bool = False,
    progress: ShownProgress = None,
    shown: OnPartNumber = lambda part, comparison: None,
    **options: Unpack[ReproduceOptions],
) -> Reproduction:
    """Repeat one of the paper's tables on its own models and data sets, with its settings, beside its own numbers.

    `name` is 1 to 5 or A to H; `tasks` are all of the table's by default, and `seeds` as many as the paper has.
    `source_of` maps tasks to fine-tuned sources; missing ones are fine-tuned by the paper's recipe and kept, and with
    `train_target` the target is too. `data_of` maps tasks to other copies of their data sets. The options are those
    of `hf_bico.Settings` for running and training.

    >>> print(hf_bico.reproduce("1", ["eurosat", "mnist"]).text())  # doctest: +SKIP
    """
    given = {"source_of": source_of, "target_of": target_of, "data_of": data_of}
    job = Job.of(name, tasks, folder, **given, seeds=seeds, train_target=train_target)
    settings = settings_of(reproduce, {"max_download": MOST_DOWNLOAD, **options})
    return run_job(job, settings, token, allow_pickle, callback_of(progress), shown)


def run_job(
    job: Job,
    settings: Settings,
    token: str | None = None,
    allow_pickle: bool = False,
    progress: Progress = silent,
    shown: OnPartNumber = lambda part, comparison: None,
) -> Reproduction:
    """Fine-tune missing models, compare on every task, and write the table as it fills."""
    hub, call = Hub(token), {"token": token, "allow_pickle": allow_pickle, "progress": progress}
    comparisons: dict[tuple[str, str], Comparison] = {}
    reproduction = Reproduction(job.table, job.task_names, comparisons)

    def add(key: tuple[str, str], part: str, more: Comparison) -> None:
        """Merge comparisons of the same models and data, which may have numbers in common."""
        known = comparisons.get(key, more)
        cells = {cell.key: cell for cell in (*known.cells, *more.cells)}
        refusals, about = (*known.refusals, *more.refusals), more.about or known.about
        comparisons[key] = replace(more, cells=tuple(cells.values()), refusals=refusals, about=about)
        shown(part, more)

    for model, role in job.given_models():  # a mistyped name is refused before hours of work
        locate(model, role, hub)
    for one in job.tasks:
        if one.name in job.data:
            _task_options(job, one, settings, hub)
        _require_same_recipe(job, one, settings)
    for one in job.tasks:
        options = _task_options(job, one, settings, hub) | call
        for model in job.trainings(one):
            _fine_tune(job, model, one, options)
        for sampling, grid in job.comparisons():
            part = one.title if len(job.table.samplings) == 1 else f"{one.title}, {sampling}"
            add_part = partial(add, (one.name, sampling), part)
            for comparison in _compare(job, one, sampling, grid, options, add_part):
                add_part(comparison)
            reproduction.save(job.results)
    return reproduction


def _compare(
    job: Job,
    of: PaperTask,
    sampling: str,
    grid: dict[str, Any],
    options: dict[str, Any],
    shown: Callable[[Comparison], None],
) -> Iterator[Comparison]:
    """Compare on one task; sizes that its classes cannot give are refused one by one."""
    size = "per_class" if job.table.is_per_class else "n"
    try:
        yield compare(
            job.source_of(of),
            to=job.table.target,
            base=job.table.source,
            data=job.data_of(of),
            fine_tuned=job.target_of(of),
            with_base=job.table.has("base"),
            seeds=job.seeds,
            folder=job.results / of.name / sampling,
            shown=shown,
            evaluation=job.table.protocol,
            **{**options, **LITERAL, **grid},
        )
    except (OutputExistsError, RecordError) as error:
        remedy = f"give the same models and options, or remove '{job.results}'; fine-tuned models lie elsewhere"
        raise type(error)(error.cause, remedy) from error
    except SampleCountError as error:
        if len(grid[size]) > 1:  # some of the sizes may do
            for number in grid[size]:
                yield from _compare(job, of, sampling, {**grid, size: [number]}, options, shown)
            return
        reason = f"{'K' if job.table.is_per_class else 'N'} = {grid[size][0]}: {error.cause}"
        refusals = tuple(Refusal(method, reason) for method in grid["methods"] if takes_samples(method))
        yield Comparison(str(job.source_of(of)), job.table.target, (), refusals)


def _task_options(job: Job, of: PaperTask, settings: Settings, hub: Hub) -> dict[str, Any]:
    """Return the settings for a task, with the class names in the order of this copy of its data set."""
    data = job.data_of(of)
    options = of.options(data) | {name: getattr(settings, name) for name in (*RUN_SETTINGS, *RECIPE_SETTINGS)}
    if job.table.protocol == PROBE:  # tasks of texts
        return options
    return options | {"class_names": _class_names(of, data, Settings.of(options), hub)}


def _class_names(of: PaperTask, data: str, settings: Settings, hub: Hub) -> tuple[str, ...]:
    unnamed = replace(settings, class_names=None, evaluate=False, n=1)
    own = open_data(data, unnamed, hub, known_names=of.classes).class_names
    remedy = f"name another copy with --data-of {of.name}=REPO"
    if len(own) != len(of.classes):
        cause = f"'{data}' has {len(own)} classes, and the paper's {of.title} has {len(of.classes)}"
        raise ClassNamesError(cause, remedy)
    ours = {_plain(name): name for name in of.classes}
    for name in own:
        if _plain(name) not in ours:
            cause = f"'{data}' calls a class '{name}', and the paper's {of.title} has no such"
            raise ClassNamesError(cause, remedy)
    return tuple(ours[_plain(name)] for name in own)


def _plain(name: str) -> str:
    """Remove from a class name what differs between copies of a data set.

    >>> _plain("Annual_Crop land"), _plain("annual crop-land")
    ('annualcropland', 'annualcropland')
    """
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _fine_tune(job: Job, model: str, of: PaperTask, options: dict[str, Any]) -> None:
    """Fine-tune a pretrained model on a task, by the paper's recipe, and keep it; resume an interrupted training."""
    folder = job.tuned_folder(model, of)
    checkpoint = folder.with_name(f"{folder.name}-training")
    with locked_folder(folder):
        if (folder / RECORD_FILE).is_file():  # another process has made it since
            return
        if folder.exists():
            raise OutputExistsError(f"'{folder}' exists and holds no {RECORD_FILE}", "choose another folder with -o")
        tuned = port(
            model,
            to=model,
            base=model,
            data=job.data_of(of),
            method="finetune",
            checkpoint=str(checkpoint),
            evaluate=False,
            labels="dataset",
            **options,
        )
        tuned.save(folder)
        remove_checkpoint(checkpoint)


def _require_same_recipe(job: Job, of: PaperTask, settings: Settings) -> None:
    """Refuse a model that was fine-tuned here by another recipe, or on other data."""
    for model, used in ((job.table.source, job.source_of(of)), (job.table.target, job.target_of(of))):
        folder = job.tuned_folder(model, of)
        if used != folder or not (folder / RECORD_FILE).is_file():
            continue
        record = read_record(folder)
        training, data = record.method.training, record.data
        if training is None or data is None:
            raise OutputExistsError(
                f"'{folder}' holds no fine-tuned model of this tool's", "choose another folder with -o"
            )
        recipe = (training.learning_rate, training.weight_decay, training.steps, training.batch, training.warmup)
        reference = parse(job.data_of(of), "the data set", files=True)
        if data.id != (reference.resolve().name if isinstance(reference, Path) else reference.id):
            raise OutputExistsError(
                f"'{folder}' was fine-tuned on '{data.id}', not on '{job.data_of(of)}'",
                "name the same data, or choose another folder with -o",
            )
        if recipe != tuple(training_recipe(replace(settings, method="finetune"))[name] for name in RECIPE_SETTINGS):
            raise OutputExistsError(
                f"'{folder}' was fine-tuned by another recipe ({training.steps} steps at "
                f"{training.learning_rate:g}, {training.batch} samples each)",
                "give the same recipe, or choose another folder with -o",
            )


EFFICIENCY = 0.3
"""Speed of models as a share of the speed of a plain product of matrices."""
SAMPLED_BYTES = 200_000_000
"""Most bytes that samples take from a large data set; fine-tuning reads the whole split."""
TEXT_TOKENS = 128
"""Approximate tokens of a pair of sentences."""


@dataclass(frozen=True)
class Estimate:
    """Bytes to download, models to fine-tune, numbers to measure and floating-point operations of a table."""

    models: dict[str, int]
    data: dict[str, int | None]
    trainings: list[str]
    numbers: int
    operations: dict[str, float] = field(default_factory=dict)
    speed: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.operations.values()) / self.speed if self.speed else 0.0

    def lines(self) -> list[str]:
        known = [size for size in self.data.values() if size is not None]
        unknown = [name for name, size in self.data.items() if size is None]
        more = f", and {', '.join(unknown)}, whose size is not known" if unknown else ""
        return [
            f"Downloads: models {size_text(sum(self.models.values()))}, data {size_text(sum(known))}{more}.",
            *([f"Fine-tunes first: {', '.join(self.trainings)}."] if self.trainings else []),
            f"Measures up to {self.numbers} numbers.",
            f"About {_duration(self.seconds)}: {sum(self.operations.values()):.1e} operations, at {self.speed:.1e} a "
            f"second ({EFFICIENCY:.0%} of what this device does in a plain product of matrices).",
        ]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds}


def estimate(job: Job, settings: Settings, token: str | None = None, allow_pickle: bool = False) -> Estimate:
    """Estimate what is still to be done, from file lists, shapes and a short timing; download no weights."""
    hub = Hub(token)
    source, target = (
        Model.open(name, role, hub=hub, allow_pickle=allow_pickle)
        for name, role in ((job.table.source, "the base"), (job.table.target, "the target"))
    )
    downloads = {
        model.name: 0 if model.place is None else model.place.to_download(model.needed()) for model in (source, target)
    }
    for name, role in job.given_models():
        files = locate(name, role, hub)
        tuned = open_source(files, source.family.library, hub, allow_pickle)
        downloads.setdefault(tuned.name, files.to_download(tuned.needed(beside=False)))
    trainings = {one.name: job.trainings(one) for one in job.tasks}
    data = {one.title: _data_bytes(job, one, hub, bool(trainings[one.name])) for one in job.tasks}
    seeds = job.seeds if isinstance(job.seeds, int) else len(job.seeds)
    rows = [row.method for row in job.table.rows]
    cells = seeds * sum(
        len(rows) - (rows.count("target fine-tuned") if job.target_of(one) is None else 0) for one in job.tasks
    )
    cost = {job.table.source: _products_per_sample(source), job.table.target: _products_per_sample(target)}
    classes = sum(len(one.classes) if job.table.is_per_class else 1 for one in job.tasks)
    samples = seeds * len(job.table.samplings) * sum(job.table.sizes) * classes
    steps = replace(settings, method="finetune").training_steps * settings.train_batch
    operations = {
        "fine-tuning": float(
            sum((FORWARD + BACKWARD) * cost[model] * steps for models in trainings.values() for model in models)
        ),
        "calibration": float(samples * (FORWARD + BACKWARD) * sum(cost.values())),
        "measuring": float(cells * settings.eval_samples * FORWARD * max(cost.values())),
    }
    named = [f"{Path(model).name} on {one.title}" for one in job.tasks for model in trainings[one.name]]
    return Estimate(downloads, data, named, cells, operations, EFFICIENCY * _speed(settings))


def _products_per_sample(model: Model) -> int:
    """Count the products of weights and activations in a forward pass of one sample: FORWARD operations each."""
    tokens = model.layout.tokens
    rows = TEXT_TOKENS if tokens is None else tokens.count
    return rows * sum(prod(site.shape) for site in model.layout.main_sites)


def _data_bytes(job: Job, of: PaperTask, hub: Hub, whole: bool) -> int | None:
    """Return the bytes to download of a task's data set; None if its file names do not tell the splits."""
    reference = parse(job.data_of(of), "the data set", files=True)
    if isinstance(reference, Path):
        return 0
    repo = hub.repo(reference, "the data set", "dataset")
    named = [name for name in repo.files if (of.config or "") in name]
    files = [[name for name in named if split in name] for split in (of.split, of.measured_on)]
    if not all(files):
        return None
    training, measured = map(repo.to_download, files)
    return (training if whole else min(training, SAMPLED_BYTES)) + min(measured, SAMPLED_BYTES)


def _speed(settings: Settings) -> float:
    """Time products of float32 matrices on this device, in operations per second."""
    device = choose_device(settings.device)
    size = 4096 if device.type == "cuda" else 512
    matrix = torch.rand(size, size, device=device)
    with exact_float32():
        for repeats in (1, 4):  # the first warms up
            started = time.perf_counter()
            for _ in range(repeats):
                product = matrix @ matrix
            float(product[0, 0])
            seconds = time.perf_counter() - started
    return 2 * repeats * size**3 / seconds


def _duration(seconds: float) -> str:
    """
    >>> _duration(5), _duration(600), _duration(9000)
    ('5 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
