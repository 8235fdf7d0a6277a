"""The polar factor: SVD, or iterations on a GPU.

Iterations that move the singular values of matrices: to one, or apart at a threshold, with products only.

Knows batches of real matrices: not what a map is, nor which answers are good enough.

Partial isometries: U V^T over the singular values above a cut, without singular vectors wherever that is certain.

Knows batches of matrices of one shape: not what they were summed from, nor how the maps are scored.

Three ways, each checked on its own result, and the singular value decomposition for whatever fails a check:

- `iterated`: two weighted Halley steps bring every value above the cut well above zero, and leave those below it lower
  than all of these. Polynomials then bring them to one. Where values lie on both sides of the cut without a gap, the
  sign of X^T X less its value at the cut, after the Halley steps, is the projector on the seen directions.
- `reduced` (large matrices): where few directions are seen, or few are not, a block of vectors is filtered with powers
  of the second Halley step's inverse until it spans them. The cut is then made in the block's small space.
- `svd`: the decomposition itself.
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


SMALLEST = {"cuda": 96}
"""From which smaller side on a device iterates. Below it the decomposition is quicker; on one core of a CPU it is
quicker at every size that was measured, 48 to 1536, by 1.3 to 13 times."""

LARGE = 1500
"""From which smaller side a matrix is solved alone, and in a small space where that can be: a batch of large
factorisations is slower than one after the other."""

CUTS = (1e-7, 1e-2)
"""The cuts that the iterations are made for; others take the decomposition."""

TOLERANCE = 1e-10
"""How far the trace of a projector may be from the square of its norm: a value s away from zero adds s^2."""

MISFIT = 1e-8
"""How far the squared norm of a result may be from its rank."""

LEAK = 1e-5
"""How far the directions of a small space may be from the matrix's own."""

FEW_ERROR = 1e-10
"""How far from one a value may stay where the unseen directions were taken out before."""

FEW_MISFIT = 1e-6
"""How far the squared norm of such a result may be from its rank."""

FIRST_MARGIN = 8.0
"""The first Halley step is made for values from this many times the cut: all larger ones stay far from its image, and
its rounding errors are small."""

MARGIN = 1.25
"""The same for later steps: all larger ones stay clear of the cut's image."""

ENOUGH = 0.3
"""From where polynomials are quicker than Halley steps."""

DOUBT = 1e-6
"""Values this close to the cut, as a share of it, are left to the decomposition. The cut itself is as exact as the
largest value, half of `iterations.KNOWN`."""

NEAR = 3e-4
"""Values this close to the cut, as a share of it, are told apart without more steps than planned."""

EXTRA_STEPS = 16
"""How many more polynomials a sign may take for values that are still closer."""

DAMPING = 1e-5
"""What a filter leaves of the unwanted directions at least: it keeps the columns of a block well apart."""

COUNT_SQUARINGS = 3
"""How often the inverse is squared before its trace counts directions: those up to about three times the cut."""

CLOSER_SQUARINGS = 1
"""How often more where few are unseen: those up to about twice the cut, as many more may lie beyond."""

FILTER_SQUARINGS = 2
"""How often more for the filter of the unseen directions: twice the cut is then four decades below the cut."""

SPARE = 32
"""How many columns a block has above twice the directions that it is for."""

SHARE = 6
"""A block may have the smaller side over this many columns."""

ROUNDS = 3
"""How often a block is filtered before the small space is given up."""


@dataclass(frozen=True)
class SeenPart:
    """U V^T over the singular values above the cut, their number, their sum, and the way that it was found."""

    matrix: Tensor
    rank: int
    nuclear: float
    way: str


@dataclass(frozen=True)
class _Stage:
    """A batch on its way, with its Gram matrices: the values of the cut and above have come to [edge, 1]."""

    matrices: Tensor
    grams: Tensor
    edge: float


