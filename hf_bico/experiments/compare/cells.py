"""Defines the measured numbers of a comparison, their order, and their means and gains. Measures and writes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from math import isfinite
from statistics import fmean, stdev
from typing import Any

from hf_bico.settings import METHODS, method_info

LOSS = "loss"
"""The protocol whose numbers are losses, not accuracies: less is better."""
REFERENCE_LABELS = {
    "target": "target, zero-shot",
    "base": "source, before it was fine-tuned",
    "source": "source, fine-tuned",
    "target fine-tuned": "target, fine-tuned",
}
REFERENCES = tuple(REFERENCE_LABELS)
"""The models that methods are compared with; nothing is carried to them."""


def method_label(name: str) -> str:
    """Return the name of a method or reference in words."""
    return REFERENCE_LABELS.get(name) or method_info(name).label


@dataclass(frozen=True)
class CellKey:
    """Identifies a number: data set, method, samples (`n` in all, or `per_class`), the draw's seed, and variants.

    `n`, `per_class` and `seed` are None where the method takes no samples; `control` means that the two models saw
    different samples, `readout` that the readout was corrected; `protocol` is None for zero-shot, "probe", or "loss".
    """

    data: str
    method: str
    _: KW_ONLY
    n: int | None = None
    per_class: int | None = None
    seed: int | None = None
    control: bool = False
    readout: bool = False
    protocol: str | None = None

    def with_value(self, value: float) -> Cell:
        return Cell(value=value, **vars(self))


@dataclass(frozen=True)
class Cell(CellKey):
    """One measured number, an accuracy between 0 and 1 or a loss, with the fields of its key."""

    value: float

    def __post_init__(self) -> None:
        if not isfinite(self.value):
            raise ValueError(f"what was measured of {self.method} on {self.data} is {self.value}")
        if self.n is not None and self.per_class is not None:
            raise ValueError(f"{self.method} on {self.data} has both n and per_class")

    @property
    def key(self) -> CellKey:
        """All fields but the value."""
        return CellKey(**{field.name: getattr(self, field.name) for field in fields(CellKey)})

    def as_dict(self) -> dict[str, Any]:
        return {"data": self.data, "method": self.method, "value": self.value} | vars(self)


@dataclass(frozen=True)
class Refusal:
    """The reason why a method cannot carry between these models, or on this data set, in one line."""

    method: str
    reason: str
    data: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _in_rows() -> tuple[str, ...]:
    return tuple(sorted(METHODS, key=lambda name: METHODS[name].row))


@dataclass(frozen=True)
class Order:
    """Sort keys of numbers: methods and data sets as given; then registered methods, then by name."""

    methods: Sequence[str] = ()
    data_sets: Sequence[str] = ()

    def of_method(self, method: str) -> tuple[int, int, str]:
        for rank, names in enumerate((REFERENCES, self.methods, _in_rows())):
            if method in names:
                return rank, names.index(method), ""
        return 3, 0, method

    def of_data(self, data: str) -> tuple[int, str]:
        return (self.data_sets.index(data), "") if data in self.data_sets else (len(self.data_sets), data)

    def of_row(self, key: CellKey) -> tuple[Any, ...]:
        """Sort by `group`, then by method, the plain one before its variants."""
        return *group(key), self.of_method(key.method), key.control, key.readout

    def of_cell(self, key: CellKey) -> tuple[Any, ...]:
        return self.of_data(key.data), self.of_row(key), -1 if key.seed is None else key.seed


def is_reference(key: CellKey) -> bool:
    """Return True for an existing model that is measured without calibration samples."""
    return key.method in REFERENCES and key.n is None and key.per_class is None and not key.readout


def group(key: CellKey) -> tuple[Any, ...]:
    """Return the sort key of a table's groups: references, methods without samples, then each number of samples."""
    kind = 0 if is_reference(key) else 2 if key.n is not None else 3 if key.per_class is not None else 1
    return key.protocol or "", kind, key.n or key.per_class or 0


def cell_line(cell: Cell) -> str:
    """Return a number as one line of text.

    >>> cell_line(Cell("digits", "bico", 0.596, n=100, seed=0))
    'digits: BiCo, N = 100, seed 0: 59.6%'
    """
    size = "" if cell.n is None else f", N = {cell.n}"
    size += "" if cell.per_class is None else f", {cell.per_class} of each class"
    size += "" if cell.seed is None else f", seed {cell.seed}"
    value = f"loss {cell.value:.3f}" if cell.protocol == LOSS else f"{cell.value:.1%}"
    return f"{cell.data}: {label(cell.key)}{size}: {value}"


def label(key: CellKey) -> str:
    """Return the name of a method and its variant.

    >>> label(CellKey("digits", "bico", n=100, control=True))
    'BiCo, mispaired'
    >>> label(CellKey("digits", "target", n=100, readout=True))
    'target, readout'
    """
    name = method_label(key.method)
    if key.method == "target" and (key.readout or key.protocol):
        name = "target"
    protocol = None if key.protocol == LOSS else key.protocol
    variants = ("mispaired" if key.control else None, "readout" if key.readout else None, protocol)
    return ", ".join([name, *filter(None, variants)])


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
class Row:
    """One method with one number of samples: its accuracy, or its loss, on each data set.

    `average` is the mean of the data sets' means, None unless all of them were measured; its standard deviation is
    that of the seeds' own averages, None unless every data set has every seed. `gain` is the average less that of the
    untouched target, measured in the same way.
    """

    label: str
    method: str
    n: int | None
    per_class: int | None
    control: bool
    readout: bool
    protocol: str | None
    values: dict[str, MeanAndError]
    average: MeanAndError | None = None
    gain: float | None = None

    @property
    def key(self) -> CellKey:
        """The key of its cells, without data set and seed."""
        names = (field.name for field in fields(CellKey) if field.name not in ("data", "seed"))
        return CellKey(data="", **{name: getattr(self, name) for name in names})

    @property
    def group(self) -> tuple[Any, ...]:
        return group(self.key)

    @property
    def is_reference(self) -> bool:
        return is_reference(self.key)

    @property
    def size(self) -> int | None:
        """The number of calibration samples, in all or of each class."""
        return self.per_class if self.n is None else self.n

    @property
    def is_loss(self) -> bool:
        return self.protocol == LOSS

    @property
    def better(self) -> float | None:
        """The gain over the untouched target, with the sign turned for a loss."""
        return None if self.gain is None else -self.gain if self.is_loss else self.gain

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def aggregate(cells: Iterable[Cell], data_sets: Sequence[str], order: Order) -> tuple[Row, ...]:
    """Return the rows in their order; an average must cover all `data_sets`."""
    gathered: dict[CellKey, dict[str, dict[int | None, float]]] = {}
    for cell in cells:
        key = replace(cell.key, data="", seed=None)
        gathered.setdefault(key, {}).setdefault(cell.data, {})[cell.seed] = cell.value
    rows = {key: _row(key, gathered[key], data_sets) for key in sorted(gathered, key=order.of_row)}
    return tuple(replace(row, gain=_gain(row, rows)) for row in rows.values())


def _row(key: CellKey, by_data: dict[str, dict[int | None, float]], data_sets: Sequence[str]) -> Row:
    values = {data: MeanAndError.of(list(by_data[data].values())) for data in data_sets if data in by_data}
    return Row(
        label=label(key),
        values=values,
        average=_average(values, by_data) if len(values) == len(data_sets) else None,
        **{name: value for name, value in vars(key).items() if name not in ("data", "seed")},
    )


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
