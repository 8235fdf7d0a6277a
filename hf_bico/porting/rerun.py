"""Repeats a port from its record alone, and compares the new files with the recorded ones.

Reads settings from the record; does not know how a port is computed.
"""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_bico.data.columns import format_text_columns
from hf_bico.errors import RecordError, UsageError
from hf_bico.hub.client import Hub, RepoFiles, locate
from hf_bico.porting.planner import plan_port
from hf_bico.porting.port import run_port
from hf_bico.porting.result import CardNames
from hf_bico.reports.record import DataRecord, MethodRecord, Record, read_record
from hf_bico.reports.verdict import held_back_sentence
from hf_bico.runtime.library_errors import translate_errors
from hf_bico.runtime.output import RECORD_FILE, atomic_folder
from hf_bico.settings import AUTO, DEFAULT_DOWNLOAD, DEFAULT_UNLABELLED, GENERATED, OPTIONS, Settings
from hf_bico.utils.files import sha256_of
from hf_bico.utils.progress import ShownProgress, callback_of
from hf_bico.utils.text import size_text

MOST = {
    **{"path_steps": 100, "augment": 100, "batch_size": 1_024, "calibration_batch": 1_024, "max_length": 2**17},
    **{
        "train_steps": 100_000,
        "polish_steps": 100_000,
        "train_batch": 8_192,
        "warmup": 100_000,
        "eval_samples": 1_000_000,
        "rank": 2**16,
    },
    **{"class_names": 2_000_000, "unlabelled_samples": 1_000_000},
}
"""The most that a record may ask for of each option; of class names, as often as there are templates."""


@dataclass(frozen=True)
class Rerun:
    """The result of repeating a port."""

    files: dict[str, bool]
    """Weight files; True for each one with the recorded SHA-256."""
    replaced: list[str]
    """Files next to the record that are not the recorded ones."""
    differences: list[str]
    """Other differences: inputs, samples, versions, device."""

    @property
    def same(self) -> bool:
        """True if every file equals the recorded one, and so do the files next to the record."""
        return all(self.files.values()) and not self.replaced


@translate_errors()
def rerun(
    reference: str | Path,
    *,
    folder: str | Path | None = None,
    overwrite: bool = False,
    device: str = "auto",
    max_download: int | str = DEFAULT_DOWNLOAD,
    force: bool = False,
    token: str | None = None,
    allow_pickle: bool = False,
    progress: ShownProgress = None,
) -> Rerun:
    """Repeat the port that the record of a folder or Hub repo describes; keep the result in `folder`, if given.

    A record may be a stranger's: what costs more than `max_download`, or looks as if the base was wrong, is refused
    unless it is asked for here (`force`), whatever the record says.

    >>> hf_bico.rerun("user/vit-b16-plus-eurosat").same  # doctest: +SKIP
    """
    hub = Hub(token)
    place = locate(reference, "the port", hub)
    place.fetch([RECORD_FILE])
    then = read_record(place.folder)
    if then.output is None:
        raise RecordError(f"{RECORD_FILE} of '{place.name}' does not say what was written", "port again")
    limits = Settings.of({"device": device, "max_download": max_download, "force": force})
    settings, source, target = _settings(then, place.name, limits), then.source, then.target
    unlabelled = None if then.data is None else then.data.unlabelled
    planned = plan_port(
        place.recorded(source.id, source.commit),
        place.recorded(target.id, target.commit),
        base=None if source.base is None else place.recorded(source.base.id, source.base.commit),
        data=_recorded_data(then.data, place),
        unlabelled=None if unlabelled is None else place.recorded(unlabelled.id, unlabelled.commit),
        hub=hub,
        allow_pickle=allow_pickle,
    )
    ported = run_port(planned, settings, hub, callback_of(progress))
    if ported.held_back:
        files = dict.fromkeys(then.output.files, False)
        return Rerun(files, [], [held_back_sentence(ported.record), *_differences(then, ported.record)])
    named = CardNames(then.output.repo, then.output.revision, then.output.title)
    if folder is not None:
        now = read_record(ported.save(folder, None, overwrite, named.repo, named.revision, title=named.title))
    else:
        with tempfile.TemporaryDirectory() as scratch, atomic_folder(Path(scratch) / "rerun") as written:
            now = ported.write_weights(written, None, named)
    recorded, digests = then.output.files, now.output.files if now.output is not None else {}
    files = {name: digests.get(name) == digest for name, digest in recorded.items()}
    stored = dict(place.repo.sha256) if place.repo is not None else {}
    stored |= sha256_of(file for name in recorded if (file := place.folder / Path(name).name).is_file())
    replaced = [name for name, digest in recorded.items() if stored.get(name, digest) != digest]
    return Rerun(files, replaced, _differences(then, now))


