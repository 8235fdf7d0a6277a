"""The solver without singular vectors: on every way the same answer as the float64 decomposition, and never a guess."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hf_bico.alignment.polar import (
    halley_image,
    halley_inverse_image,
    halley_inverses,
    largest_eigenvalues,
    partial_isometries,
    polynomials,
    quintic,
)
from hf_bico.errors import NonFiniteWeightsError

pytestmark = pytest.mark.quick

CUT = 1e-6
SIDE = 300
ALONE = 100_000  # no matrix is this large: all are iterated


def falling(first: float, last: float, count: int) -> Tensor:
    """Values that fall evenly in their logarithm, from 10^first to 10^last."""
    return torch.logspace(first, last, count, dtype=torch.float64)


def level(value: float, count: int) -> Tensor:
    return torch.full((count,), value, dtype=torch.float64)


SPECTRA = {
    "over twelve decades": [falling(0, -12, SIDE)],
    "clusters one percent above and below the cut": [level(1, 1), level(1.01e-6, 150), level(0.99e-6, 149)],
    "rank 40": [falling(0, -3, 40), level(0, 260)],
    "rank 7, two of them below the cut": [falling(0, -5, 5), level(3e-7, 2), level(0, 293)],
    "all but one": [falling(0, -5, 299), level(0, 1)],
    "one in twenty seen and a tail below the cut": [falling(0, -5.8, 15), falling(-6.1, -12, 285)],
    "few seen and a long tail": [falling(0, -5.9, 5), falling(-6.3, -12, 295)],
    "nearly full": [falling(0, -3, 293), falling(-5.7, -5.98, 3), falling(-6.01, -6.1, 4)],
    "flat": [level(1, SIDE)],
    "nothing": [level(0, SIDE)],
    "all seen": [falling(0, -4, SIDE)],
}
REDUCED = {
    "rank 7, two of them below the cut",
    "all but one",
    "one in twenty seen and a tail below the cut",
    "few seen and a long tail",
    "nearly full",
    "flat",
    "nothing",
    "all seen",
}


def frame(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(rows, columns, dtype=torch.float64, generator=generator))[0]


def made(values: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix of these singular values with its seen part and its right vectors far above the cut."""
    left, right = frame(rows, len(values), 1), frame(columns, len(values), 2)
    seen = (left * (values > CUT * values.max())) @ right.T
    return (left * values) @ right.T, seen, right[:, values >= 10 * CUT * values.max()]


