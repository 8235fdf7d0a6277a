"""Blocks by index."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from math import floor

from hf_bico.matching import blocks_by_index


def test_formula_with_halves_rounded_up() -> None:
    for source, target in product(range(1, 25), range(2, 25)):
        expected = [floor(Fraction(j * (source - 1), target - 1) + Fraction(1, 2)) for j in range(target)]
        assert blocks_by_index(source, target) == expected


def test_first_and_last_blocks_meet() -> None:
    assert blocks_by_index(12, 24)[0] == 0
    assert blocks_by_index(12, 24)[-1] == 11


def test_single_target_block_takes_the_last() -> None:
    assert blocks_by_index(12, 1) == [11]
