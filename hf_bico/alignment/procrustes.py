"""Solve orthogonal Procrustes problems: the maps that best align two sets of rows, from their cross-covariances.

Knows covariances and rows; not where they come from, nor what the maps are used for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_bico.alignment.memory import BATCH_BYTES
from hf_bico.alignment.polar import PartialIsometry, isometries_by_svd, partial_isometries

CUT = 1e-6
"""Singular values below this share of the largest count as zero: their directions are unseen."""


@dataclass(frozen=True)
class OrthogonalMap:
    """R with X_A R ~ X_B: the polar factor of C = X_A^T X_B, float64.

    `seen` is U V^T over the singular values above the cut, a unique partial isometry; `matrix` is what is applied:
    `seen`, or its arbitrary completion by the null space (`svd`). `score` is the sum of those singular values over
    |X_A| |X_B|: 1 if an orthogonal map carries the rows of A onto those of B exactly, up to scale. `way` names the
    algorithm, in the words of `hf_bico.alignment.polar`.
    """

    matrix: Tensor
    seen: Tensor
    rank: int
    score: float
    way: str = "svd"


@dataclass(frozen=True)
class PairedRows:
    """X_A and X_B in place of their covariance: few rows are solved in the small space that they span."""

    source: Tensor
    target: Tensor

    @property
    def covariance(self) -> Tensor:
        return self.source.double().mT @ self.target.double()

    @property
    def few(self) -> bool:
        """Whether there are fewer rows than either side is wide."""
        return len(self.source) < min(self.source.shape[1], self.target.shape[1])


Statistic = Tensor | PairedRows


def polar(
    covariances: Sequence[Statistic],
    norms: Sequence[float],
    completion: str = "drop",
    cut: float = CUT,
) -> list[OrthogonalMap]:
    """Solve many cross-covariances on their device, those of equal shape in one batch.

    `norms` are |X_A| |X_B|, one per covariance.

    >>> rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    >>> rows = torch.randn(9, 3, dtype=torch.float64)
    >>> other = rows @ rotation
    >>> [solved] = polar([rows.T @ other], [float(rows.norm() * other.norm())])
    >>> torch.allclose(solved.matrix, rotation), solved.rank, round(solved.score, 6)
    (True, 3, 1.0)
    """
    waiting = dict(enumerate(covariances))
    maps: dict[int, OrthogonalMap] = {}
    for indices in _batches(waiting):
        batch = [waiting.pop(index) for index in indices]
        for index, (part, matrix) in zip(indices, _solved(batch, completion, cut), strict=True):
            score = part.nuclear / norms[index] if norms[index] > 0 else 0.0
            maps[index] = OrthogonalMap(matrix, part.matrix, part.rank, score, part.way)
    return [maps[index] for index in range(len(maps))]


def _batches(waiting: dict[int, Statistic]) -> list[list[int]]:
    """Group indices by shape; small matrices many at a time, large ones one by one."""
    by_shapes: dict[tuple[torch.Size, ...], list[int]] = defaultdict(list)
    for index, one in waiting.items():
        tensors = [one.source, one.target] if isinstance(one, PairedRows) else [one]
        by_shapes[tuple(tensor.shape for tensor in tensors)].append(index)
    batches = []
    for shapes, indices in by_shapes.items():
        count = max(1, BATCH_BYTES // (8 * sum(shape.numel() for shape in shapes)))
        batches += [indices[start : start + count] for start in range(0, len(indices), count)]
    return batches


def _solved(batch: list[Statistic], completion: str, cut: float) -> list[tuple[PartialIsometry, Tensor]]:
    """Solve a batch, with the map to apply: U V^T over all singular values where the null space is completed."""
    if completion != "drop":
        parts, left, right = isometries_by_svd(_stacked(batch), cut)
        return list(zip(parts, left @ right, strict=True))
    few = all(isinstance(one, PairedRows) and one.few for one in batch)
    parts = _of_few_rows(batch, cut) if few else partial_isometries(_stacked(batch), cut)
    return [(part, part.matrix) for part in parts]


def _of_few_rows(batch: list[Statistic], cut: float) -> list[PartialIsometry]:
    """Solve in the span of the rows: C = Q_A (T_A T_B^T) Q_B^T with orthonormal Q."""
    rows = [one for one in batch if isinstance(one, PairedRows)]
    batch.clear()
    source, inner = torch.linalg.qr(torch.stack([one.source.double() for one in rows]).mT)
    target, outer = torch.linalg.qr(torch.stack([one.target.double() for one in rows]).mT)
    parts = partial_isometries(inner @ outer.mT, cut)
    bases = zip(parts, source, target, strict=True)
    return [replace(part, matrix=left @ part.matrix @ right.mT) for part, left, right in bases]


def _stacked(batch: list[Statistic]) -> Tensor:
    """Stack all covariances in one tensor, and drop the originals."""
    covariances = torch.stack([one.covariance if isinstance(one, PairedRows) else one.double() for one in batch])
    batch.clear()
    return covariances
