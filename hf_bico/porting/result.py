"""Saves and pushes results: a port, or a change of a model that needed no calibration.

Does not know how a change was computed.
"""

from __future__ import annotations

import copy
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

from hf_bico.arguments import as_written
from hf_bico.errors import HeldBackError, UsageError
from hf_bico.hub.client import Hub
from hf_bico.hub.push import Pushed, PushOptions
from hf_bico.models.adapters.writing import NOT_LINEAR
from hf_bico.models.model import Model
from hf_bico.porting.formats import WrittenChange, format_change, require_format, write_change
from hf_bico.porting.publish import push_folder
from hf_bico.porting.recording import model_record, rounding_notices, with_output
from hf_bico.porting.task_vector import TaskVector
from hf_bico.reports.model_cards import write_card
from hf_bico.reports.outcome_picture import outcome_picture
from hf_bico.reports.pictures import picture_figure
from hf_bico.reports.record import (
    ACCURACY,
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
from hf_bico.reports.results import (
    Report,
    compared_entries,
    control_sentence,
    gain_of,
    headline,
    measured_on,
    metric_name,
    readout_sentence,
    result_rows,
    value_text,
)
from hf_bico.reports.verdict import held_back_remedy, held_back_sentence
from hf_bico.runtime.distributed import is_first_process
from hf_bico.runtime.environment import exact_float32, installed_versions
from hf_bico.runtime.library_errors import translate_errors
from hf_bico.runtime.output import atomic_folder, require_apart, write_file
from hf_bico.utils import __version__
from hf_bico.utils.files import expanded, sha256_of
from hf_bico.utils.html import html_page
from hf_bico.utils.text import command_line, markdown_table, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AnyRecord = TypeVar("AnyRecord", Record, ChangeRecord)


@dataclass(frozen=True)
class CardNames:
    """What the card of a result names: the repo and branch that it will be pushed to, and its title."""

    repo: str | None = None
    revision: str | None = None
    title: str | None = None


UNNAMED = CardNames()


@dataclass(frozen=True, repr=False)
class BaseResult(ABC, Generic[AnyRecord]):
    """A change of a model, the format in which it is written, and its record."""

    task_vector: TaskVector
    target: Model
    form: WrittenChange
    """The change as it is written; a port is evaluated in this format, and saved in it unless another is requested."""
    record: AnyRecord

    @property
    def energy_kept(self) -> float | None:
        """The share of the change's energy that an adapter holds."""
        return self.form.energy_kept

    @property
    def rounding_lost(self) -> float | None:
        """The share of the change that rounding to the target's half precision takes away."""
        return self.form.rounding_lost

    def write(self, folder: Path, form: WrittenChange | None = None, named: CardNames = UNNAMED) -> None:
        """Write weights, `bico.json` and the model card into an existing folder, file after file."""
        record = self.write_weights(folder, form, named)
        record.write(folder)
        write_card(record, folder)

    def write_weights(self, folder: Path, form: WrittenChange | None = None, named: CardNames = UNNAMED) -> AnyRecord:
        """Write the weights only, as they were evaluated unless `form` is given, and return their record."""
        form = form or self.form
        files = sha256_of(write_change(form, self.target, folder))
        return self._record_of(form, _output_record(form, files, named))

    @abstractmethod
    def _record_of(self, form: WrittenChange, output: OutputRecord) -> AnyRecord: ...

    def _save(self, folder: str | Path, overwrite: bool, form: WrittenChange, named: CardNames) -> Path:
        """Write everything into a folder that appears complete or not at all."""
        folder = expanded(folder)
        require_apart(folder, None if form.format == "full" else self.target.folder)
        with atomic_folder(folder, overwrite) as scratch:
            self.write(scratch, form, named)
        return folder

    def _push(
        self, name: str, form: WrittenChange, repo_id: str, title: str | None, token: str | None, options: PushOptions
    ) -> Pushed:
        """Save to a temporary folder of this name, and push it as one commit."""
        with tempfile.TemporaryDirectory() as scratch:
            named = CardNames(repo_id, options.revision, title)
            folder = self._save(Path(scratch) / name, False, form, named)
            return push_folder(folder, repo_id, options, Hub(token), kept=False)


@dataclass(frozen=True, repr=False)
class Ported(BaseResult[Record]):
    """A task vector in the target's coordinates, with everything known about how it got there."""

    report: Report
    held_back: bool = False
    """True if the samples spoke against the change: then this is the target as it is, and nothing is written."""

    def __repr__(self) -> str:
        if self.held_back:
            return f"Port of {self.record.source.id} to {self.target.name}, held back by the samples"
        entries = compared_entries(self.record)
        numbers = [f"{name} {value_text(entries[name])}" for name in ("target", "ported", "source") if name in entries]
        measured = f": {metric_name(next(iter(entries.values())))} {', '.join(numbers)}" if numbers else ""
        return f"Ported of {self.record.source.id} to {self.target.name}, as {self.form!r}{measured}"

    @property
    def accuracy(self) -> float | None:
        """The port's accuracy on held-out samples; None where nothing or a loss was measured.

        >>> hf_bico.port("user/vit-b16-eurosat", to="laion/ViT-B-16-plus").accuracy  # doctest: +SKIP
        0.713
        """
        entry = compared_entries(self.record).get("ported")
        return entry.value if entry is not None and entry.metric == ACCURACY else None

    @property
    def gain(self) -> float | None:
        """How much better than the untouched target it measured: in accuracy, or by how much less loss.

        None if nothing was measured.
        """
        entries = compared_entries(self.record)
        if not {"target", "ported"} <= entries.keys():
            return None
        return gain_of(entries["ported"], entries["target"])

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the results, or what this is if nothing was evaluated."""
        if self.held_back:
            return html_page(held_back_sentence(self.record), below=[as_written(held_back_remedy(self.record))])
        first = headline(self.record) if self.record.evaluation else None
        if first is None:
            return html_page(repr(self))
        last = (control_sentence(self.record), readout_sentence(self.record))
        return html_page(first, result_rows(self.record), below=[measured_on(self.record), *filter(None, last)])

    @translate_errors()
    def draw(self, path: str | Path | None = None) -> Figure | None:
        """Draw what the samples expected beside what was measured, into a PNG if a path is given.

        None if there is nothing to draw.
        """
        content = outcome_picture(self.record)
        if content is None:
            return None
        if path is not None:
            write_file(expanded(path), content)
        return picture_figure(content)

    def _repr_markdown_(self) -> str:
        """Return what a notebook shows: the results, or what this is if nothing was evaluated."""
        if self.held_back:
            return f"**{plain(held_back_sentence(self.record))}**\n\n{plain(as_written(held_back_remedy(self.record)))}"
        first = headline(self.record) if self.record.evaluation else None
        if first is None:
            return str(plain(repr(self)))
        sentences = (control_sentence(self.record), readout_sentence(self.record))
        last = [plain(sentence, 2000) for sentence in sentences if sentence]
        table = markdown_table(result_rows(self.record))
        return "\n\n".join([f"**{plain(first)}**", table, f"({plain(measured_on(self.record))})", *last])

    @translate_errors()
    @exact_float32()
    def model(self, device: str = "cpu") -> nn.Module:
        """Return a new copy of the target with the task vector applied, in float32 on this device."""
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
        title: str | None = None,
    ) -> Path:
        """Write weights, `bico.json` and the model card; the folder appears complete or not at all.

        `format` is "full", "adapter" (of a `rank`) or "delta"; by default the format that the port was asked for.
        `repo` and `revision` are named in the card of a result that will be pushed there; `title` is the card's title.
        Only the first of several processes writes.
        """
        self._require_written()
        form = self._in_format(format, rank)
        named = CardNames(repo, revision, title)
        return self._save(folder, overwrite, form, named) if is_first_process() else expanded(folder)

    @translate_errors()
    def push_to_hub(
        self,
        repo_id: str,
        *,
        format: str | None = None,
        rank: int | float | None = None,
        title: str | None = None,
        token: str | None = None,
        **options: Any,
    ) -> Pushed:
        """Save to a temporary folder and push it as one commit; `title` is the card's title.

        The options are those of `PushOptions`: private, create_pr, revision, message, overwrite, force.
        """
        self._require_written()
        wanted = PushOptions(**options)
        if not is_first_process():
            raise UsageError("only the first of several processes pushes", "push where the variable RANK is 0")
        return self._push("ported", self._in_format(format, rank), repo_id, title, token, wanted)

    def _require_written(self) -> None:
        if self.held_back:
            raise HeldBackError(held_back_sentence(self.record), held_back_remedy(self.record))

    def _in_format(self, format: str | None, rank: int | float | None) -> WrittenChange:
        """Return the change in the format in which it was evaluated, unless another is requested."""
        if format is None:
            format = self.form.format if rank is None else "adapter"
        require_format(format, rank)
        if format == self.form.format and rank in (None, self.form.rank):
            return self.form
        return format_change(self.task_vector, self.target, format, rank, head=self.form.head)

    def _record_of(self, form: WrittenChange, output: OutputRecord) -> Record:
        record = replace(self.record, sites=with_adapter_ranks(self.record.sites, form, self.target))
        return with_output(record, output, as_measured=form is self.form)


def with_adapter_ranks(sites: Iterable[SiteRecord], form: WrittenChange, target: Model) -> list[SiteRecord]:
    """Return the records of sites with the rank and the share of energy that an adapter holds of each."""
    held = {site.name: form.held(site) or (None, None) for site in target.layout.sites}
    return [replace(site, rank=held[site.name][0], kept=held[site.name][1]) for site in sites]


@dataclass(frozen=True, repr=False)
class ChangeResult(BaseResult[ChangeRecord]):
    """A change over a model, in the format in which it will be written."""

    def __repr__(self) -> str:
        return f"Making of {self.record.job} over {self.target.name}, as {self.form!r}"

    @translate_errors()
    def save(
        self,
        folder: str | Path,
        overwrite: bool = False,
        repo: str | None = None,
        revision: str | None = None,
        title: str | None = None,
    ) -> Path:
        """Write weights, `bico.json` and the card of this `title`; the folder appears complete or not at all."""
        return self._save(folder, overwrite, self.form, CardNames(repo, revision, title))

    @translate_errors()
    def push_to_hub(
        self, repo_id: str, *, title: str | None = None, token: str | None = None, **options: Any
    ) -> Pushed:
        """Save to a temporary folder and push it as one commit; the options are those of `PushOptions`."""
        return self._push("made", self.form, repo_id, title, token, PushOptions(**options))

    def _record_of(self, form: WrittenChange, output: OutputRecord) -> ChangeRecord:
        return replace(self.record, output=output)


def make_change_record(
    job: str,
    parts: Sequence[Summand],
    target: Model,
    form: WrittenChange,
    *,
    alpha: float = 1.0,
    started: datetime,
    seconds: float,
    command: Sequence[str] | None,
    notices: Sequence[str],
) -> ChangeRecord:
    """Record a job; `command` are the words of its command line, None if no command line does the same."""
    layers, left = _layers_and_left(form, target)
    return ChangeRecord(
        hf_bico=__version__,
        job=job,
        parts=list(parts),
        target=model_record(target),
        alpha=alpha,
        output=_output_record(form, {}, UNNAMED),
        run=ArithmeticRecord(started.isoformat(timespec="seconds"), seconds, installed_versions()),
        command=None if command is None else command_line(["hf-bico", job, *command]),
        layers=layers,
        left=left,
        notices=[*notices, *rounding_notices(form.rounding_lost, form.format)],
    )


def _output_record(form: WrittenChange, files: dict[str, str], named: CardNames) -> OutputRecord:
    return OutputRecord(
        form.format,
        files,
        form.rounding_lost,
        named.repo,
        named.revision,
        rank=form.rank,
        energy_kept=form.energy_kept,
        replaced=form.replaced,
        title=named.title or None,
    )


def _layers_and_left(form: WrittenChange, target: Model) -> tuple[list[LayerRecord], list[LeftRecord]]:
    """List what an adapter holds of each tensor, and which tensors it leaves out."""
    fitted = form.fitted
    if fitted is None:
        return [], []
    energies = {name: fitted.vector.energy(name) for name in fitted.vector}
    total = sum(energies.values()) or 1.0
    own_names, others = target.layout.own_names, target.layout.others
    held = [name for name in energies if name in fitted.changes]
    missing = [name for name in energies if name not in fitted.changes]
    layers = [LayerRecord(name, energies[name] / total, fitted.kept[name], fitted.ranks.get(name)) for name in held]
    reasons = {own_names.get(name, name): reason for name, reason in others.items()}
    reasons |= {fitted.routes.origin[name]: JOINED for name in fitted.routes.joined}
    return layers, [LeftRecord(name, reasons.get(name, NOT_LINEAR), energies[name] / total) for name in missing]
