"""The pipeline: plan, sample, download, read, load, calibrate, align, transport, evaluate.

Computes and returns data classes; prints and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch

from hf_bico.alignment.methods.base import Method, Trainer
from hf_bico.alignment.objectives.base import Batch, Classifier
from hf_bico.data.draw import CalibrationDraw, repeat_notices
from hf_bico.errors import UnsupportedModelError
from hf_bico.hub.client import Hub
from hf_bico.models.deltas import MADE_FROM, Deltas
from hf_bico.models.model import ModelReference
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.evaluate import HeldOutEvaluation
from hf_bico.porting.formats import WrittenChange, written_change
from hf_bico.porting.heads import HeadForm, WrittenHead, head_form, written_head
from hf_bico.porting.lineage import Lineage
from hf_bico.porting.plan import Plan
from hf_bico.porting.planner import plan
from hf_bico.porting.prepare import measures, prepare, training_samples, uses_template
from hf_bico.porting.recording import RunFindings, make_record
from hf_bico.porting.result import Ported, with_held
from hf_bico.porting.task_vector import TaskVector
from hf_bico.porting.transfer import UNTOUCHED, TransferResult, transfer, with_readout
from hf_bico.reports.record import EvaluationRecord, ForecastRecord, RunRecord
from hf_bico.reports.results import LOSS
from hf_bico.runtime.distributed import ALONE, ProcessGroup, join, local_device
from hf_bico.runtime.environment import (
    Stopwatch,
    choose_device,
    device_name,
    enough_memory,
    exact_float32,
    installed_versions,
    peak_memory,
)
from hf_bico.runtime.library_errors import translate_errors
from hf_bico.settings import Settings
from hf_bico.utils.progress import Progress, silent

__all__ = ["Batch", "carry_out", "port"]


@translate_errors()
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
@enough_memory()
@exact_float32()
def carry_out(
    planned: Plan,
    settings: Settings,
    hub: Hub,
    progress: Progress = silent,
    foretold: Callable[[ForecastRecord], None] = lambda foresight: None,
) -> Ported:
    """Do what was planned: sample, download, calibrate, align, transport, evaluate.

    `foretold` is called, before anything is measured, with what calibration says about the outcome.
    """
    started, watch = datetime.now(UTC), Stopwatch(progress)
    device = choose_device(local_device(settings.device))
    team = join(device)
    ready = prepare(planned, settings, hub, watch, device, team)
    models, settings, method, drawn, held_out = ready.models, ready.settings, ready.method, ready.drawn, ready.held_out
    # a head that is fitted to the samples answers them all, and leaves nothing to foretell from
    forecasts = settings.objective != "classification"
    calibration = Calibration(models, drawn, ready.heads, watch, settings, keeps=False, forecasts=forecasts)
    whole = None
    if drawn is not None and held_out is not None and isinstance(method, Trainer) and method.whole_split:
        whole = training_samples(drawn, *held_out)
    result = transfer(method, calibration, whole)
    team.leave()
    if result.foresight is not None and team.is_first:
        foretold(result.foresight)
    models.team = ALONE  # each process has all that was carried, and one is enough for the rest
    settings = settings if team.is_first else replace(settings, evaluate=False, control=False)
    lineage = models.planned.lineage
    with watch("form"):
        ported = _over_target(result.changes, lineage)
        usual = models.planned.format if method.keeps_factors else "full"
        format = settings.format or ("adapter" if settings.rank is not None else usual)

        read_by = None if drawn is None else written_head(calibration, result)
        head = None if read_by is None else _beside(format, lineage, read_by, calibration.class_names)

        def written(changes: TaskVector) -> WrittenChange:
            return written_change(
                changes, lineage.target, format, settings.rank, models.target.module, device, head=head
            )

        form = written(ported)
        report = result.report
        report = replace(report, sites=tuple(with_held(list(report.sites), form, lineage.target)))
    evaluation: list[EvaluationRecord] = []
    with watch("evaluate"):
        if drawn is not None and held_out is not None and measures(settings, drawn, held_out[1]):
            how = (settings.evaluation, settings.batch)
            evaluator = HeldOutEvaluation(drawn.data.name, *held_out, drawn.samples, *how)
            of_target = evaluator
            if isinstance(calibration.heads.target, Classifier):
                evaluator = evaluator.read_once()
                of_target = evaluator.prepared_by(models.target)
            evaluation = _evaluate(of_target, evaluator, calibration, form, read_by, watch.progress)
            for name, others in _variants(method, calibration, result, drawn):
                changes = written(_over_target(others, lineage)).changes
                own = read_by if result.trained else written_head(calibration, replace(UNTOUCHED, changes=others))
                evaluation += of_target.measure_target(name, calibration, changes, None if own is None else own.head)

    with watch("record"):
        copies = calibration.copies if method.looks_at_data and result.trained is None else 0
        origin = None if read_by is None else read_by.origin
        template = None if drawn is None else uses_template(models, drawn.samples)
        readout = result.readout
        repeats = (
            () if drawn is None else tuple(repeat_notices(drawn, held_out[1] if held_out and evaluation else None))
        )
        beside = (copies, result.trained, readout, origin, template, result.foresight, repeats)
        found = RunFindings(models.vector, report, tuple(evaluation), *beside)
        record = make_record(models.planned, settings, drawn, found, _run(started, watch, calibration, team))
    return Ported(ported, report, record, lineage.target, form)


def _beside(format: str, lineage: Lineage, read_by: WrittenHead, class_names: Sequence[str]) -> HeadForm | None:
    """The head as it is written; a change alone needs none, and the target's class may have no place for one."""
    try:
        return head_form(read_by, lineage.target, class_names)
    except UnsupportedModelError:
        if format == "delta":
            return None
        raise