def _recorded_data(data: DataRecord | None, place: RepoFiles) -> Any:
    if data is None or data.generation is not None:
        return None if data is None else GENERATED
    return place.recorded(data.id, data.commit)


def _settings(record: Record, name: str, limits: Settings) -> Settings:
    """Return the settings of the port that gave a record, within the `limits` of who repeats it."""
    if record.command is None:
        raise RecordError(
            f"'{name}' was made from models, rows or an objective that were passed from Python",
            "repeat it with the program that made it",
        )
    protocols = {entry.protocol for entry in record.evaluation}
    options: dict[str, Any] = {
        "method": record.method.name,
        "alpha": AUTO if record.method.chosen_by_samples else record.method.alpha,
        "bold": bool(record.method.bold),
        "tower": record.method.tower,
        "objective": record.objective.name,
        "probe": record.objective.head == "fitted",
        "batch_size": _typed_batch(record.command),
        "calibration_batch": record.run.batch_size,
        "dtype": record.run.dtype,
        "device": limits.device,
        "format": record.output.format if record.output else None,
        "rank": record.output.rank if record.output else None,
        "evaluate": bool(record.evaluation),
        "evaluation": "zero-shot" if protocols <= {None} else "probe" if len(protocols) == 1 else "both",
        "control": any(entry.model == "control" for entry in record.evaluation),
        "force": limits.force,
    }
    if record.evaluation:  # what is measured on may not be trained on
        options["eval_samples"] = max(1, *(entry.n for entry in record.evaluation))
    if record.objective.templates is not None:
        options["templates"] = record.objective.templates
    if record.data is not None:
        options |= _sampling(record.data)
        # the number that was asked for: of a large data set, it decides which rows are read
        options["unlabelled_samples"] = record.settings.get("unlabelled_samples", DEFAULT_UNLABELLED)
        options["max_download"] = _allowed_download(record.data, name, limits.max_download)
    try:
        options |= _method_options(record.method, record.data.n if record.data else 0)
        settings = Settings(**options)
    except UsageError as error:
        raise RecordError(f"{RECORD_FILE} of '{name}' cannot be repeated: {error.cause}", "port again") from error
    _require_affordable(options, name)
    if record.data is not None:
        _require_listed(record.data, name)
    return settings


def _allowed_download(data: DataRecord, name: str, most: int) -> int:
    """Return the recorded limit, by which row groups were chosen; refuse one above that of who repeats the port."""
    if data.max_download is None:
        return min(DEFAULT_DOWNLOAD, most)
    if data.max_download > most:
        raise RecordError(
            f"{RECORD_FILE} of '{name}' asks for up to {size_text(data.max_download)} of its data set, and "
            f"--max-download is {size_text(most)}",
            f"allow it with --max-download {data.max_download}",
        )
    return data.max_download


def _require_affordable(options: dict[str, Any], name: str) -> None:
    """Refuse numbers that no honest record has, and that would cost without bound."""
    counts = {option: value for option, value in options.items() if type(value) is int}
    counts["class_names"] = len(options.get("class_names") or ()) * max(1, len(options.get("templates", ())))
    for option, most in MOST.items():
        if counts.get(option, 0) > most:
            raise RecordError(
                f"{RECORD_FILE} of '{name}' asks for {counts[option]:,} as {OPTIONS[option].typed_as(option)}, and "
                f"{most:,} is the most that is repeated",
                "run the port yourself, with what you can afford",
            )


