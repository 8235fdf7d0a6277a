"""Shared settings: one thread a worker, a loopback Hub for the network, nothing of the user's own configuration."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import forks
from support.durations import Durations
from support.loopback import HUB, TOKEN
from support.reached_errors import ReachedErrors
from support.unchanged import Unchanged

if TYPE_CHECKING:
    from hf_bico.experiments.demo.world import World
    from support.hub import Hub


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hf-bico")
    group.addoption("--all", action="store_true", help="also tests of what has not changed since they passed")
    group.addoption("--keep-durations", action="store_true", help="write what each file costs to tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and config.option.markexpr != "quick":
        forks.start_warm_process()  # while the workers are started, which share it
    for plugin in (ReachedErrors, Durations, Unchanged):
        config.pluginmanager.register(plugin(config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For the quick tests alone, the files that have none are not even imported."""
    if config.option.markexpr != "quick" or collection_path.suffix != ".py":
        return None
    return "mark.quick" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage looks through it again, which takes half a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


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


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which commands run."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


@pytest.fixture(scope="session")
def ported_once() -> dict[str, Path]:
    """What `result` has ported, for all tests."""
    return {}


@pytest.fixture
def result(hub: Hub, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, ported_once: dict[str, Path]) -> Path:
    """A port between repos of the Hub, which are there, in a folder of its own."""
    import hf_bico
    from support.hub_scenes import SOURCE, TARGET, publish
    from support.paper import PAPER

    publish(hub, tmp_path / "scene")
    if not ported_once:
        ported = hf_bico.port(SOURCE, TARGET, n=24, device="cpu", **PAPER)
        ported_once["full"] = ported.save(tmp_path_factory.mktemp("ported") / "result")
    return shutil.copytree(ported_once["full"], tmp_path / "result")


@pytest.fixture(scope="session")
def worlds() -> Callable[[int], World]:
    """The small world of a seed, trained once for all runs; nobody writes into it."""
    from support.worlds import small_world

    return small_world
