"""The record of a run, `bico.json`: everything needed to repeat it and to write its card.

Data classes with a schema number, written as JSON without empty fields. They hold no path of a machine.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from hf_bico.errors import RecordError
from hf_bico.runtime.output import RECORD_FILE
from hf_bico.settings import VETO
from hf_bico.utils.files import Within, folder_name, from_plain, read_json, to_plain
from hf_bico.utils.samples import FilePart

JOINED = "joined with others when loaded"
"""Why an adapter cannot hold a tensor that is merged with others when the model is loaded."""
LOSS = "loss"
"""The metric of which less is better."""
RECORD_SCHEMA = 2
READ_SCHEMAS = (1, 2)
JOBS = ("extract", "apply")
"""What a change was made by."""
ACCURACY = "accuracy"

# bounds of what is read: a record may be a stranger's
Count = Annotated[int, Within(0)]
Amount = Annotated[float, Within(0)]
Share = Annotated[float, Within(-0.05, 1.05)]
"""With room for rounding."""
Probability = Annotated[float, Within(0, 1)]
_VALUES = {ACCURACY: Within(0, 1), LOSS: Within(0)}
"""What a measurement of each metric can be."""
_FEW, _MANY, _VERY_MANY = Within(0, 100), Within(0, 10_000), Within(0, 100_000)
_CLASSES = Within(0, 1_000_000)
Texts = Annotated[list[str], _MANY]
Digests = Annotated[dict[str, str], _MANY]
Versions = Annotated[dict[str, str], _FEW]
Notices = Annotated[list[str], _FEW]
Setting = str | int | float | bool | Annotated[list[str | int | float], _CLASSES] | None
"""The value of an option."""


@dataclass(frozen=True)
class ModelRecord:
    """A model: a Hub id with its `commit`, or the name of a local folder.

    `kind` of a source is "full", "delta" or "adapter", the last with its `peft_type`. `license` (with `license_name` if
    it is "other") and `language` come from its card.
    """

    id: str
    commit: str | None = None
    sha256: Digests = field(default_factory=dict)
    family: str | None = None
    kind: str | None = None
    peft_type: str | None = None
    base: ModelRecord | None = None
    license: str | None = None
    license_name: str | None = None
    language: Texts = field(default_factory=list)


@dataclass(frozen=True)
class UnlabelledRecord:
    """More samples, whose labels were not read; `indices` count rows as those of a `DataRecord` do."""

    id: str
    split: str
    n: Count
    indices: list[int]
    columns: Annotated[dict[str, str], _FEW]
    commit: str | None = None
    config: str | None = None
    parts: Annotated[list[FilePart], _VERY_MANY] = field(default_factory=list)


@dataclass(frozen=True)
class PairingRecord:
    """How much of the samples pairs, of two models that cut them into different tokens: shares of tokens and of bytes.

    Inputs pair where both models have the same piece, gradients where the next piece is the same.
    """

    tokens: Probability
    bytes: Probability
    gradient_tokens: Probability
    gradient_bytes: Probability


@dataclass(frozen=True)
class GenerationRecord:
    """Samples that the fine-tuned source wrote: at which temperature, at most how many tokens, behind which prompts.

    `prompts` are those that were given; without any, neutral ones were used.
    """

    temperature: Amount
    tokens: Count
    prompts: Texts = field(default_factory=list)


@dataclass(frozen=True)
class ExampleRecord:
    """A sample for the card's snippet: its `texts`, shortened, or the `row` of the split that holds its image.

    It is recorded only of public data sets on the Hub: texts of a private or local data set stay out of the record.
    """

    texts: Annotated[list[str], Within(0, 2)] = field(default_factory=list)
    row: Count | None = None


@dataclass(frozen=True)
class DataRecord:
    """The calibration samples: `indices` count the rows of the split, or of its `parts` one after the other.

    `labels` come from the "dataset", are "pseudo" (predictions of the fine-tuned source), or "none". `chat_template`
    says whether the target's tokenizer rendered prompts and chats with its chat template, and `special_tokens` is False
    if texts were read without the tokenizer's. `pairing` is set if the two models cut the texts into different tokens,
    `generation` if the fine-tuned source wrote them. `benchmark` is the task that the held-out split is, if the Hub
    registers the data set as a benchmark.
    """

    id: str
    split: str
    n: Count
    sampling: str
    seed: int
    indices: list[int]
    columns: Annotated[dict[str, str], _FEW]
    labels: str
    class_names: Annotated[list[str], _CLASSES]
    commit: str | None = None
    config: str | None = None
    per_class: Count | None = None
    max_download: Count | None = None
    max_length: Count | None = None
    chat_template: bool | None = None
    special_tokens: bool | None = None
    parts: Annotated[list[FilePart], _VERY_MANY] = field(default_factory=list)
    unlabelled: UnlabelledRecord | None = None
    pairing: PairingRecord | None = None
    generation: GenerationRecord | None = None
    example: ExampleRecord | None = None
    benchmark: str | None = None


@dataclass(frozen=True)
class ObjectiveRecord:
    """The loss that calibration differentiated, and its prompt templates.

    A classifier's `head` was "carried" from the source or "fitted" to the calibration samples; where it reads what a
    sentence encoder pools, `pooling` says how. `loss` describes the loss where the paper does not.
    """

    name: str
    templates: Texts | None = None
    head: str | None = None
    loss: str | None = None
    pooling: str | None = None


@dataclass(frozen=True)
class TrainingRecord:
    """Training of the target; `validation` is the accuracy on held-back samples.

    A brief training, or a polish, learnt the samples' "labels" or the "source": that is `toward`. Of at most `most`
    steps, `left_out` samples chose how many, and the learning rate unless it was `given`; their loss was `before` and
    `after` it. `unlabelled` of the samples came without labels, and `rank` is that of trained factors. A polish that
    did not help the samples left out was dropped: then `helped` is False. It is `alone` if the samples had held back
    what was carried, so that it began at the untouched target.
    """

    learning_rate: Amount
    weight_decay: Amount
    steps: Count
    samples: Count
    batch: Count | None = None
    warmup: Count | None = None
    validation: Probability | None = None
    toward: str | None = None
    most: Count | None = None
    given: bool | None = None
    left_out: Count | None = None
    before: Amount | None = None
    after: Amount | None = None
    unlabelled: Count | None = None
    rank: Count | None = None
    helped: bool | None = None
    alone: bool | None = None


@dataclass(frozen=True)
class ReadoutRecord:
    """A correction of the final projection: its strength, and the mean squared residual before and left out.

    `copies` counts the augmented copies of each sample that it was fitted to.
    """

    accepted: bool
    before: Amount
    left_out: Amount
    strength: float | None = None
    copies: Count | None = None


@dataclass(frozen=True)
class CurveRecord:
    """The samples' mean loss at one scale of a change, by which alpha was chosen.

    `error` is the standard error of its difference from the smallest mean of the curve. `step` counts the steps of a
    walk from 1; where it is absent, the whole change was scaled. `accuracy` is the mean probability that the fine-tuned
    source gives to the classes that the target predicts.
    """

    alpha: float
    mean: float
    error: Amount | None = None
    accuracy: Share | None = None
    step: Count | None = None


@dataclass(frozen=True)
class GainRecord:
    """The samples' mean gain by the change, and its standard error: a change without a clear one is held back."""

    mean: float
    error: Amount | None = None


