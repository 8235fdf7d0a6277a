"""Shared settings: one thread a worker, a loopback Hub for the network, nothing of the user's own configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

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
