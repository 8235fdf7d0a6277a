"""Makes the record of a run: lineage, samples, notices, and the command line that repeats it.

Does not run anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from hf_bico.alignment.methods.brief import BriefTrainer
from hf_bico.alignment.methods.training import Trained
from hf_bico.data.dataset import DataSet
from hf_bico.data.draw import CalibrationDraw, Unlabelled
from hf_bico.data.notices import calibration_notices, class_notices, repeat_notices
from hf_bico.hub.benchmarks import benchmark_task
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.adapters.config import LORA
from hf_bico.models.families.pooling import read_pooling
from hf_bico.models.low_rank import Factors
from hf_bico.models.model import Model, OpenedRepo
from hf_bico.models.name_matching import Overlap
from hf_bico.models.shared_reading import pairing_notices
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.examples import example_record
from hf_bico.porting.generation import TEMPERATURE, TOKENS
from hf_bico.porting.head_plan import files_of, place_in_source
from hf_bico.porting.heads import class_order_notice
from hf_bico.porting.identity import BASE, FINE_TUNED, has_weights_of
from hf_bico.porting.lineage import Lineage, chance_notice, lineage_warnings
from hf_bico.porting.planner import TEXT_TO_TEXT
from hf_bico.porting.polish import Polished
from hf_bico.porting.prepare import PreparedPort
from hf_bico.porting.reading import reading_notices
from hf_bico.porting.training_tasks import SOURCE
from hf_bico.porting.transfer import Judgement, TransferResult
from hf_bico.reports.record import (
    CandidateRecord,
    CurveRecord,
    DataRecord,
    EvaluationRecord,
    GainRecord,
    GenerationRecord,
    MethodRecord,
    ModelRecord,
    ObjectiveRecord,
    OutlookRecord,
    OutputRecord,
    PairingRecord,
    ReadoutRecord,
    Record,
    RunRecord,
    SourceLeadRecord,
    TrainingRecord,
    UnlabelledRecord,
)
from hf_bico.settings import DEFAULT_DOWNLOAD, OPTIONS, PROBE, Option, Settings, method_info, read_lines
from hf_bico.utils import __version__
from hf_bico.utils.text import command_line, typed_path

UNNAMED_LOSS = (
    "cross-entropy of the answers' tokens, label words where there are classes, through each model's own decoder; the "
    "paper does not name its loss"
)
_FIRST = (
    *("seed", "config", "image_column", "label_column", "text_column", "caption_column", "max_length", "class_names"),
    *("templates", "objective", "tower", "method", "completion", "alpha", "sampling", "labels", "layers", "augment"),
    *("path_steps", "signs", "readout", "probe", "learning_rate", "weight_decay", "train_steps", "train_batch"),
    *("warmup", "evaluation", "eval_samples", "control", "batch_size", "memory", "device_map", "dtype", "max_download"),
)
"""The order of options in the commands of the first records; what is not named here follows."""
_SPELT = ("method", "alpha", "path_steps")
"""The options that a command names even if they have their defaults, which may become others."""
NOTABLE_ROUNDING = 0.05
"""A larger share of the change lost by rounding is worth a notice."""


def make_record(
    prepared: PreparedPort,
    method: MethodRecord,
    result: TransferResult,
    evaluation: Sequence[EvaluationRecord],
    head_origin: str | None,
    run: RunRecord,
    outlook: OutlookRecord | None,
    lead: SourceLeadRecord | None,
) -> Record:
    """Record all that is needed to repeat the run and to write its card; hashes the models' files."""
    lineage, settings, drawn = prepared.models.lineage, prepared.settings, prepared.drawn
    objective = settings.objective
    name = objective if isinstance(objective, str) else getattr(objective, "__name__", "custom")
    usual = next(iter(lineage.base.layout.objectives), "zero-shot")
    name = usual if name == "auto" else name
    templates = list(settings.templates) if name in ("zero-shot", "contrastive") else None
    return Record(
        hf_bico=__version__,
        command=_command(lineage, settings, drawn),
        source=source_record(lineage.source, lineage.base),
        target=model_record(lineage.target),
        data=None if drawn is None else _data_record(prepared, drawn),
        objective=ObjectiveRecord(
            name,
            templates,
            head_origin,
            UNNAMED_LOSS if name == TEXT_TO_TEXT else None,
            None if head_origin is None else _pooling(lineage.target),
        ),
        method=method,
        sites=list(result.report.sites),
        left=list(result.report.left),
        settings=_given(prepared.asked),
        outlook=outlook,
        source_lead=lead,
        evaluation=list(evaluation),
        notices=_notices(prepared, result, evaluation, head_origin),
        run=run,
    )


