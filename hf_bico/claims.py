"""The place of a result: held by one run at a time, with room for it, freed of what killed runs left there.

Knows folders; not what is written into them.
"""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from hf_bico.errors import OutputError
from hf_bico.utils.text import size_text

_SCRATCH = ".hf-bico-"
"""What stands between a folder's name and the random end of the hidden folders that are made beside it."""
_ASIDE = "old"
_A_MOMENT = 0.3
"""Seconds: a run that has just ended is not taken for one that goes on."""


@contextmanager
def claimed(folder: Path, size: int | None = None, waits: bool = False) -> Iterator[None]:
    """Hold the place of a folder of about this size: another run is refused, or `waits`; may be nested.

    What runs that were killed left beside it is cleared away, now that nobody else is writing there.
    """
    require_writable(folder)
    place = Path(os.path.abspath(folder))
    try:
        made = _make_parents(place)
        lock = FileLock(place.with_name(f".{place.name}.lock"), is_singleton=True)
        lock.acquire(timeout=-1 if waits else _A_MOMENT)
    except Timeout:
        raise OutputError(
            f"another run is writing into '{folder}'", "wait for it, or choose another folder with -o"
        ) from None
    except OSError as error:
        raise OutputError(f"'{folder}' cannot be written: {error.strerror}", "choose another folder") from error
    try:
        if lock.lock_counter == 1:
            clear_leftovers(place)
            require_room(place.parent, size)
        yield
    finally:
        _let_go(lock, made)


def require_writable(folder: Path) -> None:
    """Refuse a place that no folder can be made in."""
    parent = next(path for path in folder.absolute().parents if os.path.exists(path))  # pathlib's raises if too long
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise OutputError(f"nothing can be written into '{parent}'", "choose another folder")


def require_room(
    folder: Path, size: int | None, what: str = "the result", elsewhere: str = "choose a folder on another disk"
) -> None:
    """Refuse before a long run what the disk has no room for."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if size is not None and size > free:
        raise OutputError(
            f"{what} takes about {size_text(size)}, and the disk of '{there}' has {size_text(free)} left",
            f"free some space, or {elsewhere}",
        )


def scratch_beside(folder: Path) -> Path:
    """A new hidden folder on the same disk, which is cleared away by the next run if this one is killed."""
    return Path(tempfile.mkdtemp(prefix=f".{folder.name}{_SCRATCH}", dir=folder.parent))


def put_in_place(new: Path, folder: Path) -> None:
    """Make `new` the folder; one that is there is put aside first, and is back if that fails or is cut short."""
    if not folder.exists():
        new.rename(folder)
        return
    aside = scratch_beside(folder)
    try:
        old = folder.rename(aside / _ASIDE)
        try:
            new.rename(folder)
        except BaseException:
            old.rename(folder)
            raise
        shutil.rmtree(old)
    finally:
        if not any(aside.iterdir()):  # an old result that could not be put back is kept here
            aside.rmdir()


def clear_leftovers(folder: Path) -> None:
    """Remove what killed runs left beside a folder; an old result that one had put aside goes back to its place."""
    pattern = glob.escape(f".{folder.name}{_SCRATCH}") + "?" * 8
    for left in folder.parent.glob(pattern):
        if (left / _ASIDE).is_dir() and not folder.exists():
            (left / _ASIDE).rename(folder)
        shutil.rmtree(left, ignore_errors=True)


def _make_parents(place: Path) -> list[Path]:
    """Those of the folders above that had to be made, the innermost first."""
    made = [parent for parent in place.parents if not parent.exists()]
    place.parent.mkdir(parents=True, exist_ok=True)
    return made


def _let_go(lock: FileLock, made: list[Path]) -> None:
    """Release a claim and leave nothing of it: neither the lock's file nor folders that stayed empty."""
    with suppress(OSError):
        if lock.lock_counter == 1:
            os.unlink(lock.lock_file)  # before the release: who waits for the file sees that it is gone
    lock.release()
    for parent in made:
        with suppress(OSError):  # it holds the result
            parent.rmdir()
