"""A run of all tests fails where one of the error classes was never raised in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


class ReachedErrors:
    """The pytest plugin; in a run by several workers, each tells the first process what it has seen."""

    def __init__(self, config: pytest.Config) -> None:
        from hf_bico.errors import BicoError

        self.config, self.reached = config, set[str]()
        plain = BicoError.__init__

        def noted(error: BicoError, cause: str, remedy: str, add: str = "") -> None:
            self.reached.add(type(error).__name__)
            plain(error, cause, remedy, add)

        BicoError.__init__ = noted  # type: ignore[method-assign]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self.reached.update(node.workeroutput.get("errors", ()) if hasattr(node, "workeroutput") else ())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        if hasattr(self.config, "workeroutput"):  # before it is sent
            self.config.workeroutput["errors"] = sorted(self.reached)
            yield
            return
        yield
        selected = self.config.option.keyword or self.config.option.markexpr != "not slow"
        whole = not selected and self.config.args == self.config.getini("testpaths")
        if whole and self.missing and session.exitstatus == pytest.ExitCode.OK:
            print(f"\nNo test reached: {', '.join(self.missing)}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @property
    def missing(self) -> list[str]:
        """Those that nothing is derived from: the others are there to be caught by."""
        from hf_bico import errors

        named = [kind for kind in vars(errors).values() if isinstance(kind, type)]
        kinds = [kind for kind in named if issubclass(kind, errors.BicoError)]
        return [kind.__name__ for kind in kinds if not kind.__subclasses__() and kind.__name__ not in self.reached]
