"""The documentation says what is there: every method, every table as it was measured, no link that leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hf_bico.cards.methods import METHODS as TOLD
from hf_bico.comparison import LABELS
from hf_bico.methods import METHODS
from hf_bico.settings import METHOD_NAMES, SAMPLINGS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "methods.md").read_text()


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_every_method_has_its_line(name: str) -> None:
    assert f"| `{name}` |" in PAGE
    assert f"`{name}`" in (ROOT / "README.md").read_text()
    assert name in TOLD
    assert name in LABELS


def test_every_name_has_its_method() -> None:
    assert tuple(METHODS) == METHOD_NAMES


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_sampling_is_told(name: str) -> None:
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("table", sorted((ROOT / "docs" / "small-world").glob("*.md")), ids=lambda file: file.stem)
def test_tables_are_those_that_were_measured(table: Path) -> None:
    assert table.read_text() in PAGE
    assert table.with_suffix(".png").is_file()


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "methods.md", ROOT / "model_cards" / "README.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("https://") or (page.parent / link).exists(), (page.name, link)
