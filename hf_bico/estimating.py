"""What reproducing a table takes, before it begins: downloads, trainings and numbers, and about how long.

Looks at the Hub's lists of files and at shapes, and times this device for a moment; downloads no weight.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from hf_bico.costs import BACKWARD, FORWARD
from hf_bico.hub.client import Hub, locate
from hf_bico.hub.references import parse
from hf_bico.models.model import Model
from hf_bico.paper import Task
from hf_bico.porting.lineage import open_source
from hf_bico.reproducing import Job
from hf_bico.settings import Settings
from hf_bico.utils.text import size_text

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


def _data_bytes(job: Job, of: Task, hub: Hub, whole: bool) -> int | None:
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
