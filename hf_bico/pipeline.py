"""The pipeline: plan, sample, download, read, load, calibrate, align, transport, evaluate.

Computes and returns data classes; prints and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from threading import Thread
from typing import Any

import torch

from hf_bico.bench import Bench, similar_blocks
from hf_bico.choosing import settled, towers_of, without_labels
from hf_bico.classifiers import HeadForm
from hf_bico.data.calibration import Drawn, draw, evaluation_samples
from hf_bico.data.dataset import Samples
from hf_bico.delta_file import MADE_FROM
from hf_bico.deltas import Deltas
from hf_bico.environment import (
    Stopwatch,
    choose_device,
    device_name,
    enough_memory,
    exact_float32,
    installed_versions,
    peak_memory,
)
from hf_bico.errors import (
    DataUnknownError,
    EmptyTaskVectorError,
    UnsuitableMethodError,
    UnsupportedModelError,
    UsageError,
)
from hf_bico.forms import Form, make_form
from hf_bico.heads import WrittenHead, head_form, heads_of, written_head
from hf_bico.hub.client import Hub
from hf_bico.methods import METHODS, Method, Trainer
from hf_bico.methods.aligning import Aligner
from hf_bico.models import ModelReference
from hf_bico.objectives import Batch, Heads
from hf_bico.outcomes import UNTOUCHED, Outcome, outcome_of, with_readout
from hf_bico.planning import matched, plan
from hf_bico.plans import Plan
from hf_bico.ported import Ported, with_held
from hf_bico.processes import ALONE, Team, join, local_device, process_count
from hf_bico.progress import Progress, silent
from hf_bico.record import EvaluationRecord, RunRecord
from hf_bico.recording import Findings, make_record
from hf_bico.resolving import Lineage
from hf_bico.results import LOSS
from hf_bico.rounds import Round, no_predictions, require_enough_to_mispair
from hf_bico.settings import Settings
from hf_bico.sites import TEXT_SIDE, TEXTS
from hf_bico.task_vector import TaskVector
from hf_bico.text_checks import require_readable, require_tokenizers, uses_template
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
@enough_memory()
@exact_float32()
def carry_out(planned: Plan, settings: Settings, hub: Hub, progress: Progress = silent) -> Ported:
    """Do what was planned: sample, download, calibrate, align, transport, evaluate."""
    started, watch = datetime.now(UTC), Stopwatch(progress)
    device = choose_device(local_device(settings.device))
    team = join(device)
    planned, asked, measured_by = matched(planned, settings.layers), settings.objective, settings.evaluation
    settings = _settled(planned, settings)
    method = METHODS[settings.method](settings)
    require_possible(planned, settings, method)
    with watch("sample"):
        drawn = _draw(planned, settings, hub)
        if drawn is not None:
            if not drawn.data.labelled and drawn.data.columns.teaches_itself:
                settings = without_labels(settings, measured_by)
            if settings.control:
                require_enough_to_mispair(len(drawn.samples))
            require_tokenizers(planned.lineage, [drawn])
    with watch("download"):
        planned = planned.fetched(watch.progress)
    _hash_meanwhile(planned.lineage)
    bench = _with_towers(Bench.open(planned, settings, device, watch, team), method, drawn, asked)
    settings, heads, held_out = bench.settings, None, None
    if drawn is not None:
        bench, drawn, heads, held_out = _asked_about(bench, drawn, method)
    round = Round(bench, drawn, heads, watch, settings, keeps=False)
    whole = None
    if drawn is not None and held_out is not None and isinstance(method, Trainer) and method.whole_split:
        whole = training_samples(drawn, *held_out)
    outcome = outcome_of(method, round, whole)
    team.leave()
    bench.team = ALONE  # each process has all that was carried, and one is enough for the rest
    settings = settings if team.is_first else replace(settings, evaluate=False, control=False)
    lineage = bench.planned.lineage
    with watch("form"):
        ported = _over_target(outcome.changes, lineage)
        usual = planned.format if method.keeps_factors else "full"
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
        if drawn is not None and held_out is not None and _measures(settings, drawn, held_out[1]):
            how = (settings.evaluation, settings.batch)
            yardstick = Yardstick(drawn.data.name, *held_out, drawn.samples, *how)
            evaluation = _evaluate(yardstick, round, form, read_by, watch.progress)
            for name, others in _variants(method, round, outcome, drawn):
                changes = written(_over_target(others, lineage)).changes
                own = read_by if outcome.trained else written_head(round, replace(UNTOUCHED, changes=others))
                evaluation += yardstick.measure_target(name, round, changes, None if own is None else own.head)

    with watch("record"):
        copies = round.copies if method.looks_at_data and outcome.trained is None else 0
        origin = None if read_by is None else read_by.origin
        template = None if drawn is None else uses_template(bench, drawn.samples)
        readout = outcome.readout
        found = Findings(bench.vector, report, tuple(evaluation), copies, outcome.trained, readout, origin, template)
        record = make_record(bench.planned, settings, drawn, found, _run(started, watch, round, team))
    return Ported(ported, report, record, lineage.target, form)


def _hash_meanwhile(lineage: Lineage) -> None:
    """Find the files' SHA-256, which the record tells in the end, while the GPU is busy."""

    def find() -> None:
        with suppress(OSError):  # what cannot be read is told by who reads it
            _ = [model.sha256 for model in lineage.models]  # each keeps its own

    Thread(target=find, daemon=True).start()


