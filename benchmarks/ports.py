"""Measures ports between small worlds: full fine-tunes, gentle and hard LoRAs, by several methods.

`loras.py` and `foresight.py` make their tables of these numbers. Every port is kept in the folder as soon as it is
measured, and read from there the next time.
"""

from __future__ import annotations

import csv
import json
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

if TYPE_CHECKING:
    from hf_bico.experiments.demo.world import World

PAIRS = (("narrow", "wide"), ("narrow", "deep"), ("narrow", "twin"), ("wide", "narrow"))
TASKS = ("inverted", "rotated-90", "inverted-rotated-180", "plain")
"""The last one is near its ceiling: the target reads it well already."""
SIZES = (10, 20, 50, 100)
KINDS = ("full fine-tune", "gentle LoRA", "hard LoRA")
FIRST_HELD_OUT = 10
"""Worlds from this one on were not looked at when a method, a rule or a threshold was chosen."""
VARIANTS: dict[str, dict[str, Any]] = {
    "bico@1": {"method": "bico", "alpha": 1.0},
    "bico-path@1": {"method": "bico-path", "alpha": 1.0},
    "bico-path@0.5": {"method": "bico-path", "alpha": 0.5},
    "bico": {"method": "bico"},
    "bico-path": {"method": "bico-path"},
    "bico-path --bold": {"method": "bico-path", "bold": True},
}
FOLDER = "ports"


@dataclass(frozen=True)
class MeasuredPort:
    """One port: its gain over the target if it is written, in points, and what the samples said of it."""

    world: int
    source: str
    target: str
    task: str
    kind: str
    n: int
    draw: int
    variant: str
    gain: float
    held_back: bool
    outlook: float
    error: float
    alphas: list[float]

    def __post_init__(self) -> None:
        for name in ("gain", "outlook", "error"):  # as they are written: a correlation of ranks sees ties
            object.__setattr__(self, name, round(getattr(self, name), 4))

    @property
    def key(self) -> tuple[int, int, str]:
        """Samples, draw and variant, which tell the ports of one job apart."""
        return self.n, self.draw, self.variant

    @property
    def written_gain(self) -> float:
        """The gain of what a user gets: a port that is held back leaves the target as it is."""
        return 0.0 if self.held_back else self.gain

    @property
    def harmful(self) -> bool:
        return self.written_gain < -1.0


@dataclass(frozen=True)
class Job:
    """All ports of one source to one target."""

    world: int
    source: str
    target: str
    task: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.world}-{self.source}-{self.target}-{self.task}-{self.kind.replace(' ', '-')}"


def kept_ports(folder: Path, job: Job) -> list[MeasuredPort]:
    """Return the ports of a job that the folder holds."""
    kept = folder / FOLDER / f"{job.name}.jsonl"
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.is_file() else []
    return [MeasuredPort(**json.loads(line)) for line in lines]


def measure(folder: Path, job: Job, draws: int) -> list[MeasuredPort]:
    """Measure the ports that the folder does not hold yet, and return all."""
    found = kept_ports(folder, job)
    known = {one.key for one in found}
    wanted = [(n, draw, name) for n in SIZES for draw in range(draws) for name in VARIANTS]
    kept = folder / FOLDER / f"{job.name}.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.open("a", encoding="utf-8") as stream:
        for one in _measure(folder, job, [key for key in wanted if key not in known]):
            stream.write(json.dumps(asdict(one)) + "\n")
            stream.flush()
            found.append(one)
    return found