def method_record(
    prepared: PreparedPort, calibration: Calibration, result: TransferResult, tried: Mapping[str, TransferResult]
) -> MethodRecord:
    """Record the method, its options and what the samples chose; `tried` are the results of all candidates."""
    settings, readout, scaling = prepared.settings, result.readout, result.scaling
    method, asked = method_info(settings.method), prepared.asked.method
    augmented = result.trained is None and (prepared.method.looks_at_data or settings.finds_alpha)
    candidates = [
        CandidateRecord(name, _alpha(one.scaling.alphas), one.scaling.gain.mean, one.held_back)
        for name, one in tried.items()
        if one.scaling is not None and len(tried) > 1
    ]
    alpha = 1.0 if settings.finds_alpha else float(settings.alpha)
    return MethodRecord(
        settings.method,
        alpha if scaling is None else _alpha(scaling.alphas),
        list(prepared.models.planned.blocks),
        completion=settings.completion if "completion" in method.options else None,
        matching=None if settings.layers == "index" else "similarity" if settings.layers == "similarity" else "given",
        steps=settings.steps if "path_steps" in method.options else None,
        copies=(calibration.copies or None) if augmented else None,
        signs=settings.signs if "signs" in method.options else None,
        tower=settings.tower,
        training=None if result.trained is None else _training_record(prepared, result.trained),
        readout=None
        if readout is None
        else ReadoutRecord(
            readout.accepted, readout.before, readout.left_out, readout.strength, settings.augment or None
        ),
        asked=asked if asked != settings.method else None,
        bold=settings.bold or None,
        curve=[] if scaling is None else [CurveRecord(**vars(point)) for point in scaling.curve],
        veto=None if scaling is None else GainRecord(scaling.gain.mean, scaling.gain.error),
        candidates=candidates,
        polish=None if result.polished is None else _polish_record(settings, result.polished),
    )


def _alpha(alphas: Sequence[float]) -> float | list[float]:
    return alphas[0] if len(alphas) == 1 else list(alphas)


def outlook_record(judged: Judgement | None, result: TransferResult) -> OutlookRecord | None:
    """Record the gain to expect of what is written; nothing for a change that is held back."""
    if judged is None or result.held_back:
        return None
    return OutlookRecord(judged.gain.mean, judged.unit, judged.gain.error)


def _given(settings: Settings) -> dict[str, Any]:
    """Return the options that are not the defaults, as plain data; not where something is on this machine."""
    given: dict[str, Any] = {}
    for one in fields(Settings):
        value = getattr(settings, one.name)
        if value != one.default and one.name not in ("device", "checkpoint"):
            given[one.name] = list(value) if isinstance(value, tuple) else value
    if settings.own_objective:
        given["objective"] = getattr(settings.objective, "__name__", "custom")
    return given


def _training_record(prepared: PreparedPort, trained: Trained) -> TrainingRecord:
    settings, method = prepared.settings, prepared.method
    if isinstance(method, BriefTrainer):
        unlabelled = prepared.drawn.unlabelled if prepared.drawn is not None and method.toward == SOURCE else None
        more = None if unlabelled is None else len(unlabelled.samples)
        return _brief_record(settings, trained, settings.training_steps, method.toward, more)
    many = settings.trains_on_all
    return TrainingRecord(
        settings.rate if trained.rate is None else trained.rate,
        settings.weight_decay,
        trained.steps,
        trained.samples,
        batch=settings.train_batch if many else None,
        warmup=min(settings.warmup, settings.training_steps) if many else None,
        validation=trained.validation,
    )


