"""One number; means and gains.

One measured number, what it is of, and its place among the others.

Many measured numbers as few: means and standard deviations over seeds, averages over data sets, gains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from statistics import fmean, stdev
from typing import Any, NamedTuple

from hf_bico.settings import METHODS, method_info

LOSS = "loss"
"""The protocol whose numbers are losses, of which less is better, and no accuracies."""
REFERENCE_LABELS = {
    "target": "target, zero-shot",
    "base": "source, before it was fine-tuned",
    "source": "source, fine-tuned",
    "target fine-tuned": "target, fine-tuned",
}
REFERENCES = tuple(REFERENCE_LABELS)
"""What the methods are held against: nothing is carried."""


def method_label(name: str) -> str:
    """Return the name of a method or reference in words."""
    return REFERENCE_LABELS.get(name) or method_info(name).label


class CellKey(NamedTuple):
    """What a number is of: data set, method, samples (`n` in all, or `per_class`), the draw's seed, and variants.

    `n`, `per_class` and `seed` are None where the method takes no samples; `control` means that the two models saw
    different samples, `readout` that the readout was corrected; `protocol` is None for zero-shot, "probe", or "loss".
    """

    data: str
    method: str
    n: int | None = None
    per_class: int | None = None
    seed: int | None = None
    control: bool = False
    readout: bool = False
    protocol: str | None = None

    def measured(self, value: float) -> Cell:
        return Cell(value=value, **self._asdict())


@dataclass(frozen=True)
class Cell:
    """One measured number: an accuracy, between 0 and 1, or a loss, and what it is of, as in `CellKey`."""

    data: str
    method: str
    value: float
    n: int | None = None
    per_class: int | None = None
    seed: int | None = None
    control: bool = False
    readout: bool = False
    protocol: str | None = None

    def __post_init__(self) -> None:
        if not isfinite(self.value):
            raise ValueError(f"what was measured of {self.method} on {self.data} is {self.value}")
        if self.n is not None and self.per_class is not None:
            raise ValueError(f"{self.method} on {self.data} has both n and per_class")

    @property
    def key(self) -> CellKey:
        """All but the value."""
        return CellKey(**{name: getattr(self, name) for name in CellKey._fields})


@dataclass(frozen=True)
class Refusal:
    """What a method could not do for this pair of models, or on this data set, in one line."""

    method: str
    reason: str
    data: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _in_rows() -> tuple[str, ...]:
    return tuple(sorted(METHODS, key=lambda name: METHODS[name].row))


@dataclass(frozen=True)
class Order:
    """The place of every number: methods and data sets as given, then registered methods, then by name."""

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
        """By `group`, then by method, the plain one before its variants."""
        return *group(key), self.of_method(key.method), key.control, key.readout

    def of_cell(self, key: CellKey) -> tuple[Any, ...]:
        return self.of_data(key.data), self.of_row(key), -1 if key.seed is None else key.seed


def is_reference(key: CellKey) -> bool:
    """Whether it is a model that is there already, measured without any calibration sample."""
    return key.method in REFERENCES and key.n is None and key.per_class is None and not key.readout


def group(key: CellKey) -> tuple[Any, ...]:
    """What stands together in a table: references, methods without samples, then each number of samples."""
    kind = 0 if is_reference(key) else 2 if key.n is not None else 3 if key.per_class is not None else 1
    return key.protocol or "", kind, key.n or key.per_class or 0


def cell_line(cell: Cell) -> str:
    """One number in a line.

    >>> cell_line(Cell("digits", "bico", 0.596, n=100, seed=0))
    'digits: BiCo, N = 100, seed 0: 59.6%'
    """
    size = "" if cell.n is None else f", N = {cell.n}"
    size += "" if cell.per_class is None else f", {cell.per_class} of each class"
    size += "" if cell.seed is None else f", seed {cell.seed}"
    value = f"loss {cell.value:.3f}" if cell.protocol == LOSS else f"{cell.value:.1%}"
    return f"{cell.data}: {label(cell.key)}{size}: {value}"


def label(key: CellKey) -> str:
    """A method and its variant in words.

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
        """That of its cells, without data set and seed."""
        return CellKey("", self.method, self.n, self.per_class, None, self.control, self.readout, self.protocol)

    @property
    def group(self) -> tuple[Any, ...]:
        """Rows of the same group stand together in a table."""
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
        """How much better than the untouched target: the gain, or of a loss what it is less."""
        return None if self.gain is None else -self.gain if self.is_loss else self.gain

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def aggregate(cells: Iterable[Cell], data_sets: Sequence[str], order: Order) -> tuple[Row, ...]:
    """The rows in their order; `data_sets` are those that an average must cover."""
    gathered: dict[CellKey, dict[str, dict[int | None, float]]] = {}
    for cell in cells:
        key = cell.key._replace(data="", seed=None)
        gathered.setdefault(key, {}).setdefault(cell.data, {})[cell.seed] = cell.value
    rows = {key: _row(key, gathered[key], data_sets) for key in sorted(gathered, key=order.of_row)}
    return tuple(replace(row, gain=_gain(row, rows)) for row in rows.values())


def _row(key: CellKey, found: dict[str, dict[int | None, float]], data_sets: Sequence[str]) -> Row:
    values = {data: MeanAndError.of(list(found[data].values())) for data in data_sets if data in found}
    return Row(
        label=label(key),
        values=values,
        average=_average(values, found) if len(values) == len(data_sets) else None,
        **{name: value for name, value in key._asdict().items() if name not in ("data", "seed")},
    )


def _average(values: dict[str, MeanAndError], found: dict[str, dict[int | None, float]]) -> MeanAndError:
    mean = fmean(spread.mean for spread in values.values())
    seeds = set.intersection(*(set(by_seed) for by_seed in found.values()))
    if any(set(by_seed) != seeds for by_seed in found.values()):
        return MeanAndError(mean, None, min(spread.seeds for spread in values.values()))
    return replace(MeanAndError.of([fmean(by_seed[seed] for by_seed in found.values()) for seed in seeds]), mean=mean)


def _gain(row: Row, rows: dict[CellKey, Row]) -> float | None:
    """Over the target of the same protocol, with the same samples where the protocol itself takes some."""
    own = CellKey("", "target", row.n, row.per_class, protocol=row.protocol)
    target = rows.get(own) or rows.get(own._replace(n=None, per_class=None))
    if row.average is None or target is None or target.average is None:
        return None
    return row.average.mean - target.average.mean
