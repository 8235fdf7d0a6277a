"""Inputs that look fine and are not end well: right, refused, or said; and the page says what happens to each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hf_bico.experiments.demo.world import World
from support.fine.cases import CASES, Case, Stage
from support.looks_fine import PAGE, page
from support.paper import PAPER


@pytest.fixture(scope="module")
def stage(worlds: Callable[[int], World], tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """Sound models and data, and what several cases make of them."""
    return Stage(worlds(0), tmp_path_factory.mktemp("looks-fine"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_looks_fine_ends_well(case: Case, stage: Stage) -> None:
    case.ending.hold(case, stage)


@pytest.mark.parametrize("recipe", [PAPER, {"method": "auto", "alpha": "auto"}], ids=["the paper's", "the default"])
def test_a_sound_port_is_not_doubted(recipe: dict[str, Any], stage: Stage) -> None:
    found = stage.port(evaluate=True, **recipe)
    assert found.change, "it is not held back"
    assert [sentence for sentence in found.said if not sentence.startswith("Outlook: about +")] == []


def test_the_page_tells_every_case() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m support.looks_fine writes it again"


def test_the_cases_are_many_and_told_apart() -> None:
    assert len(CASES) >= 30
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({(case.looks, case.is_not) for case in CASES}) == len(CASES)
