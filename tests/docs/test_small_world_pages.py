"""What the pages say was measured on the small world is what the benchmarks wrote beside them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import foresight
import loras
from ports import FIRST_HELD_OUT, KINDS, SIZES, VARIANTS, MeasuredPort, markdown, read_csv

pytestmark = pytest.mark.quick

DOCS = ROOT / "docs"
KEPT = DOCS / "small-world"


def kept() -> list[MeasuredPort]:
    return read_csv(KEPT / "ports.csv")


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def of(ports: list[MeasuredPort], n: int, variant: str, kinds: tuple[str, ...] = KINDS) -> list[MeasuredPort]:
    return [one for one in ports if (one.n, one.variant) == (n, variant) and one.kind in kinds]


def test_the_ports_are_of_worlds_that_nothing_was_chosen_on() -> None:
    found = kept()
    assert {one.world for one in found} == set(range(FIRST_HELD_OUT, FIRST_HELD_OUT + 5))
    assert all(len(of(found, n, variant)) == 240 for n in SIZES for variant in VARIANTS)


@pytest.mark.parametrize(("make", "name"), [(loras, "methods.md"), (foresight, "reading-the-report.md")])
def test_the_tables_of_ports_come_from_their_numbers(make: Any, name: str) -> None:
    table = markdown(make.lines(kept()))
    assert table == (KEPT / f"{make.NAME}.md").read_text(encoding="utf-8")
    assert table in page(name)


def test_what_the_pages_say_about_harm() -> None:
    found = kept()
    default, paper = of(found, 100, "bico-path"), of(found, 100, "bico@1")
    assert not any(one.harmful for one in default)
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "and no port leaves it more than a point worse" in readme
    mean = [sum(one.written_gain for one in some) / len(some) for some in (default, paper)]
    assert f"B gains {mean[0]:.1f} points of accuracy on average" in readme
    assert f"gains {mean[1]:.1f} points there and hurts {sum(one.harmful for one in paper)} times" in readme
    hard = of(found, 100, "bico@1", KINDS[2:])
    worst = min(one.gain for one in hard)
    said = f"{sum(one.harmful for one in hard)} of {len(hard)} ports hurt, by up to {-worst:.1f} points"
    assert said in " ".join(page("adapters.md").split())


def test_what_the_page_says_about_doubtful_ports() -> None:
    some = of(kept(), 100, "bico@1")
    harmful = [one for one in some if one.gain < -1]
    helpful = [one for one in some if one.gain > 1]
    flagged, alarms = map(foresight.flagged, (harmful, helpful))
    text = " ".join(page("reading-the-report.md").split())
    assert f"flags {flagged} of the {len(harmful)} harmful ports" in text
    assert f"and {alarms} of the {len(helpful)} that gain more than a point" in text


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
