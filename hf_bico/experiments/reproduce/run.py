"""`reproduce` and its estimate.

Reproducing a table of the paper: its fine-tunes, where none are given, and its comparison on every task.

All that is done is kept as it comes, in one folder for all tables, so that an interrupted run goes on and tables share
their fine-tuned models. Prints nothing.

What reproducing a table takes, before it begins: downloads, trainings and numbers, and about how long.

Looks at the Hub's lists of files and at shapes, and times this device for a moment; downloads no weight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from hf_bico.alignment.methods.finetuning import remove_checkpoint
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
from hf_bico.runtime.library_errors import translate_errors
from hf_bico.runtime.output import RECORD_FILE, locked_folder
from hf_bico.settings import METHODS, PROBE, Settings
from hf_bico.utils.files import expanded
from hf_bico.utils.progress import Progress, silent
from hf_bico.utils.samples import IMAGES, TEXTS
from hf_bico.utils.text import did_you_mean, size_text

LITERAL: dict[str, Any] = {"completion": "svd", "labels": "dataset", "alpha": 1.0}
"""What the paper does where our own defaults are others."""
RUNNING = ("max_download", "batch_size", "memory", "device", "dtype", "eval_samples", "max_length", "seed")
RECIPE = ("learning_rate", "weight_decay", "train_steps", "train_batch", "warmup")
MOST_DOWNLOAD = "20GB"
"""Of one data set: fine-tuning reads all of its training split."""
Shown = Callable[[str, Comparison], None]
"""Called after every number, with the task (and the sampling, where there are several) and the numbers so far."""


@dataclass(frozen=True)
class Given:
    """Models and data sets by task, that stand for those that would be made, or downloaded."""

    sources: Mapping[str, str] = field(default_factory=dict)
    targets: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)

    def of_table(self, wanted: PaperTable) -> Given:
        """The same by the names of the table's tasks; refused for a task that it does not have."""
        given = {"source": self.sources, "target": self.targets, "data": self.data}
        named = [{_task_name(name, wanted, f"--{of}-of"): one[name] for name in one} for of, one in given.items()]
        return Given(*named)


def _task_name(written: str, wanted: PaperTable, option: str) -> str:
    """Which of the table's tasks an option names, in whatever capitals."""
    name = written.strip().lower()
    if name not in wanted.tasks:
        remedy = did_you_mean(name, wanted.tasks, f"its tasks are: {', '.join(wanted.tasks)}")
        raise UsageError(f"{option} names '{written}', and table {wanted.name} has no such task", remedy)
    return name