@pytest.mark.parametrize("symmetric", [100, ALONE], ids=["by blocks", "whole"])
@pytest.mark.parametrize("large", [2, ALONE], ids=["reduced", "iterated"])
@pytest.mark.parametrize("name", SPECTRA)
def test_equals_the_decomposition(name: str, large: int, symmetric: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_bico.alignment.polar.SYMMETRIC", symmetric)
    values = torch.cat(SPECTRA[name])
    matrix, seen, far = made(values, 340, SIDE)
    [found] = partial_isometries(matrix[None].clone(), CUT, smallest=2, large=large)
    assert found.way == ("reduced" if large == 2 and name in REDUCED else "iterated")
    kept = values > CUT * values.max()
    assert found.rank == int(kept.sum())
    assert found.nuclear == pytest.approx(float(values[kept].sum()), rel=1e-9)
    assert (found.matrix - seen).norm() < 1e-6
    assert ((found.matrix - seen) @ far).norm() < 1e-7
    gram = found.matrix.T @ found.matrix
    assert (gram @ gram - gram).norm() < 1e-8


@pytest.mark.parametrize("large", [2, ALONE], ids=["reduced", "iterated"])
@pytest.mark.parametrize("shape", [(300, 340), (300, 300), (340, 300)])
def test_wide_square_and_tall(shape: tuple[int, int], large: int) -> None:
    matrix, seen, _ = made(torch.cat(SPECTRA["nearly full"]), *shape)
    [found] = partial_isometries(matrix[None].clone(), CUT, smallest=2, large=large)
    assert found.way != "svd"
    assert (found.matrix - seen).norm() < 1e-6


def test_one_column_is_its_direction() -> None:
    column = torch.arange(1.0, 6.0, dtype=torch.float64)[:, None]
    [found] = partial_isometries(column[None].clone(), CUT, smallest=1)
    assert (found.way, found.rank) == ("iterated", 1)
    assert torch.allclose(found.matrix, column / column.norm(), atol=1e-14)


def test_a_mixed_batch_is_each_alone() -> None:
    matrices = [made(torch.cat(parts), 310, SIDE)[0] for parts in SPECTRA.values()]
    together = partial_isometries(torch.stack(matrices), CUT, smallest=2, large=ALONE)
    for matrix, found in zip(matrices, together, strict=True):
        [alone] = partial_isometries(matrix[None].clone(), CUT, smallest=2, large=ALONE)
        assert found.rank == alone.rank
        assert (found.matrix - alone.matrix).norm() < 1e-6


@pytest.mark.parametrize("large", [2, ALONE])
@pytest.mark.parametrize("side", [1 - 1e-9, 1 + 1e-9])
def test_a_value_at_the_cut_is_left_to_the_decomposition(side: float, large: int) -> None:
    values = torch.cat([level(1, 1), falling(-1, -3, 198), level(CUT * side, 1)])
    sure, seen, _ = made(falling(0, -3, 200), 220, 200)
    doubtful, _, _ = made(values, 220, 200)
    found, beside = partial_isometries(torch.stack([doubtful, sure]), CUT, smallest=2, large=large)
    assert found.way == "svd"
    assert found.rank == 199 + (side > 1)
    assert beside.way != "svd"
    assert (beside.matrix - seen).norm() < 1e-6


def test_other_cuts_are_honoured() -> None:
    values = falling(0, -12, 80)
    matrix = made(values, 90, 80)[0]
    ways = {}
    for cut in (1e-10, 1e-7, 1e-4, 1e-2, 0.3):
        [found] = partial_isometries(matrix[None].clone(), cut, smallest=2)
        assert found.rank == int((values > cut).sum())
        ways[cut] = found.way
    assert ways == {1e-10: "svd", 1e-7: "iterated", 1e-4: "iterated", 1e-2: "iterated", 0.3: "svd"}


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_scale_goes_into_the_sum_only(scale: float) -> None:
    matrix, seen, _ = made(torch.cat(SPECTRA["rank 40"]), 310, SIDE)
    [found] = partial_isometries(scale * matrix[None], CUT, smallest=2)
    assert (found.matrix - seen).norm() < 1e-6
    assert found.nuclear / scale == pytest.approx(float(torch.cat(SPECTRA["rank 40"]).sum()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_refused(bad: float) -> None:
    matrix = torch.ones(1, 8, 8, dtype=torch.float64)
    matrix[0, 3, 3] = bad
    with pytest.raises(NonFiniteWeightsError, match="cross-covariance"):
        partial_isometries(matrix, CUT, smallest=2)


@pytest.mark.parametrize("size", [130, 1500])
def test_inverses_of_any_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_bico.alignment.polar.BLOCKED", 2)
    monkeypatch.setattr("hf_bico.alignment.polar.LEAF", 48)
    monkeypatch.setattr("hf_bico.alignment.polar.SYMMETRIC", 200)
    rows = frame(size, 60, 3)
    gram = rows @ rows.T
    found = halley_inverses(gram[None], 0.1)[0]
    # on the span of the rows the eigenvalue is that of one, beside it that of zero
    expected = torch.eye(size, dtype=torch.float64) + (halley_inverse_image(1.0, 0.1) - 1) * gram
    assert torch.allclose(found, expected, atol=1e-13)


def test_largest_eigenvalue_of_spectra_with_and_without_gaps() -> None:
    turn = frame(120, 120, 4)
    spectra = [falling(0, -8, 120), level(1, 120), torch.linspace(1, 0, 120, dtype=torch.float64)]
    grams = torch.stack([(turn * values) @ turn.T for values in spectra])
    assert torch.allclose(largest_eigenvalues(grams), torch.ones(3, dtype=torch.float64), rtol=2e-5)


@pytest.mark.parametrize("low", [0.05, 0.3, 0.99])
def test_polynomials_end_within_the_error_and_not_above_one(low: float) -> None:
    values = torch.linspace(low, 1, 1000, dtype=torch.float64)[:, None, None]
    for weights in polynomials(low, 1e-10):
        values = quintic(values, values * values, weights)
    assert float((values - 1).max()) < 1e-14
    assert float((1 - values).max()) < 1e-10


@pytest.mark.parametrize("low", [1e-6, 1e-3, 0.2])
def test_halley_keeps_the_order_at_its_lower_end(low: float) -> None:
    edge = halley_image(low, low)
    above = [halley_image(float(value), low) for value in falling(0, 1, 500) * low if value <= 1]
    below = [halley_image(low * step / 100, low) for step in range(100)]
    assert min(above) >= edge * (1 - 1e-12)
    assert max(below) < edge
    assert all(one < other for one, other in itertools.pairwise(below))
