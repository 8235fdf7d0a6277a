"""Turn measurements and energies of a record into rows and sentences.

Reads records; measures nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from typing import TYPE_CHECKING, TypeVar

from hf_bico.models.layout import ROLES
from hf_bico.reports.record import (
    LOSS,
    EvaluationRecord,
    LeftRecord,
    PairingRecord,
    Record,
    SiteRecord,
)
from hf_bico.reports.verdict import lead_sentence
from hf_bico.settings import PROBE, method_info
from hf_bico.utils.text import count_text, format_table, markdown_table, plain

if TYPE_CHECKING:
    from pandas import DataFrame

PERPLEXITY, MAX_EXPONENT = "perplexity per byte", 700.0
VALUE_NAMES = {
    "target": "target, zero-shot",
    "target, readout": "target, with the readout alone",
    "control": "control, samples mispaired",
    "ported, no readout": "target, ported, without the readout",
    "ported, no polish": "target, ported, without the polish",
    "ported": "target, ported",
    "base": "source, before fine-tuning",
    "source": "source, fine-tuned",
}
"""The name of each measured model, in the order of a table."""
MAX_LEFT = 0.5
"""Share of the task vector's energy above which the headline begins with what stayed behind."""
NO_GAIN = 0.1
"""Share of the port's gain below which a control's gain counts as none."""
SAFE_SAMPLES = 50
"""With fewer samples no rule was found that keeps a port from hurting."""
MAX_ROLES = 24
"""Rows of a readable table or picture."""
OTHER_ROLES = "other roles"
OTHER_REASONS = "other reasons"
_MAX_LABEL = 60
_PATH = re.compile(r"[A-Za-z0-9_.-]+")

RowT = TypeVar("RowT")


@dataclass(frozen=True)
class Result:
    """One row of the results: a measurement, with the names of its model and protocol."""

    name: str
    protocol: str
    entry: EvaluationRecord

    @property
    def value(self) -> str:
        return value_text(self.entry)

    @property
    def unit(self) -> str:
        return unit_name(self.entry)

    @property
    def perplexity(self) -> str:
        return perplexity_text(self.entry)


def value_text(entry: EvaluationRecord) -> str:
    """Format a measured value."""
    if entry.metric == LOSS:
        return f"{entry.value:.3f}"
    return f"{entry.value:.1%}" if entry.metric == "accuracy" else f"{entry.value:.4g}"


def gain_of(value: EvaluationRecord, over: EvaluationRecord) -> float:
    """Return how much better one value is than another of the same metric."""
    return over.value - value.value if value.metric == LOSS else value.value - over.value


def is_trained(record: Record) -> bool:
    """Return True if the target was trained, and nothing was carried."""
    return record.method.trained is not None or method_info(record.method.name).trains_on is not None


def carries(record: Record) -> bool:
    """Return True if a task vector was carried: the target was not trained, nor only its readout corrected."""
    return not is_trained(record) and record.method.name != "readout" and not record.method.polished_alone


def results(record: Record) -> list[Result]:
    """Return the known measurements, zero-shot before probes, and each from the target to the source."""
    order = list(VALUE_NAMES)
    known = [e for e in record.evaluation if e.model in VALUE_NAMES and e.protocol in (None, PROBE)]
    known.sort(key=lambda entry: (entry.protocol or "", order.index(entry.model)))
    return [Result(_value_name(record, entry), _protocol_name(record, entry), entry) for entry in known]


def result_rows(record: Record) -> list[tuple[str, ...]]:
    """Return the results as a table with its header, with protocols if any is a probe."""
    measured = results(record)
    metrics = {unit_name(row.entry) for row in measured}
    rows = [("model", "protocol", metrics.pop() if len(metrics) == 1 else "value", PERPLEXITY)] if measured else []
    rows += [(row.name, row.protocol, row.value, perplexity_text(row.entry)) for row in measured]
    shown = (True, any(entry.protocol == PROBE for entry in record.evaluation), True, any(row[3] for row in rows[1:]))
    return [tuple(cell for cell, is_shown in zip(row, shown, strict=True) if is_shown) for row in rows]


def unit_name(entry: EvaluationRecord) -> str:
    """Return "accuracy", "loss", or "loss per byte"."""
    return entry.metric if entry.per is None else f"{entry.metric} per {entry.per}"