@dataclass(frozen=True)
class Job:
    """What a table takes: which tasks, with which models, and which of them are fine-tuned first."""

    table: PaperTable
    tasks: tuple[PaperTask, ...]
    folder: Path
    given: Given = field(default_factory=Given)
    seeds: int | Sequence[int] = 1
    train_target: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        tasks: Sequence[str] | None,
        folder: Path | str,
        given: Given,
        seeds: int | Sequence[int] | None,
        train_target: bool,
    ) -> Job:
        wanted = table(name)
        given = given.of_table(wanted)
        named = wanted.tasks if tasks is None else [_task_name(one, wanted, "--tasks") for one in tasks]
        chosen = [one for one in wanted.tasks if one in named]
        if not chosen:
            raise UsageError("--tasks leaves nothing to reproduce", f"name some of: {', '.join(wanted.tasks)}")
        if (train_target or given.targets) and not wanted.has("target fine-tuned"):
            option = "--train-target" if train_target else "--target-of"
            raise UsageError(f"table {wanted.name} has no line of the fine-tuned target", f"leave {option} out")
        seeds = wanted.seeds if seeds is None else seeds
        if not seeds or (isinstance(seeds, int) and seeds < 1):
            raise UsageError(f"--seeds is {seeds}", "give at least one draw of the samples")
        return cls(wanted, tuple(map(task, chosen)), expanded(folder), given, seeds, train_target)

    def data_of(self, of: PaperTask) -> str:
        return self.given.data.get(of.name, of.data)

    def tuned_folder(self, model: str, of: PaperTask) -> Path:
        """Where a model that is fine-tuned here is kept; tables that need the same one share it."""
        return self.folder / "fine-tuned" / f"{model.rpartition('/')[2]}-{of.name}"

    def source_of(self, of: PaperTask) -> str | Path:
        return self.given.sources.get(of.name) or self.tuned_folder(self.table.source, of)

    def target_of(self, of: PaperTask) -> str | Path | None:
        """The fine-tuned target, where there is one and the table has a line of it."""
        if not self.table.has("target fine-tuned"):
            return None
        given = self.given.targets.get(of.name)
        made = self.tuned_folder(self.table.target, of)
        return given or (made if self.train_target or (made / RECORD_FILE).is_file() else None)

    def given_models(self) -> Iterator[tuple[str, str]]:
        """The fine-tuned models that are given for its tasks, and what they are called in errors."""
        for what, given in (
            ("the fine-tuned source", self.given.sources),
            ("the fine-tuned target", self.given.targets),
        ):
            yield from ((given[one.name], what) for one in self.tasks if one.name in given)

    def trainings(self, of: PaperTask) -> list[str]:
        """The models that are to be fine-tuned on a task, and are not yet."""
        wanted = [] if of.name in self.given.sources else [self.table.source]
        wanted += [self.table.target] if self.train_target and of.name not in self.given.targets else []
        return [model for model in dict.fromkeys(wanted) if not (self.tuned_folder(model, of) / RECORD_FILE).is_file()]

    @property
    def results(self) -> Path:
        return self.folder / f"table-{self.table.name}"

    def comparisons(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Ways of drawing samples, each with methods and sizes that are asked for together."""
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


@translate_errors()
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
    progress: Progress = silent,
    shown: Shown = lambda part, comparison: None,
    **options: Any,
) -> Reproduction:
    """One of the paper's tables on its own models and data sets, with its settings, beside its own numbers.

    `name` is 1 to 5 or A to H; `tasks` are all of the table's by default, and `seeds` as many as the paper has. What is
    not given by `source_of` (a fine-tuned source by task) is fine-tuned by the paper's recipe and kept; so is the
    target, for its own line, with `train_target`. `data_of` names other copies of the data sets. The options are those
    of `hf_bico.Settings` that say how to run and how to train.

    >>> print(hf_bico.reproduce("1", ["eurosat", "mnist"]).text())  # doctest: +SKIP
    """
    given = Given(source_of or {}, target_of or {}, data_of or {})
    job = Job.of(name, tasks, folder, given, seeds, train_target)
    settings = Settings.of({"max_download": MOST_DOWNLOAD, **options})
    for option in options:
        if option not in (*RUNNING, *RECIPE):
            raise UsageError(f"'{option}' is the table's own", f"the options are: {', '.join((*RUNNING, *RECIPE))}")
    return run_job(job, settings, token, allow_pickle, progress, shown)


def run_job(
    job: Job,
    settings: Settings,
    token: str | None = None,
    allow_pickle: bool = False,
    progress: Progress = silent,
    shown: Shown = lambda part, comparison: None,
) -> Reproduction:
    """Fine-tune what is missing, compare on every task, and write the table as it fills."""
    reads = TEXTS if job.table.protocol == PROBE else IMAGES
    found: dict[tuple[str, str], Comparison] = {}
    asked = tuple(one.name for one in job.tasks)

    def so_far() -> Reproduction:
        return Reproduction(job.table, asked, dict(found))

    how = {"token": token, "allow_pickle": allow_pickle, "progress": progress}
    hub = Hub(token)

    def asked_with(of: PaperTask) -> dict[str, Any]:
        options = of.options(job.data_of(of)) | _running(settings)
        return options | _names(of, job.data_of(of), Settings.of(options), hub, reads)

    for model, what in job.given_models():  # what is mistyped is said before what takes hours
        locate(model, what, hub)
    for one in job.tasks:
        if one.name in job.given.data:
            asked_with(one)
        _require_same_recipe(job, one, settings)
    for one in job.tasks:
        options = asked_with(one)
        for model in job.trainings(one):
            _fine_tune(job, model, one, options | _recipe(settings), how)
        for sampling, grid in job.comparisons():
            part = one.title if len(job.table.samplings) == 1 else f"{one.title}, {sampling}"

            def note(comparison: Comparison, key: tuple[str, str] = (one.name, sampling), part: str = part) -> None:
                found[key] = comparison if key not in found else _joined(found[key], comparison)
                shown(part, comparison)

            for comparison in _compared(job, one, sampling, grid, {**options, **_recipe(settings), **how}, note):
                note(comparison)
            so_far().save(job.results)
    return so_far()


def _compared(
    job: Job,
    of: PaperTask,
    sampling: str,
    grid: dict[str, Any],
    options: dict[str, Any],
    note: Callable[[Comparison], None],
) -> Iterator[Comparison]:
    """The numbers of one task that are asked for together; of sizes that its classes cannot give, why not."""
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
            shown=note,
            evaluation=job.table.protocol,
            **{**options, **LITERAL, **grid},
        )
    except (OutputExistsError, RecordError) as error:
        remedy = f"give the same models and options, or remove '{job.results}'; fine-tuned models lie elsewhere"
        raise type(error)(error.cause, remedy) from error
    except SampleCountError as error:
        if len(grid[size]) > 1:  # some of the sizes may do
            for number in grid[size]:
                yield from _compared(job, of, sampling, {**grid, size: [number]}, options, note)
            return
        told = f"{'K' if job.table.is_per_class else 'N'} = {grid[size][0]}: {error.cause}"
        refusals = tuple(Refusal(method, told) for method in grid["methods"] if takes_samples(method))
        yield Comparison(str(job.source_of(of)), job.table.target, (), refusals)


def _joined(known: Comparison, more: Comparison) -> Comparison:
    """The numbers of two comparisons of the same models and data; they may have some in common."""
    cells = {cell.key: cell for cell in (*known.cells, *more.cells)}
    refusals = tuple(dict.fromkeys((*known.refusals, *more.refusals)))
    return replace(more, cells=tuple(cells.values()), refusals=refusals, about=more.about or known.about)


def _running(settings: Settings) -> dict[str, Any]:
    """Those of the settings that say how to run and measure."""
    return {name: getattr(settings, name) for name in RUNNING}


def _recipe(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in RECIPE}


def _names(of: PaperTask, data: str, settings: Settings, hub: Hub, reads: str) -> dict[str, Any]:
    """The names of the classes in the order in which this copy of the data set counts them."""
    if reads == TEXTS:
        return {}
    unnamed = replace(settings, class_names=None, evaluate=False, n=1)
    own = open_data(data, unnamed, hub, known_names=of.classes).class_names
    if len(own) != len(of.classes):
        raise ClassNamesError(
            f"'{data}' has {len(own)} classes, and the paper's {of.title} has {len(of.classes)}",
            f"name another copy with --data-of {of.name}=REPO",
        )
    ours = {_plain(name): name for name in of.classes}
    if all(_plain(name) in ours for name in own):
        return {"class_names": tuple(ours[_plain(name)] for name in own)}
    different = next(name for name in own if _plain(name) not in ours)
    raise ClassNamesError(
        f"'{data}' calls a class '{different}', and the paper's {of.title} has no such",
        f"name another copy with --data-of {of.name}=REPO",
    )


def _plain(name: str) -> str:
    """A class name without what copies of a data set write in different ways.

    >>> _plain("Annual_Crop land"), _plain("annual crop-land")
    ('annualcropland', 'annualcropland')
    """
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _fine_tune(job: Job, model: str, of: PaperTask, options: dict[str, Any], how: dict[str, Any]) -> None:
    """Fine-tune a pretrained model on a task, by the paper's recipe, and keep it; what was interrupted goes on."""
    folder = job.tuned_folder(model, of)
    checkpoint = folder.with_name(f"{folder.name}-training")
    with locked_folder(folder):
        if (folder / RECORD_FILE).is_file():  # another process has made it since
            return
        if folder.exists():
            raise OutputExistsError(f"'{folder}' exists and holds no {RECORD_FILE}", "choose another folder with -o")
        made = port(
            model,
            to=model,
            base=model,
            data=job.data_of(of),
            method="finetune",
            checkpoint=str(checkpoint),
            evaluate=False,
            labels="dataset",
            **options,
            **how,
        )
        made.save(folder)
        remove_checkpoint(checkpoint)


def _require_same_recipe(job: Job, of: PaperTask, settings: Settings) -> None:
    """Refuse to go on with a model that was fine-tuned here by another recipe, or on other data."""
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
        asked = tuple(getattr(settings, name) for name in RECIPE)
        if data.id != _data_name(job.data_of(of)):
            raise OutputExistsError(
                f"'{folder}' was fine-tuned on '{data.id}', not on '{job.data_of(of)}'",
                "name the same data, or choose another folder with -o",
            )
        if recipe != asked:
            raise OutputExistsError(
                f"'{folder}' was fine-tuned by another recipe ({training.steps} steps at "
                f"{training.learning_rate:g}, {training.batch} samples each)",
                "give the same recipe, or choose another folder with -o",
            )


def _data_name(data: str) -> str:
    """What a record calls a data set: its Hub id, or the name of its folder."""
    place = parse(data, "the data set", files=True)
    return place.resolve().name if isinstance(place, Path) else place.id


REACHED = 0.3
"""The share of the speed of a plain product of matrices that models reach; the rest is waiting and moving."""
READ_IN_PART = 200_000_000
"""Of a large data set, so many bytes at most are read for samples; fine-tuning reads all of the split."""
SHORT_TEXT = 128
"""Tokens of a pair of sentences, about."""


@dataclass(frozen=True)
class Expected:
    """What a table takes: bytes by what they are of, trainings, comparisons' numbers, and operations."""

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
        """In words."""
        known = [size for size in self.data.values() if size is not None]
        unknown = [name for name, size in self.data.items() if size is None]
        beside = f", and {', '.join(unknown)}, whose size is not known" if unknown else ""
        found = [f"Downloads: models {size_text(sum(self.models.values()))}, data {size_text(sum(known))}{beside}."]
        if self.trainings:
            found.append(f"Fine-tunes first: {', '.join(self.trainings)}.")
        found.append(f"Measures up to {self.numbers} numbers.")
        found.append(
            f"About {_duration(self.seconds)}: {sum(self.operations.values()):.1e} operations, at {self.speed:.1e} a "
            f"second ({REACHED:.0%} of what this device does in a plain product of matrices)."
        )
        return found

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds}


