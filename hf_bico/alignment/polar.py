"""Compute partial isometries U V^T over the singular values above a cut: by SVD, or by iterations on a GPU.

Knows batches of matrices of one shape; not what they were summed from, nor how maps are scored. Directions above the
cut are called seen, the others unseen. There are three ways; a result that fails its check is computed by `svd`:

- `iterated`: two weighted Halley steps raise every value above the cut well above zero, and leave those below it lower
  than all of these. More steps and polynomials then bring them to one. Where values lie on both sides of the cut
  without a gap, the sign of X^T X minus its value at the cut, after two steps, gives the projector on the seen
  directions.
- `reduced` (large matrices): where few directions are seen, or few are unseen, a block of vectors is filtered with
  powers of the second Halley step's inverse until it spans them. The cut is then made in this small subspace.
- `svd`: the singular value decomposition.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_bico.errors import NonFiniteWeightsError

Weights = tuple[float, float, float]

LANCZOS_CHECK = 6
"""Lanczos steps between two checks of the residual."""
LANCZOS_STEPS = 96
"""Most Lanczos steps."""
LANCZOS_ERROR = 1e-5
"""Relative error of the largest eigenvalue at which Lanczos stops."""
BLOCKED = 256
"""Size from which inverses are assembled from blocks: the libraries' own are slow on GPUs."""
LEAF = 192
"""Largest of those blocks."""
NEWTON: Weights = (15 / 8, -10 / 8, 3 / 8)
"""The odd polynomial of degree 5 that turns an error e from one into 2.5 e^3."""
SMALLEST = {"cuda": 96}
"""Smaller side from which a device iterates. Below it the SVD is faster; on one core of a CPU it is faster at every
measured size, 48 to 1536, by 1.3 to 13 times."""
LARGE = 1500
"""Smaller side from which a matrix is solved alone, and in a subspace if possible: a batch of large factorisations is
slower than one after the other."""
CUTS = (1e-7, 1e-2)
"""Range of cuts that the iterations support; others take the SVD."""
TOLERANCE = 1e-10
"""Largest difference of a projector's trace and its squared norm: a value s away from zero adds s^2."""
MISFIT = 1e-8
"""Largest difference of a result's squared norm and its rank."""
LEAK = 1e-5
"""Largest part of the subspace's directions that lies outside of it."""
REDUCED_ERROR = 1e-10
"""Largest distance of a value from one where the unseen directions were removed before."""
REDUCED_MISFIT = 1e-6
"""The same as MISFIT for such a result."""
FIRST_MARGIN = 8.0
"""The first Halley step is optimal from this many times the cut: all larger values stay far from its image, and its
rounding errors are small."""
MARGIN = 1.25
"""The same for later steps: all larger values stay clear of the cut's image."""
ENOUGH = 0.3
"""Value from which a matrix can be cut: what lies above it has come far from what lies below."""
POLYNOMIAL, LARGE_POLYNOMIAL = 0.1, 0.95
"""Values from which polynomials are faster than Halley steps, the second from a side of SYMMETRIC."""
SYMMETRIC = 3000
"""Side from which a symmetric product is computed by blocks, only half of those beside the diagonal."""
DOUBT = 1e-6
"""Values this close to the cut, as a share of it, are left to the SVD. The cut itself is as exact as the largest
value, half of LANCZOS_ERROR."""
NEAR = 1e-5
"""Values this close to the cut, as a share of it, are separated without extra steps."""
EXTRA_STEPS = 8
"""Most extra polynomials of a sign iteration, for values that are still closer, down to DOUBT or so."""
DAMPING = 1e-5
"""Least that a filter leaves of other directions, so that the columns of a block stay independent."""
COUNT_SQUARINGS = 3
"""Squarings of the inverse before its trace counts directions: those up to about three times the cut."""
CLOSER_SQUARINGS = 1
"""More of them where few are unseen: its trace then counts those up to about twice the cut."""
FILTER_SQUARINGS = 2
"""More of them for the filter of unseen directions: twice the cut is then damped by four decades."""
SPARE_COLUMNS = 32
"""Columns of a block above twice the number of directions to find."""
SHARE = 4
"""A block has at most the smaller side over this number of columns."""
ROUNDS = 3
"""How often a block is filtered before the subspace is given up."""


