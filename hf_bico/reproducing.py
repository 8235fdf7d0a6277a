"""Reproducing a table of the paper: its fine-tunes, where none are given, and its comparison on every task.

All that is done is kept as it comes, in one folder for all tables, so that an interrupted run goes on and tables share
their fine-tuned models. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_bico.alignment.methods import METHODS
from hf_bico.alignment.methods.finetuning import remove_checkpoint
from hf_bico.comparing import compare
from hf_bico.comparing.grid import takes_samples
from hf_bico.comparison.cells import Refusal
from hf_bico.comparison.results import Comparison
from hf_bico.data.draw import open_data
from hf_bico.errors import ClassNamesError, OutputExistsError, RecordError, SampleCountError, UsageError
from hf_bico.hub.client import Hub, locate
from hf_bico.hub.references import parse
from hf_bico.paper import PaperTable, Task, table, task
from hf_bico.porting.port import port
from hf_bico.reports.record import read_record
from hf_bico.reproduction import Reproduction
from hf_bico.runtime.library_errors import last_net
from hf_bico.runtime.output import RECORD_FILE, claimed
from hf_bico.settings import PROBE, Settings
from hf_bico.utils.files import expanded
from hf_bico.utils.progress import Progress, silent
from hf_bico.utils.samples import IMAGES, TEXTS
from hf_bico.utils.text import did_you_mean

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
    tasks: tuple[Task, ...]
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

    def data_of(self, of: Task) -> str:
        return self.given.data.get(of.name, of.data)

    def tuned_folder(self, model: str, of: Task) -> Path:
        """Where a model that is fine-tuned here is kept; tables that need the same one share it."""
        return self.folder / "fine-tuned" / f"{model.rpartition('/')[2]}-{of.name}"

    def source_of(self, of: Task) -> str | Path:
        return self.given.sources.get(of.name) or self.tuned_folder(self.table.source, of)

    def target_of(self, of: Task) -> str | Path | None:
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

    def trainings(self, of: Task) -> list[str]:
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


@last_net()
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
    return carry_out(job, settings, token, allow_pickle, progress, shown)


def carry_out(
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

    def asked_with(of: Task) -> dict[str, Any]:
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
    job: Job, of: Task, sampling: str, grid: dict[str, Any], options: dict[str, Any], note: Callable[[Comparison], None]
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


def _names(of: Task, data: str, settings: Settings, hub: Hub, reads: str) -> dict[str, Any]:
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


def _fine_tune(job: Job, model: str, of: Task, options: dict[str, Any], how: dict[str, Any]) -> None:
    """Fine-tune a pretrained model on a task, by the paper's recipe, and keep it; what was interrupted goes on."""
    folder = job.tuned_folder(model, of)
    checkpoint = folder.with_name(f"{folder.name}-training")
    with claimed(folder):
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


def _require_same_recipe(job: Job, of: Task, settings: Settings) -> None:
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