def _measure(folder: Path, job: Job, missing: Sequence[tuple[int, int, str]]) -> Iterator[MeasuredPort]:
    if not missing:
        return
    import torch

    from hf_bico.alignment.methods import make_method
    from hf_bico.alignment.scaling import outlook
    from hf_bico.experiments.demo.world import build
    from hf_bico.hub.client import Hub
    from hf_bico.porting.calibration import Calibration
    from hf_bico.porting.evaluate import HeldOutEvaluation
    from hf_bico.porting.planner import plan
    from hf_bico.porting.prepare import PreparedPort, prepare
    from hf_bico.porting.scoring import make_scorer
    from hf_bico.porting.transfer import UNTOUCHED, transfer
    from hf_bico.runtime.environment import Stopwatch
    from hf_bico.settings import Settings

    torch.set_num_threads(1)
    made = build(world_folder(folder, job.world), seed=job.world, shapes=(), tasks=())
    source, base = source_of(made, folder, job)
    planned = plan(source, made.base(job.target), base=base, data=made.data(job.task), hub=Hub())
    before: float | None = None
    drawn: dict[tuple[int, int], PreparedPort] = {}
    for n, draw, name in missing:
        if (n, draw) not in drawn:
            settings = Settings(n=n, seed=draw, device="cpu", batch_size=256)
            drawn[n, draw] = prepare(planned, settings, Hub(), Stopwatch(), torch.device("cpu"))
        ready = drawn[n, draw]
        assert ready.drawn is not None
        assert ready.held_out is not None
        settings = replace(ready.settings, **VARIANTS[name])
        evaluator = HeldOutEvaluation(job.task, *ready.held_out, ready.drawn.samples, "zero-shot", 256)
        calibration = Calibration(ready.models, ready.drawn, ready.heads, Stopwatch(), settings, keeps=False)
        if before is None:
            before = evaluator.measure_target("target", calibration, UNTOUCHED.changes)[0].value
        result = transfer(make_method(settings.method, settings), calibration)
        after = evaluator.measure_target("ported", calibration, result.changes)[0].value
        if result.scaling is None:
            seen = make_scorer(calibration).scores(result.changes, (0.0, 1.0))
            gain, alphas = outlook(seen[0.0], seen[1.0]), [float(settings.alpha)]
        else:
            gain, alphas = result.scaling.gain, list(result.scaling.alphas)
        numbers = (100 * (after - before), result.held_back, 100 * gain.mean, 100 * (gain.error or 0.0))
        yield MeasuredPort(job.world, job.source, job.target, job.task, job.kind, n, draw, name, *numbers, alphas)


def world_folder(folder: Path, world: int) -> Path:
    return folder / "worlds" / f"seed-{world}"


def source_of(world: World, folder: Path, job: Job) -> tuple[Path, Path]:
    """Return the fine-tuned model or the LoRA, and its base."""
    if job.kind == KINDS[0]:
        return world.fine_tuned(job.source, job.task), world.base(job.source)
    loras = world_folder(folder, job.world).with_name(f"loras-{job.world}")
    return loras / f"{job.source}-{job.task}-{job.kind.replace(' ', '-')}", loras / f"{job.source}-hf"


def train(folder: Path, world: int, shape: str) -> None:
    from hf_bico.experiments.demo.world import build

    is_target_only = shape and all(shape != source for source, _ in PAIRS)
    shapes, tasks = (shape,) if shape else (), () if is_target_only else TASKS
    build(world_folder(folder, world), seed=world, shapes=shapes, tasks=tasks)


def train_loras(folder: Path, world: int, shape: str) -> None:
    """Train a gentle LoRA and a hard one for each task, on a copy of the base in transformers' layout."""
    import torch
    from transformers.utils import logging

    from hf_bico.experiments.demo.world import build
    from support.transformers_world import LoraRecipe, as_transformers, train_lora

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    made = build(world_folder(folder, world), seed=world, shapes=(), tasks=())
    loras = world_folder(folder, world).with_name(f"loras-{world}")
    base = loras / f"{shape}-hf"
    if not base.is_dir():
        as_transformers(made.base(shape), base)
    recipes = {KINDS[1]: LoraRecipe(rank=8, steps=60), KINDS[2]: LoraRecipe(rank=8, steps=400)}
    for task in TASKS:
        for kind, recipe in recipes.items():
            out = loras / f"{shape}-{task}-{kind.replace(' ', '-')}"
            if not (out / "adapter_config.json").is_file():
                train_lora(base, out, task, recipe, seed=world)


