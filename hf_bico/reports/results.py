"""Results and energies as rows and sentences.

What was measured of a port, as rows and sentences. Reads records; measures nothing.

What a port carried and how well, as plain tables. Reads records; measures nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

from hf_bico.models.layout import ROLES
from hf_bico.reports.record import EvaluationRecord, ForecastRecord, LeftRecord, Record, SiteRecord
from hf_bico.settings import PROBE, method_info
from hf_bico.utils.text import format_table, markdown_table, plain


def role_labels(roles: Iterable[str]) -> dict[str, str]:
    """The line of a table or picture that each role stands in; the known ones first, then as they appear.

    Roles that differ in numbers alone share a line, and so does what comes after `MOST_ROLES` lines, or is no path of
    modules. Of a long path the end is shown, which tells more than its beginning.

    >>> role_labels(["block.0.up", "mlp.up", "block.1.up"])
    {'mlp.up': 'mlp.up', 'block.0.up': 'block.*.up', 'block.1.up': 'block.*.up'}
    """
    present = dict.fromkeys(roles)
    ordered = [role for role in ROLES if role in present] + [role for role in present if role not in ROLES]
    labels = {role: _label(role) for role in ordered}
    shown = [label for label in dict.fromkeys(labels.values()) if label != OTHER_ROLES]
    shown = shown if len(shown) <= MOST_ROLES else shown[: MOST_ROLES - 1]
    return {role: label if label in shown else OTHER_ROLES for role, label in labels.items()}


def _label(role: str) -> str:
    if not _PATH.fullmatch(role):
        return OTHER_ROLES
    label = re.sub(r"(?<![^.])\d+(?![^.])", "*", role)
    return label if len(label) <= _LONGEST_LABEL else f"...{label[3 - _LONGEST_LABEL :]}"


_LONGEST_LABEL = 60
_PATH = re.compile(r"[A-Za-z0-9_.-]+")

MOST_ROLES = 24
"""In so many lines a table or picture is still readable."""
OTHER_ROLES = "other roles"

VALUE_NAMES = {
    "target": "target, zero-shot",
    "target, readout": "target, with the readout alone",
    "control": "control, samples mispaired",
    "ported, no readout": "target, ported, without the readout",
    "ported": "target, ported",
    "base": "source, before it was fine-tuned",
    "source": "source, fine-tuned",
}
"""What each measured model is called, in the order of a table."""
LOSS = "loss"
"""The metric of which less is better."""
MOST_LEFT = 0.5
"""Above this share of the task vector's energy, what stayed behind is told before everything else."""
VANISHED = 0.1
"""Below this share of the port's gain, a control's counts as none."""


@dataclass(frozen=True)
class Result:
    """One row of the results: a measurement, what was measured, and how."""

    name: str
    protocol: str
    entry: EvaluationRecord

    @property
    def value(self) -> str:
        """As it is printed."""
        return value_text(self.entry)


def value_text(entry: EvaluationRecord) -> str:
    """A measured value as it is printed."""
    if entry.metric == LOSS:
        return f"{entry.value:.3f}"
    return f"{entry.value:.1%}" if entry.metric == "accuracy" else f"{entry.value:.4g}"


def gain_of(value: EvaluationRecord, over: EvaluationRecord) -> float:
    """How much better one value is than another of the same metric."""
    return over.value - value.value if value.metric == LOSS else value.value - over.value


def is_trained(record: Record) -> bool:
    """Whether the target was trained, and nothing was carried."""
    return record.method.training is not None or method_info(record.method.name).trains_on is not None


def results(record: Record) -> list[Result]:
    """What was measured and is understood, by protocol, zero-shot first, and then from the target to the source."""
    order = list(VALUE_NAMES)
    known = [e for e in record.evaluation if e.model in VALUE_NAMES and e.protocol in (None, PROBE)]
    known.sort(key=lambda entry: (entry.protocol or "", order.index(entry.model)))
    return [Result(_value_name(record, entry), _protocol_name(record, entry), entry) for entry in known]


def result_rows(record: Record) -> list[tuple[str, ...]]:
    """The results as a table, its head first; with their protocols where these are not zero-shot throughout."""
    measured = results(record)
    metrics = {row.entry.metric for row in measured}
    rows = [("model", "protocol", metrics.pop() if len(metrics) == 1 else "value")] if measured else []
    rows += [(row.name, row.protocol, value_text(row.entry)) for row in measured]
    return [row if is_probed(record) else (row[0], row[2]) for row in rows]


