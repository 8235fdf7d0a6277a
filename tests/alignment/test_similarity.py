"""Linear CKA and cosines against their definitions, however the rows come, and what they do not see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_bico.alignment.similarity import ActivationDrift, Likeness, RunningMean, cosine_distances, linear_cka

pytestmark = pytest.mark.quick

SHAPES = [(40, 5, 7), (40, 39, 40), (12, 30, 20), (12, 5, 30), (12, 30, 5), (2, 3, 3)]


def random(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hsic(x: Tensor, y: Tensor) -> float:
    """The definition: HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) with K = x x^T, L = y y^T."""
    n = len(x)
    centring = torch.eye(n, dtype=torch.float64) - torch.ones(n, n, dtype=torch.float64) / n

    def hsic(k: Tensor, l: Tensor) -> Tensor:  # noqa: E741
        return torch.trace(k @ centring @ l @ centring) / (n - 1) ** 2

    k, l = x @ x.T, y @ y.T  # noqa: E741
    return float(hsic(k, l) / (hsic(k, k) * hsic(l, l)).sqrt())


@pytest.mark.parametrize(("rows", "left", "right"), SHAPES)
def test_definition(rows: int, left: int, right: int) -> None:
    x, noise = random(rows, left, 0), random(rows, right, 1)
    y = noise + x @ random(left, right, 2)
    assert linear_cka(x, y) == pytest.approx(by_hsic(x, y), rel=1e-10)
    assert linear_cka(x, y) == pytest.approx(linear_cka(y, x), rel=1e-10)


@pytest.mark.parametrize(("rows", "width"), [(40, 6), (6, 40)])
def test_rotation_scale_and_shift_do_not_matter(rows: int, width: int) -> None:
    x, other = random(rows, width, 0), random(rows, width, 1)
    turn = torch.linalg.qr(random(width, width, 2)).Q
    moved = 0.01 * x @ turn + 100 * random(1, width, 3)
    assert linear_cka(x, moved) == pytest.approx(1.0, abs=1e-10)
    assert linear_cka(moved, other) == pytest.approx(linear_cka(x, other), rel=1e-8)


def test_one_at_most_and_in_float64_whatever_comes() -> None:
    x = random(50, 8, 0).to(torch.bfloat16)
    assert linear_cka(x, x) == pytest.approx(1.0, abs=1e-14)
    assert linear_cka(x, x) <= 1.0


@pytest.mark.parametrize("value", [0.0, 0.1, 1e5 / 3])
@pytest.mark.parametrize("width", [3, 30])
def test_constant_side_is_like_nothing(value: float, width: int) -> None:
    x = random(11, 4, 0)
    constant = torch.full((11, width), value)
    assert linear_cka(x, constant) == linear_cka(constant, x) == linear_cka(constant, constant) == 0.0
    assert linear_cka(x[:1], x[:1]) == 0.0


@pytest.mark.parametrize("scale", [1e-150, 1e150])
def test_extreme_scales_neither_vanish_nor_overflow(scale: float) -> None:
    x, y = random(20, 4, 0), random(20, 5, 1)
    assert linear_cka(x * scale, y) == pytest.approx(linear_cka(x, y), rel=1e-10)


# Batch by batch


WIDTHS = [(5, 5), (5, 9), (9, 5)]
TURN_SEED = 7


def paired(rows: int, left: int, right: int) -> tuple[Tensor, Tensor]:
    """Rows that have something in common, around means of their own."""
    x = random(rows, left, 0) + random(1, left, 4)
    return x, 0.5 * random(rows, right, 1) + x @ random(left, right, 2) + random(1, right, 5)


def likeness(x: Tensor, y: Tensor, turn: Tensor, size: int = 7) -> Likeness:
    """Fed so many rows at a time."""
    found = Likeness(turn)
    for start in range(0, len(x), size):
        found.add(x[start : start + size], y[start : start + size])
    return found


def mean_cosine(x: Tensor, y: Tensor) -> float:
    return float(functional.cosine_similarity(x, y, dim=-1).mean())


@pytest.mark.parametrize(("left", "right"), WIDTHS)
@pytest.mark.parametrize("size", [1, 7, 40])
def test_likeness_by_batches_is_that_of_all_rows(left: int, right: int, size: int) -> None:
    x, y = paired(40, left, right)
    turn = random(left, right, TURN_SEED)
    found = likeness(x, y, turn, size)
    assert found.rows == 40
    assert found.widths == (left, right)
    assert found.cka == pytest.approx(linear_cka(x, y), rel=1e-10)
    assert found.cka_aligned == pytest.approx(linear_cka(x @ turn, y), rel=1e-10)
    assert found.cosine_aligned == pytest.approx(mean_cosine(x @ turn, y), abs=1e-12)
    assert abs(found.cka - found.cka_aligned) > 0.01, "a map that is no rotation shows in CKA"


def test_cosine_is_that_of_raw_coordinates_and_of_one_width_alone() -> None:
    x, y = paired(40, 5, 5)
    found = likeness(x, y, random(5, 5, TURN_SEED)).cosine
    assert found == pytest.approx(mean_cosine(x, y), abs=1e-12)
    assert likeness(*paired(40, 5, 9), random(5, 9, TURN_SEED)).cosine is None


def test_a_map_that_drops_directions_shows_in_aligned_cka() -> None:
    """As a map of fewer rows than are wide does: what it does not see is gone."""
    x, y = paired(40, 5, 5)
    turn = torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    found = likeness(x, y, turn)
    assert found.cka_aligned == pytest.approx(linear_cka(x[:, :2], y), rel=1e-10)
    assert found.cka == pytest.approx(linear_cka(x, y), rel=1e-10)


@pytest.mark.parametrize("mean", [1.0, 1e2, 1e4])
def test_likeness_of_rows_far_from_zero(mean: float) -> None:
    """Sums of products lose what the means take: a millionth where they are 10,000 times what varies."""
    x, y = paired(40, 5, 5)
    x, y = x + mean, y - 2 * mean
    found = likeness(x, y, torch.eye(5))
    assert found.cka == pytest.approx(linear_cka(x, y), abs=1e-6)
    assert found.cosine == pytest.approx(mean_cosine(x, y), abs=1e-12)


def test_likeness_of_rows_very_far_from_zero() -> None:
    x, y = paired(40, 5, 5)
    x, y = x + 1e8, y - 1e8
    assert likeness(x, y, torch.eye(5)).cka == pytest.approx(linear_cka(x, y), abs=1e-3)


def test_rows_that_never_vary_are_like_nothing_by_batches() -> None:
    x, y = (random(1, 8, seed).float().expand(2720, 8) for seed in (0, 1))
    assert linear_cka(x, y) == 0.0
    assert likeness(x, y, torch.eye(8), 700).cka == 0.0


def test_likeness_reads_half_precision_in_float64() -> None:
    x, y = (rows.to(torch.bfloat16) for rows in paired(200, 5, 5))
    found = likeness(x, y, torch.eye(5, dtype=torch.float32))
    assert found.cka == pytest.approx(linear_cka(x, y), rel=1e-10)
    assert found.cosine == pytest.approx(mean_cosine(x.double(), y.double()), abs=1e-12)
    assert likeness(x, x, torch.eye(5)).cka <= 1.0


def test_rows_of_zeros_have_no_direction_and_count_in_cka_alone() -> None:
    x, y = paired(40, 5, 5)
    x[3], y[11] = 0.0, 0.0
    told = torch.ones(40, dtype=torch.bool)
    told[[3, 11]] = False
    found = likeness(x, y, torch.eye(5))
    assert found.cosine == pytest.approx(mean_cosine(x[told], y[told]), abs=1e-12)
    assert found.cosine_aligned == found.cosine
    assert found.cka == pytest.approx(linear_cka(x, y), rel=1e-10)
    assert found.cka != pytest.approx(linear_cka(x[told], y[told]), rel=1e-6)


def test_rows_that_are_all_zeros_are_like_nothing() -> None:
    nothing = torch.zeros(9, 4)
    found = likeness(nothing, random(9, 4, 0), torch.eye(4))
    assert (found.cka, found.cka_aligned, found.cosine, found.cosine_aligned) == (0.0, 0.0, 0.0, 0.0)


def test_one_row_is_no_evidence_for_cka() -> None:
    x, y = paired(1, 4, 4)
    found = likeness(x, y, torch.eye(4))
    assert found.cka == found.cka_aligned == 0.0
    assert found.cosine == pytest.approx(mean_cosine(x, y), abs=1e-12)


# What moved


def moved(before: Tensor, now: Tensor, size: int = 7) -> ActivationDrift:
    found = ActivationDrift()
    for start in range(0, len(before), size):
        found.add(before[start : start + size], now[start : start + size])
    return found


def test_rows_that_did_not_move_have_moved_by_exactly_nothing() -> None:
    x = random(1000, 7, 0).float() * torch.logspace(-20, 15, 1000)[:, None]
    found = moved(x, x.clone())
    assert (found.direction, found.magnitude) == (0.0, 0.0)
    assert cosine_distances(x, x.clone()).abs().max() == 0


def test_moved_is_the_mean_over_rows_of_the_two_formulas() -> None:
    before, now = paired(40, 6, 6)
    found = moved(before, now)
    cosines = [float(x @ y) / float((x @ x).sqrt() * (y @ y).sqrt()) for x, y in zip(before, now, strict=True)]
    shares = [abs(float(y.norm()) - float(x.norm())) / float(x.norm()) for x, y in zip(before, now, strict=True)]
    assert found.direction == pytest.approx(sum(1 - cosine for cosine in cosines) / 40, rel=1e-12)
    assert found.magnitude == pytest.approx(sum(shares) / 40, rel=1e-12)
    assert found.direction > 0.1


def test_a_longer_row_has_moved_in_length_alone_and_a_turned_one_in_direction_alone() -> None:
    x = random(9, 6, 0)
    longer, turned = moved(x, 3 * x), moved(x, x.flip(-1))
    assert longer.direction == pytest.approx(0.0, abs=1e-15)
    assert longer.magnitude == pytest.approx(2.0, rel=1e-12)
    assert moved(x, -x).direction == pytest.approx(2.0, rel=1e-12)
    assert turned.magnitude == pytest.approx(0.0, abs=1e-15)


def test_small_turns_are_told_to_the_last_digit() -> None:
    """1 - cos of a small angle: a difference of two numbers near 1 would have none left."""
    angle = 1e-7
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([[1.0, angle]], dtype=torch.float64)
    assert cosine_distances(x, y).item() == pytest.approx(angle**2 / 2, rel=1e-6)


def test_rows_that_began_as_zeros_are_left_out_of_both() -> None:
    before, now = paired(8, 4, 4)
    before[2] = 0.0
    kept = [number for number in range(8) if number != 2]
    found, expected = moved(before, now), moved(before[kept], now[kept])
    assert found.direction == pytest.approx(expected.direction, rel=1e-12)
    assert found.magnitude == pytest.approx(expected.magnitude, rel=1e-12)


def test_a_row_that_became_zero_has_lost_all_of_its_length() -> None:
    x = random(1, 4, 0)
    found = moved(x, torch.zeros(1, 4))
    assert (found.direction, found.magnitude) == (0.0, 1.0)


def test_the_mean_of_numbers_that_come_some_at_a_time() -> None:
    mean = RunningMean()
    assert mean.value == 0.0
    for some in ([1.0, 2.0], [], [6.0]):
        mean.add(torch.tensor(some))
    assert mean.value == 3.0
