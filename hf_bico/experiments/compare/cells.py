"""Defines the rows and numbers of a comparison, their order, and their means and gains. Measures and writes nothing.

A row is a reference, or a method: `bico` as a port runs it, `bico@1` at alpha 1, `train@20` with at most 20 training
steps, `bico+polish@20` carried and then polished.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from functools import cached_property
from math import inf, isfinite
from statistics import fmean, stdev
from typing import Any

from hf_bico.errors import UsageError
from hf_bico.reports.record import Count
from hf_bico.settings import BRIEF, METHODS, MethodInfo, method_info
from hf_bico.utils.text import count_text, near

LOSS, LOSS_PER_BYTE = "loss", "loss per byte"
"""The protocols whose numbers are losses, not accuracies: less is better. Of models with different tokenizers, those of
tokens are not comparable."""
_MAX_LOSS = 1e300
REFERENCE_LABELS = {
    "target": "target, zero-shot",
    "base": "source, before it was fine-tuned",
    "source": "source, fine-tuned",
    "target fine-tuned": "target, fine-tuned",
}
REFERENCES = tuple(REFERENCE_LABELS)
"""The models that methods are compared with; nothing is carried to them."""
ALL, STANDARD = "all", "standard"
"""Stand for every registered method, each as a port runs it, and for those that answer: port, polish or train?"""
_POLISH = re.compile(r"\+polish(@[^@+]*)?$")


def split_method(row: str) -> tuple[str, float | None]:
    """Split a row's name into a method and its alpha, or its training steps; None where the settings say it.

    >>> split_method("bico@0.5"), split_method("bico"), split_method("train@20"), split_method("bico@1+polish@20")
    (('bico', 0.5), ('bico', None), ('train', 20.0), ('bico', 1.0))
    """
    row = plain_row(row)
    name, _, number = row.partition("@")
    try:
        found = float(number)
    except ValueError:
        return row, None
    return (name, found) if isfinite(found) else (row, None)


def plain_row(row: str) -> str:
    """Return a row's name without its polish."""
    return _POLISH.sub("", row)


def is_polished(row: str) -> bool:
    return _POLISH.search(row) is not None


def polish_steps(row: str) -> int | None:
    """Return the most steps of a row's polish; None where it has none, or the settings say it.

    >>> polish_steps("bico+polish@20"), polish_steps("bico")
    (20, None)
    """
    found = _POLISH.search(row)
    number = "" if found is None else (found[1] or "").removeprefix("@")
    return int(number) if number.isdecimal() else None


def read_row(text: str) -> str:
    """Return a row's name as comparisons have it; refuse what is no method, or no number after @.

    >>> read_row("bico@1.0")
    'bico@1'
    """
    if is_polished(text):
        return _read_polished(text)
    name, at, number = text.partition("@")
    if name in (ALL, STANDARD) and at:
        raise UsageError(f"'{text}' gives an alpha to several methods", f"use {name}, with --alpha {number or 1}")
    if name not in METHODS:
        known = (ALL, STANDARD, *METHODS)
        meant = near(name, known)
        question = "" if meant is None else f"did you mean '{meant}{at}{number}'? Else "
        raise UsageError(f"there is no method '{name}'", f"{question}use some of: {', '.join(known)}")
    if not at:
        return name
    if name in BRIEF:
        if not number.isdecimal() or int(number) < 1:
            raise UsageError(f"'{text}' has no number of training steps after @", f"use {name}@20, or {name}")
        return f"{name}@{int(number)}"
    if METHODS[name].trains_on is not None or name == "readout":
        raise UsageError(f"'{text}' gives an alpha to a method that carries nothing", f"use {name}")
    alpha = split_method(text)[1]
    if alpha is None:
        raise UsageError(f"'{text}' has no number after @", f"use {name}@1, or {name}")
    return f"{name}@{_number(alpha)}"


def _read_polished(text: str) -> str:
    """Return the name of a row with a polish; refuse it where nothing is carried that could be polished."""
    row, steps = read_row(plain_row(text)), polish_steps(text)
    if METHODS[split_method(row)[0]].trains_on is not None or row == "readout":
        raise UsageError(f"'{text}' polishes a method that carries nothing", f"use {row}, or bico+polish")
    if not text.endswith("+polish") and not steps:
        raise UsageError(f"'{text}' has no number of polishing steps after @", f"use {row}+polish@20, or {row}+polish")
    return f"{row}+polish" if steps is None else f"{row}+polish@{steps}"


def row_method(row: str) -> MethodInfo | None:
    """Return the registered method of a row; None for a reference, or a method that is not registered here."""
    return METHODS.get(split_method(row)[0])


