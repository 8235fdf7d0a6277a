"""The polar factor of cross-covariances: the orthogonal map that best lines up two sets of rows.

Knows matrices only: not where they come from, nor what the maps are used for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CUT = 1e-6
"""Singular values below this share of the largest count as unseen."""

BATCH_BYTES = 2**27
"""How much one batch of covariances may take."""


@dataclass(frozen=True)
class OrthogonalMap:
    """R with X_A R ~ X_B: the polar factor of C = X_A^T X_B, float64.

    `seen` is U V^T over the singular values above the cut, a partial isometry that is unique; `matrix` is what
    is applied: `seen` itself, or its arbitrary completion by the null space (`svd`). `score` is the nuclear norm
    of C over |X_A| |X_B|: 1 when an orthogonal map carries the rows of A onto those of B exactly, up to scale.
    """

    matrix: Tensor
    seen: Tensor
    rank: int
    score: float


def polar(
    covariances: Sequence[Tensor],
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
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for index, covariance in enumerate(covariances):
        by_shape[covariance.shape].append(index)
    maps: dict[int, OrthogonalMap] = {}
    for indices in (chunk for group in by_shape.values() for chunk in _chunks(group, covariances[group[0]])):
        batch = torch.stack([covariances[index].double() for index in indices])
        for index, found in zip(indices, _polar_of_batch(batch, completion, cut), strict=True):
            matrix, seen, rank, nuclear = found
            score = nuclear / norms[index] if norms[index] > 0 else 0.0
            maps[index] = OrthogonalMap(matrix, seen, rank, score)
    return [maps[index] for index in range(len(covariances))]


def _chunks(indices: list[int], one: Tensor) -> list[list[int]]:
    """Small matrices many at a time, large ones one by one: the solver needs several times a batch's memory."""
    size = max(1, BATCH_BYTES // (8 * one.numel()))
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def _polar_of_batch(batch: Tensor, completion: str, cut: float) -> list[tuple[Tensor, Tensor, int, float]]:
    left, values, right = torch.linalg.svd(batch, full_matrices=False)
    # a zero matrix has seen nothing: its singular values are not above a cut of zero
    kept = values > cut * values[:, :1]
    seen = (left * kept.unsqueeze(-2)) @ right
    matrix = seen if completion == "drop" else left @ right
    ranks = kept.sum(-1).tolist()
    nuclear = values.sum(-1).tolist()
    return list(zip(matrix, seen, ranks, nuclear, strict=True))
