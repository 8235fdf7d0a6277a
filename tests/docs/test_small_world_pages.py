"""What the pages say was measured on the small world is what the benchmarks wrote beside them."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import foresight

pytestmark = pytest.mark.quick

DOCS = ROOT / "docs"
KEPT = DOCS / "small-world"


def kept() -> list[foresight.Ported]:
    with (KEPT / "foresight.csv").open(encoding="utf-8", newline="") as stream:
        return [
            foresight.Ported(
                **{
                    name: value if name in ("source", "target", "task") else _number(value)
                    for name, value in row.items()
                }
            )
            for row in csv.DictReader(stream)
        ]


def _number(text: str) -> float | int | bool:
    if text in ("True", "False"):
        return text == "True"
    return float(text) if "." in text or "e" in text else int(text)


def test_the_tables_of_the_outlook_come_from_its_numbers(tmp_path: Path) -> None:
    found = kept()
    assert len(found) == 2400
    foresight.write(found, (foresight.flags(found), foresight.signals(found)), tmp_path)
    tables = (tmp_path / "foresight.md").read_text(encoding="utf-8")
    assert tables == (KEPT / "foresight.md").read_text(encoding="utf-8")
    page = (DOCS / "reading-the-report.md").read_text(encoding="utf-8")
    for table in tables.strip().split("\n\n"):
        assert table in page


def test_what_the_page_says_about_the_outlook() -> None:
    found = kept()
    held_out = [one for one in found if one.world >= foresight.CHOSEN_ON]
    harmful, helpful = ([one for one in held_out if sign * one.gain > 0] for sign in (-1, 1))
    page = " ".join((DOCS / "reading-the-report.md").read_text(encoding="utf-8").split())
    flagged = [sum(not one.helps for one in some) / len(some) for some in (harmful, helpful)]
    assert f"found {flagged[0]:.0%} of the harmful ports on pretrainings that it was not chosen on" in page
    assert f"with {flagged[1]:.0%} of the helpful ones" in page
    as_they_are = [one for one in found if not one.mispaired and one.gain < 0]
    assert 0.45 < sum(one.helps for one in as_they_are) / len(as_they_are) < 0.55, "one harmful in two"
    assert sum(one.n <= 20 for one in as_they_are if one.helps) > sum(one.helps for one in as_they_are) / 2


def test_the_outlook_is_what_its_parts_give() -> None:
    for one in kept():
        least = min(-one.first_order, one.headroom)
        expected = least * (1 - one.unseen) if least > 0 else least
        assert abs(one.outlook - expected) < 1e-5
        assert one.helps == (one.outlook >= 0.1)


def test_the_pictures_of_a_diagnosis_show_what_their_page_says() -> None:
    text = (KEPT / "diagnosis.txt").read_text(encoding="utf-8")
    blocks = [line.split() for line in text.split("\n\n")[0].splitlines()[1:]]
    page = (DOCS / "diagnosing.md").read_text(encoding="utf-8")
    cka, cosine, aligned = ([float(row[column]) for row in blocks] for column in (1, 3, 4))
    assert f"CKA is {min(cka):.2f} to {max(cka):.2f}" in page
    assert max(map(abs, cosine)) < 0.05
    assert f"the cosine {min(aligned):.2f} to {max(aligned):.2f}" in page
    outputs = [line.split() for line in text.split("\n\n")[1].splitlines()[1:]]
    for row in outputs:
        untouched, input_only, theseus, bico = map(float, row[1:5])
        assert input_only < untouched, "input maps alone are further away"
        assert bico >= theseus or row[0] == "0"
    assert float(outputs[-1][4]) > float(outputs[-1][3]) > float(outputs[-1][1])