@dataclass(frozen=True)
class CandidateRecord:
    """A method that was tried for "auto", and the samples' mean gain by it."""

    method: str
    alpha: float | Annotated[list[float], _MANY]
    gain: float
    held_back: bool


@dataclass(frozen=True)
class MethodRecord:
    """The method and its options; `layers` has the source block of each target block.

    `asked` is there if another name was asked for: "auto", whose `candidates` were compared if there were several.
    `alpha` is a number, or one for each step. If the samples chose it, `curve` has the losses that they chose by, and
    `veto` the gain that decides whether the change is held back.
    `matching` is absent for blocks matched by index, else "similarity" or "given"; `steps` counts those along a path,
    `copies` the augmented copies of each sample; `signs` says how gradient signs were taken, `tower` which towers of a
    CLIP were requested. `polish` is the training of what was carried.
    """

    name: str
    alpha: float | Annotated[list[float], _MANY]
    layers: Annotated[list[Count], _MANY]
    completion: str | None = None
    matching: str | None = None
    steps: Count | None = None
    copies: Count | None = None
    signs: str | None = None
    tower: str | None = None
    training: TrainingRecord | None = None
    readout: ReadoutRecord | None = None
    asked: str | None = None
    bold: bool | None = None
    curve: Annotated[list[CurveRecord], _MANY] = field(default_factory=list)
    veto: GainRecord | None = None
    candidates: Annotated[list[CandidateRecord], _FEW] = field(default_factory=list)
    polish: TrainingRecord | None = None

    @property
    def polished(self) -> bool:
        """True if what was carried was trained, and not left as it was."""
        return self.polish is not None and bool(self.polish.helped) and not self.polish.alone

    @property
    def polished_alone(self) -> bool:
        """True if a polish is all there is, because the samples held back what was carried."""
        return self.polish is not None and bool(self.polish.helped) and bool(self.polish.alone)

    @property
    def trained(self) -> TrainingRecord | None:
        """The training that stands in place of a port; None without any step, or if something was carried."""
        alone = self.polish if self.polished_alone and self.polish is not None and self.polish.steps else None
        return self.training or alone

    @property
    def chosen_by_samples(self) -> bool:
        """True if the samples chose alpha."""
        return bool(self.curve)


