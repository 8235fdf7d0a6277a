"""What each file of tests costs, as it was once measured: the longest begin first, and a run says which ones grew.

`pytest --keep-durations` measures anew.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import Any

import pytest

from support import ROOT

FILE = ROOT / "tests" / "durations.json"
FACTOR, LEAST = 2.0, 5.0
"""A file has grown if it costs so many times what it did, and so many seconds more."""


class Durations:
    """The pytest plugin."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.measured: defaultdict[str, float] = defaultdict(float)
        self.before: dict[str, float] = json.loads(FILE.read_text()) if FILE.is_file() else {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """The longest first, so that no worker is left alone with one at the end; what is not known is the longest."""
        items.sort(key=lambda item: -self.before.get(_file_of(item.nodeid), float("inf")))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.measured[_file_of(report.nodeid)] += report.duration

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for file, then, now in grown(self.before, self.measured):
            terminalreporter.write_line(f"{file} took {now:.0f} s; it was {then:.0f} s when it was measured")
        if self.config.option.keep_durations:
            kept = {file: round(seconds, 1) for file, seconds in sorted(self.measured.items())}
            FILE.write_text(json.dumps({**self.before, **kept}, indent=0) + "\n")


def grown(before: Mapping[str, float], now: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """The files that cost more than twice what they did, on a machine as fast as that one was.

    On a slower or a busy machine all files take longer: what most of them take more is taken off.

    >>> grown({"a": 10, "b": 20, "c": 1}, {"a": 10, "b": 50, "c": 1})
    [('b', 20, 50)]
    >>> grown({"a": 10, "b": 20, "c": 30}, {"a": 30, "b": 60, "c": 90})
    []
    """
    known = [file for file in now if before.get(file, 0) > 0]
    slower = max(1.0, median(now[file] / before[file] for file in known)) if len(known) > 2 else 1.0
    return [
        (file, before[file], now[file])
        for file in known
        if now[file] > FACTOR * slower * before[file] and now[file] > slower * before[file] + LEAST
    ]


def _file_of(test: str) -> str:
    return test.partition("::")[0]