@dataclass(frozen=True)
class PartialIsometry:
    """U V^T over the singular values above the cut, their number, their sum, and how it was computed."""

    matrix: Tensor
    rank: int
    nuclear: float
    way: str


@dataclass(frozen=True)
class _Stage:
    """A batch during iteration, with its Gram matrices: values at or above the cut have come to [edge, 1]."""

    matrices: Tensor
    grams: Tensor
    edge: float


@dataclass(frozen=True)
class _Candidates:
    """Partial isometries with their ranks, and which of them passed every check."""

    matrices: Tensor
    ranks: Tensor
    sure: Tensor
    way: str = "iterated"


def partial_isometries(
    batch: Tensor, cut: float, smallest: int | None = None, large: int = LARGE
) -> list[PartialIsometry]:
    """Solve a batch of matrices of one shape, which is overwritten.

    >>> matrix = torch.diag(torch.tensor([2.0, 1.0, 1e-9], dtype=torch.float64))
    >>> [part] = partial_isometries(matrix[None], 1e-6)
    >>> part.matrix.diagonal().tolist(), part.rank, part.nuclear, part.way
    ([1.0, 1.0, 0.0], 2, 3.0, 'svd')
    """
    scales = batch.abs().amax((-2, -1))
    on_host = scales.tolist()
    if not all(math.isfinite(scale) for scale in on_host):
        raise NonFiniteWeightsError(
            "a cross-covariance holds NaN or infinite values", "check the weights and the calibration samples"
        )
    batch.div_(torch.where(scales > 0, scales, 1.0)[:, None, None])
    if smallest is None:
        smallest = SMALLEST.get(batch.device.type, sys.maxsize)
    if min(batch.shape[-2:]) < smallest or not CUTS[0] <= cut <= CUTS[1]:
        parts = isometries_by_svd(batch, cut)[0]
    elif batch.shape[-2] < batch.shape[-1]:
        parts = [replace(part, matrix=part.matrix.mT) for part in _isometries_by_iteration(batch.mT, cut, large)]
    else:
        parts = _isometries_by_iteration(batch, cut, large)
    return [replace(part, nuclear=part.nuclear * scale) for part, scale in zip(parts, on_host, strict=True)]


def isometries_by_svd(batch: Tensor, cut: float) -> tuple[list[PartialIsometry], Tensor, Tensor]:
    """Solve a batch by SVD, and return all left and right singular vectors too."""
    left, values, right = torch.linalg.svd(batch, full_matrices=False)
    kept = values > cut * values[:, :1]  # strictly, so that a zero matrix has rank 0
    matrices = (left * kept.unsqueeze(-2)) @ right
    ranks, sums = torch.stack([kept.sum(-1), (values * kept).sum(-1)]).tolist()
    solved = zip(matrices, ranks, sums, strict=True)
    return [PartialIsometry(matrix, int(rank), total, "svd") for matrix, rank, total in solved], left, right


def _isometries_by_iteration(batch: Tensor, cut: float, large: int) -> list[PartialIsometry]:
    """Solve matrices with at least as many rows as columns; scales the batch to largest singular values of one."""
    grams = _gram(batch)
    squares = largest_eigenvalues(grams)
    squares = torch.where(squares > 0, squares, 1.0)
    batch.div_(squares.sqrt()[:, None, None])
    grams.div_(squares[:, None, None])
    if batch.shape[-1] < large:
        parts = _checked(batch, _iterated(_halley_step(_Stage(batch, grams, cut), FIRST_MARGIN)), cut)
    else:
        pairs = zip(batch.split(1), grams.split(1), strict=True)
        parts = [part for one, gram in pairs for part in _checked(one, _large(one, gram, cut), cut)]
    tops = squares.sqrt().tolist()
    return [replace(part, nuclear=part.nuclear * top) for part, top in zip(parts, tops, strict=True)]


