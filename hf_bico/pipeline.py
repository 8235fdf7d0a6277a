"""The pipeline: plan, sample, download, read, load, calibrate, align, transport, evaluate.

Computes and returns data classes; prints and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch

from hf_bico.bench import Bench, similar_blocks
from hf_bico.data.calibration import Drawn, draw, evaluation_samples
from hf_bico.data.dataset import Samples
from hf_bico.delta_file import MADE_FROM
from hf_bico.deltas import Deltas
from hf_bico.environment import (
    Stopwatch,
    choose_device,
    device_name,
    exact_float32,
    installed_versions,
    peak_memory,
)
from hf_bico.errors import DataUnknownError, UnsuitableMethodError, UsageError
from hf_bico.forms import Form, make_form
from hf_bico.hub.client import Hub
from hf_bico.methods import METHODS, Method, Trainer
from hf_bico.methods.aligning import Aligner
from hf_bico.models import ModelReference
from hf_bico.outcomes import UNTOUCHED, Outcome, outcome_of, with_readout
from hf_bico.planning import matched, plan
from hf_bico.plans import Plan
from hf_bico.ported import Ported, with_held
from hf_bico.progress import Progress, silent
from hf_bico.record import EvaluationRecord, RunRecord
from hf_bico.recording import Findings, make_record
from hf_bico.resolving import Lineage
from hf_bico.rounds import Batch, Round, require_enough_to_mispair
from hf_bico.settings import Settings
from hf_bico.task_vector import TaskVector
from hf_bico.yardstick import Yardstick

__all__ = ["Batch", "carry_out", "port"]


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
    `hf_bico.Settings`, such as n, per_class, seed, method, alpha, format, rank, objective and device.

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
    planned = matched(planned, settings.layers)
    require_possible(planned, settings, method)
    with watch("sample"):
        drawn = _draw(planned, settings, hub)
        if drawn is not None and settings.control:
            require_enough_to_mispair(len(drawn.samples))
    with watch("download"):
        planned = planned.fetched(watch.progress)
    bench = Bench.open(planned, settings, device, watch)
    heads = None
    if drawn is not None:
        heads = bench.heads(drawn.data.class_names) if settings.zero_shot else None
        drawn = bench.settled(drawn, heads)
        bench = bench.matched(similar_blocks(bench, drawn.samples)) if settings.layers == "similarity" else bench

    held_out = None if drawn is None else _held_out(drawn, method)
    round = Round(bench, drawn, heads, watch, settings)
    whole = None
    if drawn is not None and held_out is not None and isinstance(method, Trainer) and method.whole_split:
        whole = training_samples(drawn, *held_out)
    outcome = outcome_of(method, round, whole)
    lineage = bench.planned.lineage
    with watch("transport"):
        ported = _over_target(outcome.changes, lineage)
        usual = planned.format if method.keeps_factors else "full"
        format = settings.format or ("adapter" if settings.rank is not None else usual)

        def written(changes: TaskVector) -> Form:
            return make_form(changes, lineage.target, format, settings.rank, bench.target.module, device)

        form = written(ported)
        report = outcome.report
        report = replace(report, sites=tuple(with_held(list(report.sites), form, lineage.target)))
    evaluation: list[EvaluationRecord] = []
    with watch("evaluate"):
        if drawn is not None and held_out is not None and settings.evaluate and len(held_out[1]):
            measured_by = (settings.evaluation, settings.batch_size)
            yardstick = Yardstick(drawn.data.name, *held_out, drawn.samples, *measured_by)
            evaluation = _evaluate(yardstick, round, form.changes, watch.progress)
            for name, others in _variants(method, round, outcome, drawn):
                changes = written(_over_target(others, lineage)).changes
                evaluation += yardstick.measure_target(name, round, changes)

    with watch("record"):
        copies = round.copies if method.looks_at_data and outcome.trained is None else 0
        found = Findings(bench.vector, report, tuple(evaluation), copies, outcome.trained, outcome.readout)
        record = make_record(bench.planned, settings, drawn, found, _run(started, watch, bench))
    return Ported(ported, report, record, lineage.target, form)


def _run(started: datetime, watch: Stopwatch, bench: Bench) -> RunRecord:
    device = bench.source.device
    return RunRecord(
        started=started.isoformat(timespec="seconds"),
        seconds=watch.seconds,
        peak_memory=peak_memory(device),
        device=device_name(device),
        dtype=str(bench.source.dtype).removeprefix("torch."),
        batch_size=bench.settings.batch_size,
        processes=1,
        versions=installed_versions(),
    )


def require_possible(planned: Plan, settings: Settings, method: Method) -> None:
    """Refuse, before anything large is downloaded, what cannot be done with these models and this data."""
    lineage = planned.lineage
    method.require(lineage.base.layout, lineage.target.layout, planned.pairs)
    if lineage.data is None and (method.looks_at_data or settings.readout):
        raise lineage.no_data or DataUnknownError("no calibration data was given", "name it with --data")
    if not settings.zero_shot and (method.needs_predictions or settings.readout):
        what = "--readout" if settings.readout else settings.method
        raise UnsuitableMethodError(f"{what} needs the zero-shot objective", "leave the objective out, or use bico")
    require_projection(planned, settings)
    if isinstance(method, Trainer) and method.whole_split and settings.labels == "pseudo":
        raise UnsuitableMethodError(
            f"{settings.method} trains on the data set's own labels", "leave --labels pseudo out, or use fewshot"
        )
    if settings.control and not isinstance(method, Aligner):
        raise UnsuitableMethodError(
            f"--control mispairs the two models' samples, and {settings.method} does not pair any",
            "leave --control out, or use a method that aligns, such as bico",
        )
    if settings.layers == "similarity" and lineage.data is None:
        raise UsageError("--layers similarity compares what blocks read, and no data was given", "name it with --data")
    if settings.zero_shot and lineage.data is not None:
        for model in (lineage.base, lineage.target):
            model.family.require_zero_shot()


def require_projection(planned: Plan, settings: Settings) -> None:
    """Refuse a readout where there is nothing that it could correct."""
    if settings.readout and not any(site.role == "proj" for site in planned.lineage.target.layout.sites):
        raise UnsuitableMethodError("--readout corrects a final projection, and the target has none", "leave it out")


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


def training_samples(drawn: Drawn, split: str, held_out: Samples) -> Samples:
    """All labelled samples of the split that was drawn from, but for those that are measured on.

    There are none where its labels are not there, or are not to be used.
    """
    taken = set(held_out.indices) if split == drawn.split else set()
    order = drawn.data.order(drawn.split, drawn.strategy.seed) if drawn.labels == "dataset" else []
    return drawn.data.samples(drawn.split, [index for index in order if index not in taken])


def _held_out(drawn: Drawn, method: Method) -> tuple[str, Samples]:
    """What is measured on; where that is of the split that a whole split is trained on, a fifth of it at most."""
    split, samples = evaluation_samples(drawn.data, drawn.samples, drawn.split, drawn.strategy.seed)
    if isinstance(method, Trainer) and method.whole_split and split == drawn.split:
        samples = samples.first(max(1, len(drawn.data.splits[split]) // 5))
    return split, samples


def _variants(method: Method, round: Round, outcome: Outcome, drawn: Drawn) -> Iterator[tuple[str, Deltas]]:
    """What else is measured beside a port: without its readout, the readout alone, and from mispaired samples."""
    if outcome.unread is not None:
        yield "ported, no readout", outcome.unread
        yield "target, readout", with_readout(UNTOUCHED, round).changes
    if round.settings.control:
        plain = replace(round.settings, readout=False)
        mispaired = Round(round.bench, drawn, round.heads, round.watch, plain, mispaired=True)
        yield "control", outcome_of(method, mispaired).changes


def _evaluate(yardstick: Yardstick, round: Round, ported: Deltas, progress: Progress) -> list[EvaluationRecord]:
    """Target, ported, and source fine-tuned, on the same held-out samples."""
    results = yardstick.measure_target("target", round, UNTOUCHED.changes)
    progress("evaluate", 1, 3)
    results += yardstick.measure_target("ported", round, ported)
    progress("evaluate", 2, 3)
    return results + yardstick.measure_source("source", round)
