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
from hf_bico.data.draw import Drawn, repeat_notices
from hf_bico.errors import UnsupportedModelError
from hf_bico.hub.client import Hub
from hf_bico.models.deltas import MADE_FROM, Deltas
from hf_bico.models.model import ModelReference
from hf_bico.porting.calibration import Round
from hf_bico.porting.evaluate import Yardstick
from hf_bico.porting.formats import Form, make_form
from hf_bico.porting.heads import HeadForm, WrittenHead, head_form, written_head
from hf_bico.porting.lineage import Lineage
from hf_bico.porting.plan import Plan
from hf_bico.porting.planner import plan
from hf_bico.porting.prepare import measures, prepare, training_samples, uses_template
from hf_bico.porting.recording import Findings, make_record
from hf_bico.porting.result import Ported, with_held
from hf_bico.porting.task_vector import TaskVector
from hf_bico.porting.transfer import UNTOUCHED, Outcome, outcome_of, with_readout
from hf_bico.reports.record import EvaluationRecord, ForesightRecord, RunRecord
from hf_bico.reports.results import LOSS
from hf_bico.runtime.distributed import ALONE, Team, join, local_device
from hf_bico.runtime.environment import (
    Stopwatch,
    choose_device,
    device_name,
    enough_memory,
    exact_float32,
    installed_versions,
    peak_memory,
)
from hf_bico.runtime.library_errors import last_net
from hf_bico.settings import Settings
from hf_bico.utils.progress import Progress, silent

__all__ = ["Batch", "carry_out", "port"]


@last_net()
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
    foretold: Callable[[ForesightRecord], None] = lambda foresight: None,
) -> Ported:
    """Do what was planned: sample, download, calibrate, align, transport, evaluate.

    `foretold` is called, before anything is measured, with what calibration says about the outcome.
    """
    started, watch = datetime.now(UTC), Stopwatch(progress)
    device = choose_device(local_device(settings.device))
    team = join(device)
    ready = prepare(planned, settings, hub, watch, device, team)
    bench, settings, method, drawn, held_out = ready.bench, ready.settings, ready.method, ready.drawn, ready.held_out
    # a head that is fitted to the samples answers them all, and leaves nothing to foretell from
    foretells = settings.objective != "classification"
    round = Round(bench, drawn, ready.heads, watch, settings, keeps=False, foretells=foretells)
    whole = None
    if drawn is not None and held_out is not None and isinstance(method, Trainer) and method.whole_split:
        whole = training_samples(drawn, *held_out)
    outcome = outcome_of(method, round, whole)
    team.leave()
    if outcome.foresight is not None and team.is_first:
        foretold(outcome.foresight)
    bench.team = ALONE  # each process has all that was carried, and one is enough for the rest
    settings = settings if team.is_first else replace(settings, evaluate=False, control=False)
    lineage = bench.planned.lineage
    with watch("form"):
        ported = _over_target(outcome.changes, lineage)
        usual = bench.planned.format if method.keeps_factors else "full"
        format = settings.format or ("adapter" if settings.rank is not None else usual)

        read_by = None if drawn is None else written_head(round, outcome)
        head = None if read_by is None else _beside(format, lineage, read_by, round.class_names)

        def written(changes: TaskVector) -> Form:
            return make_form(changes, lineage.target, format, settings.rank, bench.target.module, device, head=head)

        form = written(ported)
        report = outcome.report
        report = replace(report, sites=tuple(with_held(list(report.sites), form, lineage.target)))
    evaluation: list[EvaluationRecord] = []
    with watch("evaluate"):
        if drawn is not None and held_out is not None and measures(settings, drawn, held_out[1]):
            how = (settings.evaluation, settings.batch)
            yardstick = Yardstick(drawn.data.name, *held_out, drawn.samples, *how)
            of_target = yardstick
            if isinstance(round.heads.target, Classifier):
                yardstick = yardstick.read_once()
                of_target = yardstick.prepared_by(bench.target)
            evaluation = _evaluate(of_target, yardstick, round, form, read_by, watch.progress)
            for name, others in _variants(method, round, outcome, drawn):
                changes = written(_over_target(others, lineage)).changes
                own = read_by if outcome.trained else written_head(round, replace(UNTOUCHED, changes=others))
                evaluation += of_target.measure_target(name, round, changes, None if own is None else own.head)

    with watch("record"):
        copies = round.copies if method.looks_at_data and outcome.trained is None else 0
        origin = None if read_by is None else read_by.origin
        template = None if drawn is None else uses_template(bench, drawn.samples)
        readout = outcome.readout
        repeats = (
            () if drawn is None else tuple(repeat_notices(drawn, held_out[1] if held_out and evaluation else None))
        )
        beside = (copies, outcome.trained, readout, origin, template, outcome.foresight, repeats)
        found = Findings(bench.vector, report, tuple(evaluation), *beside)
        record = make_record(bench.planned, settings, drawn, found, _run(started, watch, round, team))
    return Ported(ported, report, record, lineage.target, form)


def _beside(format: str, lineage: Lineage, read_by: WrittenHead, class_names: Sequence[str]) -> HeadForm | None:
    """The head as it is written; a change alone needs none, and the target's class may have no place for one."""
    try:
        return head_form(read_by, lineage.target, class_names)
    except UnsupportedModelError:
        if format == "delta":
            return None
        raise


def _run(started: datetime, watch: Stopwatch, round: Round, team: Team) -> RunRecord:
    bench = round.bench
    device = bench.device
    return RunRecord(
        started=started.isoformat(timespec="seconds"),
        seconds=watch.seconds,
        peak_memory=peak_memory(device),
        device=device_name(device),
        dtype=str(bench.source.dtype).removeprefix("torch."),
        batch_size=round.batch_size or bench.settings.batch,
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


def _variants(method: Method, round: Round, outcome: Outcome, drawn: Drawn) -> Iterator[tuple[str, Deltas]]:
    """What else is measured beside a port: without its readout, the readout alone, and from mispaired samples."""
    if outcome.unread is not None:
        yield "ported, no readout", outcome.unread
        yield "target, readout", with_readout(UNTOUCHED, round).changes
    if round.settings.control:
        plain = replace(round.settings, readout=False)
        mispaired = Round(round.bench, drawn, round.heads, round.watch, plain, mispaired=True, keeps=False)
        yield "control", outcome_of(method, mispaired).changes


def _evaluate(
    of_target: Yardstick,
    of_source: Yardstick,
    round: Round,
    form: Form,
    read_by: WrittenHead | None,
    progress: Progress,
) -> list[EvaluationRecord]:
    """Target, ported, and source fine-tuned, on the same held-out samples; a classifier's heads found in one way."""
    before = written_head(round, UNTOUCHED)
    results = of_target.measure_target("target", round, UNTOUCHED.changes, None if before is None else before.head)
    steps = 4 if any(entry.metric == LOSS for entry in results) else 3
    progress("evaluate", 1, steps)
    after = read_by if form.head is None else form.head
    results += of_target.measure_target("ported", round, form.changes, None if after is None else after.head)
    progress("evaluate", 2, steps)
    if steps == 4:  # what fine-tuning did for its own base is the measure of a port
        results += of_source.measure_base("base", round)
        progress("evaluate", 3, steps)
    return results + of_source.measure_source("source", round)