def _polish_record(settings: Settings, polished: Polished) -> TrainingRecord:
    more = polished.unlabelled or None
    record = _brief_record(settings, polished.trained, settings.polish_steps, settings.polish_on, more)
    alone = polished.alone or None
    return replace(record, before=polished.carried, after=polished.polished, helped=polished.helped, alone=alone)


def _brief_record(
    settings: Settings, trained: Trained, most: int, toward: str, unlabelled: int | None
) -> TrainingRecord:
    """Record a training that samples left out stopped."""
    left_out, ranks = trained.left_out, [one.rank for one in trained.changes.values() if isinstance(one, Factors)]
    return TrainingRecord(
        settings.rate if trained.rate is None else trained.rate,
        settings.weight_decay,
        trained.steps,
        trained.samples,
        batch=settings.train_batch,
        toward=toward,
        most=most,
        given=True if settings.learning_rate is not None else None,
        left_out=None if left_out is None else len(left_out.samples),
        before=None if left_out is None else float(left_out.before.losses.mean()),
        after=None if left_out is None else float(left_out.after.losses.mean()),
        unlabelled=unlabelled,
        rank=max(ranks, default=None),
    )


def source_record(source: Model | Adapter, base: Model | None) -> ModelRecord:
    """Record a fine-tuned model or an adapter, over its base if that is known."""
    kind, peft_type = ("adapter", source.config.kind) if isinstance(source, Adapter) else ("full", None)
    over = None if base is None else model_record(base)
    return replace(model_record(source), base=over, kind=kind, peft_type=peft_type)


def model_record(model: Model | Adapter) -> ModelRecord:
    return ModelRecord(
        model.name,
        model.commit,
        model.sha256,
        model.family.name if isinstance(model, Model) else None,
        license=model.origin.license,
        license_name=model.origin.license_name,
        language=list(model.origin.language),
    )


def _pooling(target: Model) -> str | None:
    """Say how a sentence encoder's tokens are pooled before its head reads them."""
    folder = files_of(target)
    pooling = None if folder is None else read_pooling(folder)
    return None if pooling is None else str(pooling)


def _notices(
    prepared: PreparedPort, result: TransferResult, evaluation: Sequence[EvaluationRecord], head_origin: str | None
) -> list[str]:
    """List what a reader of the result should know and would not see."""
    lineage, settings, drawn = prepared.models.lineage, prepared.settings, prepared.drawn
    notices = list(lineage.notices)
    target, vector = lineage.target, prepared.models.vector
    for sentence, model, change in ((BASE, lineage.base, None), (FINE_TUNED, lineage.source, vector)):
        same_files = bool(target.sha256) and target.sha256 == model.sha256
        if sentence not in notices and (same_files or has_weights_of(target, lineage.base, change)):
            notices.append(sentence)
    overlap = vector.overlap
    if head_origin == "carried":
        layers = place_in_source(lineage.source, lineage.base).layers
        overlap = replace(overlap, extra=tuple(name for name in overlap.extra if name.rpartition(".")[0] not in layers))
    notices += [notice for notice in lineage_warnings(lineage) if notice not in notices]
    notices += tensor_notices(overlap)
    if drawn is not None:
        measured = prepared.held_out[1] if prepared.held_out is not None and evaluation else None
        notices += [*repeat_notices(drawn, measured), *calibration_notices(drawn, settings)]
        notices += class_notices(drawn.data, measured)
        notices += [*reading_notices(prepared.models, drawn.samples, measured, prepared.cut), *prepared.doubts]
        notices += pairing_notices(prepared.models.pairing)
        if head_origin == "carried":
            names, sorts = drawn.data.class_names, drawn.data.sorts_classes
            notices += class_order_notice(lineage.source.origin.head_names, names, sorts)
        notices += chance_notice(evaluation, len(drawn.data.class_names))
    if settings.evaluate and not evaluation and not result.held_back:
        reason = "calibration used every labelled sample"
        reason = "the objective is the caller's own" if settings.own_objective else reason
        reason = reason if drawn is None or drawn.data.labelled else "the data set has no labels"
        reason = "the source wrote the samples, and none is left" if lineage.writes_data else reason
        notices.append(f"Nothing was measured: {'no data was given' if drawn is None else reason}.")
    if result.trained is not None and drawn is not None and drawn.split in drawn.data.parts:
        notices.append("It was trained on those rows alone that were read of a large data set.")
    return notices


