"""How alike two models see the same things: linear CKA of paired rows. Knows tensors, and no models."""

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
        shared, norms = (gram_x * gram_y).sum(), gram_x.norm() * gram_y.norm()
    else:
        shared, norms = (x.T @ y).square().sum(), (x.T @ x).norm() * (y.T @ y).norm()
    return 0.0 if norms == 0 else min(1.0, float(shared / norms))


def _centred(rows: Tensor) -> Tensor:
    """Rows less their mean, in float64, the largest entry about 1; exactly 0 where all rows are equal."""
    rows = rows.to(torch.float64)
    rows = rows - rows[:1]
    largest = rows.abs().max()
    rows = rows if largest == 0 else rows / largest
    return rows - rows.mean(0)
