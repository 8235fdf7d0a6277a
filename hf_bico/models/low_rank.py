"""Low-rank changes as products of two thin matrices, and the best such product of a given rank or energy.

A change of weights is a tensor or such a product; the functions here take both. Knows matrices only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor

RANDOMISED_FROM = 1024
"""The shorter side from which a small rank is found by random projections instead of all singular values."""
OVERSAMPLING = 16
KRYLOV_BLOCKS = 16
"""With these two, 4096 x 4096 noise too keeps all but a thousandth of the best energy: benchmarks/truncation.py."""

SUMMED = 2**20
"""How many squares are summed at a time: the float64 copy of so many stays in a processor's cache."""


@dataclass(frozen=True)
class Factors:
    """The product left @ right, of shapes (out, r) and (r, in); multiplied out only by `dense`.

    >>> product = Factors(torch.ones(3, 1), torch.ones(1, 2))
    >>> product.shape, product.rank, product.T.shape, product[:1].shape
    ((3, 2), 1, (2, 3), (1, 2))
    """

    left: Tensor
    right: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[1]

    @property
    def rank(self) -> int:
        """Columns of `left`: at least the rank of the product."""
        return self.left.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.left.dtype, self.right.dtype)

    @property
    def device(self) -> torch.device:
        return self.left.device

    @property
    def T(self) -> Factors:
        return Factors(self.right.T, self.left.T)

    def __getitem__(self, rows: slice) -> Factors:
        """Return some rows of the product."""
        return Factors(self.left[rows], self.right)

    def __mul__(self, factor: float) -> Factors:
        return Factors(factor * self.left, self.right)

    __rmul__ = __mul__

    def to(self, *how: Any, **more: Any) -> Factors:
        return Factors(self.left.to(*how, **more), self.right.to(*how, **more))

    @cached_property
    def energy(self) -> float:
        """Squared norm of the product, from the Gram matrices of the factors."""
        left, right = self.left.double(), self.right.double()
        left, right = left.T @ left, right @ right.T
        found = float((left * right).sum())
        # below this the factors cancel, and only rounding error is left
        return found if found > 1e-14 * float(left.trace() * right.trace()) else 0.0

    def dense(self) -> Tensor:
        """Multiply the factors, summing in at least float32."""
        wide = _wide(self.dtype)
        return self.left.to(wide) @ self.right.to(wide)


Change: TypeAlias = "Tensor | Factors"


def dense(change: Change) -> Tensor:
    return change.dense() if isinstance(change, Factors) else change


def energy(change: Change) -> float:
    """Return the squared norm."""
    if isinstance(change, Factors):
        return change.energy
    return sum(float(torch.linalg.vector_norm(part.double())) ** 2 for part in change.reshape(-1).split(SUMMED))


def inner_product(one: Change, other: Change) -> float:
    """Return the sum of the products of all entries; of factors, nothing is multiplied out."""
    if isinstance(one, Factors) and isinstance(other, Factors):
        left, right = one.left.double().T @ other.left.double(), one.right.double() @ other.right.double().T
        return float((left * right).sum())
    if isinstance(other, Factors):
        return inner_product(other, one)
    if isinstance(one, Factors):
        return float((one.left.double() * (other.double() @ one.right.double().T)).sum())
    parts = zip(one.reshape(-1).split(SUMMED), other.reshape(-1).split(SUMMED), strict=True)
    return sum(float(torch.dot(first.double(), second.double())) for first, second in parts)


def is_finite(change: Change) -> bool:
    parts = (change.left, change.right) if isinstance(change, Factors) else (change,)
    # minimum and maximum reveal a NaN too, in half of the time
    wide = (part if part.dtype.itemsize > 1 else part.float() for part in parts if part.numel())
    return all(bool(end.isfinite()) for part in wide for end in torch.aminmax(part))


def is_zero(change: Change) -> bool:
    return change.energy == 0.0 if isinstance(change, Factors) else not bool(change.any())


def total(parts: Sequence[Change]) -> Change:
    """Sum the changes; factors stay factors, with the sum of their ranks."""
    if len(parts) == 1:
        return parts[0]
    factors = [part for part in parts if isinstance(part, Factors)]
    if len(factors) == len(parts):
        return Factors(torch.cat([part.left for part in factors], 1), torch.cat([part.right for part in factors]))
    return reduce(torch.add, map(dense, parts))


def between(left: Tensor, change: Change, right: Tensor) -> Change:
    """Return left @ change @ right, in the dtype and on the device of `left`; factors stay factors."""
    if isinstance(change, Factors):
        return Factors(left @ change.left.to(left), change.right.to(right) @ right)
    return left @ change.to(left) @ right