def measured_on(record: Record) -> str:
    """ "597 samples of split test of inverted"; only where anything was measured."""
    first = results(record)[0].entry
    return f"{first.n} samples of split {first.split} of {first.data}"


def _value_name(record: Record, entry: EvaluationRecord) -> str:
    name = VALUE_NAMES[entry.model]
    if entry.model == "target" and (entry.protocol is not None or record.objective.name != "zero-shot"):
        return "target, as it was"
    return name.replace("ported", "trained") if is_trained(record) else name


def _protocol_name(record: Record, entry: EvaluationRecord) -> str:
    if entry.protocol is None:
        if entry.metric == LOSS:
            return "held-out loss"
        return "zero-shot" if record.objective.head is None else f"{record.objective.head} head"
    if entry.trained_on is None:
        return "linear probe"
    return f"linear probe, fitted to {_count(entry.trained_on, 'calibration sample')}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def metric_name(entry: EvaluationRecord) -> str:
    """ "accuracy", "linear-probe accuracy" or "held-out loss"."""
    if entry.protocol is None:
        return "held-out loss" if entry.metric == LOSS else entry.metric
    return f"linear-probe {entry.metric}"


def is_probed(record: Record) -> bool:
    return any(entry.protocol == PROBE for entry in record.evaluation)


def _entries(record: Record) -> dict[str, EvaluationRecord]:
    """The measurement of each model by the protocol that the headline is of: zero-shot, else the probe."""
    found = [result.entry for result in results(record)]
    protocol = None if any(entry.protocol is None for entry in found) else PROBE
    return {entry.model: entry for entry in found if entry.protocol == protocol}


def _values(record: Record) -> dict[str, float]:
    return {name: entry.value for name, entry in _entries(record).items()}


def is_worse(record: Record) -> bool:
    """Whether the port measured worse than the target it started from."""
    found = _entries(record)
    return "target" in found and "ported" in found and gain_of(found["ported"], found["target"]) < 0


def gap_closed(record: Record) -> float | None:
    """The share of the way from the target's own value to the fine-tuned source's; None where there is no way."""
    target, ported, source = (_entries(record).get(name) for name in ("target", "ported", "source"))
    if target is None or ported is None or source is None or gain_of(source, target) <= 0:
        return None
    return gain_of(ported, target) / gain_of(source, target)


def share_of_gain(record: Record) -> float | None:
    """What the port did for the target, as a share of what fine-tuning did for the source; None if that was nothing."""
    found = _entries(record)
    if not {"target", "ported", "base", "source"} <= found.keys():
        return None
    own = gain_of(found["source"], found["base"])
    return gain_of(found["ported"], found["target"]) / own if own > 0 else None


def left_behind(record: Record) -> str | None:
    """What to say first where more than half of the task vector stayed behind; None where it did not."""
    left = sum(entry.energy for entry in record.left)
    if left <= MOST_LEFT or is_trained(record):
        return None
    reasons: dict[str, float] = {}
    for entry in record.left:
        reasons[entry.reason] = reasons.get(entry.reason, 0.0) + entry.energy
    most = max(reasons, key=lambda reason: reasons[reason])
    return f"MOST of the task vector stayed behind: {left:.0%} of its energy ({most}: {reasons[most]:.0%})."


def sampling_error(record: Record) -> float | None:
    """Half the width of the 95% interval of the least certain accuracy, by the number of its samples."""
    counted = [entry for entry in record.evaluation if entry.metric == "accuracy" and entry.n > 0]
    return max((1.96 * sqrt(max(0.0, e.value * (1 - e.value)) / e.n) for e in counted), default=None)


def headline(record: Record) -> str | None:
    """The result in one sentence: what was done to the target's accuracy; None when nothing was measured."""
    told, stayed = _told(record), left_behind(record)
    return told if stayed is None else " ".join(filter(None, [stayed, told]))


