"""Output folder: lock, free space, written whole or not at all.

The place of a result: held by one run at a time, with room for it, freed of what killed runs left there.

Knows folders; not what is written into them.

Writing a result: a folder or files that appear whole or not at all. Knows folders; not what is written into them.
"""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from hf_bico.errors import OutputError, OutputExistsError, RecordError
from hf_bico.utils.files import read_bytes
from hf_bico.utils.text import size_text

RECORD_FILE = "bico.json"

_SCRATCH = ".hf-bico-"
"""What stands between a folder's name and the random end of the hidden folders that are made beside it."""
_ASIDE = "old"
_A_MOMENT = 0.3
"""Seconds: a run that has just ended is not taken for one that goes on."""


@contextmanager
def locked_folder(folder: Path, size: int | None = None, waits: bool = False) -> Iterator[None]:
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


MOST_RESULT = 256_000_000
"""Bytes of a file of results: a comparison of a million cells has so many."""


def require_free(folder: Path, overwrite: bool) -> None:
    """Refuse a place that cannot be written to, or a folder that is there, unless it is ours and may be replaced."""
    if not os.path.exists(folder):  # False, where pathlib raises, for a name that is too long
        require_writable(folder)
        return
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if not (folder / RECORD_FILE).is_file():
        raise OutputExistsError(
            f"'{folder}' exists and was not written by hf-bico (it holds no {RECORD_FILE})",
            "choose another folder with -o",
        )
    if not overwrite:
        raise OutputExistsError(
            f"the output folder '{folder}' exists", "choose another folder with -o, or replace it with --overwrite"
        )


@contextmanager
def reserved(folder: Path, overwrite: bool = False, size: int | None = None) -> Iterator[None]:
    """Hold the place of a result from the beginning of a run: what would be refused at its end is refused now."""
    with locked_folder(folder, size):
        require_free(folder, overwrite)
        yield


@contextmanager
def atomic_folder(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary sibling to write into; it becomes `folder` at the end, and vanishes if anything fails."""
    with reserved(folder, overwrite):
        try:
            scratch = scratch_beside(folder)
        except OSError as error:
            raise OutputError(f"'{folder}' cannot be written: {error.strerror}", "choose another folder") from error
        try:
            yield scratch
            scratch.chmod(0o755)  # mkdtemp makes private folders
            require_free(folder, overwrite)
            put_in_place(scratch, folder)
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"'{folder.name}' cannot be written: {error}", "free some space or choose another folder"
            ) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def write_file(file: Path, content: bytes) -> None:
    """Write a file that appears whole, or stays what it was."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def write_files(folder: Path, content: Mapping[str, str | bytes | None]) -> tuple[Path, ...]:
    """Write files in their order, each whole or not at all, and remove those of no content; those that were written."""
    written = {name: some for name, some in content.items() if some is not None}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in content.keys() - written.keys():  # what an earlier run wrote would be taken for this one's
            (folder / name).unlink(missing_ok=True)
        for name, some in written.items():
            write_file(folder / name, some.encode(errors="backslashreplace") if isinstance(some, str) else some)
    except OSError as error:
        raise OutputError(
            f"'{folder}' cannot be written: {error.strerror}", "free some space or choose another folder"
        ) from error
    return tuple(folder / name for name in written)


def read_text(folder: Path, name: str, what: str) -> str:
    """The text of a file that `write_files` wrote into the folder of `what`."""
    try:
        return read_bytes(folder / name, MOST_RESULT).decode("utf-8")
    except (OSError, ValueError) as error:
        raise RecordError(f"'{folder}' holds no {name} that can be read", f"name the folder of {what}") from error
