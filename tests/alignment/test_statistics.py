"""Pairing rows, and sums that are sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from hf_bico.alignment.calibration_pass import Side, collect, pair_rows
from hf_bico.alignment.statistics import CrossCovariance, Kind
from hf_bico.models.hooks import Losses, Trace
from hf_bico.models.layout import Site, SitePair, Slot, Tokens

pytestmark = pytest.mark.quick


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


def test_registers_of_unequal_number_do_not_pair() -> None:
    source, target = pair_rows(numbered(1, 6), numbered(1, 3), Tokens(5, (1, 1)), Tokens(2, (1, 1)))
    assert source[:, 1].tolist() == [0, 5]
    assert target[:, 1].tolist() == [0, 2]


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


class TwoReaders:
    """A model whose two sites, q and k, read the same activation."""

    def __init__(self, width: int) -> None:
        self.weights = [torch.randn(width, width, generator=torch.Generator().manual_seed(i)) for i in range(2)]
        self.sites = [
            Site(f"blocks.0.{role}", role, 0, "blocks.0.attn.in", (width, width), Slot(role))
            for role in ("attn.q", "attn.k")
        ]

    @contextmanager
    def observed(self, sites: Sequence[Site], trace: Trace) -> Iterator[Trace]:
        self.trace = trace
        yield trace

    def weight(self, name: str) -> torch.Tensor:
        return self.weights[[site.name for site in self.sites].index(name)]

    def run(self, x: torch.Tensor) -> Losses:
        outputs = [self.trace.tap(site, x, x @ weight.T) for site, weight in zip(self.sites, self.weights, strict=True)]
        return Losses((outputs[0] * outputs[1]).sum())


def test_a_shared_input_is_counted_once() -> None:
    source, target = TwoReaders(3), TwoReaders(4)
    x, y = torch.randn(2, 5, 3), torch.randn(2, 5, 4)
    pairs = [SitePair(a, b) for a, b in zip(source.sites, target.sites, strict=True)]
    tokens = Tokens(1, (2, 2))
    batches = [(lambda: source.run(x), lambda: target.run(y))]
    kinds = {Kind.INPUTS, Kind.GRADIENTS}
    statistics = collect(pairs, Side(source, tokens), Side(target, tokens), batches, kinds)
    assert statistics.kinds == kinds
    assert len(statistics.sums[Kind.INPUTS]) == 1
    expected = x.flatten(0, 1).double().T @ y.flatten(0, 1).double()
    assert torch.allclose(statistics.of(Kind.INPUTS, pairs[0]).total, expected)
    # d/dq of sum(q k) is k
    keys = [rows.flatten(0, 1) @ model.weights[1].T for rows, model in ((x, source), (y, target))]
    found = statistics.of(Kind.GRADIENTS, pairs[0]).total
    assert torch.allclose(found, keys[0].double().T @ keys[1].double(), atol=1e-4)


def test_sum_over_batches_is_the_sum_over_all() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 4, generator=generator), 3 * torch.randn(30, 5, generator=generator)
    sums = CrossCovariance((4, 5), torch.device("cpu"))
    for start in range(0, 30, 7):
        sums.add(x[start : start + 7], y[start : start + 7])
    assert torch.allclose(sums.total, x.double().T @ y.double(), atol=1e-12)
    assert abs(float(sums.norms) - float(x.double().norm() * y.double().norm())) < 1e-9
