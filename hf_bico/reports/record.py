"""The record, `bico.json`: all that is needed to repeat a run and to write its card.

A data class with a schema number, written as JSON without its empty fields. Holds no path of a machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hf_bico.errors import RecordError
from hf_bico.runtime.output import RECORD_FILE
from hf_bico.utils.files import folder_name, from_plain, read_json, to_plain
from hf_bico.utils.samples import FilePart

JOINED = "joined with others when loaded"
"""Why an adapter cannot hold a tensor that has no counterpart in the loaded model."""
SCHEMA = 1


@dataclass(frozen=True)
class ModelRecord:
    """One model; `commit` is there for a Hub repo, and then `id` is its Hub id, else the name of a local folder.

    `kind` of a source is "full", "delta" or "adapter", and then `peft_type` says which. `license` (with `license_name`
    where it is "other") and `language` are what its own card says.
    """

    id: str
    commit: str | None = None
    sha256: dict[str, str] = field(default_factory=dict)
    family: str | None = None
    kind: str | None = None
    peft_type: str | None = None
    base: ModelRecord | None = None
    license: str | None = None
    license_name: str | None = None
    language: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class DataRecord:
    """The calibration samples: `indices` count the rows of the split, or of its `parts` one after the other.

    `labels` are the "dataset"'s, "pseudo" (what the fine-tuned source predicts), or "none" where they were not there.
    `chat_template` says of prompts and chats whether they went through one.
    """

    id: str
    split: str
    n: int
    sampling: str
    seed: int
    indices: list[int]
    columns: dict[str, str]
    labels: str
    class_names: list[str]
    commit: str | None = None
    config: str | None = None
    per_class: int | None = None
    max_download: int | None = None
    max_length: int | None = None
    chat_template: bool | None = None
    parts: list[FilePart] = field(default_factory=list)


@dataclass(frozen=True)
class ObjectiveRecord:
    """The loss that calibration differentiated, and the prompts that it asked with.

    Of a classifier, `head` says whether the source's was "carried" or one "fitted" to the calibration samples. `loss`
    says what it is where the paper does not.
    """

    name: str
    templates: list[str] | None = None
    head: str | None = None
    loss: str | None = None


@dataclass(frozen=True)
class TrainingRecord:
    """How a method that trains trained, on how many samples; `validation` is the accuracy on those it held back."""

    learning_rate: float
    weight_decay: float
    steps: int
    samples: int
    batch: int | None = None
    warmup: int | None = None
    validation: float | None = None


@dataclass(frozen=True)
class ReadoutRecord:
    """A correction of the final projection: of which strength, and the mean squared residual before and left out.

    `copies` are how many altered copies of each sample it was found from, too.
    """

    accepted: bool
    before: float
    left_out: float
    strength: float | None = None
    copies: int | None = None


@dataclass(frozen=True)
class MethodRecord:
    """How it was carried; `layers` are the source blocks of the target's.

    `matching` is absent where these are by index, else "similarity" or "given"; `steps` are those along a path,
    `copies` how many altered copies of each sample were added, `signs` how a gradient's signs were taken, `tower` which
    of a CLIP's towers were asked for.
    """

    name: str
    alpha: float
    layers: list[int]
    completion: str | None = None
    matching: str | None = None
    steps: int | None = None
    copies: int | None = None
    signs: str | None = None
    tower: str | None = None
    training: TrainingRecord | None = None
    readout: ReadoutRecord | None = None


@dataclass(frozen=True)
class SiteRecord:
    """One carried site.

    `energy` is the share of the task vector's energy that lies in its source's weight and bias, `unseen` the share of
    the weight's energy that lay where calibration saw nothing. Of an adapter, `rank` is that of the weight's factors
    (absent where it is held exactly) and `kept` the share of the carried weight's energy that they hold.
    """

    name: str
    role: str
    source: str
    shape_source: tuple[int, int]
    shape_target: tuple[int, int]
    energy: float
    rank_in: int | None = None
    rank_out: int | None = None
    score_in: float | None = None
    score_out: float | None = None
    unseen: float | None = None
    rank: int | None = None
    kept: float | None = None


@dataclass(frozen=True)
class LeftRecord:
    """A changed tensor of the source that was not carried, with its share of the task vector's energy."""

    name: str
    reason: str
    energy: float


@dataclass(frozen=True)
class OutputRecord:
    """What was written, and the Hub `repo`, with the branch, that it was made for.

    `rounding_lost` is the share of the change that rounding to half precision took away, `rank` what was asked of an
    adapter (absent: as it came), `energy_kept` the share of the change that it holds, and `replaced` the tensors that
    peft loads in place of the base's.
    """

    format: str
    files: dict[str, str]
    rounding_lost: float | None = None
    repo: str | None = None
    revision: str | None = None
    rank: int | float | None = None
    energy_kept: float | None = None
    replaced: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ForecastRecord:
    """Whether the port will help, foretold from its calibration pass alone, before anything was measured.

    `first_order` is by how much the mean calibration `loss` changes to first order, by what is carried outside of MLPs
    (of a change of MLPs alone, by all of it), `agreement` the cosine of that change and the target's own descent,
    `headroom` the share of the calibration answers that the target gets wrong, and `unseen` that of the carried energy
    where calibration saw nothing. The `outlook` is the least of the fall of the loss and the headroom, less what is
    unseen: it orders ports, and is no accuracy. Of a port with a readout, it is that of what is carried.
    """

    outlook: float
    helps: bool
    first_order: float
    agreement: float
    loss: float | None = None
    headroom: float | None = None
    unseen: float | None = None


