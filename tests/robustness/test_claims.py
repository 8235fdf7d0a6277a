"""The place of a result: one run at a time, room enough, and nothing of killed runs left."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from hf_bico.errors import OutputError
from hf_bico.runtime.output import (
    atomic_folder,
    clear_leftovers,
    locked_folder,
    put_in_place,
    require_room,
    scratch_beside,
)

pytestmark = pytest.mark.quick


def test_a_claim_leaves_nothing_behind(tmp_path: Path) -> None:
    with locked_folder(tmp_path / "a" / "b" / "out"):
        assert (tmp_path / "a" / "b" / ".out.lock").is_file()
    assert list(tmp_path.iterdir()) == []


def test_folders_above_a_result_stay(tmp_path: Path) -> None:
    with locked_folder(tmp_path / "a" / "out"), atomic_folder(tmp_path / "a" / "out") as scratch:
        (scratch / "file").write_text("x")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["out"]


def test_claims_of_one_run_may_be_nested_and_another_is_refused(tmp_path: Path) -> None:
    folder, refused = tmp_path / "out", list[str]()

    def other() -> None:
        with pytest.raises(OutputError) as raised, locked_folder(folder):
            pass
        refused.append(raised.value.cause)

    with locked_folder(folder):
        with locked_folder(folder):
            pass
        another = threading.Thread(target=other)
        another.start()
        another.join()
    assert refused == [f"another run is writing into '{folder}'"]
    with locked_folder(folder):
        pass


def test_who_waits_gets_the_place_when_it_is_free(tmp_path: Path) -> None:
    got = threading.Event()

    def other() -> None:
        with locked_folder(tmp_path / "out", waits=True):
            got.set()

    with locked_folder(tmp_path / "out"):
        another = threading.Thread(target=other)
        another.start()
        assert not got.wait(0.2)
    another.join(timeout=10)
    assert got.is_set()


def test_leftovers_are_cleared_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    left = scratch_beside(folder)
    (left / "half").write_text("x")
    others = [tmp_path / name for name in (".out-mine", "out2", ".out.hf-bico-of-mine", ".out2.hf-bico-abcdefgh")]
    for other in others:
        other.mkdir()
    clear_leftovers(folder)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_what_was_put_aside_goes_back(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "file").write_text("old")
    aside = scratch_beside(folder)
    folder.rename(aside / "old")
    half = scratch_beside(folder)
    (half / "file").write_text("new, and perhaps not whole")
    clear_leftovers(folder)
    assert (folder / "file").read_text() == "old"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_name_with_signs_of_patterns(tmp_path: Path) -> None:
    left = scratch_beside(tmp_path / "[o]*t")
    other = scratch_beside(tmp_path / "oxt")
    clear_leftovers(tmp_path / "[o]*t")
    assert not left.exists()
    assert other.exists()


def test_put_in_place(tmp_path: Path) -> None:
    folder, new = tmp_path / "out", tmp_path / "new"
    for place, text in ((folder, "old"), (new, "new")):
        place.mkdir()
        (place / "file").write_text(text)
    put_in_place(new, folder)
    assert (folder / "file").read_text() == "new"
    assert list(tmp_path.iterdir()) == [folder]


def test_room_is_asked_for_before(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    require_room(tmp_path / "not" / "there", free // 2)
    require_room(tmp_path, None)
    with pytest.raises(OutputError, match=r"the result takes about .* has .* left"):
        require_room(tmp_path / "not" / "there", 2 * free)
    with pytest.raises(OutputError, match="takes about"), locked_folder(tmp_path / "out", size=2 * free):
        pytest.fail("there is no such room")
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_locks_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".out.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OutputError), locked_folder(tmp_path / "out"):
        pytest.fail("a link was followed")
    assert not (tmp_path / "precious").exists()


@pytest.mark.parametrize("name", ["x" * 256, "x" * 300])
def test_a_name_that_is_too_long(name: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="too long"), atomic_folder(tmp_path / name):
        pytest.fail("it was made")
    assert list(tmp_path.iterdir()) == []