def method_label(row: str) -> str:
    """Return the name of a method or reference in words.

    >>> method_label("bico"), method_label("bico@1"), method_label("train@20")
    ('BiCo', 'BiCo, alpha 1', 'training, 20 steps')
    >>> method_label("bico+polish@20")
    'BiCo, polished, 20 steps'
    """
    name, number = split_method(row)
    label = REFERENCE_LABELS.get(name) or method_info(name).label
    if number is not None:
        label += f", {count_text(int(number), 'step')}" if name in BRIEF else f", alpha {_number(number)}"
    if is_polished(row):
        steps = polish_steps(row)
        label += ", polished" if steps is None else f", polished, {count_text(steps, 'step')}"
    return label


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else str(value)


@dataclass(frozen=True)
class CellKey:
    """Identifies a number: data set, row, samples (`n` in all, or `per_class`), the draw's seed, and variants.

    `n`, `per_class` and `seed` are None where the row needs no samples; `control` means that the two models saw
    different samples, `readout` that the readout was corrected; `protocol` is None for zero-shot, "probe", "loss"
    or "loss per byte".
    """

    data: str
    method: str
    _: KW_ONLY
    n: Count | None = None
    per_class: Count | None = None
    seed: Count | None = None
    control: bool = False
    readout: bool = False
    protocol: str | None = None

    @property
    def key(self) -> CellKey:
        """The key without what a subclass adds."""
        return CellKey(**{field.name: getattr(self, field.name) for field in fields(CellKey)})

    @property
    def size(self) -> int | None:
        """The number of calibration samples, in all or of each class."""
        return self.per_class if self.n is None else self.n

    @property
    def is_loss(self) -> bool:
        return self.protocol in (LOSS, LOSS_PER_BYTE)

    @property
    def is_reference(self) -> bool:
        """True for an existing model that is measured without calibration samples."""
        return self.method in REFERENCES and self.size is None and not self.readout

    @property
    def group(self) -> tuple[Any, ...]:
        """Sort key of a table's groups: references, methods without samples, then each number of samples."""
        kind = 0 if self.is_reference else 2 if self.n is not None else 3 if self.per_class is not None else 1
        return self.protocol or "", kind, self.size or 0

    @property
    def label(self) -> str:
        """Name of the method and its variant.

        >>> CellKey("digits", "bico", n=100, control=True).label
        'BiCo, mispaired'
        >>> CellKey("digits", "target", n=100, readout=True).label
        'target, readout'
        """
        name = method_label(self.method)
        if self.method == "target" and (self.readout or self.protocol):
            name = "target"
        protocol = None if self.is_loss else self.protocol
        variants = ("mispaired" if self.control else None, "readout" if self.readout else None, protocol)
        return ", ".join([name, *filter(None, variants)])

    def with_value(self, value: float, held_back: bool = False) -> Cell:
        return Cell(value=value, held_back=held_back, **vars(self))


@dataclass(frozen=True)
class Cell(CellKey):
    """One measured number, an accuracy between 0 and 1 or a loss, with the fields of its key.

    `held_back` means that the samples spoke against the method: the number is that of the target as it is.
    """

    value: float
    held_back: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not 0 <= self.value <= (_MAX_LOSS if self.is_loss else 1):
            raise ValueError(f"what was measured of {self.method} on {self.data} is {self.value}")
        if self.n is not None and self.per_class is not None:
            raise ValueError(f"{self.method} on {self.data} has both n and per_class")

    def as_dict(self) -> dict[str, Any]:
        return {"data": self.data, "method": self.method, "value": self.value} | vars(self)

    def __str__(self) -> str:
        """
        >>> print(Cell("digits", "bico", 0.596, n=100, seed=0))
        digits: BiCo, N = 100, seed 0: 59.6%
        >>> print(Cell("digits", "bico", 0.466, n=100, seed=1, held_back=True))
        digits: BiCo, N = 100, seed 1: 46.6%, held back
        """
        size = "" if self.n is None else f", N = {self.n}"
        size += "" if self.per_class is None else f", {self.per_class} of each class"
        size += "" if self.seed is None else f", seed {self.seed}"
        value = f"loss {self.value:.3f}" if self.is_loss else f"{self.value:.1%}"
        return f"{self.data}: {self.label}{size}: {value}{', held back' if self.held_back else ''}"


