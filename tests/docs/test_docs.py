"""The documentation says what is there: every method, every sampling, every table as it was measured, every test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hf_bico.alignment.methods import method_class
from hf_bico.alignment.methods.base import Method
from hf_bico.settings import METHODS, SAMPLINGS
from support import ROOT
from support.page_text import inline_code

pytestmark = pytest.mark.quick

PAGE = (ROOT / "docs" / "methods.md").read_text()


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_its_line(name: str) -> None:
    assert f"| `{name}` |" in PAGE
    assert METHODS[name].sentence


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_its_class(name: str) -> None:
    assert issubclass(method_class(name), Method)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_sampling_is_told(name: str) -> None:
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("table", sorted((ROOT / "docs" / "small-world").glob("*-*.md")), ids=lambda file: file.stem)
def test_tables_are_those_that_were_measured(table: Path) -> None:
    """Of methods and of training; those of the outlook stand in another page, and have tests of their own."""
    page = ROOT / "docs" / ("when-to-port.md" if table.stem.startswith("training-") else "methods.md")
    assert table.read_text() in page.read_text()
    assert table.with_suffix(".png").is_file()


def test_numbers_of_other_pages_are_those_of_the_tables() -> None:
    """Means with their deviation are copied from the tables, and must be in them. Those of training are other ones."""
    for page in sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "when-to-port.md"}):
        quoted = re.findall(r"\| `(bico[\w-]*)` \| (.*\d ± .*) \|", page.read_text())
        for name, numbers in quoted:
            assert f"| {METHODS[name].label} |  | {numbers} |" in PAGE, (page.name, name)


def test_the_tests_that_show_what_is_checked_are_there() -> None:
    named = {code for code in inline_code((ROOT / "docs" / "security.md").read_text()) if code.startswith("test_")}
    defined = {
        name
        for file in (ROOT / "tests").glob("*/test_*.py")
        for name in re.findall(r"def (test_\w+)\(", file.read_text())
    }
    assert len(named) > 30
    assert named <= defined
