"""Pairing rows, and sums that are sums."""

from __future__ import annotations

import torch

from hf_bico.sites import Tokens
from hf_bico.statistics import CrossCovariance, pair_rows


def numbered(samples: int, tokens: int) -> torch.Tensor:
    """Each row holds its sample and its token."""
    rows = [[[float(sample), float(token)] for token in range(tokens)] for sample in range(samples)]
    return torch.tensor(rows)


def test_equal_grids_pair_row_by_row() -> None:
    tokens = Tokens(1, (2, 3))
    source, target = pair_rows(numbered(2, 7), numbered(2, 7) + 100, tokens, tokens)
    assert torch.equal(target - source, torch.full((14, 2), 100.0))


def test_only_cls_pairs_where_prefix_counts_differ() -> None:
    """CLS and four registers on one side, CLS alone on the other."""
    many, one = Tokens(5, (2, 2)), Tokens(1, (2, 2))
    source, target = pair_rows(numbered(1, 9), numbered(1, 5), many, one)
    assert source[:, 1].tolist() == [0, 5, 6, 7, 8]
    assert target[:, 1].tolist() == [0, 1, 2, 3, 4]
    target, source = pair_rows(numbered(1, 5), numbered(1, 9), one, many)
    assert source[:, 1].tolist() == [0, 5, 6, 7, 8]
    assert target[:, 1].tolist() == [0, 1, 2, 3, 4]


def test_equal_prefixes_all_pair() -> None:
    tokens = Tokens(3, (1, 1))
    source, target = pair_rows(numbered(1, 4), numbered(1, 4), tokens, tokens)
    assert source[:, 1].tolist() == target[:, 1].tolist() == [0, 1, 2, 3]


def test_no_prefix_at_all() -> None:
    source, target = pair_rows(numbered(1, 5), numbered(1, 4), Tokens(1, (2, 2)), Tokens(0, (2, 2)))
    assert source[:, 1].tolist() == [1, 2, 3, 4]
    assert target[:, 1].tolist() == [0, 1, 2, 3]


def test_pooled_rows_pair_by_sample() -> None:
    rows = torch.randn(3, 4)
    assert pair_rows(rows, rows, Tokens(1, (2, 2)), Tokens(1, (3, 3))) == (rows, rows)


def test_sum_over_batches_is_the_sum_over_all() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 4, generator=generator), 3 * torch.randn(30, 5, generator=generator)
    sums = CrossCovariance.zeros(4, 5, torch.device("cpu"))
    for start in range(0, 30, 7):
        sums.add(x[start : start + 7], y[start : start + 7])
    assert torch.allclose(sums.total, x.double().T @ y.double(), atol=1e-12)
    assert abs(sums.norms - float(x.double().norm() * y.double().norm())) < 1e-9
