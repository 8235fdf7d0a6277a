"""What pages and notebooks show, held against what is measured here.

Another kind of machine rounds otherwise while the small world is trained, and so measures a little else. What is shown
says which kind measured it: there it must come out exactly, elsewhere nearly.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np
import torch
from PIL import Image

from support import ROOT

STAMP = ROOT / "docs" / "made-on.txt"
"""What drew and measured what README and docs/ show."""
_NUMBER = re.compile(
    r"(?<![\w.])(?:[-+]?(?:\d+\.\d+|\d+(?=%))"
    r"|(?<=± )\d+|(?<=about )[-+]\d+(?= points))(?![\w.]*\.\d)"
)
"""What is measured: with a point, in percent, an error, or an outlook in points. Not the parts of a version."""


def machine() -> str:
    """The kind of this machine, as far as numbers depend on it: torch, and what the CPU can do."""
    if not hasattr(torch.cpu, "get_capabilities"):  # torch before 2.9
        return f"torch {version('torch')}, {torch.backends.cpu.get_cpu_capability()}"
    of_cpu = torch.cpu.get_capabilities()
    features = sorted(name for name, there in of_cpu.items() if there is True)
    caches = [of_cpu.get(f"{level}_cache_size") for level in ("l1d", "l2")]
    return f"torch {version('torch')}, {of_cpu['architecture']} with {' '.join(features)}, caches {caches}"


def stamp() -> str:
    return f"{_matplotlib()}\n{machine()}\n"


def drawn_here(said: str) -> bool:
    """Whether a stamp names the matplotlib that is installed: another draws other pictures."""
    return _matplotlib() in said.splitlines()


def measured_here(said: str) -> bool:
    """Whether a stamp names this kind of machine."""
    return machine() in said.splitlines()


def look_alike(one: bytes, other: bytes, exact: bool) -> bool:
    """Whether two pictures are the same; if not exact, but for fonts, and for what differs a little."""
    first, second = (np.asarray(Image.open(io.BytesIO(data)).convert("L"), dtype=float) for data in (one, other))
    if exact or first.shape != second.shape:
        return np.array_equal(first, second)
    return bool(np.abs(first - second).mean() < 2)


def _matplotlib() -> str:
    return f"matplotlib {version('matplotlib')}"


def is_as_shown(shown: Sequence[str], printed: Sequence[str], exact: bool) -> bool:
    """Whether this was printed; a line of three dots stands for any lines, and one commit is as good as another.

    If not exact, what was measured may differ by a little.

    >>> [is_as_shown(["BiCo   9.8 (29%)", "..."], ["BiCo  10.1 (30%)", "more"], exact) for exact in (True, False)]
    [False, True]
    >>> is_as_shown(["BiCo 9.8"], ["BiCo 19.8"], exact=False), is_as_shown(["12 sites"], ["13 sites"], exact=False)
    (False, False)
    >>> is_as_shown(["Outlook: about +19 points (± 4.3)."], ["Outlook: about +21 points (± 4)."], exact=False)
    True
    """
    line_pattern = re.escape if exact else _any_numbers
    lines = [line if line == "..." else _any_commit(line) for line in shown]
    pattern = "".join("(?:.*\n)*" if line == "..." else line_pattern(line) + "\n" for line in lines)
    found = re.fullmatch(pattern, "".join(f"{_any_commit(line)}\n" for line in printed))
    expected = [] if exact else [number for line in lines for number in _NUMBER.findall(line)]
    return found is not None and all(map(_are_near, expected, found.groups()))


def _any_numbers(line: str) -> str:
    """A pattern for the line with other numbers that were measured, and columns as wide as they need."""
    texts = [re.sub(r"(?:\\ )+", " *", re.escape(text)) for text in _NUMBER.split(line)]
    return r"([-+]?\d+(?:\.\d+)?)".join(texts)


def _are_near(one: str, other: str) -> bool:
    """Percents within 15, one digit behind the point within 2, more of them within 0.1."""
    digits = len(one.partition(".")[2])
    return abs(float(one) - float(other)) <= (15.0, 2.0, 0.1)[min(digits, 2)]


def _any_commit(line: str) -> str:
    """A push makes another commit every time: the record in it holds the time."""
    return re.sub(r"\b(commit|at) [0-9a-f]{12}\b", r"\1 <any>", line)