def _asked_about(bench: Bench, drawn: Drawn, method: Method) -> tuple[Bench, Drawn, Heads, tuple[str, Samples]]:
    """The samples as they are used, how the models are asked about them, and what is held out to measure on."""
    bench.agree_on_length()
    drawn = bench.chosen(drawn)
    held_out = _held_out(drawn, method)
    require_readable(bench, drawn.split, drawn.samples)
    if _measures(bench.settings, drawn, held_out[1]):
        require_readable(bench, *held_out)
    heads = heads_of(bench, drawn.data.class_names, drawn)
    drawn = bench.labelled(drawn, heads)
    if bench.settings.layers == "similarity":
        bench = bench.matched(similar_blocks(bench, drawn.samples))
    return bench, drawn, heads, held_out


def _measures(settings: Settings, drawn: Drawn, samples: Samples) -> bool:
    """Whether measuring is asked for, and there are samples for it, with labels where classes are told apart."""
    known = drawn.data.labelled or settings.objective != "classification"
    return settings.evaluate and len(samples) > 0 and known


def _beside(format: str, lineage: Lineage, read_by: WrittenHead, class_names: Sequence[str]) -> HeadForm | None:
    """The head as it is written; a change alone needs none, and the target's class may have no place for one."""
    try:
        return head_form(read_by, lineage.target, class_names)
    except UnsupportedModelError:
        if format == "delta":
            return None
        raise


def _with_towers(bench: Bench, method: Method, drawn: Drawn | None, asked: Any) -> Bench:
    """The bench with those towers of a CLIP that are carried, and the objective that asks both of them.

    A data set of captions, or a text tower to carry, is asked by contrast, unless something else was `asked` for.
    """
    settings = bench.settings
    if not bench.source.layout.text_blocks:
        return bench
    captions = drawn is not None and not drawn.data.labelled and drawn.data.columns.teaches_itself
    predicted = drawn is not None and drawn.labels == "pseudo" and not captions
    by_classes = predicted or isinstance(method, Trainer) or method.needs_predictions or settings.readout
    fixed = by_classes or method.one_tower or asked == "zero-shot" or settings.own_objective
    towers = towers_of(settings, bench.changed_towers, fixed)
    objective = settings.objective
    if drawn is not None and not settings.own_objective:
        contrast = asked == "contrastive" or (not fixed and (TEXT_SIDE in towers or captions))
        objective = "contrastive" if contrast else "zero-shot"
        if TEXT_SIDE in towers and not contrast:
            raise UnsuitableMethodError(
                f"the text tower is asked by captions, and {settings.method} by classes", "use --tower vision, or bico"
            )
    if objective == "contrastive" and settings.control:
        raise UnsuitableMethodError(
            "--control mispairs samples, and captions of different lengths have no rows to pair", "leave --control out"
        )
    found = bench.of_towers(towers, objective)
    lineage = found.planned.lineage
    if not found.pairs:
        raise EmptyTaskVectorError(
            f"'{lineage.source.name}' changed nothing that can be carried in the "
            f"{settings.tower or 'vision'} tower of its base",
            "choose another with --tower",
        )
    method.require(lineage.base.layout, lineage.target.layout, found.pairs)
    return found


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


