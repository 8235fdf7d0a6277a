"""What is kept between runs of the tests is read only if it is what would be made now: nothing stale, nothing torn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support import unchanged, worlds
from support.unchanged import Ground
from support.worlds import Recipe

pytestmark = pytest.mark.quick


class Making:
    """A recipe of one source file, and how often it was followed."""

    def __init__(self, folder: Path) -> None:
        self.source, self.place, self.times = folder / "recipe.py", folder / "kept", 0
        self.source.write_text("steps = 3")

    def make(self, folder: Path) -> None:
        self.times += 1
        (folder / "models").mkdir()
        (folder / "models" / "weights").write_bytes(bytes(1000))
        (folder / "data").write_text("rows")

    def kept(self) -> Path:
        worlds._digest.cache_clear()
        return Recipe("toy", (self.source,), self.make).kept(self.place)


@pytest.fixture
def making(tmp_path: Path) -> Making:
    return Making(tmp_path)


def test_a_world_is_made_once(making: Making) -> None:
    first = making.kept()
    assert making.kept() == first
    assert making.times == 1
    assert (first / "models" / "weights").read_bytes() == bytes(1000)


def test_another_recipe_is_another_world_and_the_old_one_goes(making: Making) -> None:
    first = making.kept()
    making.source.write_text("steps = 4")
    assert making.kept() != first
    assert making.times == 2
    assert not first.exists()


@pytest.mark.parametrize(
    "tear",
    [
        lambda folder: (folder / "models" / "weights").write_bytes(bytes(999)),
        lambda folder: (folder / "data").unlink(),
        lambda folder: (folder / "models" / "more").write_text("somebody wrote here"),
        lambda folder: (folder / "kept.json").unlink(),
        lambda folder: (folder / "kept.json").write_text('{"data": "half of a li'),
    ],
    ids=["shorter", "lost", "more", "never finished", "half a list"],
)
def test_a_torn_world_is_made_again(making: Making, tear: Callable[[Path], object]) -> None:
    tear(making.kept())
    folder = making.kept()
    assert making.times == 2
    assert sorted(file.name for file in folder.rglob("*") if file.is_file()) == ["data", "kept.json", "weights"]


def test_a_making_that_was_stopped_leaves_nothing_to_read(making: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(folder: Path) -> None:
        (folder / "data").write_text("half of the ro")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(making, "make", stopped)
        with pytest.raises(KeyboardInterrupt):
            making.kept()
    assert (making.kept() / "data").read_text() == "rows"


def test_tests_are_skipped_only_while_their_ground_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unchanged, "KEPT", tmp_path / "kept")
    source = tmp_path / "double.py"
    source.write_text("answer = 42")
    ground = Ground("a double", (), (source,), ("peft",))
    assert not ground.is_unchanged, "a cold run runs them"
    ground.note.parent.mkdir(parents=True)
    ground.note.write_text(ground.digest)
    assert ground.is_unchanged
    source.write_text("answer = 43")
    assert not ground.is_unchanged
    source.write_text("answer = 42")
    monkeypatch.setattr(unchanged, "version", lambda name: "1000.0")
    assert not ground.is_unchanged, "another release of a library"
