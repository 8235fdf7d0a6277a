"""Iterations that move the singular values of matrices: to one, or apart at a threshold, with products only.

Knows batches of real matrices: not what a map is, nor which answers are good enough.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = tuple[float, float, float]

STEPS = 6
"""Lanczos steps between two looks at the residual."""

MOST_STEPS = 96
"""Lanczos steps after which the estimate is taken as it is."""

KNOWN = 1e-5
"""Lanczos stops where the largest eigenvalue is known to this share of itself."""

BLOCKED = 256
"""From which size on inverses are put together from blocks: the libraries' own are slow on GPUs."""

LEAF = 192
"""The largest of those blocks."""

NEWTON: Weights = (15 / 8, -10 / 8, 3 / 8)
"""The odd polynomial of degree 5 that turns an error e from one into 2.5 e^3."""


def largest(grams: Tensor) -> Tensor:
    """The largest eigenvalue of each positive matrix, by Lanczos; the start is the same in every run."""
    size = grams.shape[-1]
    start = torch.randn(size, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(grams.device)
    vector = (start / start.norm()).expand(grams.shape[0], -1, -1)
    before = torch.zeros_like(vector)
    below = torch.zeros_like(vector[:, :1])
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    for step in range(1, MOST_STEPS + 1):
        image = torch.bmm(grams, vector).addcmul_(before, below, value=-1.0)
        along = (image * vector).sum(-2, keepdim=True)
        image.addcmul_(vector, along, value=-1.0)
        before, below = vector, torch.linalg.vector_norm(image, dim=-2, keepdim=True)
        vector = image / below.clamp(min=1e-300)
        diagonal.append(along)
        beside.append(below)
        if step % STEPS == 0 or step == MOST_STEPS:
            found, error = _ritz(torch.cat(diagonal, -1)[:, 0], torch.cat(beside, -1)[:, 0])
            if bool((error <= KNOWN * found).all()) or step >= size:
                break
    return found.to(grams.device)


def _ritz(diagonal: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
    """The largest eigenvalue of the tridiagonal matrices, and its distance from one of the large matrix."""
    both = torch.stack([diagonal, beside]).cpu()
    matrix = torch.diag_embed(both[0])
    matrix += torch.diag_embed(both[1, :, :-1], 1) + torch.diag_embed(both[1, :, :-1], -1)
    values, vectors = torch.linalg.eigh(matrix)
    residual = both[1, :, -1] * vectors[:, -1, -1].abs()
    gap = (values[:, -1] - values[:, -2]).clamp(min=1e-300)
    return values[:, -1].clamp(min=0.0), torch.minimum(residual, residual * (residual / gap))


def halley(matrices: Tensor, inverses: Tensor, low: float) -> Tensor:
    """One weighted Halley step, the best one for singular values in [low, 1]; `inverses` as by `halley_inverses`."""
    a, b, c = _halley_weights(low)
    inner = inverses * (a - b / c)
    inner.diagonal(dim1=-2, dim2=-1).add_(b / c)
    return torch.bmm(matrices, inner)


def halley_inverses(grams: Tensor, low: float) -> Tensor:
    """(1 + c X^T X)^-1, whose eigenvalues fall from one to zero as singular values grow."""
    shifted = grams * _halley_weights(low)[2]
    shifted.diagonal(dim1=-2, dim2=-1).add_(1.0)
    factors = torch.linalg.cholesky_ex(shifted)[0]
    if factors.shape[-1] < BLOCKED:
        return torch.cholesky_inverse(factors)
    del shifted
    halves = _triangular_inverses(factors)
    return torch.bmm(halves.mT, halves)


def _triangular_inverses(factors: Tensor) -> Tensor:
    """The inverses of lower triangular matrices, from those of small blocks on the diagonal by products."""
    size = factors.shape[-1]
    count = 2 ** math.ceil(math.log2(size / LEAF))
    leaf = -(-size // count)
    if leaf * count > size:
        factors = F.pad(factors, (0, leaf * count - size, 0, leaf * count - size))
        factors.diagonal(dim1=-2, dim2=-1)[:, size:] = 1.0

    def blocks(row: int, column: int, step: int, width: int) -> Tensor:
        starts = range(0, factors.shape[-1], step)
        cut = [factors[:, at + row : at + row + width, at + column : at + column + width] for at in starts]
        return torch.stack(cut, 1).flatten(0, 1)

    one = torch.eye(leaf, dtype=factors.dtype, device=factors.device)
    found: Tensor = torch.linalg.solve_triangular(blocks(0, 0, leaf, leaf), one, upper=False)
    while leaf < factors.shape[-1]:
        upper, lower = found[0::2], found[1::2]
        corner = torch.bmm(lower, torch.bmm(blocks(leaf, 0, 2 * leaf, leaf), upper)).neg_()
        found = torch.cat([F.pad(upper, (0, leaf)), torch.cat([corner, lower], -1)], -2)
        leaf *= 2
    return found[:, :size, :size]


def halley_image(value: float, low: float) -> float:
    """Where the Halley step for [low, 1] takes a singular value.

    Those of [low, 1] stay between the image of `low` and one, and below `low` the images fall to zero.

    >>> [round(halley_image(value, 1e-3), 3) for value in (1e-4, 1e-3, 1e-2, 1.0)]
    [0.025, 0.248, 0.975, 1.0]
    """
    a, b, c = _halley_weights(low)
    square = value * value
    return value * (a + b * square) / (1 + c * square)


def halley_inverse_image(value: float, low: float) -> float:
    """The eigenvalue of `halley_inverses` at a singular value."""
    return 1 / (1 + _halley_weights(low)[2] * value * value)


def _halley_weights(low: float) -> Weights:
    square = low * low
    root = math.sqrt(1 + (4 * (1 - square) / square**2) ** (1 / 3))
    a = root + 0.5 * math.sqrt(8 - 4 * (root * root - 1) + 8 * (2 - square) / (square * root))
    b = (a - 1) ** 2 / 4
    return a, b, a + b - 1


def to_one(matrices: Tensor, grams: Tensor, low: float, error: float = 1e-15) -> Tensor:
    """Singular values of [low, 1] to one, by odd polynomials of degree 5; zero stays zero. `grams` are X^T X.

    None of the values comes out above one, and none of them more than `error` below it, but for rounding.
    """
    for index, weights in enumerate(polynomials(low, error)):
        matrices = quintic(matrices, torch.bmm(matrices.mT, matrices) if index else grams, weights)
    return matrices


def quintic(matrices: Tensor, grams: Tensor, weights: Weights) -> Tensor:
    """a X + b X X^T X + c X (X^T X)^2, of which `grams` are X^T X."""
    a, b, c = weights
    inner = torch.baddbmm(grams, grams, grams, beta=b, alpha=c)
    inner.diagonal(dim1=-2, dim2=-1).add_(a)
    return torch.bmm(matrices, inner)


@lru_cache
def polynomials(low: float, error: float) -> tuple[Weights, ...]:
    """The polynomials that bring [low, 1] to within the error from one, the best one first."""
    found: list[Weights] = []
    while low < 0.98:
        weights, low = _best_quintic(low)
        found.append(weights)
    left = 1.0 - low
    while left > error or not found:
        found.append(NEWTON)
        left = 2.5 * left**3
    return tuple(found)


def _best_quintic(low: float) -> tuple[Weights, float]:
    """The odd polynomial of degree 5 that is nearest to one over [low, 1], scaled to stay at one or below (Remez)."""
    points = [low, low + (1 - low) * 0.25, low + (1 - low) * 0.75, 1.0]
    for _ in range(50):
        powers = [[x, x**3, x**5, (-1.0) ** index] for index, x in enumerate(points)]
        a, b, c, error = torch.linalg.solve(
            torch.tensor(powers, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
        ).tolist()
        root = math.sqrt(9 * b * b - 20 * a * c)
        moved = sorted(math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1))
        if max(abs(old - new) for old, new in zip(points[1:3], moved, strict=True)) < 1e-12:
            break
        points = [low, *moved, 1.0]
    top = 1 + abs(error)
    return (a / top, b / top, c / top), (1 - abs(error)) / top