def tensor_notices(overlap: Overlap) -> list[str]:
    """List the tensors that the fine-tuned model or its base lacks."""
    notices = []
    for names, what in (
        (overlap.missing, "of the base that the fine-tuned model lacks, taken as unchanged"),
        (overlap.extra, "of the fine-tuned model that its base lacks, left behind"),
    ):
        if names:
            listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            notices.append(f"Tensors {what}: {len(names)} ({listed}).")
    return notices


def rounding_notices(lost: float | None, format: str) -> list[str]:
    """Return a notice if rounding to half precision loses a notable share of the change."""
    if lost is None or lost <= NOTABLE_ROUNDING:
        return []
    if format == "adapter":
        return [f"Over a model in half precision {lost:.0%} of the change is lost by rounding; over float32, nothing."]
    lossy = f"{lost:.0%} of the change is lost by rounding to the target's own precision"
    return [f"{lossy}; --format adapter is written without loss."]


def with_output(record: Record, output: OutputRecord, as_measured: bool = True) -> Record:
    """Add what was written to a record; `as_measured` is False if the evaluation is of another format."""
    notices = [*record.notices, *rounding_notices(output.rounding_lost, output.format)]
    if record.evaluation and not as_measured:
        notices.append("The results were measured before the port was brought into the form that is written here.")
    command = record.command
    if command is not None:
        usual = "adapter" if record.source.peft_type == LORA else "full"
        command += f" --format {output.format}" if output.format != usual else ""
        command += f" --rank {output.rank}" if output.rank is not None else ""
    return replace(record, output=output, notices=notices, command=command)


def _data_record(prepared: PreparedPort, drawn: CalibrationDraw) -> DataRecord:
    settings, pairing, written = prepared.settings, prepared.models.pairing, prepared.models.lineage.writes_data
    return replace(
        drawn_record(drawn, settings),
        chat_template=prepared.uses_chat_template,
        example=example_record(prepared.models.target, drawn),
        benchmark=_benchmark(prepared, drawn),
        pairing=None if pairing is None else PairingRecord(*pairing.inputs, *pairing.gradients),
        generation=GenerationRecord(TEMPERATURE, TOKENS, list(settings.prompts or ())) if written else None,
    )


def _benchmark(prepared: PreparedPort, drawn: CalibrationDraw) -> str | None:
    """Return the benchmark's task that the held-out split is, if the Hub registers the data set as a benchmark."""
    repo = drawn.data.repo
    if repo is None or prepared.held_out is None or not prepared.evaluates:
        return None
    return benchmark_task(repo, drawn.data.config, prepared.held_out[0])


def drawn_record(drawn: CalibrationDraw, settings: Settings) -> DataRecord:
    """Return what finds the same samples again: the data set, the columns and how the samples were drawn."""
    return DataRecord(
        id=drawn.data.name,
        split=drawn.split,
        n=len(drawn.samples),
        per_class=settings.per_class,
        max_download=None if settings.max_download == DEFAULT_DOWNLOAD else settings.max_download,
        sampling=settings.sampling,
        seed=settings.seed,
        indices=list(drawn.samples.indices),
        columns=drawn.data.columns.by_role,
        labels=drawn.labels if drawn.labels == "dataset" or settings.predicts else "none",
        class_names=list(drawn.data.class_names),
        commit=None if drawn.data.repo is None else drawn.data.repo.commit,
        config=drawn.data.config,
        max_length=settings.max_length,
        special_tokens=None if settings.special_tokens else False,
        parts=list(drawn.data.parts.get(drawn.split, [])),
        unlabelled=None if drawn.unlabelled is None else _unlabelled_record(drawn.unlabelled),
    )