@dataclass(frozen=True)
class SiteRecord:
    """One carried site.

    `energy` is the share of the task vector's energy in its source's weight and bias, `unseen` the share of the
    weight's energy in directions that calibration did not see. Of some sites, `mispaired_in` and `mispaired_out` are
    the scores of samples that do not belong together. In an adapter, `rank` is that of the weight's factors
    (absent if it is exact) and `kept` the share of the carried weight's energy that they hold. `distance` and `cosine`
    say how far the two bases' weights are apart here, |W_B - W_A| / |W_A|, where they have the same shape.
    """

    name: str
    role: str
    source: str
    shape_source: tuple[Count, Count]
    shape_target: tuple[Count, Count]
    energy: Share
    rank_in: Count | None = None
    rank_out: Count | None = None
    score_in: Share | None = None
    score_out: Share | None = None
    unseen: Share | None = None
    rank: Count | None = None
    kept: Share | None = None
    distance: Amount | None = None
    cosine: Annotated[float, Within(-1.05, 1.05)] | None = None
    mispaired_in: Share | None = None
    mispaired_out: Share | None = None


@dataclass(frozen=True)
class LeftRecord:
    """A changed tensor of the source that was not carried, with its share of the task vector's energy."""

    name: str
    reason: str
    energy: Share


@dataclass(frozen=True)
class OutputRecord:
    """The written files, the Hub `repo` and branch they are for, and the card's `title` if it was given.

    `rounding_lost` is the share of the change lost by rounding to half precision, `rank` the one requested for an
    adapter (absent: as it came), `energy_kept` the share of the change that the adapter holds, and `replaced` the
    tensors that peft loads in place of the base's.
    """

    format: str
    files: Digests
    rounding_lost: Amount | None = None
    repo: str | None = None
    revision: str | None = None
    rank: int | float | None = None
    energy_kept: Share | None = None
    replaced: Annotated[list[str], _VERY_MANY] = field(default_factory=list)
    title: str | None = None


@dataclass(frozen=True)
class OutlookRecord:
    """The gain to expect of the change as it was written, on data like the samples, with its standard error.

    `unit` is "accuracy" or "loss"; a gain is positive in both. It does not count a readout.
    """

    value: float
    unit: str
    error: Amount | None = None

    @property
    def is_clear(self) -> bool:
        """Whether the veto would let such a gain pass; never that of a single sample, which has no standard error."""
        return self.error is not None and self.value > VETO * self.error