def _told(record: Record) -> str | None:
    found = _entries(record)
    target, ported, source = (found.get(name) for name in ("target", "ported", "source"))
    if target is None or ported is None:
        return None
    trained, metric, gain = is_trained(record), metric_name(ported), gain_of(ported, target)
    up, down = ("down", "up") if ported.metric == LOSS else ("up", "down")
    now, before = value_text(ported), value_text(target)
    if gain < 0:
        what = "The trained model" if trained else "The port"
        return f"{what} measured WORSE than the target: {metric} {now}, {down} from {before}."
    if gain == 0:
        return f"{'Training' if trained else 'The port'} changed nothing in the target's {metric} of {before}."
    sentence = f"{metric[0].upper()}{metric[1:]} {now}, {up} from the target's {before}"
    closed, share = gap_closed(record), share_of_gain(record)
    if share is not None and "base" in found and source is not None:
        sentence += f": {share:.0%} of what fine-tuning did for the source's own base"
        sentence += f" ({value_text(found['base'])} to {value_text(source)})"
    elif closed is not None and source is not None:
        reached = f"{closed:.0%} of the way to" if closed <= 1 else "above"
        sentence += f": {reached} the fine-tuned source's {value_text(source)}"
    sentence += f", after {training_steps(record)}" if trained else ", with no training step"
    alone = _readout_alone(record)
    return f"{sentence}." if alone is None else f"{sentence}; the readout alone gives {alone:.1%}."


def _readout_alone(record: Record) -> float | None:
    """What the untouched target reaches with the readout, where that is a part of the result."""
    readout = record.method.readout
    return _values(record).get("target, readout") if readout is not None and readout.accepted else None


def training_steps(record: Record) -> str:
    """ "1 training step", "30 training steps", or "training" where nobody knows."""
    training = record.method.training
    return "training" if training is None else _count(training.steps, "training step")


def control_sentence(record: Record) -> str | None:
    """What the control is, and what is left of the gain in it; None where there was none."""
    found = _entries(record)
    ported = "ported, no readout" if "ported, no readout" in found else "ported"
    if not {"control", ported, "target"} <= found.keys():
        return None
    gain, control = (gain_of(found[name], found["target"]) for name in (ported, "control"))
    without = "" if ported == "ported" else ", both without the readout"
    is_loss = found[ported].metric == LOSS
    gained = [f"{-value:+.3f}" if is_loss else _points(value) for value in (control, gain)]
    told = "its loss moves by {}, and the port's by {}" if is_loss else "it gains {} points, and the port {}"
    sentence = (
        "The control is the same method with the two models' samples mispaired, so that there is nothing to line up: "
        f"{'from' if is_loss else 'over'} the target, {told.format(*gained)}{without}"
    )
    if gain <= 0:
        return f"{sentence}. The port has no gain that could vanish."
    share = control / gain
    if share < VANISHED:
        return f"{sentence}. The gain vanishes in it: it comes from samples that belong together."
    if share < 1:
        return f"{sentence}. {share:.0%} of the gain is still there: that much does not come from the alignment."
    return f"{sentence}. The gain does not vanish in it: it does not come from the alignment."


def _points(difference: float) -> str:
    text = f"{100 * difference:+.1f}"
    return text if float(text) else "0.0"


def readout_sentence(record: Record) -> str | None:
    """What the readout is, whether it was taken, and what it gives on its own; None where there was none."""
    readout = record.method.readout
    if readout is None:
        return None
    before, after = f"{readout.before:.3g}", f"{readout.left_out:.3g}"
    parts = [
        "The readout is a closed-form distillation of the fine-tuned source's predictions into the final projection."
    ]
    if readout.accepted:
        parts.append(
            "It was accepted: on calibration samples that it was not made from, the mean squared distance to those "
            f"predictions fell from {before} to {after}."
        )
    else:
        parts.append(
            "It was not accepted, and changed nothing: on calibration samples that it was not made from, the mean "
            f"squared distance to those predictions was {before} without it and {after} with it."
        )
    values = _values(record)
    if "target, readout" in values:
        alone = values["target, readout"]
        less = readout.accepted and alone >= values.get("ported", alone + 1)
        adds = f"; {'training' if is_trained(record) else 'the port'} adds nothing to that" if less else ""
        parts.append(f"The same step on the untouched target gives {alone:.1%}{adds}.")
    if readout.accepted and "ported, no readout" in values:
        what = "training" if is_trained(record) else "the port"
        parts.append(f"Without the readout, {what} gives {values['ported, no readout']:.1%}.")
    return " ".join(parts)