def _checked(batch: Tensor, candidates: _Candidates, cut: float) -> list[PartialIsometry]:
    """Return the candidates that passed their checks, and solve the others by SVD."""
    sums = _inner(candidates.matrices, batch)
    facts = torch.stack([candidates.ranks, sums, candidates.sure.double()]).tolist()
    checked: list[PartialIsometry] = []
    for index, (matrix, rank, total, sure) in enumerate(zip(candidates.matrices, *facts, strict=True)):
        if sure:
            checked.append(PartialIsometry(matrix, round(rank), total, candidates.way))
        else:
            checked += isometries_by_svd(batch[index : index + 1], cut)[0]
    return checked


def _halley_step(stage: _Stage, margin: float = MARGIN) -> _Stage:
    low = margin * stage.edge
    matrices = halley(stage.matrices, halley_inverses(stage.grams, low), low)
    return _Stage(matrices, _gram(matrices), halley_image(stage.edge, low))


def _iterated(stage: _Stage) -> _Candidates:
    """Bring singular values of [edge, 1] to one, and project on their directions where others are left.

    Those below the edge end anywhere between zero and one. The eigenvalues of `halfway`, the Gram matrices before the
    last polynomials, are above the threshold exactly where values are above the cut.
    """
    while stage.edge < ENOUGH:
        stage = _halley_step(stage)
    halfway, threshold = stage.grams, stage.edge**2
    matrices = to_one(stage.matrices, halfway, stage.edge)
    grams = _gram(matrices)
    # positive definite exactly where all values left were above the edge: halfway - threshold on the row space, one
    # on its complement
    above = halfway - (threshold * (1 + DOUBT) + 1) * grams
    above.diagonal(dim1=-2, dim2=-1).add_(1.0)
    sure = (_openness(grams) < TOLERANCE) & (torch.linalg.cholesky_ex(above)[1] == 0)
    del stage, above  # the projectors need their memory
    ranks = _trace(grams)
    left = [index for index, clean in enumerate(sure.tolist()) if not clean]
    if left:
        projectors = _projectors_above(halfway[left], threshold)
        ranks[left] = _trace(projectors)
        fit = (ranks[left] - _inner(projectors, grams[left])).abs() < MISFIT
        matrices[left] = torch.bmm(matrices[left], projectors)
        sure[left] = fit & (_openness(projectors) < TOLERANCE)
    return _Candidates(matrices, ranks, sure)


def _projectors_above(symmetric: Tensor, threshold: float) -> Tensor:
    """Return the projectors on the eigenvectors above the threshold, for eigenvalues of [0, 1]; overwrite the input."""
    symmetric.diagonal(dim1=-2, dim2=-1).sub_(threshold)
    symmetric.div_(max(threshold, 1 - threshold))
    signs = to_one(symmetric, _gram(symmetric), NEAR)
    signs = (signs + signs.mT).div_(2)
    for _ in range(EXTRA_STEPS):
        if bool((signs.shape[-1] - _inner(signs, signs) < TOLERANCE).all()):
            break
        signs = quintic(signs, _gram(signs), NEWTON)
    signs.div_(2).diagonal(dim1=-2, dim2=-1).add_(0.5)
    return signs


def _large(unit: Tensor, gram: Tensor, cut: float) -> _Candidates:
    """Solve one large matrix in the subspace of its few seen or few unseen directions, or else iterate."""
    stage = _halley_step(_Stage(unit, gram, cut), FIRST_MARGIN)
    low = MARGIN * stage.edge
    inverse = halley_inverses(stage.grams, low)
    subspace = _find_subspace(stage, inverse, halley_inverse_image(stage.edge, low))
    if subspace is not None and subspace.of_seen:
        return subspace.isometry(stage)
    matrices, edge = halley(stage.matrices, inverse, low), halley_image(stage.edge, low)
    del inverse, stage
    if subspace is not None:
        return subspace.complement_isometry(matrices, edge)
    return _iterated(_Stage(matrices, _gram(matrices), edge))