def _unlabelled_record(unlabelled: Unlabelled) -> UnlabelledRecord:
    data, split, indices = unlabelled.data, unlabelled.split, unlabelled.samples.indices
    return UnlabelledRecord(
        id=data.name,
        split=split,
        n=len(indices),
        indices=list(indices),
        columns=data.columns.by_role,
        commit=None if data.repo is None else data.repo.commit,
        config=data.config,
        parts=list(data.parts.get(split, [])),
    )


def origin_notices(models: Iterable[OpenedRepo]) -> list[str]:
    """List where the models' weights came from, if it was not from safetensors of their own; each notice once."""
    return list(dict.fromkeys(model.notice for model in models if model.notice))


def allowing(models: Iterable[OpenedRepo]) -> list[str]:
    """Return the option that a command needs to read these models again."""
    return ["--allow-pickle"] if any(model.pickled for model in models) else []


def typed_reference(model: Model | Adapter) -> str:
    """Return what to type for a model: its Hub id, with the requested revision, or the folder's name."""
    repo = None if model.place is None else model.place.repo
    revision = None if repo is None else repo.requested.revision
    return typed_path(model.name) if revision is None else f"{model.name}@{revision}"


def _command(lineage: Lineage, settings: Settings, drawn: CalibrationDraw | None) -> str | None:
    """Return the command line that does the same, by names and without paths; None if Python passed an input."""
    models, unlabelled = lineage.models, None if drawn is None else drawn.unlabelled
    passed = any(part is not None and not part.data.named for part in (drawn, unlabelled))
    if settings.own_objective or any(model.folder is None for model in models) or passed:
        return None
    source, base, target = (typed_reference(model) for model in models)
    words = ["hf-bico", "port", source, "--base", base, "--to", target]
    if drawn is not None:
        words += ["--data", _typed_data(drawn.data), "--split", drawn.split]
        words += ["-k", str(settings.per_class)] if settings.per_class else ["-n", str(len(drawn.samples))]
    words += [] if unlabelled is None else ["--unlabelled", _typed_data(unlabelled.data)]
    usual: dict[str, Any] = {one.name: one.default for one in fields(Settings)}
    usual |= {"seed": None, "objective": next(iter(lineage.base.layout.objectives), "zero-shot")}
    usual["evaluation"] = PROBE if settings.objective == TEXT_TO_TEXT else "zero-shot"
    trains = method_info(settings.method).trains_on is not None
    values = {**vars(settings), "config": drawn.data.config if drawn else None, "path_steps": settings.steps}
    values["alpha"] = None if (trains and settings.finds_alpha) or settings.method == "readout" else settings.alpha
    for name in dict.fromkeys((*_FIRST, *OPTIONS)):
        if name == "force":
            words += allowing(models)
        value, option = values[name], OPTIONS[name]
        known = settings.reads(name) and value is not None
        if (name in _SPELT and known) or (option.recorded and known and value != usual[name]):
            words += [option.typed_as(name), *_typed(option, value)]
    return command_line(words)


def _typed_data(data: DataSet) -> str:
    """Return what to type for a data set: its Hub id, with the requested revision, or the folder's name."""
    return data.name if data.repo is None else str(data.repo.requested)


def _typed(option: Option, value: Any) -> list[str]:
    """Return what is typed behind an option for this value; a list of texts is a file that the reader has to make."""
    if option.type is bool:
        return []
    if option.read is read_lines:
        return ["FILE"]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e6:
        return [str(int(value))]  # 1, as people type it
    return [",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
