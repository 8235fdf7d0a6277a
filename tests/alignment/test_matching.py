"""Blocks by index, by similarity, and as a list."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations_with_replacement, product
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_bico.alignment.matching import blocks_by_index, blocks_by_similarity, require_blocks
from hf_bico.errors import UsageError

pytestmark = pytest.mark.quick


def test_formula_with_halves_rounded_up() -> None:
    for source, target in product(range(1, 25), range(2, 25)):
        expected = [floor(Fraction(j * (source - 1), target - 1) + Fraction(1, 2)) for j in range(target)]
        assert blocks_by_index(source, target) == expected


def test_first_and_last_blocks_meet() -> None:
    assert blocks_by_index(12, 24)[0] == 0
    assert blocks_by_index(12, 24)[-1] == 11


def test_single_target_block_takes_the_last() -> None:
    assert blocks_by_index(12, 1) == [11]


def monotone(source: int, target: int) -> list[list[int]]:
    return [list(blocks) for blocks in combinations_with_replacement(range(source), target)]


def best_of_all(scores: list[list[float]]) -> list[int]:
    """Every monotone assignment, by exact sum, then by agreement with the index, then the lowest."""
    source, target = len(scores), len(scores[0])
    by_index = blocks_by_index(source, target)

    def rank(blocks: list[int]) -> tuple[Fraction, int, list[int]]:
        total = sum(Fraction(scores[i][j]) for j, i in enumerate(blocks))
        return total, sum(i == k for i, k in zip(blocks, by_index, strict=True)), [-i for i in blocks]

    return max(monotone(source, target), key=rank)


def tables(values: st.SearchStrategy[float]) -> st.SearchStrategy[list[list[float]]]:
    sizes = st.tuples(st.integers(1, 5), st.integers(1, 5))
    return sizes.flatmap(
        lambda size: st.lists(st.lists(values, min_size=size[1], max_size=size[1]), min_size=size[0], max_size=size[0])
    )


@given(tables(st.floats(0, 1)))
def test_similarity_takes_the_best_of_all_monotone_assignments(scores: list[list[float]]) -> None:
    assert blocks_by_similarity(scores) == best_of_all(scores)


@given(tables(st.sampled_from([0.0, 0.1, 0.2, 0.3])))
def test_ties_go_to_the_index_and_then_to_the_lower_block(scores: list[list[float]]) -> None:
    assert blocks_by_similarity(scores) == best_of_all(scores)


def test_equal_scores_give_the_blocks_by_index() -> None:
    for source, target in product(range(1, 14), repeat=2):
        assert blocks_by_similarity([[0.3] * target] * source) == blocks_by_index(source, target)


def test_order_is_kept_where_the_best_single_blocks_cross() -> None:
    assert blocks_by_similarity([[0.0, 0.9], [0.7, 0.1]]) == [0, 0]
    assert blocks_by_similarity([[0.0, 0.7], [0.9, 0.1]]) == [1, 1]


def test_a_copy_is_matched_block_by_block() -> None:
    scores = [[1.0 - abs(i - 2 * j) / 24 for j in range(12)] for i in range(24)]
    assert blocks_by_similarity(scores) == list(range(0, 24, 2))


def test_a_list_of_blocks_may_be_in_any_order() -> None:
    require_blocks([1, 0, 1, 1], source_blocks=2, target_blocks=4)


@pytest.mark.parametrize(
    ("blocks", "cause"),
    [
        ([0, 0, 1], "--layers names 3 blocks and the target has 4"),
        ([0], "--layers names 1 block and the target has 4"),
        ([0, 0, 1, 2], "--layers names block 2 and the source has 2"),
        ([0, -1, 1, 1], "--layers names block -1 and the source has 2"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(blocks: list[int], cause: str) -> None:
    with pytest.raises(UsageError) as caught:
        require_blocks(blocks, source_blocks=2, target_blocks=4)
    assert caught.value.cause == cause
