"""How alike two models see the same things: linear CKA and cosines of paired rows. Knows tensors, and no models."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_cka(x: Tensor, y: Tensor) -> float:
    """The centred linear kernel alignment of x (n, d1) and y (n, d2), whose rows are pairs: 0 to 1.

    It is 1 where y is x rotated, scaled and shifted, and 0 where a side is constant.
    """
    x, y = _centred(x), _centred(y)
    if max(x.shape[1], y.shape[1]) > len(x):  # (n, n) is less than (d, d)
        gram_x, gram_y = x @ x.T, y @ y.T
        norms = gram_x.norm() * gram_y.norm()
        return 0.0 if norms == 0 else min(1.0, float((gram_x * gram_y).sum() / norms))
    return _alignment(x.T @ y, x.T @ x, y.T @ y)


def _centred(rows: Tensor) -> Tensor:
    """Rows less their mean, in float64, the largest entry about 1; exactly 0 where all rows are equal."""
    rows = rows.to(torch.float64)
    rows = rows - rows[:1]
    largest = rows.abs().max()
    rows = rows if largest == 0 else rows / largest
    return rows - rows.mean(0)


class Likeness:
    """How alike paired rows of two models are, before and after `turn` (d1, d2) is applied to those of the first.

    Rows come batch by batch and are not kept: linear CKA is found from sums of products, cosines row by row. Rows of
    nothing but zeros have no direction, and count in CKA alone.
    """

    def __init__(self, turn: Tensor) -> None:
        self.turn = turn.double()
        widths = turn.shape
        self.rows = 0
        self.widths = (widths[0], widths[1])
        self._sums = [torch.zeros(width, dtype=torch.float64, device=turn.device) for width in widths]
        self._products = [
            torch.zeros(shape, dtype=torch.float64, device=turn.device)
            for shape in ((widths[0], widths[0]), (widths[1], widths[1]), tuple(widths))
        ]
        self._before, self._after = MeanOfRows(), MeanOfRows()
        self._first: tuple[Tensor, Tensor] | None = None

    def add(self, x: Tensor, y: Tensor) -> None:
        x, y = (rows.to(self.turn) for rows in (x, y))
        self.rows += len(x)
        self._add_centred(x, y)
        if self.widths[0] == self.widths[1]:
            self._before.add(1 - turned_away(x, y))
        self._after.add(1 - turned_away(x @ self.turn, y))

    def _add_centred(self, x: Tensor, y: Tensor) -> None:
        """Sums of what is left of the first rows: of large means, products would keep no digits of what varies."""
        if self._first is None:
            self._first = x[:1], y[:1]
        x, y = x - self._first[0], y - self._first[1]
        for total, rows in zip(self._sums, (x, y), strict=True):
            total += rows.sum(0)
        for product, (left, right) in zip(self._products, ((x, x), (y, y), (x, y)), strict=True):
            product.addmm_(left.T, right)

    @property
    def cosine(self) -> float | None:
        """Of the rows as they are; None where they have other coordinates."""
        return self._before.value if self.widths[0] == self.widths[1] else None

    @property
    def cosine_aligned(self) -> float:
        return self._after.value

    @property
    def cka(self) -> float:
        own_x, own_y, shared = self._centred()
        return _alignment(shared, own_x, own_y)

    @property
    def cka_aligned(self) -> float:
        own_x, own_y, shared = self._centred()
        return _alignment(self.turn.T @ shared, self.turn.T @ own_x @ self.turn, own_y)

    def _centred(self) -> tuple[Tensor, Tensor, Tensor]:
        """X^T X, Y^T Y and X^T Y of the rows less their means."""
        x, y = self._sums
        own_x, own_y, shared = self._products
        return (
            own_x - torch.outer(x, x) / self.rows,
            own_y - torch.outer(y, y) / self.rows,
            shared - torch.outer(x, y) / self.rows,
        )


def _alignment(shared: Tensor, own_x: Tensor, own_y: Tensor) -> float:
    norms = own_x.norm() * own_y.norm()
    return 0.0 if norms == 0 else min(1.0, float(shared.square().sum() / norms))


class Moved:
    """How far rows have moved from what they were: in direction, and in length as a share of what that was."""

    def __init__(self) -> None:
        self._direction, self._magnitude = MeanOfRows(), MeanOfRows()

    def add(self, before: Tensor, now: Tensor) -> None:
        before, now = before.double(), now.double()
        self._direction.add(turned_away(before, now))
        lengths = before.norm(dim=-1)
        self._magnitude.add(((now.norm(dim=-1) - lengths).abs() / lengths)[lengths > 0])

    @property
    def direction(self) -> float:
        return self._direction.value

    @property
    def magnitude(self) -> float:
        return self._magnitude.value


def turned_away(x: Tensor, y: Tensor) -> Tensor:
    """1 - cos of paired rows, exactly 0 where they are equal; of pairs without a row of nothing but zeros.

    >>> x, y = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 3.0], [1.0, 0.0], [1.0, 0.0]])
    >>> turned_away(x, y)
    tensor([1., 0.])
    """
    lengths = x.norm(dim=-1, keepdim=True), y.norm(dim=-1, keepdim=True)
    told = ((lengths[0] > 0) & (lengths[1] > 0)).squeeze(-1)
    one, other = (rows[told] / length[told] for rows, length in zip((x, y), lengths, strict=True))
    found: Tensor = (one - other).square().sum(-1) / 2
    return found


class MeanOfRows:
    """The mean of numbers that come some at a time; 0 of none."""

    def __init__(self) -> None:
        self._total: Tensor | float = 0.0
        self._count = 0

    def add(self, numbers: Tensor) -> None:
        self._total = self._total + numbers.sum()
        self._count += len(numbers)

    @property
    def value(self) -> float:
        return float(self._total) / self._count if self._count else 0.0
