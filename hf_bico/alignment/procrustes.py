"""The polar factor of cross-covariances: the orthogonal map that best lines up two sets of rows.

Knows covariances and rows only: not where they come from, nor what the maps are used for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_bico.alignment.memory import BATCH_BYTES
from hf_bico.alignment.polar import SeenPart, decomposed, seen_parts

CUT = 1e-6
"""Singular values below this share of the largest count as unseen."""


@dataclass(frozen=True)
class OrthogonalMap:
    """R with X_A R ~ X_B: the polar factor of C = X_A^T X_B, float64.

    `seen` is U V^T over the singular values above the cut, a partial isometry that is unique; `matrix` is what
    is applied: `seen` itself, or its arbitrary completion by the null space (`svd`). `score` is the sum of those
    singular values over |X_A| |X_B|: 1 when an orthogonal map carries the rows of A onto those of B exactly, up to
    scale. `way` says how it was found, in the words of `hf_bico.alignment.polar`.
    """

    matrix: Tensor
    seen: Tensor
    rank: int
    score: float
    way: str = "svd"


@dataclass(frozen=True)
class Rows:
    """X_A and X_B themselves, in place of their covariance: the small space where the rows are few."""

    source: Tensor
    target: Tensor

    @property
    def covariance(self) -> Tensor:
        return self.source.double().mT @ self.target.double()

    @property
    def few(self) -> bool:
        """Fewer rows than either side is wide."""
        return len(self.source) < min(self.source.shape[1], self.target.shape[1])


Statistic = Tensor | Rows


def polar(
    covariances: Sequence[Statistic],
    norms: Sequence[float],
    completion: str = "drop",
    cut: float = CUT,
) -> list[OrthogonalMap]:
    """The maps of many cross-covariances, on their device; those of equal shape are solved in one batch.

    `norms` are |X_A| |X_B|, one a covariance.

    >>> rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    >>> rows = torch.randn(9, 3, dtype=torch.float64)
    >>> other = rows @ rotation
    >>> [found] = polar([rows.T @ other], [float(rows.norm() * other.norm())])
    >>> torch.allclose(found.matrix, rotation), found.rank, round(found.score, 6)
    (True, 3, 1.0)
    """
    waiting = dict(enumerate(covariances))
    maps: dict[int, OrthogonalMap] = {}
    for indices in _batches(waiting):
        batch = [waiting.pop(index) for index in indices]
        solved = _dropped(batch, cut) if completion == "drop" else _completed(batch, cut)
        for index, (part, matrix) in zip(indices, solved, strict=True):
            score = part.nuclear / norms[index] if norms[index] > 0 else 0.0
            maps[index] = OrthogonalMap(matrix, part.matrix, part.rank, score, part.way)
    return [maps[index] for index in range(len(maps))]


def _batches(waiting: dict[int, Statistic]) -> list[list[int]]:
    """Indices of equal shape; small matrices many at a time, large ones one by one."""
    alike: dict[tuple[torch.Size, ...], list[int]] = defaultdict(list)
    sizes: dict[tuple[torch.Size, ...], int] = {}
    for index, one in waiting.items():
        tensors = [one.source, one.target] if isinstance(one, Rows) else [one]
        shapes = tuple(tensor.shape for tensor in tensors)
        alike[shapes].append(index)
        sizes[shapes] = 8 * sum(tensor.numel() for tensor in tensors)
    batches = []
    for shapes, indices in alike.items():
        count = max(1, BATCH_BYTES // sizes[shapes])
        batches += [indices[start : start + count] for start in range(0, len(indices), count)]
    return batches


def _dropped(batch: list[Statistic], cut: float) -> list[tuple[SeenPart, Tensor]]:
    """The seen parts, applied as they are."""
    few = all(isinstance(one, Rows) and one.few for one in batch)
    parts = _of_few_rows(batch, cut) if few else seen_parts(_stacked(batch), cut)
    return [(part, part.matrix) for part in parts]


def _of_few_rows(batch: list[Statistic], cut: float) -> list[SeenPart]:
    """C = Q_A (T_A T_B^T) Q_B^T with orthonormal Q: its seen part lies between the bases."""
    rows = [one for one in batch if isinstance(one, Rows)]
    batch.clear()
    source, inner = torch.linalg.qr(torch.stack([one.source.double() for one in rows]).mT)
    target, outer = torch.linalg.qr(torch.stack([one.target.double() for one in rows]).mT)
    parts = seen_parts(inner @ outer.mT, cut)
    bases = zip(parts, source, target, strict=True)
    return [replace(part, matrix=left @ part.matrix @ right.mT) for part, left, right in bases]


def _completed(batch: list[Statistic], cut: float) -> list[tuple[SeenPart, Tensor]]:
    """The seen parts, and U V^T over all singular values, which is arbitrary where there are none."""
    parts, left, right = decomposed(_stacked(batch), cut)
    return list(zip(parts, left @ right, strict=True))


def _stacked(batch: list[Statistic]) -> Tensor:
    """One tensor of all covariances, which takes their place."""
    covariances = torch.stack([one.covariance if isinstance(one, Rows) else one.double() for one in batch])
    batch.clear()
    return covariances