def perplexity_text(entry: EvaluationRecord) -> str:
    """Format the perplexity of a byte, which is comparable between models of different tokenizers; else nothing."""
    return f"{exp(min(entry.value, MAX_EXPONENT)):.3f}" if entry.per is not None and entry.metric == LOSS else ""


def pairing_sentence(record: Record) -> str | None:
    """Say how much of the samples two models with different tokenizers read alike; None if their tokens are the same.

    >>> pairing_text(PairingRecord(0.999, 0.999, 0.998, 0.994))
    '99.9% of the tokens and 99.9% of the bytes pair for inputs, 99.8% and 99.4% for gradients'
    """
    pairing = None if record.data is None else record.data.pairing
    if pairing is None:
        return None
    return f"The two models tokenize the calibration samples differently: {pairing_text(pairing)}."


def pairing_text(pairing: PairingRecord) -> str:
    """Return the shares of tokens and of bytes that pair, for inputs and for gradients."""
    return (
        f"{pairing.tokens:.1%} of the tokens and {pairing.bytes:.1%} of the bytes pair for inputs, "
        f"{pairing.gradient_tokens:.1%} and {pairing.gradient_bytes:.1%} for gradients"
    )


def measured_on(record: Record) -> str:
    """Return "597 samples of split test of inverted"; only if anything was measured."""
    first = results(record)[0].entry
    return f"{first.n} samples of split {first.split} of {first.data}"


def _value_name(record: Record, entry: EvaluationRecord) -> str:
    name = VALUE_NAMES[entry.model]
    if entry.model == "target" and (entry.protocol is not None or record.objective.name != "zero-shot"):
        return "target, unchanged"
    if entry.protocol is None and entry.trained_on is not None:
        return f"{name}, with a head fitted to {count_text(entry.trained_on, 'sample')}"
    if not carries(record):
        return name.replace("ported", "trained" if is_trained(record) else "with the readout")
    return name.replace("ported", "ported and polished") if entry.model == "ported" and record.method.polished else name


def _protocol_name(record: Record, entry: EvaluationRecord) -> str:
    if entry.protocol is None:
        if entry.metric == LOSS:
            return f"held-out {unit_name(entry)}"
        return "zero-shot" if record.objective.head is None else f"{record.objective.head} head"
    if entry.trained_on is None:
        return "linear probe"
    return f"linear probe, fitted to {count_text(entry.trained_on, 'calibration sample')}"


def metric_name(entry: EvaluationRecord) -> str:
    """Return "accuracy", "linear-probe accuracy", "held-out loss" or "held-out loss per byte"."""
    if entry.protocol is None:
        return f"held-out {unit_name(entry)}" if entry.metric == LOSS else entry.metric
    return f"linear-probe {entry.metric}"


def compared_entries(record: Record) -> dict[str, EvaluationRecord]:
    """Return each model's measurement by the headline's protocol: zero-shot, else the probe."""
    entries = [result.entry for result in results(record)]
    protocol = None if any(entry.protocol is None for entry in entries) else PROBE
    return {entry.model: entry for entry in entries if entry.protocol == protocol}


def is_worse(record: Record) -> bool:
    """Return True if the port measured worse than the target it started from."""
    entries = compared_entries(record)
    return "target" in entries and "ported" in entries and gain_of(entries["ported"], entries["target"]) < 0


def gap_closed(record: Record) -> float | None:
    """Return the share closed of the gap between target and fine-tuned source; None if there is no gap."""
    entries = compared_entries(record)
    target, ported, source = (entries.get(name) for name in ("target", "ported", "source"))
    if target is None or ported is None or source is None or gain_of(source, target) <= 0:
        return None
    return gain_of(ported, target) / gain_of(source, target)


def share_of_gain(record: Record) -> float | None:
    """Return the port's gain as a share of what fine-tuning gained on the source; None if that was nothing."""
    entries = compared_entries(record)
    if not {"target", "ported", "base", "source"} <= entries.keys():
        return None
    fine_tuning = gain_of(entries["source"], entries["base"])
    return gain_of(entries["ported"], entries["target"]) / fine_tuning if fine_tuning > 0 else None