def stacked(parts: Sequence[tuple[int, Factors]], rows: int) -> Factors:
    """Place products one under another, each from its first row on, in a matrix of `rows` rows.

    If all share their right factor the rank stays; otherwise it is the sum of the ranks.
    """
    first = parts[0][1]
    shared = all(
        part.right.shape == first.right.shape and bool(torch.equal(part.right, first.right)) for _, part in parts
    )
    rank = first.rank if shared else sum(part.rank for _, part in parts)
    left = first.left.new_zeros(rows, rank)
    column = 0
    for start, part in parts:
        left[start : start + part.shape[0], column : column + part.rank] = part.left
        column += 0 if shared else part.rank
    return Factors(left, first.right if shared else torch.cat([part.right for _, part in parts]))


def truncated(change: Change, rank: int | float | None) -> Factors:
    """Return the best factors of a rank (int), or of the least rank that keeps a share of the energy (float).

    None keeps everything exactly: factors as they are, a tensor times an identity matrix. A rank above what the matrix
    can have is clipped. The factors are of float32 at least.
    """
    most = min(change.shape)
    if isinstance(change, Factors):
        enough = rank is None or (isinstance(rank, int) and rank >= change.rank)
        return change if enough and change.rank <= most else _truncated_product(change, rank)
    if rank is None or (isinstance(rank, int) and rank >= most):
        unit = torch.eye(most, dtype=change.dtype, device=change.device)
        return Factors(change, unit) if change.shape[1] == most else Factors(unit, change)
    if isinstance(rank, int) and most >= RANDOMISED_FROM and 2 * KRYLOV_BLOCKS * (rank + OVERSAMPLING) <= most:
        return _randomised(change, rank)
    return _by_eigenvectors(change, rank)


def _truncated_product(product: Factors, rank: int | float | None) -> Factors:
    """Truncate by the singular values of the small core between two orthonormal bases."""
    left, core_left = torch.linalg.qr(product.left.double())
    right, core_right = torch.linalg.qr(product.right.double().T)
    u, values, v = torch.linalg.svd(core_left @ core_right.T, full_matrices=False)
    kept = _how_many(values.square(), rank)
    root = values[:kept].sqrt()
    found = Factors((left @ u[:, :kept]) * root, root[:, None] * (v[:kept] @ right.T))
    return found.to(_wide(product.dtype))


def _by_eigenvectors(matrix: Tensor, rank: int | float) -> Factors:
    """Truncate by the eigenvectors of the shorter side's Gram matrix, summed in float64."""
    if matrix.shape[0] > matrix.shape[1]:
        return _by_eigenvectors(matrix.T, rank).T
    wide = matrix.double()
    values, vectors = torch.linalg.eigh(wide @ wide.T)
    energies = values.flip(0).clamp(min=0.0)
    kept = _how_many(energies, rank)
    basis = vectors.flip(1)[:, :kept]
    return _balanced(basis, basis.T @ wide, matrix.dtype)


def _randomised(matrix: Tensor, rank: int) -> Factors:
    """Truncate by random projections, which do not depend on the device or on the global seed.

    A block Krylov space (Musco and Musco, 2015): with power steps alone a flat spectrum lost 5 % of the best energy.
    """
    if matrix.shape[0] > matrix.shape[1]:
        return _randomised(matrix.T, rank).T
    wide = matrix.to(_wide(matrix.dtype))
    if not bool(wide.any()):  # some libraries return NaN as the basis of zeros
        return Factors(wide.new_zeros(len(wide), rank), wide.new_zeros(rank, wide.shape[1]))
    probe = torch.randn(len(wide), rank + OVERSAMPLING, generator=torch.Generator().manual_seed(0))
    blocks = [probe.to(wide)]
    for _ in range(KRYLOV_BLOCKS - 1):
        blocks.append(torch.linalg.qr(wide @ (wide.T @ blocks[-1]))[0])
    space = torch.linalg.qr(torch.cat(blocks, 1))[0]
    inside = (space.T @ wide).double()
    _, vectors = torch.linalg.eigh(inside @ inside.T)
    basis, _ = torch.linalg.qr(space.double() @ vectors[:, -rank:].flip(1))
    return _balanced(basis, basis.T @ wide.double(), matrix.dtype)


def _balanced(basis: Tensor, rest: Tensor, dtype: torch.dtype) -> Factors:
    """Scale basis @ rest so that both factors have the same size, as further training needs."""
    root = rest.norm(dim=1).sqrt()
    scale = torch.where(root > 0, root, 1.0)
    return Factors(basis * scale, rest / scale[:, None]).to(_wide(dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _how_many(energies: Tensor, rank: int | float | None) -> int:
    """Count the directions to keep, given their energies in descending order."""
    if rank is None or isinstance(rank, int):
        return min(len(energies), rank or len(energies))
    shares = energies.cumsum(0) / energies.sum()
    return min(len(energies), int((shares < rank).sum()) + 1)
