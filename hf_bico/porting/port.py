"""Ports a task vector: plan, prepare, calibrate and transfer, write and evaluate, record.

Computes and returns data classes; prints nothing and writes no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Unpack

import torch

from hf_bico.alignment.objectives.base import Classifier
from hf_bico.arguments import PortOptions, settings_of, takes
from hf_bico.errors import UnsupportedModelError
from hf_bico.hub.client import Hub
from hf_bico.models.deltas import MADE_FROM, Deltas
from hf_bico.models.inference import prepare_alike
from hf_bico.models.model import ModelReference
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.cost import time_training_step
from hf_bico.porting.evaluate import HeldOutEvaluation
from hf_bico.porting.formats import WrittenChange, format_change
from hf_bico.porting.heads import TargetHead, target_head
from hf_bico.porting.plan import Plan
from hf_bico.porting.planner import EarlyDraw, plan_port
from hf_bico.porting.prepare import PreparedPort, prepare
from hf_bico.porting.recording import make_record, method_record, outlook_record
from hf_bico.porting.result import Ported, with_adapter_ranks
from hf_bico.porting.scoring import TargetScorer, make_scorer
from hf_bico.porting.task_vector import TaskVector
from hf_bico.porting.transfer import (
    UNTOUCHED,
    Judgement,
    TransferResult,
    judge,
    output_format,
    transfer,
    with_polish,
    with_readout,
)
from hf_bico.porting.written_heads import SentenceHead, WrittenHead, written_head
from hf_bico.reports.record import LOSS, EvaluationRecord, MethodRecord, OutlookRecord, RunRecord, SourceLeadRecord
from hf_bico.runtime.distributed import join, local_device
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
from hf_bico.runtime.turns import job_turn
from hf_bico.settings import OPTIONS, Settings
from hf_bico.utils.progress import Progress, ShownProgress, callback_of, silent

OnOutlook = Callable[[MethodRecord, OutlookRecord | None, SourceLeadRecord | None], None]
"""Takes what the samples chose, what they promise, and how the source compares with the target on their labels."""


@translate_errors()
@takes(*OPTIONS)
def port(
    source: ModelReference,
    to: ModelReference,
    *,
    base: ModelReference | None = None,
    data: Any = None,
    unlabelled: Any = None,
    target_id: str | None = None,
    token: str | None = None,
    allow_pickle: bool = False,
    progress: ShownProgress = None,
    **options: Unpack[PortOptions],
) -> Ported:
    """Carry what `source` learnt over `base` to the model `to`, without training.

    Models are Hub ids, folders, or loaded modules, and `source` may be a PEFT adapter; `data` is a Hub id, a folder of
    images or parquet files, a `datasets` object or a list of rows, and so is `unlabelled`: more samples, whose labels
    are not read. `base` and `data` may be left out if the source's card names them; `target_id` is the Hub id of a
    target that is a folder, which is checked and goes into the card; `progress` is called with (stage, steps done,
    steps in all). The other options are those of `hf_bico.Settings`, such as n, per_class, seed, method, alpha, format,
    rank, objective and device. Ports of several threads take turns.

    >>> ported = hf_bico.port("user/vit-b16-eurosat", to="laion/ViT-B-16-plus", n=100)  # doctest: +SKIP
    >>> ported.push_to_hub("user/vit-b16-plus-eurosat")  # doctest: +SKIP
    """
    settings, hub = settings_of(port, options), Hub(token)
    with job_turn():  # of loaded models, the plan holds the weights: another thread's port may be changing these
        named = {"base": base, "data": data, "unlabelled": unlabelled, "target_id": target_id}
        planned = plan_port(source, to, **named, hub=hub, allow_pickle=allow_pickle)
        return run_port(planned, settings, hub, callback_of(progress))


@torch.inference_mode(False)
@enough_memory()
@exact_float32()
def run_port(
    planned: Plan,
    settings: Settings,
    hub: Hub,
    progress: Progress = silent,
    on_outlook: OnOutlook = lambda method, outlook, lead: None,
    early: EarlyDraw | None = None,
) -> Ported:
    """Run a planned port: prepare, calibrate and transfer, write and evaluate, record.

    Samples that were drawn `early` are not drawn again. `on_outlook` is called with what the samples say, before
    anything is evaluated. If the samples choose alpha and speak against the change, the result is held back: the target
    as it is, without an evaluation.
    """
    started, watch = datetime.now(UTC), Stopwatch(progress)
    device = choose_device(local_device(settings.device))
    team = join(device)
    prepared = prepare(planned, settings, hub, watch, device, team, early=early)

    attempt, tried = _best_attempt(prepared, watch)
    prepared, calibration, result = attempt.prepared, attempt.calibration, attempt.result
    if prepared.settings.polish:
        result = with_polish(result, prepared.method, calibration)
    target, judged, untouched = prepared.models.lineage.target, None, _OutputFormat(prepared, "full", None, None)
    with watch("form"):
        output = _OutputFormat.of(prepared, calibration, result) if result.changes else untouched
        written = output.formatted(result.changes)
        sites = with_adapter_ranks(result.report.sites, written, target)
        result = replace(result, report=replace(result.report, sites=tuple(sites)))
    if attempt.scorer is not None:
        judged = _judge(attempt.scorer, calibration, result, written.changes)
        if result.scaling is not None and result.changes:
            # what is written may be less than what was carried: of a lower rank, or in half precision
            result = replace(result, scaling=replace(result.scaling, gain=judged.gain))
    if result.held_back:
        output, written = untouched, untouched.formatted(UNTOUCHED.changes)
    prepared.models.leave_team()

    method, expected = method_record(prepared, calibration, result, tried), outlook_record(judged, result)
    lead = None if judged is None else judged.lead
    if team.is_first:
        on_outlook(method, expected, lead)
    evaluation: list[EvaluationRecord] = []
    if not result.held_back:
        with watch("evaluate"):
            evaluation = _evaluate(prepared, calibration, result, written, output)
    # before steps are timed: the peak of memory is the port's
    run = _run_record(started, watch, calibration, processes=team.size)
    step = None if result.held_back else time_training_step(prepared, calibration, team.size)
    if step is not None:
        run = replace(run, training_step=step.seconds, training_batch=step.samples)
    with watch("record"):
        origin = None if output.head is None else output.head.origin
        record = make_record(prepared, method, result, evaluation, origin, run, outlook=expected, lead=lead)
    return Ported(written.vector, target, written, record, result.report, result.held_back)


def _judge(scorer: TargetScorer, calibration: Calibration, result: TransferResult, changes: Deltas) -> Judgement:
    """Judge what is written by the samples: without a readout, and what was polished by the samples left out of it."""
    polished = result.polished
    if polished is None or not polished.helped or polished.gain is None:
        return judge(scorer, calibration, changes if result.unread is None else result.unread)
    return replace(judge(scorer, calibration, result.unpolished or UNTOUCHED.changes), gain=polished.gain)


@dataclass(frozen=True)
class _Attempt:
    """One method, the calibration that it used, and its result."""

    prepared: PreparedPort
    calibration: Calibration
    scorer: TargetScorer | None
    result: TransferResult

    @classmethod
    def of(cls, prepared: PreparedPort, watch: Stopwatch) -> _Attempt:
        calibration = _calibration(prepared, watch)
        scorer = make_scorer(calibration) if prepared.judges else None
        result = transfer(prepared.method, calibration, prepared.whole_split, scorer=scorer)
        return cls(prepared, calibration, scorer, result)

    @property
    def rank(self) -> tuple[bool, float]:
        """Sorts attempts: the best is not held back, and the samples gain most by it."""
        scaling = self.result.scaling
        return not self.result.held_back, 0.0 if scaling is None else scaling.gain.mean


def _best_attempt(prepared: PreparedPort, watch: Stopwatch) -> tuple[_Attempt, dict[str, TransferResult]]:
    """Try every candidate method; return the best attempt, the first of two equal ones, and all results by method."""
    attempts = [_Attempt.of(prepared.with_method(name), watch) for name in prepared.candidates]
    best = max(attempts, key=lambda attempt: attempt.rank)
    return best, {attempt.prepared.settings.method: attempt.result for attempt in attempts}


def _calibration(prepared: PreparedPort, watch: Stopwatch, mispaired: bool = False) -> Calibration:
    """Return a calibration for one method; the control has no readout."""
    settings = prepared.settings
    return Calibration(
        prepared.models,
        prepared.drawn,
        prepared.heads,
        watch,
        replace(settings, readout=False) if mispaired else settings,
        mispaired=mispaired,
        keeps=False,
        compares=not mispaired,
    )


@dataclass(frozen=True)
class _OutputFormat:
    """The format in which a port and its variants are written, and the classification head written with them."""

    prepared: PreparedPort
    format: str
    head: TargetHead | None
    written_head: WrittenHead | SentenceHead | None

    @classmethod
    def of(cls, prepared: PreparedPort, calibration: Calibration, result: TransferResult) -> _OutputFormat:
        """Choose the requested or usual format, and make the head of the target with the result's changes."""
        planned, format = prepared.models.planned, output_format(prepared.method, prepared.models, prepared.settings)
        head = result.head
        if head is None and prepared.drawn is not None:
            head = target_head(calibration, result.changes, result.trained)
        written = None
        if head is not None:
            try:
                written = written_head(head.head, planned.lineage.target, calibration.class_names)
            except UnsupportedModelError:
                if format != "delta":  # a change alone needs no model class that has a head
                    raise
        return cls(prepared, format, head, written)

    def formatted(self, changes: Deltas) -> WrittenChange:
        """Bring changes of the target into the format."""
        models = self.prepared.models
        target = models.lineage.target
        about: dict[str, Any] = {"base": target.name, "library": target.family.library}
        about |= {} if target.commit is None else {"base_commit": target.commit}
        about[MADE_FROM] = [list(name) for name in models.lineage.repos]
        return format_change(
            TaskVector(changes, about=about, base=target),
            target,
            self.format,
            models.settings.rank,
            module=models.target.module,
            device=models.device,
            head=self.written_head,
        )