@dataclass(frozen=True)
class SourceLeadRecord:
    """How much more accurate the fine-tuned source is than the target, by the calibration samples' labels."""

    source: Share
    target: Share
    error: Amount

    @property
    def is_clear(self) -> bool:
        return self.source - self.target > self.error


@dataclass(frozen=True)
class EvaluationRecord:
    """One measurement: zero-shot, or with `protocol` "probe" by a linear classifier fitted to `trained_on` samples.

    Without a protocol, `trained_on` counts the samples that a head was fitted to, for a source without one of its own.
    A loss is the mean of a label token, or of each "byte" if `per` says so: that of models with different tokenizers.
    """

    model: str
    data: str
    split: str
    n: Count
    metric: str
    value: float
    protocol: str | None = None
    trained_on: Count | None = None
    per: str | None = None


@dataclass(frozen=True)
class RunRecord:
    """Time, machine and versions of one run.

    `training_step` has the seconds of one training step of the target on `training_batch` samples, on the same device
    and in the same precision; both are absent if it was not timed.
    """

    started: str
    seconds: Annotated[dict[str, Amount], _FEW]
    peak_memory: Count
    device: str
    dtype: str
    batch_size: Count
    processes: Count
    versions: Versions
    training_step: Amount | None = None
    training_batch: Count | None = None


class _RecordBase(ABC):
    """Methods of every record; fields stay in the subclasses, because their order is that of the file."""

    target: ModelRecord

    @property
    @abstractmethod
    def sources(self) -> list[ModelRecord]: ...

    @property
    def models(self) -> list[ModelRecord]:
        """Every model that the result was made from."""
        sources = [model for source in self.sources for model in (source, source.base) if model is not None]
        return [*sources, self.target]

    def to_json(self) -> str:
        return to_plain(self)

    def write(self, folder: Path) -> Path:
        content = self.to_json().encode()  # before the file is touched: an error leaves the old record in place
        temporary = folder / f".{RECORD_FILE}"
        temporary.write_bytes(content)
        return temporary.replace(folder / RECORD_FILE)


@dataclass(frozen=True)
class Record(_RecordBase):
    """The record of a port; `settings` are the options that were given, where they are not the defaults."""

    hf_bico: str
    source: ModelRecord
    target: ModelRecord
    objective: ObjectiveRecord
    method: MethodRecord
    sites: Annotated[list[SiteRecord], Within(0, 20_000)]
    left: Annotated[list[LeftRecord], _VERY_MANY]
    run: RunRecord
    command: str | None = None
    data: DataRecord | None = None
    output: OutputRecord | None = None
    settings: Annotated[dict[str, Setting], _FEW] = field(default_factory=dict)
    outlook: OutlookRecord | None = None
    source_lead: SourceLeadRecord | None = None
    evaluation: Annotated[list[EvaluationRecord], _FEW] = field(default_factory=list)
    notices: Notices = field(default_factory=list)
    schema: int = RECORD_SCHEMA

    @property
    def sources(self) -> list[ModelRecord]:
        return [self.source]

    def value(self, model: str) -> float | None:
        """Return the value of "target", "ported" or "source", zero-shot if there are several; None if unmeasured."""
        entries = [entry for entry in self.evaluation if entry.model == model]
        return min(entries, key=lambda entry: entry.protocol or "").value if entries else None


@dataclass(frozen=True)
class Summand:
    """A fine-tuned model, adapter or task vector, and its weight in the sum."""

    model: ModelRecord
    weight: float = 1.0


@dataclass(frozen=True)
class LayerRecord:
    """A tensor that an adapter holds: its share of the change's energy, and how much of that is `kept`.

    `rank` is that of its factors, absent if it is exact.
    """

    name: str
    energy: Share
    kept: Share
    rank: Count | None = None


@dataclass(frozen=True)
class ArithmeticRecord:
    """Time and versions of one run without calibration."""

    started: str
    seconds: Amount
    versions: Versions


