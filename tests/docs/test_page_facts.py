"""What the pages list is what there is: public names, families, kinds of adapters and of rows, measured numbers."""

from __future__ import annotations

import re

import pytest

import hf_bico
from hf_bico import errors
from hf_bico.alignment.statistics import OF_TARGET, Kind
from hf_bico.models.adapters.config import BY_PEFT
from hf_bico.models.families import all_families
from support import ROOT

pytestmark = pytest.mark.quick

DOCS = ROOT / "docs"


def first_column(page: str, heading: str) -> list[str]:
    """The first cells of the first table under a heading."""
    section = (DOCS / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    table = section[section.index("|") :].partition("\n\n")[0].splitlines()
    return [line.split("|")[1].strip() for line in table[2:]]


def test_every_public_name_has_its_line() -> None:
    assert sorted(name.strip("`") for name in first_column("python.md", "The names")) == hf_bico.__all__


def test_the_errors_that_are_named_are_the_first_below_ours() -> None:
    below = {error.__name__ for error in hf_bico.BicoError.__subclasses__()}
    named = re.findall(r"`(\w+Error)`", (DOCS / "python.md").read_text().partition("## Errors")[2])
    assert set(named) - {"BicoError"} <= below
    assert all(hasattr(errors, name) for name in named)


def test_every_family_is_in_the_table() -> None:
    found = {name.strip("`") for name in re.findall(r"^\| (`[^|]+`) \|", (DOCS / "families.md").read_text(), re.M)}
    assert {family.name for family in all_families()} <= found


def test_every_kind_of_adapter_that_peft_computes_is_named() -> None:
    words = (DOCS / "adapters.md").read_text().upper().replace("-", "")
    assert [kind for kind in BY_PEFT if kind not in words] == []


def test_kinds_of_rows_are_those_that_can_be_lined_up() -> None:
    page = (DOCS / "adding-a-method.md").read_text()
    assert re.findall(r"^\| `([A-Z_]+)` \|", page, re.M) == [kind.name for kind in Kind if kind not in OF_TARGET]


@pytest.mark.parametrize(
    ("method", "label"),
    [
        ("naive", "naive (padded)"),
        ("input-only", "input maps only"),
        ("output-only", "output maps only"),
        ("gradient-only", "gradient maps only"),
        ("theseus", "THESEUS"),
        ("bico", "BiCo"),
    ],
)
def test_the_ablations_are_those_that_were_measured(method: str, label: str) -> None:
    measured = (DOCS / "small-world" / "methods-narrow-to-wide.md").read_text()
    cells = next(line for line in measured.splitlines() if line.startswith(f"| {label} |")).split("|")[2:-1]
    value = cells[4].split("±")[0].strip() or cells[0].strip()  # with 100 samples, or with none
    shown = re.search(rf"`{method}` \| ([\d.]+) \|", (DOCS / "how-bico-works.md").read_text())
    assert shown is not None
    assert shown[1] == value