def _evaluate(
    prepared: PreparedPort,
    calibration: Calibration,
    result: TransferResult,
    written: WrittenChange,
    output: _OutputFormat,
) -> list[EvaluationRecord]:
    """Evaluate target, port, fine-tuned source and variants of the port on the same held-out samples."""
    drawn, held_out, settings = prepared.drawn, prepared.held_out, prepared.settings
    if drawn is None or held_out is None or not prepared.evaluates:
        return []
    split, samples = held_out
    of_source = of_target = HeldOutEvaluation(
        drawn.data.name, split, samples, drawn.samples, evaluation=settings.evaluation, batch_size=settings.batch
    )
    if isinstance(calibration.heads.target, Classifier):
        of_source = of_source.read_once()
        of_target = of_source.prepared_by(prepared.models.target)
        of_source = of_target if prepare_alike(prepared.models.source, prepared.models.target) else of_source
    models, measured = 3, 0

    def count(taken: int, of: int) -> None:
        calibration.watch.progress("evaluate", measured * of + taken, max(models, measured + 1) * of)

    of_source, of_target = replace(of_source, report=count), replace(of_target, report=count)

    def measure(
        name: str, changes: Deltas, head: TargetHead | WrittenHead | SentenceHead | None
    ) -> list[EvaluationRecord]:
        nonlocal measured
        found = of_target.measure_target(name, calibration, changes, None if head is None else head.head)
        measured += 1
        return found

    records = measure("target", UNTOUCHED.changes, target_head(calibration, UNTOUCHED.changes))
    by_loss = any(entry.metric == LOSS for entry in records)
    models += by_loss
    records += measure("ported", written.changes, written.head or output.head)
    if by_loss:  # a port is compared with what fine-tuning did for its own base
        records += of_source.measure_base("base", calibration)
        measured += 1
    records += of_source.measure_source("source", calibration)
    measured += 1
    for name, changes in _variants(prepared, calibration, result):
        head = output.head if result.trained else target_head(calibration, changes)
        records += measure(name, output.formatted(changes).changes, head)
    return records