def foresight_sentence(foresight: ForecastRecord) -> str:
    """What calibration alone says about the outcome.

    >>> print(foresight_sentence(ForesightRecord(0.5, True, loss=1.7, first_order=-1.3, agreement=0.12, headroom=0.6)))
    Outlook: likely to help (0.50). The target gets 60% of the calibration answers wrong; to first order, its loss of
    1.70 moves by -1.30.
    """
    told = "likely to help" if foresight.helps else "doubtful, it may well not help"
    begins = f"Outlook: {told} ({foresight.outlook:.2f}). "
    of = "" if foresight.loss is None else f" of {foresight.loss:.2f}"
    moves = f"loss{of} moves by {foresight.first_order:+.2f}."
    if foresight.headroom is None:
        return f"{begins}To first order, the target's calibration {moves}"
    wrong = f"The target gets {foresight.headroom:.0%} of the calibration answers wrong"
    return f"{begins}{wrong}; to first order, its {moves}"


def training_sentence(record: Record) -> str | None:
    """How the target was trained; None where it was not."""
    training = record.method.training
    if training is None:
        return None
    text = f"{training_steps(record)} of AdamW on {_count(training.samples, 'sample')}"
    if training.batch is not None:
        text += f", {training.batch:,} at a time"
    text += f", learning rate {training.learning_rate:g}"
    if training.warmup is not None:
        text += f" after {training.warmup:,} warm-up steps and with cosine decay"
    text += f", weight decay {training.weight_decay:g}"
    if training.validation is not None:
        text += f"; accuracy {training.validation:.1%} on samples held back for validation"
    return f"{text}."


@dataclass(frozen=True)
class Report:
    """Per-site ranks, scores and energies, and what was left behind."""

    sites: tuple[SiteRecord, ...]
    left: tuple[LeftRecord, ...]

    @property
    def carried_energy(self) -> float:
        """The share of the task vector that lies in carried sites."""
        return 1.0 - sum(entry.energy for entry in self.left)

    @property
    def unseen_energy(self) -> float | None:
        """The share of the carried sites' energy that lay where calibration saw nothing."""
        takers = Counter(site.source for site in self.sites)
        weighted = [(s.energy / takers[s.source], s.unseen) for s in self.sites if s.unseen is not None]
        total = sum(energy for energy, _ in weighted)
        return sum(energy * unseen for energy, unseen in weighted) / total if total else None

    def left_by_reason(self) -> list[tuple[str, int, float]]:
        """(reason, tensors, share of the energy), the largest first."""
        reasons = dict.fromkeys(entry.reason for entry in self.left)
        rows = [(reason, [entry for entry in self.left if entry.reason == reason]) for reason in reasons]
        summed = [(reason, len(entries), sum(entry.energy for entry in entries)) for reason, entries in rows]
        return sorted(summed, key=lambda row: -row[2])

    def summary(self) -> str:
        """Where the task vector's energy went, in one line."""
        text = f"{self.carried_energy:.1%} of the task vector's energy is in carried sites"
        if self.unseen_energy is not None:
            text += f", of which {self.unseen_energy:.1%} lay where calibration saw nothing"
        left = ", ".join(f"{reason} {energy:.1%}" for reason, _, energy in self.left_by_reason())
        return f"{text}; left behind: {left}" if left else text

    def __repr__(self) -> str:
        return f"Report of {len(self.sites)} sites: {self.summary()}"

    def _repr_markdown_(self) -> str:
        """What a notebook shows."""
        return f"{markdown_table(self.rows())}\n\n{plain(self.summary(), 2000)}"

    def table(self) -> str:
        """One line a role: how many sites, their energy, scores, ranks and unseen energy, as far as they are known."""
        return format_table(self.rows())

    def rows(self) -> list[list[str]]:
        """The table's head, then a row for each role."""
        rows: list[tuple[str, ...]] = [
            ("role", "sites", "energy", "score in", "score out", "rank in", "rank out", "unseen", "rank", "kept")
        ]
        labels = role_labels(site.role for site in self.sites)
        for label in dict.fromkeys(labels.values()):
            rows.append(_role_row(label, [site for site in self.sites if labels[site.role] == label]))
        known = [column for column, _ in enumerate(rows[0]) if any(row[column] != "-" for row in rows[1:])]
        return [[row[column] for column in known] for row in rows]


def _role_row(role: str, sites: Sequence[SiteRecord]) -> tuple[str, ...]:
    # a source site that several target blocks take counts once
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
        _held_rank(sites),
        _mean((site.kept for site in sites), percent=True),
    )


def _held_rank(sites: Sequence[SiteRecord]) -> str:
    """The rank at which an adapter holds these sites; some may be saved as they will be."""
    exact = any(site.kept is not None and site.rank is None for site in sites)
    ranks = _span(site.rank for site in sites)
    return ranks if not exact else "exact" if ranks == "-" else f"{ranks}, exact"


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
