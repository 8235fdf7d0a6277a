"""Ported, Change: save and push.

What a port gives: the task vector in the target's coordinates, its report and record, saved and pushed.

A change that was made without calibration, in the form that it is written in: saved, recorded and pushed.

How it was come by is for `extracting` and `applying` to know.
"""

from __future__ import annotations

import copy
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_bico.errors import UsageError
from hf_bico.hub.client import Hub
from hf_bico.hub.push import Pushed, PushOptions
from hf_bico.models.adapters.writing import NOT_LINEAR
from hf_bico.models.model import Model
from hf_bico.porting.formats import WrittenChange, write_change, written_change
from hf_bico.porting.publish import push_folder
from hf_bico.porting.recording import model_record, rounding_notices, with_output
from hf_bico.porting.task_vector import TaskVector
from hf_bico.reports.model_cards import write_card
from hf_bico.reports.record import (
    JOINED,
    ArithmeticRecord,
    ChangeRecord,
    LayerRecord,
    LeftRecord,
    OutputRecord,
    Record,
    SiteRecord,
    Summand,
)
from hf_bico.reports.results import Report, control_sentence, headline, measured_on, readout_sentence, result_rows
from hf_bico.runtime.distributed import is_first_process
from hf_bico.runtime.environment import Stopwatch, installed_versions
from hf_bico.runtime.library_errors import translate_errors
from hf_bico.runtime.output import atomic_folder
from hf_bico.settings import FORMATS, require_rank
from hf_bico.utils import __version__
from hf_bico.utils.files import expanded, sha256_of
from hf_bico.utils.text import markdown_table, plain


@dataclass(frozen=True, repr=False)
class Ported:
    """A task vector in the target's coordinates, with everything known about how it got there."""

    task_vector: TaskVector
    report: Report
    record: Record
    target: Model
    form: WrittenChange
    """As what it was measured, and is saved unless another form is asked for."""

    def __repr__(self) -> str:
        return f"Ported of {self.record.source.id} to {self.target.name}, as {self.form!r}"

    def _repr_markdown_(self) -> str:
        """What a notebook shows: the results, or where nothing was measured, what this is."""
        said = headline(self.record)
        if said is None:
            return str(plain(repr(self)))
        sentences = (control_sentence(self.record), readout_sentence(self.record))
        told = [plain(sentence, 2000) for sentence in sentences if sentence]
        table = markdown_table(result_rows(self.record))
        return "\n\n".join([f"**{plain(said)}**", table, f"({plain(measured_on(self.record))})", *told])

    @property
    def rounding_lost(self) -> float | None:
        """The share of the change that rounding to the target's half precision takes away, in its form."""
        return self.form.rounding_lost

    @translate_errors()
    def model(self, device: str = "cpu") -> nn.Module:
        """A new copy of the target with the task vector applied, in float32 on this device."""
        if self.form.head is not None:
            return self.form.head.model(self.target, self.task_vector).to(device)
        live = self.target.load(torch.device(device), torch.float32)
        module = live.module if self.target.folder is not None else copy.deepcopy(live.module)
        changes = self.task_vector.renamed(self.target.layout.own_names)
        return changes.apply_to(module.to(device, torch.float32))

    @translate_errors()
    def save(
        self,
        folder: str | Path,
        format: str | None = None,
        overwrite: bool = False,
        repo: str | None = None,
        revision: str | None = None,
        rank: int | float | None = None,
    ) -> Path:
        """Write weights, `bico.json` and the model card; the folder appears whole or not at all.

        `format` is "full", "adapter" (of a `rank`) or "delta"; by default what the port was asked for. `repo`, and a
        branch of it, are what the card is for when it will be pushed. Of several processes only the first writes.
        """
        form = self._in_form(format, rank)
        folder = expanded(folder)
        if not is_first_process():
            return folder
        with atomic_folder(folder, overwrite) as scratch:
            self.write(scratch, form, repo, revision)
        return folder

    def write(
        self, folder: Path, form: WrittenChange | None = None, repo: str | None = None, revision: str | None = None
    ) -> None:
        """Write weights, `bico.json` and the model card into a folder that is there, file after file."""
        record = self.write_weights(folder, form, repo, revision)
        record.write(folder)
        write_card(record, folder)

    def write_weights(
        self, folder: Path, form: WrittenChange | None = None, repo: str | None = None, revision: str | None = None
    ) -> Record:
        """Write the weights alone, as they were measured unless another form is given, and return their record."""
        form = form or self.form
        files = sha256_of(write_change(form, self.target, folder))
        kept = (form.rank, form.energy_kept, form.replaced)
        output = OutputRecord(form.format, files, form.rounding_lost, repo, revision, *kept)
        measured = replace(self.record, sites=with_held(self.record.sites, form, self.target))
        return with_output(measured, output, as_measured=form is self.form)

    @translate_errors()
    def push_to_hub(
        self,
        repo_id: str,
        *,
        format: str | None = None,
        rank: int | float | None = None,
        token: str | None = None,
        **options: Any,
    ) -> Pushed:
        """Save to a temporary folder and push it as one commit; the options are those of `PushOptions`.

        private, create_pr, revision, message, overwrite, force.
        """
        wanted = PushOptions(**options)
        if not is_first_process():
            raise UsageError("only the first of several processes pushes", "push where the variable RANK is 0")
        with tempfile.TemporaryDirectory() as scratch:
            folder = self.save(Path(scratch) / "ported", format, repo=repo_id, revision=wanted.revision, rank=rank)
            return push_folder(folder, repo_id, wanted, Hub(token), kept=False)

    def _in_form(self, format: str | None, rank: int | float | None) -> WrittenChange:
        """The form that was measured, unless another is asked for."""
        if format is None:
            format = self.form.format if rank is None else "adapter"
        if format not in FORMATS:
            raise UsageError(f"there is no format '{format}'", f"use one of: {', '.join(FORMATS)}")
        if require_rank(rank) is not None and format != "adapter":
            raise UsageError(f"a rank was given for the format '{format}'", "give it with the format 'adapter'")
        if format == self.form.format and rank in (None, self.form.rank):
            return self.form
        return written_change(self.task_vector, self.target, format, rank, head=self.form.head)