def left_behind(record: Record) -> str | None:
    """Return a warning if more than half of the task vector stayed behind."""
    left = sum(entry.energy for entry in record.left)
    if left <= MAX_LEFT or is_trained(record):
        return None
    reason, _, energy = Report((), tuple(record.left)).left_by_reason()[0]
    return f"MOST of the task vector was left behind: {left:.0%} of its energy ({reason}: {energy:.0%})."


def interval_of(entry: EvaluationRecord) -> float | None:
    """Return half the width of the 95% interval of an accuracy; None of anything else."""
    if entry.metric != "accuracy" or entry.n <= 0:
        return None
    return 1.96 * sqrt(max(0.0, entry.value * (1 - entry.value)) / entry.n)


def sampling_error(record: Record) -> float | None:
    """Return half the width of the widest 95% interval of the accuracies."""
    known = [half for entry in record.evaluation if (half := interval_of(entry)) is not None]
    return max(known, default=None)


def headline(record: Record) -> str | None:
    """Return the result in one sentence: the change of the target's accuracy; None if nothing was measured.

    Anything that speaks against the port comes first.
    """
    return (
        " ".join(filter(None, [lead_sentence(record.source_lead), left_behind(record), _result_sentence(record)]))
        or None
    )


def _result_sentence(record: Record) -> str | None:
    entries = compared_entries(record)
    target, ported, source = (entries.get(name) for name in ("target", "ported", "source"))
    if target is None or ported is None:
        return None
    trained, metric, gain = is_trained(record), metric_name(ported), gain_of(ported, target)
    up, down = ("down", "up") if ported.metric == LOSS else ("up", "down")
    now, before = value_text(ported), value_text(target)
    if gain < 0:
        what = "The trained model" if trained else "The port" if carries(record) else "The readout"
        return f"{what} measured WORSE than the target: {metric} {now}, {down} from {before}."
    if gain == 0:
        what = "Training" if trained else "The port" if carries(record) else "The readout"
        return f"{what} did not change the target's {metric} of {before}."
    sentence = f"{metric[0].upper()}{metric[1:]} {now}, {up} from the target's {before}"
    closed, share = gap_closed(record), share_of_gain(record)
    if share is not None and source is not None:
        sentence += f": {share:.0%} of the gain that fine-tuning gave the source's own base"
        sentence += f" ({value_text(entries['base'])} to {value_text(source)})"
    elif closed is not None and source is not None:
        reached = f"{closed:.0%} of the way to" if closed <= 1 else "above"
        sentence += f": {reached} the fine-tuned source's {value_text(source)}"
    polish = record.method.polish
    if polish is not None and record.method.polished:
        steps = f" and then polished for {count_text(polish.steps, 'training step')}"
        sentence += f", carried{steps if polish.steps else ', and its readout corrected'}"
    else:
        sentence += f", after {training_steps(record)}" if trained else ", with no training step"
    readout, alone = record.method.readout, entries.get("target, readout")
    if readout is not None and readout.accepted and alone is not None:
        sentence += f"; the readout alone gives {alone.value:.1%}"
    return f"{sentence}."


def training_steps(record: Record) -> str:
    """Return "1 training step", "30 training steps", or "training" if the number is unknown."""
    training = record.method.trained
    return "training" if training is None else count_text(training.steps, "training step")


def control_sentence(record: Record) -> str | None:
    """Describe the control and how much of the gain it keeps; None without one."""
    entries = compared_entries(record)
    ported = "ported, no readout" if "ported, no readout" in entries else "ported"
    if not {"control", ported, "target"} <= entries.keys():
        return None
    gain, control = (gain_of(entries[name], entries["target"]) for name in (ported, "control"))
    without = "" if ported == "ported" else ", both without the readout"
    is_loss = entries[ported].metric == LOSS
    gains = [f"{-value:+.3f}" if is_loss else _points(value) for value in (control, gain)]
    comparison = "its loss moves by {}, and the port's by {}" if is_loss else "it gains {} points, and the port {}"
    sentence = (
        "The control is the same method with the two models' samples mispaired, so that nothing can be aligned: "
        f"{'from' if is_loss else 'over'} the target, {comparison.format(*gains)}{without}"
    )
    if gain <= 0:
        return f"{sentence}. The port has no gain that could disappear."
    share = control / gain
    if share < NO_GAIN:
        return f"{sentence}. The gain disappears in the control, so it comes from the alignment of matching samples."
    if share < 1:
        return (
            f"{sentence}. {share:.0%} of the gain remains in the control: that part does not come from the alignment."
        )
    return f"{sentence}. The gain does not disappear in the control, so it does not come from the alignment."