def estimate(job: Job, settings: Settings, token: str | None = None, allow_pickle: bool = False) -> Expected:
    """What the job takes from here on; what is there already is not counted."""
    hub = Hub(token)
    source, target = (
        Model.open(name, what, hub=hub, allow_pickle=allow_pickle)
        for name, what in ((job.table.source, "the base"), (job.table.target, "the target"))
    )
    downloads = {
        model.name: 0 if model.place is None else model.place.to_download(model.needed()) for model in (source, target)
    }
    for name, what in job.given_models():
        place = locate(name, what, hub)
        tuned = open_source(name, place, source.family.library, hub, allow_pickle)
        downloads.setdefault(tuned.name, place.to_download(tuned.needed(beside=False)))
    trainings = {one.name: job.trainings(one) for one in job.tasks}
    data = {one.title: _data_bytes(job, one, hub, bool(trainings[one.name])) for one in job.tasks}
    seeds = job.seeds if isinstance(job.seeds, int) else len(job.seeds)
    rows = [row.method for row in job.table.rows]
    cells = seeds * sum(
        len(rows) - (rows.count("target fine-tuned") if job.target_of(one) is None else 0) for one in job.tasks
    )
    cost = {job.table.source: _of_sample(source), job.table.target: _of_sample(target)}
    steps = settings.train_steps * settings.train_batch
    operations = {
        "fine-tuning": float(
            sum((FORWARD + BACKWARD) * cost[model] * steps for models in trainings.values() for model in models)
        ),
        "calibration": float(_draws(job, seeds) * (FORWARD + BACKWARD) * sum(cost.values())),
        "measuring": float(cells * settings.eval_samples * FORWARD * max(cost.values())),
    }
    named = [f"{Path(model).name} on {one.title}" for one in job.tasks for model in trainings[one.name]]
    return Expected(downloads, data, named, cells, operations, REACHED * _speed(settings))


