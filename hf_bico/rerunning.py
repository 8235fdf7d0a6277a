"""Repeating a port from its record alone, and comparing what comes out with what came out then."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_bico.errors import RecordError
from hf_bico.hub.client import Hub
from hf_bico.hub.repos import locate
from hf_bico.pipeline import port
from hf_bico.progress import Progress, silent
from hf_bico.record import RECORD_FILE, ModelRecord, Record, read_record


@dataclass(frozen=True)
class Rerun:
    """What a repeat gave."""

    files: dict[str, bool]
    """Whether each file of weights came out with the recorded SHA-256."""
    differences: list[str]
    """What else was not as it was: inputs, samples, versions, device."""

    @property
    def same(self) -> bool:
        return all(self.files.values())


def rerun(
    reference: str | Path,
    *,
    folder: str | Path | None = None,
    device: str = "auto",
    token: str | None = None,
    allow_pickle: bool = False,
    progress: Progress = silent,
) -> Rerun:
    """Do again what the record of a folder or Hub repo says; the result is kept in `folder`, if one is given.

    >>> hf_bico.rerun("user/vit-b16-plus-eurosat").same  # doctest: +SKIP
    """
    place = locate(reference, "the port", Hub(token))
    place.fetch([RECORD_FILE])
    then = read_record(place.folder)
    ported = port(
        _reference(then.source),
        _reference(then.target),
        base=None if then.source.base is None else _reference(then.source.base),
        progress=progress,
        token=token,
        allow_pickle=allow_pickle,
        **_options(then, place.name),
        device=device,
    )
    if then.output is None:
        raise RecordError(f"{RECORD_FILE} of '{place.name}' does not say what was written", "port again")
    with tempfile.TemporaryDirectory() as scratch:
        written = ported.save(folder or Path(scratch) / "rerun", then.output.format, repo=then.output.repo)
        now = read_record(written)
    digests = now.output.files if now.output is not None else {}
    return Rerun(
        {name: digests.get(name) == digest for name, digest in then.output.files.items()}, _differences(then, now)
    )


def _reference(model: ModelRecord) -> str:
    return model.id if model.commit is None else f"{model.id}@{model.commit}"


def _options(record: Record, name: str) -> dict[str, Any]:
    """The options of the port that gave a record."""
    if record.command is None:
        raise RecordError(
            f"'{name}' was made from models, rows or an objective that were passed from Python",
            "repeat it with the program that made it",
        )
    options: dict[str, Any] = {
        "method": record.method.name,
        "alpha": record.method.alpha,
        "batch_size": record.run.batch_size,
        "dtype": record.run.dtype,
        "evaluate": bool(record.evaluation),
        "force": True,  # what was let through then
    }
    if record.method.completion is not None:
        options["completion"] = record.method.completion
    if record.objective.templates is not None:
        options["templates"] = record.objective.templates
    data = record.data
    if data is None:
        return options
    return {
        **options,
        "data": data.id if data.commit is None else f"{data.id}@{data.commit}",
        "config": data.config,
        "split": data.split,
        **({"n": data.n} if data.per_class is None else {"per_class": data.per_class}),
        "seed": data.seed,
        "image_column": data.columns["image"],
        "label_column": data.columns["label"],
        "class_names": data.class_names,
    }


def _differences(then: Record, now: Record) -> list[str]:
    found = []
    for what, old, new in (
        ("the fine-tuned model's weights", then.source.sha256, now.source.sha256),
        (
            "the base's weights",
            then.source.base and then.source.base.sha256,
            now.source.base and now.source.base.sha256,
        ),
        ("the target's weights", then.target.sha256, now.target.sha256),
        ("the samples", then.data and then.data.indices, now.data and now.data.indices),
    ):
        if old != new:
            found.append(f"{what} are others")
    for what, was, is_now in (
        ("hf-bico", then.hf_bico, now.hf_bico),
        ("device", then.run.device, now.run.device),
        *((name, version, now.run.versions.get(name)) for name, version in then.run.versions.items()),
    ):
        if was != is_now:
            found.append(f"{what} was {was}, is {is_now}")
    return found