@dataclass(frozen=True)
class MeanAndError:
    """A mean over seeds, with the sample standard deviation where there are several."""

    mean: float
    std: float | None = None
    seeds: int = 1

    @classmethod
    def of(cls, values: Sequence[float]) -> MeanAndError:
        return cls(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Row(CellKey):
    """One method with one number of samples: its accuracy, or its loss, on each data set; `data` is "".

    `average` is the mean of the data sets' means, None unless all of them were measured; its standard deviation is
    that of the seeds' own averages, None unless every data set has every seed. `gain` is the average less that of the
    untouched target, measured in the same way. `held_back` of its `draws`, over all data sets, count as the target.
    """

    values: dict[str, MeanAndError]
    average: MeanAndError | None = None
    gain: float | None = None
    held_back: int = 0

    @property
    def draws(self) -> int:
        return sum(value.seeds for value in self.values.values())

    def as_dict(self) -> dict[str, Any]:
        content = {name: value for name, value in asdict(self).items() if name not in ("data", "seed")}
        return {"label": self.label, **content}


@dataclass(frozen=True)
class Refusal:
    """The reason why a method cannot carry between these models, or on this data set, in one line."""

    method: str
    reason: str
    data: str | None = None


@dataclass(frozen=True)
class Order:
    """Sort keys of numbers: methods and data sets as given; then registered methods, then by name.

    A method with an alpha of its own stands before the same method as a port runs it.
    """

    methods: Sequence[str] = ()
    data_sets: Sequence[str] = ()

    @cached_property
    def _places(self) -> list[dict[str, int]]:
        """The place of each reference, method, registered method, and data set."""
        registered = sorted(METHODS, key=lambda name: METHODS[name].row)
        lists = (REFERENCES, self.methods, registered, self.data_sets)
        return [{name: place for place, name in reversed(list(enumerate(names)))} for names in lists]

    def of_method(self, method: str) -> tuple[int, int, float, str]:
        references, methods, registered, _ = self._places
        for rank, places in enumerate((references, methods)):
            if method in places:
                return rank, places[method], 0.0, ""
        name, number = split_method(method)
        if name in registered:
            polish = f"{polish_steps(method) or 0:09}" if is_polished(method) else ""
            return 2, registered[name], inf if number is None else number, polish
        return 3, 0, 0.0, method

    def of_data(self, data: str) -> tuple[int, str]:
        places = self._places[3]
        return (places[data], "") if data in places else (len(self.data_sets), data)

    def of_row(self, key: CellKey) -> tuple[Any, ...]:
        """Sort by `group`, then by method, the plain one before its variants."""
        return *key.group, self.of_method(key.method), key.control, key.readout

    def of_cell(self, key: CellKey) -> tuple[Any, ...]:
        return self.of_data(key.data), self.of_row(key), -1 if key.seed is None else key.seed


def aggregate(cells: Iterable[Cell], data_sets: Sequence[str], order: Order) -> tuple[Row, ...]:
    """Return the rows in their order; an average must cover all `data_sets`."""
    gathered: dict[CellKey, dict[str, dict[int | None, float]]] = {}
    held_back: Counter[CellKey] = Counter()
    for cell in cells:
        key = replace(cell.key, data="", seed=None)
        gathered.setdefault(key, {}).setdefault(cell.data, {})[cell.seed] = cell.value
        held_back[key] += cell.held_back
    rows = {}
    for key in sorted(gathered, key=order.of_row):
        by_data = gathered[key]
        values = {data: MeanAndError.of(list(by_data[data].values())) for data in data_sets if data in by_data}
        average = _average(values, by_data) if len(values) == len(data_sets) else None
        rows[key] = Row(**vars(key), values=values, average=average, held_back=held_back[key])
    return tuple(replace(row, gain=_gain(row, rows)) for row in rows.values())


def _average(values: dict[str, MeanAndError], by_data: dict[str, dict[int | None, float]]) -> MeanAndError:
    mean = fmean(value.mean for value in values.values())
    seeds = set.intersection(*(set(by_seed) for by_seed in by_data.values()))
    if any(set(by_seed) != seeds for by_seed in by_data.values()):
        return MeanAndError(mean, None, min(value.seeds for value in values.values()))
    return replace(MeanAndError.of([fmean(by_seed[seed] for by_seed in by_data.values()) for seed in seeds]), mean=mean)


def _gain(row: Row, rows: dict[CellKey, Row]) -> float | None:
    """Subtract the target of the same protocol, with the same samples if the protocol itself takes some."""
    key = CellKey("", "target", n=row.n, per_class=row.per_class, protocol=row.protocol)
    target = rows.get(key) or rows.get(replace(key, n=None, per_class=None))
    if row.average is None or target is None or target.average is None:
        return None
    return row.average.mean - target.average.mean
