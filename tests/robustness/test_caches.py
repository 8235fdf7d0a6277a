"""A home or a cache that cannot be used is not needed, or named with the way out; and what is kept by its time."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from click.testing import CliRunner

from hf_bico.cli.main import main
from hf_bico.data.loading import open_folder
from hf_bico.reports.record import read_record
from support import forks
from support.hub import Hub
from support.hub_scenes import BASE, DATA, SOURCE, TARGET, publish
from support.loopback import TOKEN
from support.paper import PAPER_WORDS
from support.scenes import Scene, make_scene

MORTAL = """
import ctypes, sys
# of root, no right is left but those of the owner of a file
assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0
from hf_bico.cli.main import main
main(sys.argv[1:], prog_name="hf-bico")
"""
PORT = ["port", SOURCE, "--to", TARGET, "-n", "8", *PAPER_WORDS, "-o", "out"]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A folder into which nothing can be written."""
    place = tmp_path / "locked"
    place.mkdir(mode=0o555)
    yield place
    unlock(place)


def lock(folder: Path, mode: int) -> None:
    for place, _, _ in os.walk(folder, topdown=False):
        Path(place).chmod(mode)


def unlock(folder: Path) -> None:
    folder.chmod(0o755)
    for place, folders, _ in os.walk(folder):
        for name in folders:
            (Path(place) / name).chmod(0o755)


def run(*words: str, **environment: str) -> CompletedProcess[str]:
    """As somebody who has no right of root, with nothing of HF_* but what is given."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_HOME", "HF_HUB_CACHE", "XDG"))
    }
    return forks.run(*words, code=MORTAL, env={**kept, **environment})


def require_told(done: CompletedProcess[str], *said: str) -> None:
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 2, done.stderr
    for words in said:
        assert words in done.stderr


UNUSABLE = ("HOME", "HF_HOME", "XDG_CACHE_HOME")


@pytest.mark.parametrize("name", UNUSABLE)
def test_local_folders_need_no_cache(name: str, scene: Scene, here: Path, locked: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    home = {"HOME": str(tmp_path), "TMPDIR": str(temporary), name: str(locked)}
    done = run(*scene.port_by_paper, "-o", "out", **home)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in here.iterdir()] == ["out"]
    assert list(temporary.iterdir()) == []


def test_a_home_that_cannot_be_made_is_named_before_any_work(hub: Hub, here: Path, tmp_path: Path) -> None:
    publish(hub, tmp_path / "scene")
    home = {**hub.environment(tmp_path, TOKEN), "HOME": "/dev/null/home"}
    del home["HF_HOME"]
    done = run(*PORT, **home)
    require_told(done, "cannot be put into the cache: Not a directory", "set HF_HOME to another folder")
    assert list(here.iterdir()) == []
    assert not any("safetensors" in request.path for request in hub.log)


@pytest.fixture
def cached(hub: Hub, here: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a port whose files are all in the cache, which is somebody's own."""
    publish(hub, tmp_path / "scene")
    own = hub.environment(tmp_path / "cache", TOKEN)
    assert run(*PORT, **own).returncode == 0
    shutil.move(here / "out", tmp_path / "first")
    hub.clear_log()
    yield own
    unlock(tmp_path / "cache")


def test_a_cache_that_may_only_be_read_serves_what_it_has(cached: dict[str, str], hub: Hub, tmp_path: Path) -> None:
    lock(tmp_path / "cache", 0o555)
    done = run(*PORT, **cached)
    assert done.returncode == 0, done.stderr
    first, second = (read_record(folder) for folder in (tmp_path / "first", tmp_path / "here" / "out"))
    assert first.output is not None
    assert second.output is not None
    assert first.output.files == second.output.files
    assert not [request for request in hub.log if "/resolve/" in request.path]


@pytest.mark.parametrize("name", [BASE, DATA])
def test_what_a_cache_that_may_only_be_read_lacks_is_told(
    name: str, cached: dict[str, str], here: Path, tmp_path: Path
) -> None:
    kind = "datasets" if name == DATA else "models"
    shutil.rmtree(tmp_path / "cache" / "hub" / f"{kind}--{name.replace('/', '--')}")
    lock(tmp_path / "cache", 0o555)
    done = run(*PORT, **cached)
    require_told(done, f"'{name}' cannot be put into the cache: Permission denied", "set HF_HOME to another folder")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("place", ["hub", "datasets"])
def test_the_cache_of_another_user_is_named(
    place: str, cached: dict[str, str], here: Path, tmp_path: Path, scene: Scene
) -> None:
    """Of which not even the names can be read."""
    theirs = tmp_path / "cache" / place
    lock(theirs, 0o000)
    done = run(*PORT, **cached)
    if place == "datasets":  # of which nothing is needed
        assert done.returncode == 0, done.stderr
    else:
        require_told(done, "cannot be put into the cache: Permission denied", "set HF_HOME to another folder")
        assert list(here.iterdir()) == []
    done = run(*scene.port_by_paper, "-o", "local", **cached)
    assert done.returncode == 0, done.stderr


def test_a_part_of_the_cache_that_is_anothers_is_named(cached: dict[str, str], here: Path, tmp_path: Path) -> None:
    [theirs] = [path for path in (tmp_path / "cache" / "datasets").iterdir() if path.is_dir()]
    lock(theirs, 0o000)
    require_told(
        run(*PORT, **cached), "of the cache cannot be used: Permission denied", "set HF_HOME to another folder"
    )
    assert list(here.iterdir()) == []


# what is kept by its time


@pytest.mark.parametrize("name", ["", "train.csv"])
@pytest.mark.parametrize("link", [False, True])
def test_data_that_changed_and_kept_its_time_is_read_again(name: str, link: bool, tmp_path: Path, hub: Hub) -> None:
    """As after a copy, from an archive, or by a clock that was set back; `datasets` takes it for the same."""
    folder, file = tmp_path / "data", tmp_path / "rows.csv"
    folder.mkdir()
    if link:
        (folder / "train.csv").symlink_to(file)
    else:
        file = folder / "train.csv"
    for texts in (["aa", "bb"], ["cc", "dd"], ["aa", "bb"]):
        file.write_text("\n".join(["text", *texts, ""]))
        os.utime(file, (1e9, 1e9))
        splits, _ = open_folder(folder / name, "data")
        assert list(splits["train"]["text"]) == texts


def test_a_clock_that_goes_backwards_changes_nothing(
    hub: Hub, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, tmp_path / "scene")
    words = [*PORT, "--overwrite", "--force", "--push-to", "user/pushed"]
    assert CliRunner().invoke(main, words).exit_code == 0
    before = read_record(here / "out")
    shutil.rmtree(tmp_path / "hub-cache")
    hub.delete("user/pushed")
    hours = count()
    monkeypatch.setattr(time, "time", lambda: 2e9 - 3600 * next(hours))
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert next(hours) > 1, "somebody looked at it"
    after = read_record(here / "out")
    assert after.output is not None
    assert before.output is not None
    assert after.output.files == before.output.files
    assert all(0 <= seconds < 600 for seconds in after.run.seconds.values())
    assert [path.name for path in here.iterdir()] == ["out"]
