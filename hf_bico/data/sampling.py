"""Which rows: the ways to choose among rows by their labels and a seed, the same ones on every machine.

Knows numbers of rows and of classes; neither data sets nor models.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_bico.settings import DEFAULT_SAMPLES, Settings

if TYPE_CHECKING:
    from torch import Tensor


CANDIDATES = 2000
"""Among so many rows, or 10 times as many as are wanted, the nearest or farthest are looked for."""
NEGLIGIBLE = 1e-6
"""A distance below this, of features of length one, is the noise of their arithmetic."""


def draw_order(size: int, seed: int) -> list[int]:
    """A random order of `size` rows that depends on the seed alone: rows sorted by a hash of seed and index.

    The first n of it are the sample, so smaller samples are part of larger ones.

    >>> draw_order(5, seed=0)
    [3, 1, 2, 0, 4]
    """
    return sorted(range(size), key=lambda index: hashlib.blake2b(f"{seed}:{index}".encode()).digest())


@dataclass(frozen=True)
class Wanted:
    """How many labelled rows are needed: `rows` in all, and `each` of every one of `classes` (or of those seen).

    `enough` says it better where the classes to draw from are not known before. `evenly` shares the rows among the
    classes, as far as twice the budget allows. Rows need not be `labelled`.
    """

    rows: int
    each: int = 0
    classes: Sequence[Any] = ()
    enough: Callable[[Counter[Any]], bool] | None = None
    evenly: bool = False
    labelled: bool = True

    def missing(self, found: Counter[Any]) -> list[Any]:
        return [label for label in self.classes or found if found[label] < self.each]

    def suffices(self, found: Counter[Any]) -> bool:
        """Whether the samples can be drawn."""
        if not self.labelled:
            return True
        if self.enough is not None:
            return self.enough(found)
        return not self.missing(found) if self.each and not self.evenly else found.total() >= self.rows

    def is_met(self, found: Counter[Any]) -> bool:
        """Whether the samples can be drawn as well as may be."""
        return self.suffices(found) and (not self.evenly or self._is_even(found))

    def _is_even(self, found: Counter[Any]) -> bool:
        counts = [min(found[label], self.each) for label in self.classes or found]
        return sum(counts) >= self.rows and min(counts) >= self.rows // len(counts)

    def helps(self, some: Counter[Any], found: Counter[Any]) -> bool:
        """Whether rows with these labels bring nearer what is wanted."""
        if self.each and (not self.evenly or self.suffices(found)):
            return bool(set(self.missing(found)) & set(some))
        return True

    def may_be_within(self, bounds: tuple[int, int] | None, found: Counter[Any]) -> bool:
        """Whether labels between these bounds may be of use."""
        if not self.each or bounds is None or (self.evenly and not self.suffices(found)):
            return True
        least, greatest = bounds
        return any(not isinstance(label, int) or least <= label <= greatest for label in self.missing(found))


@dataclass(frozen=True)
class Strategy:
    """How rows are chosen: `n` in all or `per_class` of each class, in the way of that name, by a seed."""

    name: str = "random"
    n: int = DEFAULT_SAMPLES
    per_class: int | None = None
    seed: int = 0

    @classmethod
    def of(cls, settings: Settings) -> Strategy:
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
        """Whether all classes share the `n` rows evenly."""
        return self.per_class is None and (self.needs_features or self.name == "class-balanced")

    @property
    def leaves_out_classes(self) -> bool:
        return self.name in ("half-class", "one-class")

    def classes(self, sizes: Mapping[int, int]) -> list[int]:
        """The classes to take rows from, in an order that the seed gives; none if one class must do and none can."""
        there = [label for label, size in sizes.items() if size]
        ordered = sorted(there, key=lambda label: hashlib.blake2b(f"{self.seed}:class:{label}".encode()).digest())
        if self.name == "half-class":
            return ordered[: (len(ordered) + 1) // 2]
        if self.name == "one-class":
            wanted = self.per_class or self.n
            return [label for label in ordered if sizes[label] >= wanted][:1]
        return ordered

    def can_be_drawn(self, sizes: Mapping[int, int]) -> bool:
        """Whether classes of these sizes have enough rows."""
        classes = self.classes(sizes)
        if self.per_class is None:
            return sum(sizes[label] for label in classes) >= self.n
        return bool(classes) and all(sizes[label] >= self.per_class for label in classes)

    def wanted(self, classes: Sequence[Any]) -> Wanted:
        """What must be read to draw from, of `classes` that are numbers or names, as the label column has them."""
        if self.leaves_out_classes:
            number = {label: index for index, label in enumerate(classes)}

            def enough(found: Counter[Any]) -> bool:
                return self.can_be_drawn({number.get(label, label): count for label, count in found.items()})

            return Wanted(self.per_class or self.n, enough=enough)
        if self.per_class is not None:
            return Wanted(self.per_class * len(classes), self.per_class, classes)
        if self.is_even and classes:
            return Wanted(self.n, -(-self.n // len(classes)), classes, evenly=True)
        return Wanted(self.n)

    def quotas(self, sizes: Mapping[int, int]) -> dict[int, int]:
        """How many rows of each class are taken, where that does not follow from the order of the rows."""
        classes = self.classes(sizes)
        if self.per_class is not None:
            return dict.fromkeys(classes, self.per_class)
        return shared_evenly(self.n, {label: sizes[label] for label in classes})

    def rows(self, order: Sequence[int], labels: Mapping[int, int]) -> list[int]:
        """The rows that are chosen, or the candidates where features decide, in the order in which all are given."""
        if not self.needs_labels:
            return list(order[: self.n])
        sizes = Counter(labels[row] for row in order)
        if self.per_class is None and not self.is_even:
            classes = set(self.classes(sizes))
            return [row for row in order if labels[row] in classes][: self.n]
        quotas = self.quotas(sizes)
        chosen = set(first_of_each(order, labels, quotas))
        if self.needs_features:  # rare classes are there as often as they are wanted
            chosen |= set(order[: max(CANDIDATES, 10 * sum(quotas.values()))])
        return [row for row in order if row in chosen]

    def by_centroid(
        self, candidates: Sequence[int], labels: Mapping[int, int], sizes: Mapping[int, int], features: Tensor
    ) -> list[int]:
        """Those of the candidates that lie nearest to their class's centroid, or farthest from it.

        `features` has a row for each candidate, `sizes` are those of the classes among all rows. Of equal distances,
        the first one is taken.
        """
        distances = centroid_distances(features, [labels[row] for row in candidates])
        sign = -1 if self.name == "centroid-far" else 1
        places = sorted(range(len(candidates)), key=lambda place: (sign * distances[place], place))
        chosen = set(first_of_each([candidates[place] for place in places], labels, self.quotas(sizes)))
        return [row for row in candidates if row in chosen]


def shared_evenly(count: int, sizes: Mapping[int, int]) -> dict[int, int]:
    """How many each class gives, one by one in turn; one that runs out leaves the rest to the others.

    >>> shared_evenly(8, {2: 9, 0: 1, 1: 9})
    {2: 4, 0: 1, 1: 3}
    """
    quotas = dict.fromkeys(sizes, 0)
    able = list(sizes)
    while count > 0 and (able := [label for label in able if quotas[label] < sizes[label]]):
        for label in able[:count]:
            quotas[label] += 1
        count -= len(able)
    return quotas


def first_of_each(order: Sequence[int], labels: Mapping[int, int], quotas: Mapping[int, int]) -> list[int]:
    """The first rows of each class, as many as its quota says."""
    left = Counter(quotas)
    chosen = []
    for row in order:
        if left[labels[row]] > 0:
            left[labels[row]] -= 1
            chosen.append(row)
    return chosen


def centroid_distances(features: Tensor, labels: Sequence[int]) -> list[float]:
    """How far each sample is from the mean of its class, of features that are brought to length one.

    Rounded to 6 significant digits: which samples are nearest must not depend on a machine's last bits.
    """
    import torch
    from torch.nn.functional import normalize

    unit = normalize(features.detach().to("cpu", torch.float64), dim=1)
    classes = torch.tensor(labels)
    distances = torch.zeros(len(labels), dtype=torch.float64)
    for label in sorted(set(labels)):
        members = classes == label
        distances[members] = (unit[members] - unit[members].mean(0)).norm(dim=1)
    return [0.0 if distance < NEGLIGIBLE else float(f"{distance:.6g}") for distance in distances.tolist()]
