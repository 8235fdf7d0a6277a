"""Linear CKA against its definition, and what it does not see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_bico.similarity import linear_cka

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