@dataclass(frozen=True)
class _Converged:
    """A batch whose singular values above the cut were brought to one.

    `halfway` are the Gram matrices from before the last polynomials: their eigenvalues are above `threshold` exactly
    where the values are above the cut. `clean` says that nothing else is left: the matrices are the answer.
    """

    matrices: Tensor
    grams: Tensor
    halfway: Tensor
    threshold: float
    clean: Tensor


@dataclass(frozen=True)
class _Found:
    """Partial isometries with their ranks, and which of them passed every check."""

    matrices: Tensor
    ranks: Tensor
    sure: Tensor
    way: str = "iterated"


def seen_parts(batch: Tensor, cut: float, smallest: int | None = None, large: int = LARGE) -> list[SeenPart]:
    """The seen parts of a batch of matrices of one shape, in order; the batch is overwritten.

    >>> matrix = torch.diag(torch.tensor([2.0, 1.0, 1e-9], dtype=torch.float64))
    >>> [found] = seen_parts(matrix[None], 1e-6)
    >>> found.matrix.diagonal().tolist(), found.rank, found.nuclear, found.way
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
        parts = decomposed(batch, cut)[0]
    elif batch.shape[-2] < batch.shape[-1]:
        parts = [replace(part, matrix=part.matrix.mT) for part in _without_vectors(batch.mT, cut, large)]
    else:
        parts = _without_vectors(batch, cut, large)
    return [replace(part, nuclear=part.nuclear * scale) for part, scale in zip(parts, on_host, strict=True)]


def decomposed(batch: Tensor, cut: float) -> tuple[list[SeenPart], Tensor, Tensor]:
    """The seen parts by singular value decomposition, and all left and right vectors."""
    left, values, right = torch.linalg.svd(batch, full_matrices=False)
    # a zero matrix has seen nothing: its singular values are not above a cut of zero
    kept = values > cut * values[:, :1]
    matrices = (left * kept.unsqueeze(-2)) @ right
    ranks, sums = torch.stack([kept.sum(-1), (values * kept).sum(-1)]).tolist()
    facts = zip(matrices, ranks, sums, strict=True)
    return [SeenPart(matrix, int(rank), total, "svd") for matrix, rank, total in facts], left, right


def _without_vectors(batch: Tensor, cut: float, large: int) -> list[SeenPart]:
    """At least as many rows as columns; the batch is scaled to a largest singular value of one."""
    grams = torch.bmm(batch.mT, batch)
    squares = largest(grams)
    squares = torch.where(squares > 0, squares, 1.0)
    batch.div_(squares.sqrt()[:, None, None])
    grams.div_(squares[:, None, None])
    if batch.shape[-1] < large:
        parts = _checked(batch, _iterated(batch, grams, cut), cut)
    else:
        pairs = zip(batch.split(1), grams.split(1), strict=True)
        parts = [part for one, gram in pairs for part in _checked(one, _large(one, gram, cut), cut)]
    tops = squares.sqrt().tolist()
    return [replace(part, nuclear=part.nuclear * top) for part, top in zip(parts, tops, strict=True)]


def _checked(batch: Tensor, found: _Found, cut: float) -> list[SeenPart]:
    """What was found where it passed its checks, the decomposition where not."""
    facts = torch.stack([found.ranks, _inner(found.matrices, batch), found.sure.double()]).tolist()
    return [
        SeenPart(matrix, round(rank), total, found.way) if sure else decomposed(batch[index : index + 1], cut)[0][0]
        for index, (matrix, rank, total, sure) in enumerate(zip(found.matrices, *facts, strict=True))
    ]


def _iterated(unit: Tensor, grams: Tensor, cut: float) -> _Found:
    return _separated(_converged(_started(unit, grams, cut)))


def _started(unit: Tensor, grams: Tensor, cut: float) -> _Stage:
    return _stepped(_Stage(unit, grams, cut), FIRST_MARGIN)


def _stepped(stage: _Stage, margin: float = MARGIN) -> _Stage:
    low = margin * stage.edge
    matrices = halley(stage.matrices, halley_inverses(stage.grams, low), low)
    return _Stage(matrices, torch.bmm(matrices.mT, matrices), halley_image(stage.edge, low))


def _converged(stage: _Stage) -> _Converged:
    """Every singular value of [edge, 1] to one; those below the edge end anywhere between zero and one."""
    while stage.edge < ENOUGH:
        stage = _stepped(stage)
    threshold = stage.edge**2
    matrices = to_one(stage.matrices, stage.grams, stage.edge)
    grams = torch.bmm(matrices.mT, matrices)
    # positive exactly where all that is left was above the edge: halfway - threshold on the rows, one beside them
    above = stage.grams - (threshold * (1 + DOUBT) + 1) * grams
    above.diagonal(dim1=-2, dim2=-1).add_(1.0)
    clean = (_openness(grams) < TOLERANCE) & (torch.linalg.cholesky_ex(above)[1] == 0)
    return _Converged(matrices, grams, stage.grams, threshold, clean)


def _separated(state: _Converged) -> _Found:
    """Drops what lies below the cut, by the sign of `halfway - threshold`; clean matrices stay as they are."""
    found = _Found(state.matrices, _trace(state.grams), state.clean.clone())
    left = [index for index, clean in enumerate(state.clean.tolist()) if not clean]
    if left:
        projectors = _above(state.halfway[left], state.threshold)
        ranks = _trace(projectors)
        fit = (ranks - _inner(projectors, state.grams[left])).abs() < MISFIT
        found.matrices[left] = torch.bmm(state.matrices[left], projectors)
        found.ranks[left] = ranks
        found.sure[left] = fit & (_openness(projectors) < TOLERANCE)
    return found


def _above(symmetric: Tensor, threshold: float) -> Tensor:
    """The projectors on the eigenvectors above the threshold, for eigenvalues of [0, 1]; the input is consumed."""
    symmetric.diagonal(dim1=-2, dim2=-1).sub_(threshold)
    symmetric.div_(max(threshold, 1 - threshold))
    signs = halley(symmetric, halley_inverses(torch.bmm(symmetric, symmetric), NEAR), NEAR)
    signs = (signs + signs.mT).div_(2)
    signs = to_one(signs, torch.bmm(signs, signs), halley_image(NEAR, NEAR))
    for _ in range(EXTRA_STEPS):
        if bool((signs.shape[-1] - _inner(signs, signs) < TOLERANCE).all()):
            break
        signs = quintic(signs, torch.bmm(signs, signs), NEWTON)
    signs.div_(2).diagonal(dim1=-2, dim2=-1).add_(0.5)
    return signs


def _large(unit: Tensor, gram: Tensor, cut: float) -> _Found:
    """One large matrix: in the space of its few seen directions, or of its few unseen ones, or iterated as it is."""
    stage = _started(unit, gram, cut)
    low = MARGIN * stage.edge
    inverse = halley_inverses(stage.grams, low)
    few = _few(stage, inverse, halley_inverse_image(stage.edge, low))
    if few is not None and few.of_seen:
        return few.alone(stage)
    matrices, edge = halley(stage.matrices, inverse, low), halley_image(stage.edge, low)
    del inverse, stage
    if few is not None:
        return few.removed(matrices, edge)
    return _separated(_converged(_Stage(matrices, torch.bmm(matrices.mT, matrices), edge)))


@dataclass(frozen=True)
class _Few:
    """The right singular vectors above the cut, or those below it, whichever are few, with their values squared."""

    vectors: Tensor
    squares: Tensor
    of_seen: bool

    def alone(self, stage: _Stage) -> _Found:
        """The answer where these are all that is seen."""
        images = torch.bmm(stage.matrices, self.vectors).div_(self.squares.sqrt()[:, None])
        ranks = torch.full_like(stage.matrices[:, 0, 0], self.vectors.shape[-1])
        return _Found(torch.bmm(images, self.vectors.mT), ranks, torch.ones_like(ranks, dtype=torch.bool), "reduced")

    def removed(self, matrices: Tensor, edge: float) -> _Found:
        """The answer where these are all that is unseen, from matrices with all else at [edge, 1]."""
        if self.vectors.shape[-1]:
            matrices = torch.baddbmm(matrices, torch.bmm(matrices, self.vectors), self.vectors.mT, alpha=-1.0)
        matrices = to_one(matrices, torch.bmm(matrices.mT, matrices), edge, FEW_ERROR)
        ranks = torch.full_like(matrices[:, 0, 0], matrices.shape[-1] - self.vectors.shape[-1])
        return _Found(matrices, ranks, (ranks - _inner(matrices, matrices)).abs() < FEW_MISFIT, "reduced")


def _few(stage: _Stage, inverse: Tensor, at_cut: float) -> _Few | None:
    """The few directions on one side of the cut, where one side has few.

    The inverse has eigenvalues from one (unseen) over `at_cut` to nearly zero (seen). Powers of it, or what they are
    short of one, are the filter; the trace of a power tells how many directions are unseen or nearly so.
    """
    side = inverse.shape[-1]
    filters = _squared(inverse, COUNT_SQUARINGS)
    unseen = float(_trace(filters))
    if unseen < 0.99 * at_cut ** (2**COUNT_SQUARINGS):
        return _Few(filters[..., :0], filters[:, 0, :0], of_seen=False)
    of_seen = unseen > side / 2
    if not of_seen:
        filters = _squared(filters, CLOSER_SQUARINGS)
        unseen = float(_trace(filters))
    width = math.ceil(2 * (side - unseen if of_seen else unseen)) + SPARE
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
        few = _within(stage, vectors, of_seen)
        if few is not None:
            return few
    return None


def _within(stage: _Stage, basis: Tensor, of_seen: bool) -> _Few | None:
    """The directions of one side of the cut in the span of the basis, where it holds them all."""
    images = torch.bmm(stage.matrices, basis)
    small = torch.bmm(images.mT, images)
    if not bool(small.isfinite().all()):
        return None
    squares, turns = torch.linalg.eigh(small)
    square = stage.edge**2
    on_host = squares[0].tolist()
    below = sum(one <= square for one in on_host)
    chosen = slice(below, None) if of_seen else slice(0, below)
    doubtful = any(abs(one - square) < 2 * DOUBT * square for one in on_host)
    spare = below if of_seen else len(on_host) - below
    if doubtful or spare < SPARE / 2:
        return None
    vectors, squares = torch.bmm(basis, turns[..., chosen]), squares[:, chosen]
    back = torch.bmm(stage.grams, vectors)
    outside = torch.baddbmm(back, basis, torch.bmm(basis.mT, back), alpha=-1.0)
    leak = outside.div_(squares.clamp(min=square)[:, None]).norm()
    return _Few(vectors, squares, of_seen) if bool(leak < LEAK) else None


def _squared(matrices: Tensor, times: int) -> Tensor:
    for _ in range(times):
        matrices = torch.bmm(matrices, matrices)
    return matrices


def _orthonormal(vectors: Tensor) -> Tensor:
    """Cholesky orthogonalisation, twice: for columns that are not nearly dependent."""
    for _ in range(2):
        factor = torch.linalg.cholesky_ex(torch.bmm(vectors.mT, vectors))[0]
        vectors = torch.linalg.solve_triangular(factor, vectors.mT, upper=False).mT
    return vectors


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def _inner(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum((-2, -1))


def _openness(grams: Tensor) -> Tensor:
    """Zero for projectors, and more with every eigenvalue between zero and one."""
    return (_trace(grams) - _inner(grams, grams)).abs()