def _points(difference: float) -> str:
    text = f"{100 * difference:+.1f}"
    return text if float(text) else "0.0"


def readout_sentence(record: Record) -> str | None:
    """Describe the readout, whether it was accepted, and what it gives on its own; None without one."""
    readout = record.method.readout
    if readout is None:
        return None
    before, after = f"{readout.before:.3g}", f"{readout.left_out:.3g}"
    accepted, change = "accepted", f"fell from {before} to {after}"
    if not readout.accepted:
        accepted, change = "rejected, and changed nothing", f"was {before} without it and {after} with it"
    parts = [
        "The readout distills the fine-tuned source's predictions into the final projection, in closed form.",
        f"It was {accepted}: on calibration samples left out of the fit, the mean squared distance to those "
        f"predictions {change}.",
    ]
    values = {name: entry.value for name, entry in compared_entries(record).items()}
    what = "training" if is_trained(record) else "the polish" if record.method.polished else "the port"
    if "target, readout" in values:
        alone = values["target, readout"]
        less = readout.accepted and alone >= values.get("ported", alone + 1)
        adds = f"; {what} adds nothing to that" if less else ""
        parts.append(f"The same step on the unchanged target gives {alone:.1%}{adds}.")
    if readout.accepted and "ported, no readout" in values:
        parts.append(f"Without the readout, {what} gives {values['ported, no readout']:.1%}.")
    return " ".join(parts)


def few_samples_sentence(record: Record) -> str | None:
    """Return a warning if a port was made from few samples, whoever chose its alpha; None if no sample was used."""
    data, method = record.data, record.method
    uses_samples = method.chosen_by_samples or method_info(method.name).uses_samples
    if data is None or _judging_samples(record) >= SAFE_SAMPLES or is_trained(record) or not uses_samples:
        return None
    samples = count_text(data.n, "sample")
    return (
        f"This port was made from only {samples}. With so few samples it may do worse on new data, "
        f"especially if the source is a LoRA with a large change. Use {SAFE_SAMPLES} samples or more."
    )


def _judging_samples(record: Record) -> int:
    """Return how many samples have judged what is written: those without labels too, if it was polished on them."""
    data = record.data
    if data is None:
        return 0
    polish = record.method.polish if record.method.polished else None
    return data.n + ((polish.unlabelled or 0) if polish is not None else 0)


@dataclass(frozen=True)
class Report:
    """Per-site ranks, scores and energies, and what was left behind."""

    sites: tuple[SiteRecord, ...]
    left: tuple[LeftRecord, ...]

    @property
    def carried_energy(self) -> float:
        """The share of the task vector's energy in carried sites."""
        return 1.0 - sum(entry.energy for entry in self.left)

    @property
    def unseen_energy(self) -> float | None:
        """The share of the carried energy in directions that calibration did not see."""
        uses = Counter(site.source for site in self.sites)
        weighted = [(s.energy / uses[s.source], s.unseen) for s in self.sites if s.unseen is not None]
        total = sum(energy for energy, _ in weighted)
        return sum(energy * unseen for energy, unseen in weighted) / total if total else None

    def left_by_reason(self) -> list[tuple[str, int, float]]:
        """Return (reason, tensors, share of the energy), the largest first; the last for all beyond `MAX_ROLES`."""
        energies: dict[str, list[float]] = {}
        for entry in self.left:
            energies.setdefault(entry.reason, []).append(entry.energy)
        rows = sorted(((reason, len(some), sum(some)) for reason, some in energies.items()), key=lambda row: -row[2])
        more = rows[MAX_ROLES - 1 :]
        if len(more) > 1:
            rows[MAX_ROLES - 1 :] = [(OTHER_REASONS, sum(row[1] for row in more), sum(row[2] for row in more))]
        return rows

    def summary(self) -> str:
        """Summarise in one line where the task vector's energy went."""
        text = f"{self.carried_energy:.1%} of the task vector's energy was carried"
        if self.unseen_energy is not None:
            text += f", except {self.unseen_energy:.1%} of that, in directions that calibration did not see"
        left = ", ".join(f"{reason} {energy:.1%}" for reason, _, energy in self.left_by_reason())
        return f"{text}; left behind: {left}" if left else text

    def __repr__(self) -> str:
        return f"Report of {len(self.sites)} sites: {self.summary()}"

    def _repr_markdown_(self) -> str:
        """Render the report in a notebook."""
        return f"{markdown_table(self.rows())}\n\n{plain(self.summary(), 2000)}"

    def table(self) -> str:
        """Format one line per role: sites, energy, scores, ranks and unseen energy, as far as they are known."""
        return format_table(self.rows())

    def to_pandas(self) -> DataFrame:
        """Return a DataFrame with a row for each site: its role, score, ranks and energies.

        >>> ported.report.to_pandas().groupby("role").score_in.mean()  # doctest: +SKIP
        """
        import pandas

        return pandas.DataFrame([vars(site) for site in self.sites])

    def rows(self) -> list[list[str]]:
        """Return the table's header, then one row per role."""
        header = (
            *("role", "sites", "energy", "score in", "score out", "rank in", "rank out", "unseen", "rank", "kept"),
            *("distance", "cosine"),
        )
        rows = [_role_row(label, sites) for label, sites in by_role(self.sites, lambda site: site.role).items()]
        known = [column for column, _ in enumerate(header) if any(row[column] != "-" for row in rows)]
        return [[row[column] for column in known] for row in (header, *rows)]