@dataclass(frozen=True)
class _Subspace:
    """The right singular vectors above the cut, or those below it, whichever are few, with their squared values."""

    vectors: Tensor
    squares: Tensor
    of_seen: bool

    def isometry(self, stage: _Stage) -> _Candidates:
        """Return the isometry of exactly these directions."""
        images = torch.bmm(stage.matrices, self.vectors).div_(self.squares.sqrt()[:, None])
        ranks = torch.full_like(stage.matrices[:, 0, 0], self.vectors.shape[-1])
        return _Candidates(
            torch.bmm(images, self.vectors.mT), ranks, torch.ones_like(ranks, dtype=torch.bool), "reduced"
        )

    def complement_isometry(self, matrices: Tensor, edge: float) -> _Candidates:
        """Return the isometry of all other directions, from matrices whose other values are in [edge, 1]."""
        if self.vectors.shape[-1]:
            matrices = torch.baddbmm(matrices, torch.bmm(matrices, self.vectors), self.vectors.mT, alpha=-1.0)
        matrices = to_one(matrices, _gram(matrices), edge, REDUCED_ERROR)
        ranks = torch.full_like(matrices[:, 0, 0], matrices.shape[-1] - self.vectors.shape[-1])
        return _Candidates(matrices, ranks, (ranks - _inner(matrices, matrices)).abs() < REDUCED_MISFIT, "reduced")


def _find_subspace(stage: _Stage, inverse: Tensor, at_cut: float) -> _Subspace | None:
    """Return the directions on one side of the cut, if one side has few.

    The inverse has eigenvalues from one (unseen) over `at_cut` to nearly zero (seen). Its powers P, or 1 - P, are the
    filter; the trace of P counts the directions that are unseen or nearly so.
    """
    side = inverse.shape[-1]
    filters = _squared(inverse, COUNT_SQUARINGS)
    unseen = float(_trace(filters))
    if unseen < 0.99 * at_cut ** (2**COUNT_SQUARINGS):
        return _Subspace(filters[..., :0], filters[:, 0, :0], of_seen=False)
    of_seen = unseen > side / 2
    if not of_seen:
        filters = _squared(filters, CLOSER_SQUARINGS)
        unseen = float(_trace(filters))
    width = math.ceil(2 * (side - unseen if of_seen else unseen)) + SPARE_COLUMNS
    if not width <= side // SHARE:
        return None
    if of_seen:
        filters.neg_().diagonal(dim1=-2, dim2=-1).add_(1.0)
    else:
        filters = _squared(filters, FILTER_SQUARINGS)
    filters.diagonal(dim1=-2, dim2=-1).add_(DAMPING)
    generator = torch.Generator(filters.device).manual_seed(0)
    vectors = torch.randn(1, side, width, generator=generator, dtype=filters.dtype, device=filters.device)
    for _ in range(ROUNDS):
        for _ in range(3):
            vectors = _orthonormal(torch.bmm(filters, vectors))
        subspace = _cut_within(stage, vectors, of_seen)
        if subspace is not None:
            return subspace
    return None


def _cut_within(stage: _Stage, basis: Tensor, of_seen: bool) -> _Subspace | None:
    """Return the directions on one side of the cut in the span of the basis, if it contains them all."""
    images = torch.bmm(stage.matrices, basis)
    small = torch.bmm(images.mT, images)
    if not bool(small.isfinite().all()):
        return None
    squares, rotations = torch.linalg.eigh(small)
    square = stage.edge**2
    on_host = squares[0].tolist()
    below = sum(one <= square for one in on_host)
    chosen = slice(below, None) if of_seen else slice(0, below)
    doubtful = any(abs(one - square) < 2 * DOUBT * square for one in on_host)
    spare = below if of_seen else len(on_host) - below
    if doubtful or spare < SPARE_COLUMNS / 2:
        return None
    vectors, squares = torch.bmm(basis, rotations[..., chosen]), squares[:, chosen]
    back = torch.bmm(stage.grams, vectors)
    outside = torch.baddbmm(back, basis, torch.bmm(basis.mT, back), alpha=-1.0)
    leak = outside.div_(squares.clamp(min=square)[:, None]).norm()
    return _Subspace(vectors, squares, of_seen) if bool(leak < LEAK) else None


def _squared(matrices: Tensor, times: int) -> Tensor:
    for _ in range(times):
        matrices = _gram(matrices)
    return matrices


