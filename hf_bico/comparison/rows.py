"""Many measured numbers as few: means and standard deviations over seeds, averages over data sets, gains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import Any

from hf_bico.comparison.cells import LOSS, Cell, CellKey, Order, group, is_reference, label


@dataclass(frozen=True)
class Spread:
    """A mean over seeds, with the sample standard deviation where there are several."""

    mean: float
    std: float | None = None
    seeds: int = 1

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
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
    values: dict[str, Spread]
    average: Spread | None = None
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
    values = {data: Spread.of(list(found[data].values())) for data in data_sets if data in found}
    return Row(
        label=label(key),
        values=values,
        average=_average(values, found) if len(values) == len(data_sets) else None,
        **{name: value for name, value in key._asdict().items() if name not in ("data", "seed")},
    )


def _average(values: dict[str, Spread], found: dict[str, dict[int | None, float]]) -> Spread:
    mean = fmean(spread.mean for spread in values.values())
    seeds = set.intersection(*(set(by_seed) for by_seed in found.values()))
    if any(set(by_seed) != seeds for by_seed in found.values()):
        return Spread(mean, None, min(spread.seeds for spread in values.values()))
    return replace(Spread.of([fmean(by_seed[seed] for by_seed in found.values()) for seed in seeds]), mean=mean)


def _gain(row: Row, rows: dict[CellKey, Row]) -> float | None:
    """Over the target of the same protocol, with the same samples where the protocol itself takes some."""
    own = CellKey("", "target", row.n, row.per_class, protocol=row.protocol)
    target = rows.get(own) or rows.get(own._replace(n=None, per_class=None))
    if row.average is None or target is None or target.average is None:
        return None
    return row.average.mean - target.average.mean
