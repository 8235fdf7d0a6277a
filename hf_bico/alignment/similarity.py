"""Compare paired activations: linear CKA, cosines and drift. Knows tensors; no models."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Return the linear CKA, 0 to 1, of x (n, d1) and y (n, d2), whose rows are pairs.

    It is 1 where y is x rotated, scaled and shifted, and 0 where a side is constant.
    """
    x, y = _centred(x), _centred(y)
    if max(x.shape[1], y.shape[1]) > len(x):  # (n, n) is smaller than (d, d)
        gram_x, gram_y = x @ x.T, y @ y.T
        return _alignment(gram_x * gram_y, gram_x, gram_y)
    return _alignment((x.T @ y).square(), x.T @ x, y.T @ y)


def _centred(rows: Tensor) -> Tensor:
    """Return rows minus their mean in float64, scaled to about 1; exactly 0 where all rows are equal."""
    rows = rows.to(torch.float64)
    rows = rows - rows[:1]
    largest = rows.abs().max()
    rows = rows if largest == 0 else rows / largest
    return rows - rows.mean(0)


class Likeness:
    """Similarity of two models' paired rows, before and after the map R (d1, d2) is applied to the first.

    Rows come batch by batch and are not kept: CKA is computed from sums of products, cosines row by row. Zero rows have
    no direction, and count in CKA only.
    """

    def __init__(self, rotation: Tensor) -> None:
        self.rotation = rotation.double()
        first, second = rotation.shape
        self.rows = 0
        self.widths = (first, second)
        self._sums = [self.rotation.new_zeros(width) for width in (first, second)]
        shapes = ((first, first), (second, second), (first, second))
        self._products = [self.rotation.new_zeros(shape) for shape in shapes]
        self._before, self._after = RunningMean(), RunningMean()
        self._first: tuple[Tensor, Tensor] | None = None

    def add(self, x: Tensor, y: Tensor) -> None:
        x, y = (rows.to(self.rotation) for rows in (x, y))
        self.rows += len(x)
        if self.widths[0] == self.widths[1]:
            self._before.add(1 - cosine_distances(x, y))
        self._after.add(1 - cosine_distances(x @ self.rotation, y))
        # rows minus the first row: next to large means, products would lose the digits of what varies
        if self._first is None:
            self._first = x[:1], y[:1]
        x, y = x - self._first[0], y - self._first[1]
        for total, rows in zip(self._sums, (x, y), strict=True):
            total += rows.sum(0)
        for product, (left, right) in zip(self._products, ((x, x), (y, y), (x, y)), strict=True):
            product.addmm_(left.T, right)

    @property
    def cosine(self) -> float | None:
        """Mean cosine before the map; None where the widths differ."""
        return self._before.value if self.widths[0] == self.widths[1] else None

    @property
    def cosine_aligned(self) -> float:
        return self._after.value

    @property
    def cka(self) -> float:
        own_x, own_y, shared = self._centred()
        return _alignment(shared.square(), own_x, own_y)

    @property
    def cka_aligned(self) -> float:
        own_x, own_y, shared = self._centred()
        return _alignment((self.rotation.T @ shared).square(), self.rotation.T @ own_x @ self.rotation, own_y)

    def _centred(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return X^T X, Y^T Y and X^T Y of the rows minus their means."""
        x, y = self._sums
        own_x, own_y, shared = self._products
        return (
            own_x - torch.outer(x, x) / self.rows,
            own_y - torch.outer(y, y) / self.rows,
            shared - torch.outer(x, y) / self.rows,
        )


def _alignment(shared: Tensor, own_x: Tensor, own_y: Tensor) -> float:
    norms = own_x.norm() * own_y.norm()
    return 0.0 if norms == 0 else min(1.0, float(shared.sum() / norms))


class ActivationDrift:
    """How far rows have drifted: in direction, and in length relative to the old one."""

    def __init__(self) -> None:
        self._direction, self._magnitude = RunningMean(), RunningMean()

    def add(self, before: Tensor, after: Tensor) -> None:
        before, after = before.double(), after.double()
        self._direction.add(cosine_distances(before, after))
        lengths = before.norm(dim=-1)
        self._magnitude.add(((after.norm(dim=-1) - lengths).abs() / lengths)[lengths > 0])

    @property
    def direction(self) -> float:
        return self._direction.value

    @property
    def magnitude(self) -> float:
        return self._magnitude.value


def cosine_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return 1 - cos of paired rows, exactly 0 where they are equal; leave out pairs with a zero row.

    >>> x, y = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 3.0], [1.0, 0.0], [1.0, 0.0]])
    >>> cosine_distances(x, y)
    tensor([1., 0.])
    """
    lengths = x.norm(dim=-1, keepdim=True), y.norm(dim=-1, keepdim=True)
    nonzero = ((lengths[0] > 0) & (lengths[1] > 0)).squeeze(-1)
    one, other = (rows[nonzero] / length[nonzero] for rows, length in zip((x, y), lengths, strict=True))
    distances: Tensor = (one - other).square().sum(-1) / 2
    return distances


class RunningMean:
    """Mean of numbers that come in batches; 0 if there are none."""

    def __init__(self) -> None:
        self._total: Tensor | float = 0.0
        self._count = 0

    def add(self, numbers: Tensor) -> None:
        self._total = self._total + numbers.sum()
        self._count += len(numbers)

    @property
    def value(self) -> float:
        return float(self._total) / self._count if self._count else 0.0