def _variants(prepared: PreparedPort, calibration: Calibration, result: TransferResult) -> Iterator[tuple[str, Deltas]]:
    """Yield what is evaluated beside a port: it without its readout, the readout alone, and a mispaired control."""
    if result.unread is not None:
        yield "ported, no readout", result.unread
    if result.polished is not None and result.polished.helped and result.unpolished:
        yield "ported, no polish", result.unpolished
    if result.readout is not None and prepared.settings.method != "readout":
        yield "target, readout", with_readout(UNTOUCHED, calibration).changes
    if prepared.settings.control:
        # with a watch of its own: its stages are a part of the evaluation, and none of the port
        mispaired = _calibration(prepared, Stopwatch(calibration.watch.callback), mispaired=True)
        alphas = None if result.scaling is None else result.scaling.alphas  # or it would be held back
        yield "control", transfer(prepared.method, mispaired, alphas=alphas).changes


def _run_record(started: datetime, watch: Stopwatch, calibration: Calibration, processes: int) -> RunRecord:
    """Return when, how long and on what the port ran."""
    models = calibration.models
    return RunRecord(
        started=started.isoformat(timespec="seconds"),
        seconds=watch.seconds,
        peak_memory=peak_memory(models.device),
        device=device_name(models.device),
        dtype=str(models.source.dtype).removeprefix("torch."),
        batch_size=calibration.batch_size or models.settings.batch,
        processes=processes,
        versions=installed_versions(),
    )