def all_ports(
    folder: Path, worlds: int, first: int = FIRST_HELD_OUT, draws: int = 1, workers: int = 2
) -> list[MeasuredPort]:
    """Return every port of so many worlds; train and measure what is not there yet."""
    numbers = range(first, first + worlds)
    jobs = [Job(world, *pair, task, kind) for world in numbers for pair in PAIRS for task in TASKS for kind in KINDS]
    found = {job: kept_ports(folder, job) for job in jobs}
    wanted = {(n, draw, name) for n in SIZES for draw in range(draws) for name in VARIANTS}
    missing = [job for job, some in found.items() if not wanted <= {one.key for one in some}]
    if missing:
        _train_all(folder, sorted({job.world for job in missing}), workers)
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            running = {pool.submit(measure, folder, job, draws): job for job in missing}
            for number, done in enumerate(as_completed(running), start=1):
                found[running[done]] = done.result()
                click.echo(f"{number} of {len(missing)} sources and targets", err=True)
    return [one for some in found.values() for one in some if one.key in wanted]


def _train_all(folder: Path, worlds: Sequence[int], workers: int) -> None:
    shapes, sources = (sorted({pair[side] for pair in PAIRS}) for side in (1, 0))
    shapes = sorted({*shapes, *sources})
    stages: list[tuple[Callable[[Path, int, str], None], Sequence[str]]] = [
        (train, ("",)),  # the data, which all shapes share
        (train, shapes),
        (train_loras, sources),
    ]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for run, some in stages:
            running = [pool.submit(run, folder, world, shape) for world in worlds for shape in some]
            for made in running:
                made.result()


def command(about: str | None, write: Callable[[list[MeasuredPort], Path | None], None]) -> click.Command:
    """Return a command that measures all ports, or reads them from its folder, and passes them to `write`."""

    @click.command(help=about)
    @click.argument("folder", type=click.Path(path_type=Path))
    @click.option("--first", default=FIRST_HELD_OUT, show_default=True, help="Number of the first pretraining.")
    @click.option("--worlds", default=5, show_default=True, help="Pretrainings of every model.")
    @click.option("--workers", default=2, show_default=True, help="Processes, one thread each.")
    @click.option("--docs", type=click.Path(path_type=Path), help="Folder of the documentation's tables and pictures.")
    def main(folder: Path, first: int, worlds: int, workers: int, docs: Path | None) -> None:
        ports = all_ports(folder, worlds, first, workers=workers)
        if docs is not None:
            write_csv(ports, docs / "ports.csv")
        write(ports, docs)

    return main


def write_csv(ports: Sequence[MeasuredPort], file: Path) -> None:
    """Write every port, so that tables can be made of them again."""
    names = [one.name for one in fields(MeasuredPort)]
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(names)
        for one in ports:
            row = asdict(one) | {"alphas": " ".join(f"{alpha:.4g}" for alpha in one.alphas)}
            writer.writerow([f"{value:.4f}" if isinstance(value, float) else value for value in row.values()])


def read_csv(file: Path) -> list[MeasuredPort]:
    with file.open(encoding="utf-8", newline="") as stream:
        return [_read(row) for row in csv.DictReader(stream)]


def _read(row: dict[str, str]) -> MeasuredPort:
    numbers = {name: int(row[name]) for name in ("world", "n", "draw")}
    shares = {name: float(row[name]) for name in ("gain", "outlook", "error")}
    words = {name: row[name] for name in ("source", "target", "task", "kind", "variant")}
    alphas = [float(alpha) for alpha in row["alphas"].split()]
    return MeasuredPort(**words, **numbers, **shares, held_back=row["held_back"] == "True", alphas=alphas)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a table; numbers stand right."""
    head, *rest = lines
    rows = [head, ["---"] + ["---:"] * (len(head) - 1), *rest]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