@dataclass(frozen=True)
class ChangeRecord(_RecordBase):
    """The record of a change that was extracted from a model or applied to one, without calibration or evaluation."""

    hf_bico: str
    job: str
    """ "extract" or "apply"."""
    parts: Annotated[list[Summand], Within(0, 1_000)]
    target: ModelRecord
    """The model that the change is for."""
    alpha: float
    output: OutputRecord
    run: ArithmeticRecord
    command: str | None = None
    layers: Annotated[list[LayerRecord], _VERY_MANY] = field(default_factory=list)
    left: Annotated[list[LeftRecord], _VERY_MANY] = field(default_factory=list)
    notices: Notices = field(default_factory=list)
    schema: int = RECORD_SCHEMA

    @property
    def sources(self) -> list[ModelRecord]:
        return [part.model for part in self.parts]


def with_title(record: Record | ChangeRecord, title: str) -> Record | ChangeRecord:
    """Return the record of a written result with this title for its card; an empty title means none."""
    if record.output is None:
        raise RecordError(f"{RECORD_FILE} does not say what was written", "port again")
    return replace(record, output=replace(record.output, title=title.strip() or None))


def read_record(folder: Path) -> Record:
    """Read the record of a port."""
    record = read_any(folder)
    if isinstance(record, Record):
        return record
    cause = f"'{folder_name(folder)}' was written by 'hf-bico {record.job}', not by a port"
    raise RecordError(cause, f"repeat it with 'hf-bico {record.job}', or name what a port wrote")


def read_change_record(folder: Path) -> ChangeRecord:
    """Read the record of an `extract` or `apply`."""
    record = read_any(folder)
    if isinstance(record, ChangeRecord):
        return record
    raise RecordError(f"'{folder_name(folder)}' was written by a port", "name what 'extract' or 'apply' wrote")


def read_any(folder: Path) -> Record | ChangeRecord:
    """Read the record of any folder that this tool wrote."""
    name = folder_name(folder)
    try:
        raw = read_json(folder / RECORD_FILE)
    except FileNotFoundError as error:
        raise RecordError(f"'{name}' holds no {RECORD_FILE}", "name a folder or repo that hf-bico wrote") from error
    except (OSError, ValueError) as error:
        raise RecordError(f"{RECORD_FILE} of '{name}' cannot be read: {error}", "port again") from error
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if type(schema) is not int or schema not in READ_SCHEMAS:
        known = " and ".join(map(str, READ_SCHEMAS))
        raise RecordError(
            f"{RECORD_FILE} of '{name}' has schema {schema!r}; this version reads {known}",
            "use the version of hf-bico that wrote it",
        )
    try:
        record: Record | ChangeRecord = from_plain(ChangeRecord if "job" in raw else Record, raw)
        if isinstance(record, ChangeRecord):
            _require_one_of(JOBS, record.job, "job")
            return record
        for entry in record.evaluation:
            _require_one_of(tuple(_VALUES), entry.metric, "metric")
            _VALUES[entry.metric].check(entry.value, entry.metric)
        return _spelt_out(record)
    except TypeError as error:
        raise RecordError(f"{RECORD_FILE} of '{name}' is not a record: {error}", "port again") from error


def _require_one_of(known: Sequence[str], value: str, name: str) -> None:
    if value not in known:
        raise TypeError(f"'{name}' is {value[:60]!r}, and not one of: {', '.join(known)}")


def _spelt_out(record: Record) -> Record:
    """Spell method, alpha and steps in the command of a record of schema 1, which left out the defaults of then."""
    if record.schema != 1 or record.command is None:
        return record
    method = record.method
    values = {"--method": method.name}
    if method.training is None and isinstance(method.alpha, float):
        values["--alpha"] = f"{method.alpha:g}" if float(f"{method.alpha:g}") == method.alpha else str(method.alpha)
    if method.steps is not None:
        values["--path-steps"] = str(method.steps)
    typed = record.command.split()
    missing = [word for option, value in values.items() if option not in typed for word in (option, value)]
    return replace(record, command=f"{record.command} {shlex.join(missing)}".rstrip())
