"""The polar factor: exact above the cut, nothing below it, and the best orthogonal map there is."""

from __future__ import annotations

import pytest
import scipy.linalg
import torch

from hf_bico.alignment.procrustes import PairedRows, polar

pytestmark = pytest.mark.quick


def with_spectrum(rows: int, columns: int, values: list[float], seed: int = 0) -> tuple[torch.Tensor, ...]:
    """A matrix of given singular values, with its left and right vectors."""
    generator = torch.Generator().manual_seed(seed)

    def frame(size: int) -> torch.Tensor:
        return torch.linalg.qr(torch.randn(size, len(values), dtype=torch.float64, generator=generator))[0]

    left, right = frame(rows), frame(columns)
    return left @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right.T, left, right


@pytest.mark.parametrize("shape", [(5, 5), (4, 9), (9, 4)])
def test_equals_scipys_polar_decomposition(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    [found] = polar([matrix], [1.0])
    expected = scipy.linalg.polar(matrix.numpy())[0]
    assert torch.allclose(found.matrix, torch.from_numpy(expected), atol=1e-12)
    assert found.rank == min(shape)


@pytest.mark.parametrize("completion", ["drop", "svd"])
def test_spectrum_that_falls_across_the_cut(completion: str) -> None:
    values = [1.0, 1e-2, 1e-4, 2e-6, 5e-7, 1e-9]
    matrix, left, right = with_spectrum(8, 7, values)
    [found] = polar([matrix], [1.0], completion)
    assert found.rank == 4
    assert torch.allclose(found.seen, left[:, :4] @ right[:, :4].T, atol=1e-8)
    if completion == "drop":
        assert torch.equal(found.matrix, found.seen)
    else:
        assert torch.allclose(found.matrix.T @ found.matrix, torch.eye(7, dtype=torch.float64), atol=1e-12)


def test_seen_part_is_a_partial_isometry() -> None:
    matrix, left, right = with_spectrum(6, 9, [3.0, 2.0, 1.0])
    [found] = polar([matrix], [1.0])
    assert torch.allclose(found.matrix @ found.matrix.T, left @ left.T, atol=1e-12)
    assert torch.allclose(found.matrix.T @ found.matrix, right @ right.T, atol=1e-12)


def test_scale_of_the_covariance_does_not_matter() -> None:
    matrix, _, _ = with_spectrum(6, 5, [1.0, 0.1, 1e-3])
    small, large = polar([1e-30 * matrix, 1e30 * matrix], [1.0, 1.0])
    assert small.rank == large.rank == 3
    assert torch.allclose(small.matrix, large.matrix, atol=1e-10)


def test_no_orthogonal_map_does_better() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(50, 4, dtype=torch.float64, generator=generator)
    y = torch.randn(50, 6, dtype=torch.float64, generator=generator)
    [found] = polar([x.T @ y], [1.0])
    best = (x @ found.matrix - y).norm()
    for _ in range(200):
        other = torch.linalg.qr(torch.randn(6, 4, dtype=torch.float64, generator=generator))[0].T
        assert (x @ other - y).norm() >= best


def test_score_is_one_for_a_rotation_and_small_for_strangers() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4000, 6, dtype=torch.float64, generator=generator)
    rotated = 2.5 * x @ torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=generator))[0]
    stranger = torch.randn(4000, 6, dtype=torch.float64, generator=generator)
    same, other = polar(
        [x.T @ rotated, x.T @ stranger],
        [float(x.norm() * rotated.norm()), float(x.norm() * stranger.norm())],
    )
    assert same.score == pytest.approx(1.0)
    assert other.score < 0.1


def test_zero_matrix_has_seen_nothing() -> None:
    [found] = polar([torch.zeros(3, 4, dtype=torch.float64)], [0.0])
    assert found.rank == 0
    assert found.score == 0.0
    assert not found.matrix.any()


def test_batches_of_mixed_shapes_come_back_in_order() -> None:
    generator = torch.Generator().manual_seed(4)
    shapes = [(3, 5), (5, 3), (3, 5), (4, 4), (5, 3)]
    matrices = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    together = polar(matrices, [1.0] * len(matrices))
    for matrix, found in zip(matrices, together, strict=True):
        [alone] = polar([matrix], [1.0])
        assert torch.allclose(found.matrix, alone.matrix, atol=1e-12)


@pytest.mark.parametrize("completion", ["drop", "svd"])
@pytest.mark.parametrize("count", [1, 5, 8, 30])
def test_rows_are_worth_their_covariance(count: int, completion: str) -> None:
    generator = torch.Generator().manual_seed(5)
    # falling scales: some directions of the covariance are below the cut
    scales = torch.logspace(0, -6, count, dtype=torch.float64)[:, None]
    source = scales * torch.randn(count, 8, dtype=torch.float64, generator=generator)
    target = torch.randn(count, 11, dtype=torch.float64, generator=generator)
    norm = float(source.norm() * target.norm())
    [whole] = polar([source.T @ target], [norm], completion)
    [found] = polar([PairedRows(source, target)], [norm], completion)
    assert found.rank == whole.rank
    assert found.score == pytest.approx(whole.score)
    assert torch.allclose(found.seen, whole.seen, atol=1e-9)
    if completion == "svd":
        assert torch.allclose(found.matrix @ found.matrix.T, torch.eye(8, dtype=torch.float64), atol=1e-12)


def test_few_rows_are_exact_where_their_covariance_is_rounded() -> None:
    """Ill-conditioned rows, whose map is known: each row of A goes to the row of B at its place."""
    generator = torch.Generator().manual_seed(6)
    frames = [torch.linalg.qr(torch.randn(40, 4, dtype=torch.float64, generator=generator))[0].T for _ in range(2)]
    scales = torch.tensor([1.0, 1e-2, 2e-6, 1e-8], dtype=torch.float64)[:, None]
    [found] = polar([PairedRows(scales * frames[0], frames[1])], [1.0])
    assert found.rank == 3
    assert torch.allclose(found.seen, frames[0][:3].T @ frames[1][:3], atol=1e-9)


def test_rows_and_covariances_mix_and_come_back_in_order() -> None:
    generator = torch.Generator().manual_seed(7)
    source, target = (torch.randn(3, size, dtype=torch.float64, generator=generator) for size in (6, 5))
    mixed = [source.T @ target, PairedRows(source, target), target.T @ source, PairedRows(target, source)]
    found = polar(mixed, [1.0] * 4)
    assert [one.matrix.shape for one in found] == [(6, 5), (6, 5), (5, 6), (5, 6)]
    assert torch.allclose(found[0].matrix, found[1].matrix, atol=1e-10)
    assert torch.allclose(found[2].matrix, found[3].matrix, atol=1e-10)


def test_covariances_are_left_as_they_are() -> None:
    matrices = [torch.randn(size, size, dtype=torch.float64) for size in (3, 4, 3)]
    copies = [matrix.clone() for matrix in matrices]
    polar(matrices, [1.0] * 3)
    assert all(torch.equal(matrix, copy) for matrix, copy in zip(matrices, copies, strict=True))
