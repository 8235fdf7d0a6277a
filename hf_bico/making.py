"""A change that was made without calibration, in the form that it is written in: saved, recorded and pushed.

How it was come by is for `extracting` and `applying` to know.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hf_bico.forms import Form, write_form
from hf_bico.hub.client import Hub
from hf_bico.hub.push import Pushed, PushOptions, push_folder
from hf_bico.models.adapters.writing import NOT_LINEAR
from hf_bico.models.model import Model
from hf_bico.recording import model_record, rounding_notices
from hf_bico.reports.model_cards import write_card
from hf_bico.reports.record import JOINED, LayerRecord, LeftRecord, Made, MakingRecord, OutputRecord, PartOfSum
from hf_bico.runtime.environment import Stopwatch, installed_versions
from hf_bico.runtime.library_errors import last_net
from hf_bico.runtime.output import whole_folder
from hf_bico.task_vector import TaskVector
from hf_bico.utils import __version__
from hf_bico.utils.files import expanded, sha256_of


@dataclass(frozen=True, repr=False)
class Making:
    """A change over a model, in the form that it will be written in."""

    task_vector: TaskVector
    target: Model
    form: Form
    record: Made

    def __repr__(self) -> str:
        return f"Making of {self.record.job} over {self.target.name}, as {self.form!r}"

    @property
    def energy_kept(self) -> float | None:
        """The share of the change's energy that an adapter holds."""
        return self.form.energy_kept

    @last_net()
    def save(
        self, folder: str | Path, overwrite: bool = False, repo: str | None = None, revision: str | None = None
    ) -> Path:
        """Write weights, `bico.json` and the card; the folder appears whole or not at all."""
        folder = expanded(folder)
        with whole_folder(folder, overwrite) as scratch:
            files = sha256_of(write_form(self.form, self.target, scratch))
            output = replace(self.record.output, files=files, repo=repo, revision=revision)
            record = replace(self.record, output=output)
            record.write(scratch)
            write_card(record, scratch)
        return folder

    @last_net()
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


def make_record(
    job: str, parts: Sequence[PartOfSum], target: Model, form: Form, course: Course, words: Sequence[str] | None
) -> Made:
    """The record of a job; `words` are its command line, None where no command line could do the same."""
    run = MakingRecord(
        course.started.isoformat(timespec="seconds"), sum(course.watch.seconds.values()), installed_versions()
    )
    layers, left = _account(form, target)
    return Made(
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


def _account(form: Form, target: Model) -> tuple[list[LayerRecord], list[LeftRecord]]:
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