def _gram(matrices: Tensor, lower: bool = False) -> Tensor:
    """Return X^T X; `lower` says that X is lower triangular. The square of a symmetric matrix is one too."""
    size = matrices.shape[-1]
    if size < SYMMETRIC:
        return torch.bmm(matrices.mT, matrices)
    half = size // 2
    left, right = matrices[..., :half], matrices[..., half:]
    gram = matrices.new_empty(*matrices.shape[:-2], size, size)
    if lower:
        gram[..., :half, :half] = _gram(left[..., :half, :], lower=True)
        left, right = left[..., half:, :], right[..., half:, :]
        gram[..., :half, :half] += _gram(left)
    else:
        gram[..., :half, :half] = _gram(left)
    gram[..., half:, half:] = _gram(right, lower)
    corner = torch.bmm(left.mT, right)
    gram[..., :half, half:], gram[..., half:, :half] = corner, corner.mT
    return gram


def _orthonormal(vectors: Tensor) -> Tensor:
    """Orthonormalise columns that are not nearly dependent, by Cholesky, twice."""
    for _ in range(2):
        factor = torch.linalg.cholesky_ex(torch.bmm(vectors.mT, vectors))[0]
        vectors = torch.linalg.solve_triangular(factor, vectors.mT, upper=False).mT
    return vectors


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def _inner(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum((-2, -1))


def _openness(grams: Tensor) -> Tensor:
    """Return zero for projectors, and more with every eigenvalue between zero and one."""
    return (_trace(grams) - _inner(grams, grams)).abs()


def largest_eigenvalues(grams: Tensor) -> Tensor:
    """Return the largest eigenvalue of each positive matrix, by Lanczos from a fixed start."""
    size = grams.shape[-1]
    start = torch.randn(size, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(grams.device)
    vector = (start / start.norm()).expand(grams.shape[0], -1, -1)
    previous = torch.zeros_like(vector)
    beta = torch.zeros_like(vector[:, :1])
    alphas: list[Tensor] = []
    betas: list[Tensor] = []
    for step in range(1, LANCZOS_STEPS + 1):
        image = torch.bmm(grams, vector).addcmul_(previous, beta, value=-1.0)
        alpha = (image * vector).sum(-2, keepdim=True)
        image.addcmul_(vector, alpha, value=-1.0)
        previous, beta = vector, torch.linalg.vector_norm(image, dim=-2, keepdim=True)
        vector = image / beta.clamp(min=1e-300)
        alphas.append(alpha)
        betas.append(beta)
        if step % LANCZOS_CHECK == 0 or step == LANCZOS_STEPS:
            values, error = _ritz_values(torch.cat(alphas, -1)[:, 0], torch.cat(betas, -1)[:, 0])
            if bool((error <= LANCZOS_ERROR * values).all()) or step >= size:
                break
    return values.to(grams.device)


def _ritz_values(alphas: Tensor, betas: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalue of each tridiagonal matrix, and its error for the full matrix."""
    both = torch.stack([alphas, betas]).cpu()
    matrix = torch.diag_embed(both[0])
    matrix += torch.diag_embed(both[1, :, :-1], 1) + torch.diag_embed(both[1, :, :-1], -1)
    values, vectors = torch.linalg.eigh(matrix)
    residual = both[1, :, -1] * vectors[:, -1, -1].abs()
    gap = (values[:, -1] - values[:, -2]).clamp(min=1e-300)
    return values[:, -1].clamp(min=0.0), torch.minimum(residual, residual * (residual / gap))


def halley(matrices: Tensor, inverses: Tensor, low: float) -> Tensor:
    """Take the weighted Halley step that is best for singular values in [low, 1], by `halley_inverses`."""
    a, b, c = _halley_weights(low)
    inner = inverses * (a - b / c)
    inner.diagonal(dim1=-2, dim2=-1).add_(b / c)
    return torch.bmm(matrices, inner)


def halley_inverses(grams: Tensor, low: float) -> Tensor:
    """Return (1 + c X^T X)^-1, whose eigenvalues fall from one to zero as singular values grow."""
    shifted = grams * _halley_weights(low)[2]
    shifted.diagonal(dim1=-2, dim2=-1).add_(1.0)
    factors = torch.linalg.cholesky_ex(shifted)[0]
    if factors.shape[-1] < BLOCKED:
        return torch.cholesky_inverse(factors)
    del shifted
    halves = _triangular_inverses(factors)
    return _gram(halves, lower=True)


def _triangular_inverses(factors: Tensor) -> Tensor:
    """Invert lower triangular matrices, from the inverses of small diagonal blocks by products."""
    size = factors.shape[-1]
    count = 2 ** math.ceil(math.log2(size / LEAF))
    leaf = -(-size // count)
    if leaf * count > size:
        factors = F.pad(factors, (0, leaf * count - size, 0, leaf * count - size))
        factors.diagonal(dim1=-2, dim2=-1)[:, size:] = 1.0

    def blocks(row: int, column: int, step: int, width: int) -> Tensor:
        starts = range(0, factors.shape[-1], step)
        parts = [factors[:, at + row : at + row + width, at + column : at + column + width] for at in starts]
        return torch.stack(parts, 1).flatten(0, 1)

    identity = torch.eye(leaf, dtype=factors.dtype, device=factors.device)
    inverses: Tensor = torch.linalg.solve_triangular(blocks(0, 0, leaf, leaf), identity, upper=False)
    while leaf < factors.shape[-1]:
        upper, lower = inverses[0::2], inverses[1::2]
        corner = torch.bmm(lower, torch.bmm(blocks(leaf, 0, 2 * leaf, leaf), upper)).neg_()
        inverses = torch.cat([F.pad(upper, (0, leaf)), torch.cat([corner, lower], -1)], -2)
        leaf *= 2
    return inverses[:, :size, :size]


def halley_image(value: float, low: float) -> float:
    """Return the image of a singular value under the Halley step for [low, 1].

    Values of [low, 1] stay between the image of `low` and one; below `low` the images fall to zero.

    >>> [round(halley_image(value, 1e-3), 3) for value in (1e-4, 1e-3, 1e-2, 1.0)]
    [0.025, 0.248, 0.975, 1.0]
    """
    a, b, c = _halley_weights(low)
    square = value * value
    return value * (a + b * square) / (1 + c * square)


def halley_inverse_image(value: float, low: float) -> float:
    """Return the eigenvalue of `halley_inverses` at a singular value."""
    return 1 / (1 + _halley_weights(low)[2] * value * value)


def _halley_weights(low: float) -> Weights:
    square = low * low
    root = math.sqrt(1 + (4 * (1 - square) / square**2) ** (1 / 3))
    a = root + 0.5 * math.sqrt(8 - 4 * (root * root - 1) + 8 * (2 - square) / (square * root))
    b = (a - 1) ** 2 / 4
    return a, b, a + b - 1


def to_one(matrices: Tensor, grams: Tensor, low: float, error: float = 1e-15) -> Tensor:
    """Bring singular values of [low, 1] to one by Halley steps, and then by odd polynomials of degree 5.

    Zero stays zero. Up to rounding, no value ends above one or more than `error` below it. `grams` are X^T X.
    """
    while low < (POLYNOMIAL if matrices.shape[-1] < SYMMETRIC else LARGE_POLYNOMIAL):
        matrices = halley(matrices, halley_inverses(grams, low), low)
        low, grams = halley_image(low, low), _gram(matrices)
    for index, weights in enumerate(polynomials(low, error)):
        matrices = quintic(matrices, _gram(matrices) if index else grams, weights)
    return matrices


def quintic(matrices: Tensor, grams: Tensor, weights: Weights) -> Tensor:
    """Return a X + b X X^T X + c X (X^T X)^2; `grams` are X^T X."""
    a, b, c = weights
    inner = _gram(grams).mul_(c).add_(grams, alpha=b)
    inner.diagonal(dim1=-2, dim2=-1).add_(a)
    return torch.bmm(matrices, inner)


@lru_cache
def polynomials(low: float, error: float) -> tuple[Weights, ...]:
    """Return the polynomials that in turn bring [low, 1] to within the error from one."""
    weights: list[Weights] = []
    while low < 0.98:
        best, low = _best_quintic(low)
        weights.append(best)
    distance = 1.0 - low
    while distance > error or not weights:
        weights.append(NEWTON)
        distance = 2.5 * distance**3
    return tuple(weights)


def _best_quintic(low: float) -> tuple[Weights, float]:
    """Return the odd polynomial of degree 5 nearest to one over [low, 1], scaled to at most one (Remez)."""
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