def _require_listed(data: DataRecord, name: str) -> None:
    """Refuse more samples than are listed, which the file's size bounds."""
    if data.n != len(data.indices) or (data.per_class or 0) > data.n:
        of_each = "" if data.per_class is None else f", {data.per_class:,} of each class,"
        raise RecordError(
            f"{RECORD_FILE} of '{name}' speaks of {data.n:,} samples{of_each} and lists {len(data.indices):,}",
            "port again",
        )
    more = data.unlabelled
    if more is not None and more.n != len(more.indices):
        raise RecordError(
            f"{RECORD_FILE} of '{name}' speaks of {more.n:,} unlabelled samples and lists {len(more.indices):,}",
            "port again",
        )


def _typed_batch(command: str) -> int | None:
    """Return the batch size that was typed, if any: it also holds outside of calibration."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise RecordError(f"the recorded command cannot be read: {error}", "port again") from error
    given = "".join(words[words.index("--batch-size") + 1 :][:1]) if "--batch-size" in words else ""
    return int(given) if given.isdecimal() and len(given) < 10 else None


def _method_options(method: MethodRecord, samples: int) -> dict[str, Any]:
    layers, training = {None: "index", "given": method.layers}, method.training
    options: dict[str, Any] = {
        "layers": layers.get(method.matching, method.matching),
        "augment": _augment(method, samples),
        "readout": method.readout is not None and method.polish is None and method.name != "readout",
        "completion": method.completion,
        "path_steps": method.steps,
        "signs": method.signs,
    }
    if method.polish is not None:
        options |= {"polish": True, "polish_steps": method.polish.most, "polish_on": method.polish.toward}
    brief = method.polish or (training if training is not None and training.most is not None else None)
    if brief is not None:
        options |= {"weight_decay": brief.weight_decay, "train_batch": brief.batch}
        options |= {"learning_rate": brief.learning_rate} if brief.given else {}
        options |= {"train_steps": brief.most} if brief is training else {}
    elif training is not None:
        options |= {"learning_rate": training.learning_rate, "weight_decay": training.weight_decay}
        if training.batch is not None:
            options |= {"train_steps": training.steps, "train_batch": training.batch, "warmup": training.warmup}
    return {name: value for name, value in options.items() if value is not None}


def _augment(method: MethodRecord, samples: int) -> int | None:
    """Return the copies that were asked for; a readout does not take those that are only the method's default."""
    copies = method.copies or 0
    if method.readout is not None and method.readout.copies:
        return method.readout.copies
    return None if copies == Settings(method=method.name).copies(samples) else copies


def _sampling(data: DataRecord) -> dict[str, Any]:
    return {
        "config": data.config,
        "split": data.split,
        **({"n": data.n} if data.per_class is None else {"per_class": data.per_class}),
        "seed": data.seed,
        # of a large data set, earlier versions told what was read here
        "sampling": "random" if data.sampling == "row groups" else data.sampling,
        "labels": "auto" if data.labels == "none" else data.labels,
        "image_column": data.columns.get("image"),
        "label_column": data.columns.get("label"),
        "caption_column": data.columns.get("caption"),
        "text_column": format_text_columns({role: name for role, name in data.columns.items() if role != "label"}),
        "max_length": data.max_length,
        "special_tokens": data.special_tokens is not False,
        "class_names": data.class_names,
        "prompts": None if data.generation is None else tuple(data.generation.prompts) or None,
    }


def _unlabelled_rows(data: DataRecord | None) -> Any:
    more = None if data is None else data.unlabelled
    return None if more is None else (more.split, more.indices, more.parts)


def _differences(then: Record, now: Record) -> list[str]:
    bases = [record.source.base and record.source.base.sha256 for record in (then, now)]
    inputs = (
        ("the fine-tuned model's weights", then.source.sha256, now.source.sha256),
        ("the base's weights", *bases),
        ("the target's weights", then.target.sha256, now.target.sha256),
        ("the samples", then.data and then.data.indices, now.data and now.data.indices),
        ("the unlabelled samples", *(_unlabelled_rows(record.data) for record in (then, now))),
    )
    surroundings = (
        ("hf-bico", then.hf_bico, now.hf_bico),
        ("device", then.run.device, now.run.device),
        ("number of processes", then.run.processes, now.run.processes),
        *((name, version, now.run.versions.get(name)) for name, version in then.run.versions.items()),
    )
    others = [f"{what} differ" for what, old, new in inputs if old != new]
    return others + [f"{what[:40]} was {str(old)[:80]}, is {new}" for what, old, new in surroundings if old != new]