def _draws(job: Job, seeds: int) -> int:
    """Samples that are calibrated on, in all."""
    classes: Sequence[int] = [len(one.classes) if job.table.is_per_class else 1 for one in job.tasks]
    return seeds * len(job.table.samplings) * sum(job.table.sizes) * sum(classes)


def _of_sample(model: Model) -> int:
    """How often a row of one sample meets a weight: FORWARD operations each."""
    tokens = model.layout.tokens
    rows = SHORT_TEXT if tokens is None else tokens.prefix + prod(tokens.grid)
    return rows * sum(prod(site.shape) for site in model.layout.main_sites)


def _data_bytes(job: Job, of: PaperTask, hub: Hub, whole: bool) -> int | None:
    """What is downloaded of a task's data set; None where its repo does not say which file is of which split."""
    place = parse(job.data_of(of), "the data set", files=True)
    if isinstance(place, Path):
        return 0
    repo = hub.repo(place, "the data set", "dataset")
    config = of.config or ""
    split = [name for name in repo.files if config in name and of.split in name]
    measured = [name for name in repo.files if config in name and of.measured_on in name]
    if not split or not measured:
        return None
    sizes = [repo.to_download(names) for names in (split, measured)]
    return (sizes[0] if whole else min(sizes[0], READ_IN_PART)) + min(sizes[1], READ_IN_PART)


def _speed(settings: Settings) -> float:
    """Operations a second in products of float32 matrices on this device, timed for a moment."""
    import torch

    from hf_bico.runtime.environment import choose_device, exact_float32

    device = choose_device(settings.device)
    size = 4096 if device.type == "cuda" else 512
    one = torch.rand(size, size, device=device)
    with exact_float32():
        for rounds in (1, 4):  # the first warms up
            started = time.perf_counter()
            for _ in range(rounds):
                found = one @ one
            float(found[0, 0])
            seconds = time.perf_counter() - started
    return 2 * rounds * size**3 / seconds


def _duration(seconds: float) -> str:
    """
    >>> _duration(5), _duration(600), _duration(9000)
    ('5 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