def _run(started: datetime, watch: Stopwatch, calibration: Calibration, team: ProcessGroup) -> RunRecord:
    models = calibration.models
    device = models.device
    return RunRecord(
        started=started.isoformat(timespec="seconds"),
        seconds=watch.seconds,
        peak_memory=peak_memory(device),
        device=device_name(device),
        dtype=str(models.source.dtype).removeprefix("torch."),
        batch_size=calibration.batch_size or models.settings.batch,
        processes=team.size,
        versions=installed_versions(),
    )


def _over_target(changes: Deltas, lineage: Lineage) -> TaskVector:
    """The ported vector, which knows over which model it lies and what it was made from."""
    target = lineage.target
    about: dict[str, Any] = {"base": target.name, "library": target.family.library}
    about |= {} if target.commit is None else {"base_commit": target.commit}
    about[MADE_FROM] = [list(name) for name in lineage.repos]
    return TaskVector(changes, about=about, base=target)


def _variants(
    method: Method, calibration: Calibration, result: TransferResult, drawn: CalibrationDraw
) -> Iterator[tuple[str, Deltas]]:
    """What else is measured beside a port: without its readout, the readout alone, and from mispaired samples."""
    if result.unread is not None:
        yield "ported, no readout", result.unread
        yield "target, readout", with_readout(UNTOUCHED, calibration).changes
    if calibration.settings.control:
        plain = replace(calibration.settings, readout=False)
        mispaired = Calibration(
            calibration.models, drawn, calibration.heads, calibration.watch, plain, mispaired=True, keeps=False
        )
        yield "control", transfer(method, mispaired).changes


def _evaluate(
    of_target: HeldOutEvaluation,
    of_source: HeldOutEvaluation,
    calibration: Calibration,
    form: WrittenChange,
    read_by: WrittenHead | None,
    progress: Progress,
) -> list[EvaluationRecord]:
    """Target, ported, and source fine-tuned, on the same held-out samples; a classifier's heads found in one way."""
    before = written_head(calibration, UNTOUCHED)
    results = of_target.measure_target(
        "target", calibration, UNTOUCHED.changes, None if before is None else before.head
    )
    steps = 4 if any(entry.metric == LOSS for entry in results) else 3
    progress("evaluate", 1, steps)
    after = read_by if form.head is None else form.head
    results += of_target.measure_target("ported", calibration, form.changes, None if after is None else after.head)
    progress("evaluate", 2, steps)
    if steps == 4:  # what fine-tuning did for its own base is the measure of a port
        results += of_source.measure_base("base", calibration)
        progress("evaluate", 3, steps)
    return results + of_source.measure_source("source", calibration)