@dataclass(frozen=True)
class EvaluationRecord:
    """One measurement: zero-shot, or by the `protocol` "probe", a linear classifier fitted to `trained_on` samples."""

    model: str
    data: str
    split: str
    n: int
    metric: str
    value: float
    protocol: str | None = None
    trained_on: int | None = None


@dataclass(frozen=True)
class RunRecord:
    """What differs from run to run."""

    started: str
    seconds: dict[str, float]
    peak_memory: int
    device: str
    dtype: str
    batch_size: int
    processes: int
    versions: dict[str, str]


class _RecordBase:
    """A record as a file."""

    def to_json(self) -> str:
        return to_plain(self)

    def write(self, folder: Path) -> Path:
        file, beside = folder / RECORD_FILE, folder / f".{RECORD_FILE}"
        content = self.to_json().encode()  # first: what cannot be encoded leaves the old record as it is
        beside.write_bytes(content)
        return beside.replace(file)


@dataclass(frozen=True)
class Record(_RecordBase):
    """Of a port."""

    hf_bico: str
    source: ModelRecord
    target: ModelRecord
    objective: ObjectiveRecord
    method: MethodRecord
    sites: list[SiteRecord]
    left: list[LeftRecord]
    run: RunRecord
    command: str | None = None
    data: DataRecord | None = None
    output: OutputRecord | None = None
    foresight: ForecastRecord | None = None
    evaluation: list[EvaluationRecord] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    @property
    def models(self) -> list[ModelRecord]:
        """Every model that it was made from."""
        return [model for model in (self.source, self.source.base, self.target) if model is not None]

    def value(self, model: str) -> float | None:
        """The measured value of "target", "ported" or "source"; None when it was not evaluated.

        Where there are several, the zero-shot one.
        """
        found = sorted((entry for entry in self.evaluation if entry.model == model), key=lambda e: e.protocol or "")
        return found[0].value if found else None


@dataclass(frozen=True)
class Summand:
    """One fine-tuned model, adapter or task vector, and how much of it was taken."""

    model: ModelRecord
    weight: float = 1.0


@dataclass(frozen=True)
class LayerRecord:
    """One tensor that an adapter holds: its share of the change's energy, and how much of that is `kept`.

    `rank` is that of its factors, absent where it is held exactly.
    """

    name: str
    energy: float
    kept: float
    rank: int | None = None


@dataclass(frozen=True)
class ArithmeticRecord:
    """What differs from run to run."""

    started: str
    seconds: float
    versions: dict[str, str]


@dataclass(frozen=True)
class ChangeRecord(_RecordBase):
    """Of a change that was extracted from a model, or applied to one: nothing was calibrated, and nothing measured."""

    hf_bico: str
    job: str
    """ "extract" or "apply"."""
    parts: list[Summand]
    target: ModelRecord
    """The model that the change lies over."""
    alpha: float
    output: OutputRecord
    run: ArithmeticRecord
    command: str | None = None
    layers: list[LayerRecord] = field(default_factory=list)
    left: list[LeftRecord] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    @property
    def models(self) -> list[ModelRecord]:
        """Every model that it was made from."""
        parts = [model for part in self.parts for model in (part.model, part.model.base) if model is not None]
        return [*parts, self.target]


def read_record(folder: Path) -> Record:
    """The record of a folder that a port wrote."""
    record = read_any(folder)
    if isinstance(record, Record):
        return record
    again = f"do it again with: {record.command}" if record.command else "do it again"
    raise RecordError(f"'{folder_name(folder)}' was written by 'hf-bico {record.job}', not by a port", again)


def read_change_record(folder: Path) -> ChangeRecord:
    """The record of a folder that `extract` or `apply` wrote."""
    record = read_any(folder)
    if isinstance(record, ChangeRecord):
        return record
    raise RecordError(f"'{folder_name(folder)}' was written by a port", "name what 'extract' or 'apply' wrote")


def read_any(folder: Path) -> Record | ChangeRecord:
    """The record of a folder that this tool wrote."""
    file = folder / RECORD_FILE
    try:
        raw = read_json(file)
    except FileNotFoundError as error:
        raise RecordError(
            f"'{folder_name(folder)}' holds no {RECORD_FILE}", "name a folder or repo that hf-bico wrote"
        ) from error
    except (OSError, ValueError) as error:
        raise RecordError(f"{RECORD_FILE} of '{folder_name(folder)}' cannot be read: {error}", "port again") from error
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if schema != SCHEMA:
        raise RecordError(
            f"{RECORD_FILE} of '{folder_name(folder)}' has schema {schema!r}; this version reads {SCHEMA}",
            "use the version of hf-bico that wrote it",
        )
    try:
        if "job" in raw:
            made: ChangeRecord = from_plain(ChangeRecord, raw)
            return made
        record: Record = from_plain(Record, raw)
        return record
    except TypeError as error:
        raise RecordError(f"{RECORD_FILE} of '{folder_name(folder)}' is not a record: {error}", "port again") from error
