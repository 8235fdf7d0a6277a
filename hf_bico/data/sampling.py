"""Choose rows by their labels and a seed, the same ones on every machine.

Knows numbers of rows and classes; neither data sets nor models.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hf_bico.settings import DEFAULT_SAMPLES, Settings

if TYPE_CHECKING:
    from torch import Tensor


CANDIDATES = 2000
"""Rows, or 10 times as many as are needed, among which the nearest or farthest from a centroid are searched."""
NEGLIGIBLE_DISTANCE = 1e-6
"""Distances of unit features below this are rounding noise."""

T = TypeVar("T")


def shuffled(items: Iterable[T], seed: int | str) -> list[T]:
    """Return the items in a random order that depends on the seed and their names alone."""
    return sorted(items, key=lambda item: hashlib.blake2b(f"{seed}:{item}".encode()).digest())


def draw_order(size: int, seed: int) -> list[int]:
    """Return the rows in a random order that depends on the seed alone, sorted by a hash of seed and index.

    A sample is the first n of them, so smaller samples are part of larger ones.

    >>> draw_order(5, seed=0)
    [3, 1, 2, 0, 4]
    """
    return shuffled(range(size), seed)


@dataclass(frozen=True)
class RequiredRows:
    """Labelled rows to read: `rows` in all, and `per_class` of each of `classes` (or of those found).

    `is_enough` decides instead where the classes to draw from are not known in advance. With `evenly`, classes share
    the rows as far as twice the budget allows. With `labelled` False, any row will do.
    """

    rows: int
    per_class: int = 0
    classes: Sequence[Any] = ()
    is_enough: Callable[[Counter[Any]], bool] | None = None
    evenly: bool = False
    labelled: bool = True

    def missing(self, found: Counter[Any]) -> list[Any]:
        return [label for label in self.classes or found if found[label] < self.per_class]

    def suffices(self, found: Counter[Any]) -> bool:
        """Return True if the samples can be drawn."""
        if not self.labelled:
            return True
        if self.is_enough is not None:
            return self.is_enough(found)
        return not self.missing(found) if self.per_class and not self.evenly else found.total() >= self.rows

    def is_met(self, found: Counter[Any]) -> bool:
        """Return True if the samples can be drawn and more rows would not make them more even."""
        if not self.evenly:
            return self.suffices(found)
        counts = [min(found[label], self.per_class) for label in self.classes or found]
        return self.suffices(found) and sum(counts) >= self.rows and min(counts) >= self.rows // len(counts)

    def helps(self, some: Counter[Any], found: Counter[Any]) -> bool:
        """Return True if rows with these labels add to what is missing."""
        if self.per_class and (not self.evenly or self.suffices(found)):
            return bool(set(self.missing(found)) & set(some))
        return True

    def may_be_within(self, bounds: tuple[int, int] | None, found: Counter[Any]) -> bool:
        """Return True if a missing label may lie between these bounds."""
        if not self.per_class or bounds is None or (self.evenly and not self.suffices(found)):
            return True
        least, greatest = bounds
        return any(not isinstance(label, int) or least <= label <= greatest for label in self.missing(found))


@dataclass(frozen=True)
class Strategy:
    """A way to choose `n` rows in all, or `per_class` of each class, with a seed."""

    name: str = "random"
    n: int = DEFAULT_SAMPLES
    per_class: int | None = None
    seed: int = 0

    @classmethod
    def from_settings(cls, settings: Settings) -> Strategy:
        n = DEFAULT_SAMPLES if settings.n is None else settings.n
        return cls(settings.sampling, n, settings.per_class, settings.seed)

    @property
    def needs_labels(self) -> bool:
        return self.name != "random" or self.per_class is not None

    @property
    def needs_features(self) -> bool:
        return self.name in ("centroid-near", "centroid-far")

    @property
    def is_even(self) -> bool:
        """True if all classes share the `n` rows evenly."""
        return self.per_class is None and (self.needs_features or self.name == "class-balanced")

    @property
    def leaves_out_classes(self) -> bool:
        return self.name in ("half-class", "one-class")

    def classes(self, sizes: Mapping[int, int]) -> list[int]:
        """Return the classes to take rows from, in an order that the seed gives; empty if no class is large enough."""
        ordered = shuffled((label for label, size in sizes.items() if size), f"{self.seed}:class")
        if self.name == "half-class":
            return ordered[: (len(ordered) + 1) // 2]
        if self.name == "one-class":
            wanted = self.per_class or self.n
            return [label for label in ordered if sizes[label] >= wanted][:1]
        return ordered

    def can_be_drawn(self, sizes: Mapping[int, int]) -> bool:
        """Return True if classes of these sizes have enough rows."""
        classes = self.classes(sizes)
        if self.per_class is None:
            return sum(sizes[label] for label in classes) >= self.n
        return bool(classes) and all(sizes[label] >= self.per_class for label in classes)

    def requirement(self, classes: Sequence[Any]) -> RequiredRows:
        """Return the rows to read before drawing; `classes` are numbers or names, as in the label column."""
        if self.leaves_out_classes:
            number = {label: index for index, label in enumerate(classes)}

            def is_enough(found: Counter[Any]) -> bool:
                return self.can_be_drawn({number.get(label, label): count for label, count in found.items()})

            return RequiredRows(self.per_class or self.n, is_enough=is_enough)
        if self.per_class is not None:
            return RequiredRows(self.per_class * len(classes), self.per_class, classes)
        if self.is_even and classes:
            return RequiredRows(self.n, -(-self.n // len(classes)), classes, evenly=True)
        return RequiredRows(self.n)

    def quotas(self, sizes: Mapping[int, int]) -> dict[int, int]:
        """Return the number of rows to take of each class."""
        classes = self.classes(sizes)
        if self.per_class is not None:
            return dict.fromkeys(classes, self.per_class)
        return even_quotas(self.n, {label: sizes[label] for label in classes})

    def rows(self, order: Sequence[int], labels: Mapping[int, int]) -> list[int]:
        """Return the chosen rows, or the candidates if features decide, in the order given."""
        if not self.needs_labels:
            return list(order[: self.n])
        sizes = Counter(labels[row] for row in order)
        if self.per_class is None and not self.is_even:
            classes = set(self.classes(sizes))
            return [row for row in order if labels[row] in classes][: self.n]
        quotas = self.quotas(sizes)
        chosen = set(fill_quotas(order, labels, quotas))
        if self.needs_features:  # rare classes have their quota already
            chosen |= set(order[: max(CANDIDATES, 10 * sum(quotas.values()))])
        return [row for row in order if row in chosen]

    def by_centroid(
        self, candidates: Sequence[int], labels: Mapping[int, int], sizes: Mapping[int, int], features: Tensor
    ) -> list[int]:
        """Return the candidates nearest to their class's centroid, or farthest from it; of equal ones, the first.

        `features` has a row for each candidate; `sizes` count the rows of each class in the split.
        """
        distances = centroid_distances(features, [labels[row] for row in candidates])
        sign = -1 if self.name == "centroid-far" else 1
        nearest = sorted(range(len(candidates)), key=lambda position: sign * distances[position])
        chosen = set(fill_quotas([candidates[position] for position in nearest], labels, self.quotas(sizes)))
        return [row for row in candidates if row in chosen]


def even_quotas(count: int, sizes: Mapping[int, int]) -> dict[int, int]:
    """Share `count` among classes, one row at a time; a class that runs out leaves the rest to the others.

    >>> even_quotas(8, {2: 9, 0: 1, 1: 9})
    {2: 4, 0: 1, 1: 3}
    """
    quotas = dict.fromkeys(sizes, 0)
    able = list(sizes)
    while count > 0 and (able := [label for label in able if quotas[label] < sizes[label]]):
        for label in able[:count]:
            quotas[label] += 1
        count -= len(able)
    return quotas


def fill_quotas(order: Sequence[int], labels: Mapping[int, int], quotas: Mapping[int, int]) -> list[int]:
    """Return the first rows of each class, up to its quota."""
    left = Counter(quotas)
    chosen = []
    for row in order:
        if left[labels[row]] > 0:
            left[labels[row]] -= 1
            chosen.append(row)
    return chosen


def centroid_distances(features: Tensor, labels: Sequence[int]) -> list[float]:
    """Return each sample's distance from the mean of its class, of unit features."""
    import torch
    from torch.nn.functional import normalize

    unit = normalize(features.detach().to("cpu", torch.float64), dim=1)
    classes = torch.tensor(labels)
    distances = torch.zeros(len(labels), dtype=torch.float64)
    for label in sorted(set(labels)):
        members = classes == label
        distances[members] = (unit[members] - unit[members].mean(0)).norm(dim=1)
    # to 6 significant digits, so that the nearest samples do not depend on a machine's last bits
    return [0.0 if distance < NEGLIGIBLE_DISTANCE else float(f"{distance:.6g}") for distance in distances.tolist()]
