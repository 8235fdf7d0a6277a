"""Matrices kept as products of thin ones, against the same arithmetic on dense ones and against all singular values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_bico.models import low_rank
from hf_bico.models.low_rank import (
    Change,
    Factors,
    between,
    dense,
    energy,
    is_finite,
    is_zero,
    stacked,
    total,
    truncated,
)

pytestmark = pytest.mark.quick

SHAPES = {"tall": (23, 9), "wide": (8, 31), "square": (12, 12), "row": (1, 7), "column": (7, 1)}
MATRICES = ("tall", "wide", "square", "row", "column", "rank-deficient", "zero", "twins", "one direction")
SHARES = (0.05, 0.5, 0.9, 0.95, 0.999)

matrices = st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**16))


def random(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def product(rows: int, columns: int, rank: int, seed: int = 0) -> Factors:
    return Factors(random(rows, rank, seed), random(rank, columns, seed + 1))


def matrix(kind: str) -> Tensor:
    if kind in SHAPES:
        return random(*SHAPES[kind])
    made: dict[str, Callable[[], Tensor]] = {
        "rank-deficient": lambda: product(17, 11, 4).dense(),
        "zero": lambda: torch.zeros(6, 9),
        "twins": lambda: torch.eye(10, 14),  # all singular values are the same
        "one direction": lambda: 1e-3 * torch.ones(9, 5),
    }
    return made[kind]()


def singular_energies(change: Change) -> Tensor:
    """The slow reference."""
    return torch.linalg.svdvals(dense(change).double()).square()


def error(change: Change, found: Factors) -> float:
    return float((dense(change).double() - found.left.double() @ found.right.double()).square().sum())


def spectrum(rows: int, columns: int, power: float) -> Tensor:
    """A matrix whose singular values fall with that power of their number."""
    count = min(rows, columns)
    left, right = torch.linalg.qr(random(rows, count, 1))[0], torch.linalg.qr(random(columns, count, 2))[0]
    return (left * torch.arange(1, count + 1) ** -power) @ right.T


# --- arithmetic


@given(matrices, st.integers(1, 5))
def test_a_product_behaves_as_the_matrix_that_it_is(made: tuple[int, int, int], rank: int) -> None:
    rows, columns, seed = made
    low = product(rows, columns, rank, seed)
    whole = low.dense()
    assert low.shape == tuple(whole.shape)
    assert low.rank == rank
    assert torch.equal(low.T.dense(), whole.T) or torch.allclose(low.T.dense(), whole.T, atol=1e-5)
    assert torch.allclose((-2.5 * low).dense(), -2.5 * whole, atol=1e-4)
    assert torch.allclose(low[rows // 3 :].dense(), whole[rows // 3 :], atol=1e-5)
    assert torch.allclose(low[: rows // 2].dense(), whole[: rows // 2], atol=1e-5)
    assert energy(low) == pytest.approx(energy(whole), rel=1e-5, abs=1e-6)


@given(matrices, st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_a_sum_of_products_is_a_product_of_the_summed_rank(made: tuple[int, int, int], ranks: list[int]) -> None:
    rows, columns, seed = made
    parts = [product(rows, columns, rank, seed + index) for index, rank in enumerate(ranks)]
    found = total(parts)
    assert isinstance(found, Factors)
    assert found.rank == sum(ranks)
    assert torch.allclose(found.dense(), sum(part.dense() for part in parts), atol=1e-4)


def test_a_sum_with_a_tensor_in_it_is_a_tensor() -> None:
    low, whole = product(5, 4, 2), random(5, 4, 7)
    found = total([low, whole, 0.5 * low])
    assert isinstance(found, Tensor)
    assert torch.allclose(found, 1.5 * low.dense() + whole, atol=1e-5)
    assert total([low]) is low


def test_a_sum_takes_the_widest_dtype() -> None:
    found = total([product(5, 4, 2).to(torch.bfloat16), product(5, 4, 1)])
    assert found.dtype == torch.float32
    assert product(5, 4, 2).to(torch.bfloat16).dense().dtype == torch.float32


@given(matrices, st.integers(1, 4))
def test_between_multiplies_from_both_sides(made: tuple[int, int, int], rank: int) -> None:
    rows, columns, seed = made
    low = product(rows, columns, rank, seed)
    left, right = random(6, rows, seed + 2).double(), random(columns, 5, seed + 3).double()
    turned = between(left, low, right)
    assert isinstance(turned, Factors)
    assert turned.rank == rank
    assert turned.dtype == torch.float64
    reference = left @ low.to(torch.float64).dense() @ right
    assert torch.allclose(turned.dense(), reference)
    assert torch.allclose(dense(between(left, low.to(torch.float64).dense(), right)), reference)


def test_stacked_parts_that_read_the_same_keep_the_rank() -> None:
    right = random(2, 5)
    parts = [(start, Factors(random(3, 2, start), right)) for start in (0, 3, 7)]
    found = stacked(parts, 12)
    assert found.rank == 2
    assert torch.equal(found.dense(), _stacked_densely(parts, 12))
    assert not found.dense()[6].any(), "what lies between two parts stays zero"
    assert not found.dense()[10:].any(), "so does what comes after the last"


def test_stacked_parts_that_differ_add_their_ranks() -> None:
    parts = [(1, product(3, 5, 2)), (4, product(2, 5, 3, 9))]
    found = stacked(parts, 8)
    assert found.rank == 5
    assert torch.allclose(found.dense(), _stacked_densely(parts, 8), atol=1e-6)


def test_a_single_part_is_put_at_its_rows() -> None:
    part = product(3, 5, 2)
    assert torch.equal(stacked([(2, part)], 6).dense()[2:5], part.dense())


def _stacked_densely(parts: list[tuple[int, Factors]], rows: int) -> Tensor:
    whole = torch.zeros(rows, parts[0][1].shape[1])
    for start, part in parts:
        whole[start : start + part.shape[0]] = part.dense()
    return whole


def test_energy_of_a_product_that_cancels_is_zero_and_never_below() -> None:
    low = product(40, 30, 4)
    found = energy(total([low, -1.0 * low]))
    assert 0.0 <= found <= 1e-12 * energy(low)


def test_zero_and_finite() -> None:
    low = product(4, 3, 2)
    assert is_zero(Factors(torch.zeros(4, 2), low.right))
    assert is_zero(torch.zeros(4, 3))
    assert not is_zero(low)
    assert is_finite(low)
    assert not is_finite(Factors(low.left, low.right / 0))
    assert not is_finite(torch.tensor([float("nan")]))


# --- the best product of a rank


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("rank", [1, 2, 3, 6, 10, 100])
def test_a_rank_gives_the_least_error_that_it_can(kind: str, rank: int) -> None:
    whole = matrix(kind)
    best = float(singular_energies(whole)[rank:].sum())
    scale = energy(whole) or 1.0
    for change in (whole, _as_product(whole)):
        found = truncated(change, rank)
        assert found.rank <= min(rank, *whole.shape)
        assert is_finite(found)
        assert abs(error(whole, found) - best) <= 1e-6 * scale


def _as_product(whole: Tensor) -> Factors:
    """The same matrix as factors that share its energy unevenly, of a greater rank than need be."""
    columns = whole.shape[1]
    mixed = random(columns, columns + 2, 5)
    return Factors(whole @ mixed, torch.linalg.pinv(mixed.double()).float())


@settings(max_examples=60)
@given(matrices, st.integers(1, 12))
def test_no_matrix_of_the_rank_is_nearer(made: tuple[int, int, int], rank: int) -> None:
    rows, columns, seed = made
    whole = random(rows, columns, seed)
    best = float(singular_energies(whole)[rank:].sum())
    assert abs(error(whole, truncated(whole, rank)) - best) <= 1e-6 * energy(whole)


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("share", SHARES)
def test_a_share_takes_the_least_rank_that_keeps_it(kind: str, share: float) -> None:
    whole = matrix(kind)
    energies = singular_energies(whole)
    for change in (whole, _as_product(whole)):
        found = truncated(change, share)
        if not whole.any():
            assert found.rank == 1
            continue
        kept = 1 - error(whole, found) / energy(whole)
        assert kept >= share - 1e-6
        fewer = float(energies[: found.rank - 1].sum() / energies.sum())
        assert fewer < share + 1e-6, "one direction less would not have been enough"


def test_a_share_on_either_side_of_a_boundary() -> None:
    whole = torch.diag(torch.tensor([3.0, 2.0, 1.0]).sqrt())  # energies 1/2, 5/6 and 1 of the whole
    for change in (whole, Factors(whole, torch.eye(3))):
        assert [truncated(change, share).rank for share in (0.49, 0.51, 0.83, 0.84, 0.99)] == [1, 2, 2, 3, 3]


@settings(max_examples=60)
@given(matrices, st.floats(0.01, 0.99))
def test_each_matrix_finds_its_own_rank(made: tuple[int, int, int], share: float) -> None:
    rows, columns, seed = made
    whole = random(rows, columns, seed)
    shares = singular_energies(whole).cumsum(0) / singular_energies(whole).sum()
    found = truncated(whole, share).rank
    assert shares[found - 1] >= share - 1e-9
    assert found == 1 or shares[found - 2] < share + 1e-9


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_no_rank_keeps_a_tensor_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    whole = matrix(kind).to(dtype)
    for rank in (None, 1000):
        found = truncated(whole, rank)
        assert torch.equal(found.left @ found.right, whole)
        assert found.rank == min(whole.shape)


@pytest.mark.parametrize("rank", [None, 4, 5, 1000])
def test_a_product_that_has_the_rank_already_is_left_alone(rank: int | None) -> None:
    low = product(20, 15, 4)
    assert truncated(low, rank) is low


def test_a_product_of_more_than_full_rank_is_brought_to_it() -> None:
    low = product(3, 5, 7)
    found = truncated(low, None)
    assert found.rank == 3
    assert torch.allclose(found.dense(), low.dense(), atol=1e-5)


@pytest.mark.parametrize("shape", [(40, 25), (25, 40), (30, 30)])
def test_a_low_rank_matrix_is_recovered(shape: tuple[int, int]) -> None:
    whole = product(*shape, 5).dense()
    for rank in (5, 9, 0.999999):
        found = truncated(whole, rank)
        assert (found.dense() - whole).abs().max() <= 2e-6 * whole.abs().max()


def test_half_precision_factors_are_not_rounded_again() -> None:
    low = product(30, 20, 6).to(torch.bfloat16)
    best = float(singular_energies(low)[3:].sum())
    for change in (low, low.dense().to(torch.bfloat16)):
        found = truncated(change, 3)
        assert found.dtype == torch.float32
        reference = best if isinstance(change, Factors) else float(singular_energies(change)[3:].sum())
        assert error(change, found) == pytest.approx(reference, rel=1e-5)


def test_the_two_factors_are_of_one_size() -> None:
    whole = 1e-3 * random(30, 20)
    for change in (whole, _as_product(whole)):
        found = truncated(change, 4)
        assert torch.allclose(found.left.norm(dim=0), found.right.norm(dim=1), rtol=1e-4)


# --- large matrices


@pytest.fixture
def small_counts_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "RANDOMISED_FROM", 8)
    monkeypatch.setattr(low_rank, "_by_eigenvectors", None)  # nothing but random projections may be used


SPECTRA: dict[str, Callable[[int, int], Tensor]] = {
    "flat": random,
    "slow": lambda rows, columns: spectrum(rows, columns, 0.5),
    "fast": lambda rows, columns: spectrum(rows, columns, 2.0),
    "low rank and noise": lambda rows, columns: product(rows, columns, 8).dense() + 0.1 * random(rows, columns, 3),
}


@pytest.mark.usefixtures("small_counts_as_large")
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("shape", [(700, 760), (760, 700)])
def test_random_projections_keep_nearly_the_best_energy(name: str, shape: tuple[int, int]) -> None:
    whole = SPECTRA[name](*shape)
    best = float(singular_energies(whole)[:4].sum())
    found = truncated(whole, 4)
    assert found.rank == 4
    assert energy(whole) - error(whole, found) >= (1 - 1e-3) * best


@pytest.mark.parametrize("name", ["flat", "slow"])
def test_random_projections_of_a_matrix_of_real_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "_by_eigenvectors", None)
    whole = SPECTRA[name](1100, 1300)
    best = float(torch.linalg.eigvalsh(whole.double() @ whole.double().T)[-16:].sum())
    found = truncated(whole, 16)
    assert energy(whole) - error(whole, found) >= (1 - 1e-3) * best


@pytest.mark.usefixtures("small_counts_as_large")
def test_random_projections_recover_a_low_rank_matrix() -> None:
    whole = product(700, 760, 3).dense()
    assert (truncated(whole, 4).dense() - whole).abs().max() <= 1e-5 * whole.abs().max()
    assert not truncated(torch.zeros(700, 760), 4).dense().any()


@pytest.mark.usefixtures("small_counts_as_large")
def test_random_projections_give_the_same_bytes_and_touch_no_seed() -> None:
    whole = random(700, 760)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(truncated(whole, 4))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found[0].left, found[1].left)
    assert torch.equal(found[0].right, found[1].right)


@pytest.mark.parametrize("rank", [40, 0.9])
def test_a_large_rank_or_a_share_is_found_by_all_singular_values(
    rank: int | float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_rank, "RANDOMISED_FROM", 8)
    monkeypatch.setattr(low_rank, "_randomised", None)
    whole = random(60, 70)
    found = truncated(whole, rank)
    assert abs(error(whole, found) - float(singular_energies(whole)[found.rank :].sum())) <= 1e-6 * energy(whole)