def with_held(sites: list[SiteRecord], form: WrittenChange, target: Model) -> list[SiteRecord]:
    """The records of the sites with what an adapter holds of each."""
    held = {site.name: form.held(site) or (None, None) for site in target.layout.sites}
    return [replace(site, rank=held[site.name][0], kept=held[site.name][1]) for site in sites]


@dataclass(frozen=True, repr=False)
class ChangeResult:
    """A change over a model, in the form that it will be written in."""

    task_vector: TaskVector
    target: Model
    form: WrittenChange
    record: ChangeRecord

    def __repr__(self) -> str:
        return f"Making of {self.record.job} over {self.target.name}, as {self.form!r}"

    @property
    def energy_kept(self) -> float | None:
        """The share of the change's energy that an adapter holds."""
        return self.form.energy_kept

    @translate_errors()
    def save(
        self, folder: str | Path, overwrite: bool = False, repo: str | None = None, revision: str | None = None
    ) -> Path:
        """Write weights, `bico.json` and the card; the folder appears whole or not at all."""
        folder = expanded(folder)
        with atomic_folder(folder, overwrite) as scratch:
            files = sha256_of(write_change(self.form, self.target, scratch))
            output = replace(self.record.output, files=files, repo=repo, revision=revision)
            record = replace(self.record, output=output)
            record.write(scratch)
            write_card(record, scratch)
        return folder

    @translate_errors()
    def push_to_hub(self, repo_id: str, *, token: str | None = None, **options: Any) -> Pushed:
        """Save to a temporary folder and push it as one commit; the options are those of `PushOptions`."""
        wanted = PushOptions(**options)
        with tempfile.TemporaryDirectory() as scratch:
            folder = self.save(Path(scratch) / "made", repo=repo_id, revision=wanted.revision)
            return push_folder(folder, repo_id, wanted, Hub(token), kept=False)


@dataclass(frozen=True)
class Course:
    """When a job began, and how long its stages took."""

    started: datetime
    watch: Stopwatch


def make_change_record(
    job: str, parts: Sequence[Summand], target: Model, form: WrittenChange, course: Course, words: Sequence[str] | None
) -> ChangeRecord:
    """The record of a job; `words` are its command line, None where no command line could do the same."""
    run = ArithmeticRecord(
        course.started.isoformat(timespec="seconds"), sum(course.watch.seconds.values()), installed_versions()
    )
    layers, left = _account(form, target)
    return ChangeRecord(
        hf_bico=__version__,
        job=job,
        parts=list(parts),
        target=model_record(target),
        alpha=1.0,
        output=OutputRecord(
            form.format, {}, form.rounding_lost, rank=form.rank, energy_kept=form.energy_kept, replaced=form.replaced
        ),
        run=run,
        command=None if words is None else shlex.join(["hf-bico", job, *words]),
        layers=layers,
        left=left,
        notices=rounding_notices(form.rounding_lost, form.format),
    )


def _account(form: WrittenChange, target: Model) -> tuple[list[LayerRecord], list[LeftRecord]]:
    """What an adapter holds of each tensor, and what it does not."""
    fitted = form.fitted
    if fitted is None:
        return [], []
    energies = {name: fitted.asked.energy(name) for name in fitted.asked}
    total = sum(energies.values()) or 1.0
    own_names, others = target.layout.own_names, target.layout.others
    held = [name for name in energies if name in fitted.changes]
    missing = [name for name in energies if name not in fitted.changes]
    layers = [LayerRecord(name, energies[name] / total, fitted.kept[name], fitted.ranks.get(name)) for name in held]
    reasons = {own_names.get(name, name): reason for name, reason in others.items()}
    reasons |= {fitted.routes.origin[name]: JOINED for name in fitted.routes.joined}
    return layers, [LeftRecord(name, reasons.get(name, NOT_LINEAR), energies[name] / total) for name in missing]
