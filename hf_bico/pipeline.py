"""The pipeline: plan, sample, download, read, load, calibrate, align, transport, evaluate.

Computes and returns data classes; prints and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from hf_bico.data.calibration import Drawn, Samples, draw, evaluation_samples
from hf_bico.delta_file import MADE_FROM
from hf_bico.deltas import Deltas
from hf_bico.environment import (
    Stopwatch,
    choose_device,
    choose_dtype,
    device_name,
    halving_batches,
    installed_versions,
    peak_memory,
)
from hf_bico.errors import DataUnknownError, ObjectiveError
from hf_bico.evaluation import zero_shot_accuracy
from hf_bico.families import LiveModel
from hf_bico.forms import make_form
from hf_bico.hub.client import Hub
from hf_bico.methods import METHODS
from hf_bico.models import ModelReference
from hf_bico.objectives import ZeroShotHead, zero_shot_head, zero_shot_loss
from hf_bico.planning import Plan, plan
from hf_bico.ported import Ported, with_held
from hf_bico.progress import Progress, silent
from hf_bico.record import EvaluationRecord, RunRecord
from hf_bico.recording import Findings, make_record
from hf_bico.resolving import Lineage
from hf_bico.settings import Settings
from hf_bico.sites import SitePair
from hf_bico.statistics import Loss, Side, Statistics, collect, exact_float32
from hf_bico.task_vector import TaskVector
from hf_bico.transport import account, gather, require_plausible, site_delta


@dataclass(frozen=True)
class Batch:
    """What an objective of the caller's own gets: `pixels`, prepared for the model, and `labels`, on its device."""

    pixels: Tensor
    labels: Tensor


