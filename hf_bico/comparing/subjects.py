"""What a comparison is about: a data set with its draws, and the rows that every model is measured on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_bico.alignment.objectives.base import Heads
from hf_bico.comparing.grid import Draw, Grid
from hf_bico.data.dataset import DataSet, Samples
from hf_bico.data.draw import EVALUATION_SPLITS, Drawn, calibration_split, draw_from, evaluation_samples, open_data
from hf_bico.errors import DataUnknownError, SampleCountError, UsageError
from hf_bico.hub.client import Hub
from hf_bico.models.checkpoints import digest_of
from hf_bico.models.families.live import ImageModel
from hf_bico.models.inference import Batched, Prepared
from hf_bico.porting.heads import heads_of
from hf_bico.porting.model_pair import Bench
from hf_bico.porting.plan import Plan
from hf_bico.porting.prepare import require_readable, training_samples

LEFT_ROWS = "rows that no draw took (without a test split, other sizes and seeds leave others)"


@dataclass(frozen=True)
class Subject:
    """One data set, with the held-out rows `samples` of `split`, which the target's images are `prepared` from once.

    `heads` are None where they depend on the draw.
    """

    data: DataSet
    heads: Heads | None
    draws: Mapping[Draw, Drawn]
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


def drawn_from(planned: Plan, data: DataSet, grid: Grid, hub: Hub) -> dict[Draw, Drawn]:
    """All draws; from a large data set each reads rows of its own, as a port does, unless those may be measured on."""
    split = calibration_split(data, grid.settings.split)
    apart = split in data.parts and any(name != split and data.can_measure_on(name) for name in EVALUATION_SPLITS)
    return {
        draw: draw_from(_opened(planned, grid, draw, hub, measured=False) if apart else data, grid.settings_of(draw))
        for draw in grid.draws()
    }


def subject_of(data: DataSet, draws: Mapping[Draw, Drawn], bench: Bench) -> Subject:
    """The data set as these models see it; no row that any draw took is measured on."""
    heads = None if bench.settings.objective == "classification" else heads_of(bench, data.class_names, None)

    def settled_by(drawn: Drawn) -> Drawn:
        chosen = bench.chosen(drawn)
        require_readable(bench, chosen.split, chosen.samples)
        return bench.labelled(chosen, heads or heads_of(bench, data.class_names, chosen))

    settled = {draw: settled_by(drawn) for draw, drawn in draws.items()}
    first = next(iter(settled.values()))
    used = sorted({index for drawn in settled.values() for index in drawn.samples.indices})
    everything = replace(first.samples, indices=tuple(used), labels=(0,) * len(used))
    split, samples = evaluation_samples(data, everything, first.split, bench.settings.seed, bench.settings.eval_samples)
    if split == first.split:  # half of it is for training
        samples = samples.first(max(1, len(data.splits[split]) // 2))
    if not len(samples):
        remedy = "draw fewer, or use data with a test split" if data.labelled else "use data with labels"
        raise SampleCountError(f"'{data.name}' has no labelled sample to measure on", remedy)
    if not data.labelled and bench.settings.evaluation != "zero-shot":
        by_loss = bench.settings.objective != "classification"
        other = ", or --evaluation zero-shot, which measures the loss" if by_loss else ""
        raise UsageError(
            f"a linear probe is fitted to labels, and '{data.name}' has none", f"use data with labels{other}"
        )
    require_readable(bench, split, samples)
    prepared: Batched = samples
    if isinstance(bench.target, ImageModel):
        prepared = Prepared.by(bench.target, samples, bench.settings.batch)
    return Subject(data, heads, settled, split, samples, prepared)
