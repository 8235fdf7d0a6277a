"""Shared settings: one thread a worker, a loopback Hub for the network, nothing of the user's own configuration."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parent))

from loopback import HUB, TOKEN

if TYPE_CHECKING:
    from hub import Hub

    from hf_bico.demo import World

LONGEST = (
    *("test_small_world", "test_compare", "test_pages", "test_demo", "test_notebooks", "test_hub_command"),
    *("test_endings", "test_language_world", "test_terminal", "test_port_options"),
)
"""The files that take minutes; begun first, so that no worker is left alone with one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ReachedErrors(config))


class ReachedErrors:
    """A run of all tests fails where one of the error classes was never raised in it."""

    def __init__(self, config: pytest.Config) -> None:
        from hf_bico.errors import BicoError

        self.config, self.reached = config, set[str]()
        plain = BicoError.__init__

        def noted(error: BicoError, cause: str, remedy: str) -> None:
            self.reached.add(type(error).__name__)
            plain(error, cause, remedy)

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
        whole = not self.config.option.keyword and self.config.args == self.config.getini("testpaths")
        if whole and self.missing and session.exitstatus == pytest.ExitCode.OK:
            print(f"\nNo test reached: {', '.join(self.missing)}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @property
    def missing(self) -> list[str]:
        """Those that nothing is derived from: the others are there to be caught by."""
        from hf_bico import errors

        kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
        return [kind.__name__ for kind in kinds if not kind.__subclasses__() and kind.__name__ not in self.reached]


@pytest.fixture(autouse=True)
def _same_products() -> Iterator[None]:
    """oneDNN as before: on a CPU without bfloat16, torch leaves it for good at the first such product."""
    yield
    if "torch" in sys.modules:
        import torch

        torch.backends.mkldnn.enabled = torch.backends.mkldnn.is_available()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The loopback Hub of this process, empty but for the user `user`, whose token is set; the cache is empty too."""
    from huggingface_hub import constants

    HUB.reset()
    HUB.add_user("user", TOKEN, orgs=("laion",))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf-home"))
    yield HUB
    HUB.reset()


@pytest.fixture(scope="session")
def ported_once() -> dict[str, Path]:
    """What `result` has ported, for all tests."""
    return {}


@pytest.fixture
def result(hub: Hub, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, ported_once: dict[str, Path]) -> Path:
    """A port between repos of the Hub, which are there, in a folder of its own."""
    from hub_scenes import SOURCE, TARGET, publish

    import hf_bico

    publish(hub, tmp_path / "scene")
    if not ported_once:
        ported = hf_bico.port(SOURCE, TARGET, n=24, device="cpu")
        ported_once["full"] = ported.save(tmp_path_factory.mktemp("ported") / "result")
    return shutil.copytree(ported_once["full"], tmp_path / "result")


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], World]:
    """The world of a seed, made once a test run whatever the number of workers."""
    own = tmp_path_factory.getbasetemp()
    # workers share the folder above their own; alone, that one would outlive the test run
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "small-worlds"

    def make(seed: int) -> World:
        from hf_bico.demo import build

        with FileLock(f"{folder}-{seed}.lock"):
            return build(folder / f"seed-{seed}", seed=seed)

    return make