def port(
    source: ModelReference,
    to: ModelReference,
    *,
    base: ModelReference | None = None,
    data: Any = None,
    target_id: str | None = None,
    token: str | None = None,
    allow_pickle: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> Ported:
    """Carry what `source` learnt over `base` to the model `to`, without training.

    Models are Hub ids, folders, or loaded modules, and `source` may be a PEFT adapter; `data` is a Hub id, a folder of
    images or parquet files, a `datasets` object or a list of rows. `base` and `data` may be left out where the source's
    card names them; `target_id` is the Hub id of a target that is a folder, which is checked and goes into the card;
    `progress` is called with (stage, steps done, steps in all). The options, with what they mean, are those of
    `hf_bico.Settings`: n, per_class, config, split, seed, max_download, method, completion, alpha, format, rank,
    objective, image_column, label_column, class_names, templates, batch_size, device, dtype, evaluate, force.

    >>> ported = hf_bico.port("user/vit-b16-eurosat", to="laion/ViT-B-16-plus", n=100)  # doctest: +SKIP
    >>> ported.push_to_hub("user/vit-b16-plus-eurosat")  # doctest: +SKIP
    """
    settings, hub = Settings.of(options), Hub(token)
    planned = plan(source, to, base=base, data=data, target_id=target_id, hub=hub, allow_pickle=allow_pickle)
    return carry_out(planned, settings, hub, progress)


@torch.inference_mode(False)
@exact_float32()
def carry_out(planned: Plan, settings: Settings, hub: Hub, progress: Progress = silent) -> Ported:
    """Do what was planned: sample, download, calibrate, align, transport, evaluate."""
    started, watch = datetime.now(UTC), Stopwatch(progress)
    device = choose_device(settings.device)
    method = METHODS[settings.method](settings)
    if planned.lineage.data is None and method.needs_statistics:
        raise planned.lineage.no_data or DataUnknownError("no calibration data was given", "name it with --data")
    if settings.zero_shot and planned.lineage.data is not None:
        for model in (planned.lineage.base, planned.lineage.target):
            model.family.require_zero_shot()
    with watch("sample"):
        drawn = _draw(planned, settings, hub)
    with watch("download"):
        planned = planned.fetched(progress)
    lineage = planned.lineage
    with watch("read"):
        vector = TaskVector.over(lineage.source, lineage.base)
        pairs = [pair for pair in planned.pairs if not site_delta(vector, pair.source).is_zero]
        require_plausible(vector, [pair.source for pair in pairs], lineage.base.checkpoint, settings.force)
    with watch("load"):
        two = _load_pair(planned, device, settings, drawn)

    statistics = None
    with watch("calibrate"):
        if method.needs_statistics and drawn is not None:
            statistics = _calibrate(pairs, two, drawn.samples, settings, progress)
    with watch("align"):
        method.prepare(pairs, statistics)
    with watch("transport"):
        carried = {pair.target.name: method.carry(pair, site_delta(vector, pair.source)) for pair in pairs}
        gathered = gather(carried, pairs, lineage.target.checkpoint, settings.alpha)
        ported = _over_target(gathered, lineage)
        format = settings.format or ("adapter" if settings.rank is not None else planned.format)
        form = make_form(ported, lineage.target, format, settings.rank, two.target.module, device)
        report = account(vector, carried, pairs, planned.left)
        report = replace(report, sites=tuple(with_held(list(report.sites), form, lineage.target)))
    evaluation: list[EvaluationRecord] = []
    with watch("evaluate"):
        if settings.evaluate and drawn is not None and two.heads is not None:
            evaluation = _evaluate(two, drawn, vector, form.changes, settings, progress)

    run = RunRecord(
        started=started.isoformat(timespec="seconds"),
        seconds=watch.seconds,
        peak_memory=peak_memory(device),
        device=device_name(device),
        dtype=str(two.source.dtype).removeprefix("torch."),
        batch_size=settings.batch_size,
        processes=1,
        versions=installed_versions(),
    )
    with watch("record"):
        found = Findings(vector, report, tuple(evaluation))
        record = make_record(planned, settings, drawn, found, run)
    return Ported(ported, report, record, lineage.target, form)


def _over_target(changes: Deltas, lineage: Lineage) -> TaskVector:
    """The ported vector, which knows over which model it lies and what it was made from."""
    target = lineage.target
    about: dict[str, Any] = {"base": target.name, "library": target.family.library}
    about |= {} if target.commit is None else {"base_commit": target.commit}
    about[MADE_FROM] = [list(name) for name in lineage.repos]
    return TaskVector(changes, about=about, base=target)


def _draw(planned: Plan, settings: Settings, hub: Hub) -> Drawn | None:
    data = planned.lineage.data
    known = planned.lineage.source.origin.class_names
    return None if data is None else draw(data, settings, hub, known_names=known or None)


@dataclass(frozen=True)
class _Pair:
    """The two pretrained models, loaded, with their zero-shot heads when those give the loss."""

    source: LiveModel
    target: LiveModel
    heads: tuple[ZeroShotHead, ZeroShotHead] | None


def _load_pair(planned: Plan, device: torch.device, settings: Settings, drawn: Drawn | None) -> _Pair:
    dtype = choose_dtype(settings.dtype)
    source = planned.lineage.base.load(device, dtype)
    target = planned.lineage.target.load(device, dtype)
    if not settings.zero_shot or drawn is None:
        return _Pair(source, target, None)
    names = drawn.data.class_names
    heads = tuple(zero_shot_head(model, names, settings.templates) for model in (source, target))
    return _Pair(source, target, (heads[0], heads[1]))


def _calibrate(
    pairs: Sequence[SitePair], two: _Pair, samples: Samples, settings: Settings, progress: Progress
) -> Statistics:
    """One pass of both models over the samples."""
    source, target = Side(two.source, two.source.layout.tokens), Side(two.target, two.target.layout.tokens)
    return halving_batches(
        settings.batch_size,
        lambda size: collect(pairs, source, target, _losses(two, samples, size, settings, progress)),
    )


def _losses(
    two: _Pair, samples: Samples, size: int, settings: Settings, progress: Progress
) -> Iterator[tuple[Loss, Loss]]:
    """For each batch, the loss of the source's and of the target's pretrained model."""
    done = 0
    for images, labels in samples.batches(size):
        progress("calibrate", done, len(samples))
        heads = two.heads or (None, None)
        yield (
            _loss(two.source, heads[0], images, labels, settings),
            _loss(two.target, heads[1], images, labels, settings),
        )
        done += len(labels)


def _loss(
    model: LiveModel, head: ZeroShotHead | None, images: list[Any], labels: list[int], settings: Settings
) -> Loss:
    def loss() -> Tensor:
        batch = Batch(model.pixels(images), torch.tensor(labels, device=model.device))
        if head is not None:
            return zero_shot_loss(model, head, batch.pixels, batch.labels)
        value = settings.objective(model.module, batch)  # type: ignore[operator]
        if not isinstance(value, Tensor) or value.ndim != 0:
            raise ObjectiveError(
                f"the objective gave {type(value).__name__} of shape {getattr(value, 'shape', '-')}, not one loss",
                "return a tensor of no dimensions: the sum of the samples' losses",
            )
        return value

    return loss


def _evaluate(
    two: _Pair, drawn: Drawn, vector: Deltas, ported: Deltas, settings: Settings, progress: Progress
) -> list[EvaluationRecord]:
    """Target zero-shot, ported, and source fine-tuned, on the same held-out samples."""
    split, samples = evaluation_samples(drawn.data, drawn.samples, drawn.split, settings.seed)
    if two.heads is None or len(samples) == 0:
        return []

    def measure(name: str, model: LiveModel, head: ZeroShotHead) -> EvaluationRecord:
        value = zero_shot_accuracy(model, head, samples, settings.batch_size)
        return EvaluationRecord(name, drawn.data.name, split, len(samples), "accuracy", value)

    results = [measure("target", two.target, two.heads[1])]
    progress("evaluate", 1, 3)
    with ported.applied_to(two.target.module):
        results.append(measure("ported", two.target, two.heads[1]))
    progress("evaluate", 2, 3)
    with vector.applied_to(two.source.module):
        # a fine-tune may have changed its text side too
        head = zero_shot_head(two.source, drawn.data.class_names, settings.templates)
        results.append(measure("source", two.source, head))
    return results
