"""Inputs that look fine and are not: every case, and the page that tells them, docs/right-or-refused.md.

`python -m support.looks_fine` writes the page; `tests/robustness/test_looks_fine.py` holds what it says of each case.
"""

from __future__ import annotations

from itertools import groupby

import support.fine.adapters
import support.fine.configurations
import support.fine.data
import support.fine.files
import support.fine.labels
import support.fine.numbers
import support.fine.texts
import support.fine.weights  # noqa: F401
from support import ROOT
from support.fine.cases import CASES, Case, Refused, Right, Said

PAGE = ROOT / "docs" / "right-or-refused.md"
ORDER = (
    "The fine-tune's weights, arranged otherwise",
    "The fine-tune and its base",
    "The fine-tune's configuration",
    "Loaded models",
    "Numbers",
    "Files",
    "Adapters",
    "Task vectors and records",
    "Labels and classes",
    "Images",
    "Rows and splits",
    "Texts and language models",
)
"""The parts of the page."""


def page() -> str:
    """The whole page, from the cases."""
    counts = {kind: sum(isinstance(case.ending, kind) for case in CASES) for kind in (Right, Refused, Said)}
    told = BEGINNING.format(all=len(CASES), right=counts[Right], refused=counts[Refused], said=counts[Said])
    cases = sorted(CASES, key=lambda case: ORDER.index(case.about))
    parts = [_part(about, list(some)) for about, some in groupby(cases, lambda case: case.about)]
    return "\n".join([told, *parts, ENDING])


def _part(about: str, cases: list[Case]) -> str:
    rows = [f"| {_cell(case.looks)} | {_cell(case.is_not)} | {_cell(case.ending.told())} |" for case in cases]
    return "\n".join([f"## {about}", "", "| looks fine | is not | what hf-bico does |", "|---|---|---|", *rows, ""])


def _cell(text: str) -> str:
    """Text in a table, where a bar would begin a cell and an underscore might begin emphasis."""
    return text.replace("|", "\\|")


BEGINNING = """# Right or refused

A port of the wrong weights, or over the wrong labels, still gives a model that loads and runs. So what looks fine and
is not has one of three endings: the result is **right**, the same change as from the sound input; or the input is
**refused**, with the cause that stands here and a remedy; or, where it cannot be known for certain, the doubt is
**said**: among the notices of the output, of `bico.json` and of the card, or with the result.

Each of the {all} inputs below is made and given to hf-bico by `tests/robustness/test_looks_fine.py`, most of them on
the trained models of the small world: {right} come out right, compared number by number, {refused} are refused, and of
{said} the doubt is said. Ports use the paper's recipe here, `--method bico --alpha 1`, so that the changes can be
compared; measured numbers in the sentences differ from machine to machine.
"""

ENDING = """## What cannot be known

- **Another fine-tune of the real base, given as the base.** It lies nearly as near as the base does. Only a card that
  names its own base gives it away.
- **An adapter that was trained on another model of the same shape**, and does not say so. Its factors fit; what shows
  is that the source, with the adapter, answers as chance would. The same holds of factors of a square layer that were
  both exchanged and transposed.
- **A tokenizer that lies beside the wrong CLIP.** Two CLIPs need not have the same; what shows is the target's own
  accuracy among the results.
- **The order of a head that does not name its classes.** If it was trained with labels sorted as texts, 10 is its class
  2. The notice shows the order that was taken; `--class-names` gives another.
- **Sums of task vectors whose bases are not known**, such as those of loaded modules: they are compared by names and
  shapes only.
- **Labels that are wrong for some of the rows.** With half of the classes exchanged, the source still answers better
  than chance.
- **What only labels show, where there are none.** The samples' labels tell whether the fine-tuned source is better
  than the target. Without them it is taken at its word, by the choice of alpha and by the outlook too. With `--no-eval`
  or with fewer than 50 held-out samples it is not seen that the source answers as chance would.
- **A task vector that is added to another model on purpose.** `TaskVector.apply_to` takes the model that it is given,
  as task arithmetic needs it; `hf-bico apply` says so where it knows for which weights a vector was made.
- **Copies of images that were encoded again.** Repeats are found byte by byte.

What was made anew on purpose, such as layers that were initialised again before fine-tuning, is let through by
`--force`.
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