def require_possible(planned: Plan, settings: Settings, method: Method) -> None:
    """Refuse, before anything large is downloaded, what cannot be done with these models and this data."""
    lineage = planned.lineage
    # which towers of a CLIP a fine-tuned model changed is known once it is read
    method.require(lineage.base.layout, lineage.target.layout, planned.main_pairs or planned.pairs)
    if lineage.data is None and (method.looks_at_data or settings.readout):
        raise lineage.no_data or DataUnknownError("no calibration data was given", "name it with --data")
    if not settings.predicts and (method.needs_predictions or settings.readout):
        raise no_predictions("--readout" if settings.readout else settings.method)
    if process_count() > 1 and isinstance(method, Trainer):
        raise UnsuitableMethodError(
            f"{settings.method} trains, which several processes do not share", "use one process"
        )
    if settings.own_objective and isinstance(method, Trainer):
        raise UnsuitableMethodError(
            f"{settings.method} trains by an objective of the models' own", "leave the objective out, or use bico"
        )
    require_projection(planned, settings)
    if settings.tower is not None and "contrastive" not in lineage.base.layout.objectives:
        raise UsageError("--tower chooses between the towers of a CLIP, and the base is none", "leave --tower out")
    if settings.fit_head and settings.objective not in ("auto", "classification"):
        raise UsageError(
            f"--probe fits a classifier's head, and these models are asked by {_asked_by(settings)}",
            "leave --probe out",
        )
    if isinstance(method, Trainer) and method.whole_split and settings.labels == "pseudo":
        raise UnsuitableMethodError(
            f"{settings.method} trains on the data set's own labels", "leave --labels pseudo out, or use fewshot"
        )
    if settings.control and not isinstance(method, Aligner):
        raise UnsuitableMethodError(
            f"--control mispairs the two models' samples, and {settings.method} does not pair any",
            "leave --control out, or use a method that aligns, such as bico",
        )
    if settings.control and lineage.base.layout.reads == TEXTS:
        raise UnsuitableMethodError(
            "--control mispairs samples, and texts of different lengths have no rows to pair", "leave --control out"
        )
    if settings.layers == "similarity" and lineage.data is None:
        raise UsageError("--layers similarity compares what blocks read, and no data was given", "name it with --data")


def _settled(planned: Plan, settings: Settings) -> Settings:
    """The settings for these models; what calibrates on nothing asks nothing."""
    lineage = planned.lineage
    return settings if lineage.data is None else settled(settings, lineage.base.layout, lineage.target.layout)


def _asked_by(settings: Settings) -> str:
    return settings.objective if isinstance(settings.objective, str) else "an objective of the caller's own"


def require_projection(planned: Plan, settings: Settings) -> None:
    """Refuse a readout where there is nothing that it could correct."""
    if settings.readout and not any(site.role == "proj" for site in planned.lineage.target.layout.main_sites):
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
    reads = planned.lineage.base.layout.reads
    return None if data is None else draw(data, settings, hub, known_names=known or None, reads=reads)


def training_samples(drawn: Drawn, split: str, held_out: Samples) -> Samples:
    """All labelled samples of the split that was drawn from, but for those that are measured on; of texts all of them.

    There are none where its labels are not there, or are not to be used.
    """
    taken = set(held_out.indices) if split == drawn.split else set()
    known = drawn.labels == "dataset" or drawn.data.columns.teaches_itself
    order = drawn.data.order(drawn.split, drawn.strategy.seed) if known else []
    rows = drawn.data.first_of(drawn.split, (index for index in order if index not in taken), len(order))
    return drawn.data.samples(drawn.split, rows)


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
        mispaired = Round(round.bench, drawn, round.heads, round.watch, plain, mispaired=True, keeps=False)
        yield "control", outcome_of(method, mispaired).changes


def _evaluate(
    yardstick: Yardstick, round: Round, form: Form, read_by: WrittenHead | None, progress: Progress
) -> list[EvaluationRecord]:
    """Target, ported, and source fine-tuned, on the same held-out samples; a classifier's heads found in one way."""
    before = written_head(round, UNTOUCHED)
    results = yardstick.measure_target("target", round, UNTOUCHED.changes, None if before is None else before.head)
    steps = 4 if any(entry.metric == LOSS for entry in results) else 3
    progress("evaluate", 1, steps)
    after = read_by if form.head is None else form.head
    results += yardstick.measure_target("ported", round, form.changes, None if after is None else after.head)
    progress("evaluate", 2, steps)
    if steps == 4:  # what fine-tuning did for its own base is the measure of a port
        results += yardstick.measure_base("base", round)
        progress("evaluate", 3, steps)
    return results + yardstick.measure_source("source", round)