def role_labels(roles: Iterable[str]) -> dict[str, str]:
    """Return the row of a table or picture for each role: known roles first, then in order of appearance.

    Roles that differ only in numbers share a row; roles beyond `MAX_ROLES` rows, and names that are not module paths,
    go to "other roles". Long paths keep their end.

    >>> role_labels(["block.0.up", "mlp.up", "block.1.up"])
    {'mlp.up': 'mlp.up', 'block.0.up': 'block.*.up', 'block.1.up': 'block.*.up'}
    """
    present = dict.fromkeys(roles)
    ordered = [role for role in ROLES if role in present] + [role for role in present if role not in ROLES]
    labels = {role: _label(role) for role in ordered}
    rows = [label for label in dict.fromkeys(labels.values()) if label != OTHER_ROLES]
    rows = rows if len(rows) <= MAX_ROLES else rows[: MAX_ROLES - 1]
    return {role: label if label in rows else OTHER_ROLES for role, label in labels.items()}


def by_role(entries: Sequence[RowT], role: Callable[[RowT], str]) -> dict[str, list[RowT]]:
    """Group entries by the row of their role, in the order of the rows."""
    labels = role_labels(map(role, entries))
    rows: dict[str, list[RowT]] = {label: [] for label in labels.values()}
    for entry in entries:
        rows[labels[role(entry)]].append(entry)
    return rows


def _label(role: str) -> str:
    if not _PATH.fullmatch(role):
        return OTHER_ROLES
    label = re.sub(r"(?<![^.])\d+(?![^.])", "*", role)
    return label if len(label) <= _MAX_LABEL else f"...{label[3 - _MAX_LABEL :]}"


def _role_row(role: str, sites: Sequence[SiteRecord]) -> tuple[str, ...]:
    # a source site that maps to several target blocks counts once
    energy = sum({site.source: site.energy for site in sites}.values())
    return (
        role,
        str(len(sites)),
        f"{energy:.1%}",
        _mean(site.score_in for site in sites),
        _mean(site.score_out for site in sites),
        _span(site.rank_in for site in sites),
        _span(site.rank_out for site in sites),
        _mean((site.unseen for site in sites), percent=True),
        _adapter_rank(sites),
        _mean((site.kept for site in sites), percent=True),
        _mean(site.distance for site in sites),
        _mean(site.cosine for site in sites),
    )


def _adapter_rank(sites: Sequence[SiteRecord]) -> str:
    """Return the ranks at which an adapter holds these sites, and "exact" if any is held in full."""
    ranks = _span(site.rank for site in sites)
    if all(site.kept is None or site.rank is not None for site in sites):
        return ranks
    return "exact" if ranks == "-" else f"{ranks}, exact"


def _mean(values: Iterable[float | None], percent: bool = False) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = sum(known) / len(known)
    return f"{mean:.1%}" if percent else f"{mean:.3f}"


def _span(values: Iterable[int | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, high = min(known), max(known)
    return str(low) if low == high else f"{low}-{high}"
