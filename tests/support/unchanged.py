"""Tests of what this project only stands on run when that has changed since they last passed: each skip says so.

They hold the Hub on a loopback port against the real clients, and facts about peft. What they passed with is kept in a
folder that git ignores: a fresh checkout runs them, and so does `pytest --all`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from support import KEPT, ROOT

TESTS = ROOT / "tests"


@dataclass(frozen=True)
class Ground:
    """Something that tests stand on: its name, the files that test it, and what it consists of."""

    name: str
    tests: tuple[str, ...]
    sources: tuple[Path, ...]
    libraries: tuple[str, ...]

    @property
    def digest(self) -> str:
        tests = (ROOT / file for file in self.tests)
        texts = [file.read_text(encoding="utf-8") for file in (*tests, *self.sources)]
        return hashlib.sha256("\0".join([*texts, *self.versions]).encode()).hexdigest()

    @property
    def versions(self) -> list[str]:
        return [f"{name} {version(name)}" for name in self.libraries]

    @property
    def note(self) -> Path:
        """Holds the digest of what the tests last passed with."""
        return KEPT / "passed" / self.name.replace(" ", "-")

    @property
    def is_unchanged(self) -> bool:
        return self.note.is_file() and self.note.read_text() == self.digest


GROUNDS = (
    Ground(
        "loopback Hub",
        ("tests/hub/test_hub_server.py", "tests/hub/test_hub_xet.py"),
        (*sorted((TESTS / "support" / "hub").glob("*.py")), TESTS / "support" / "forks.py"),
        ("huggingface_hub", "hf-xet"),
    ),
    Ground(
        "peft",
        ("tests/models/test_peft_facts.py",),
        (TESTS / "support" / "toys.py", TESTS / "support" / "adapters.py"),
        ("peft", "torch", "transformers", "open_clip_torch"),
    ),
)


class Unchanged:
    """The pytest plugin; in a run by several workers, these tell the first process how many tests there are."""

    def __init__(self, config: pytest.Config, grounds: Iterable[Ground] = GROUNDS) -> None:
        self.config = config
        self.by_file = {file: ground for ground in grounds for file in ground.tests}
        self.asked, self.well = Counter[str](), Counter[str]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        skips = {
            ground: pytest.mark.skip(
                reason=f"{', '.join(ground.versions)} and the files of these tests are as when they passed; "
                "`make test-all` runs them"
            )
            for ground in set(self.by_file.values())
            if ground.is_unchanged and not self.config.option.all
        }
        for item in items:
            ground = self.by_file.get(item.nodeid.partition("::")[0])
            if ground in skips:
                item.add_marker(skips[ground])
            elif ground is not None:
                self.asked[ground.name] += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        ground = self.by_file.get(report.nodeid.partition("::")[0])
        if ground is not None and (report.skipped or (report.when == "call" and report.passed)):
            self.well[ground.name] += 1
        elif ground is not None and report.failed:
            self.well[ground.name] -= 10**6

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self.asked |= Counter(node.workeroutput.get("asked", {}) if hasattr(node, "workeroutput") else {})

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        if hasattr(self.config, "workeroutput"):  # before it is sent
            self.config.workeroutput["asked"] = dict(self.asked)
            yield
            return
        yield
        for ground in set(self.by_file.values()):
            if 0 < self.asked[ground.name] == self.well[ground.name] and not self._is_part:
                ground.note.parent.mkdir(parents=True, exist_ok=True)
                ground.note.write_text(ground.digest)

    @property
    def _is_part(self) -> bool:
        """Whether single tests were asked for."""
        return any("::" in argument for argument in self.config.args)
