"""Write output folders and files whole or not at all, locked by one run and checked for disk space.

Knows folders; not their content.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from hf_bico.errors import OutputError, OutputExistsError, RecordError
from hf_bico.utils.files import read_bytes
from hf_bico.utils.text import size_text

RECORD_FILE = "bico.json"

MAX_RESULT_BYTES = 256_000_000
"""The size of a comparison with a million cells."""
_SCRATCH = ".hf-bico-"
"""Scratch folders beside FOLDER are named .FOLDER.hf-bico-RANDOM."""
_ASIDE = "old"
_LONG_NAME = 140
"""Bytes that a name may have: common file systems allow 255, encrypted ones 143."""
_RANDOM = 8
"""Letters that mkdtemp adds to a prefix."""
_LONGEST_INNER = "x" * 60
"""Stands for the files that are written into a folder, of which none has a longer name."""
_LOCK_TIMEOUT = 0.3
"""Seconds: long enough for a run that is just ending to release its lock."""


@contextmanager
def locked_folder(folder: Path, size: int | None = None, waits: bool = False) -> Iterator[None]:
    """Lock an output folder of about this size against other runs, which are refused or wait; may be nested.

    Also clears leftovers of killed runs, and checks the disk space.
    """
    require_writable(folder)
    path = Path(os.path.realpath(folder))  # one lock, and one scratch folder, by whatever link it is named
    new_parents = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(beside(path, ".lock"), is_singleton=True)
        lock.acquire(timeout=-1 if waits else _LOCK_TIMEOUT)
    except Timeout:
        raise OutputError(
            f"another run is writing into '{folder}'", "wait for it, or choose another folder with -o"
        ) from None
    except OSError as error:
        _remove_empty(new_parents)
        raise OutputError(f"'{folder}' cannot be written: {error.strerror}", "choose another folder") from error
    try:
        if lock.lock_counter == 1:
            clear_leftovers(path)
            require_room(path.parent, size)
        yield
    finally:
        _release(lock)
        _remove_empty(new_parents)


def _release(lock: FileLock) -> None:
    """Release the lock, and delete its file."""
    with suppress(OSError):
        if lock.lock_counter == 1:
            os.unlink(lock.lock_file)  # before the release: a waiting process then sees that the file is gone
    lock.release()


def _remove_empty(new_parents: list[Path]) -> None:
    """Delete the folders made for a lock that are still empty, from the innermost one."""
    for parent in new_parents:
        with suppress(OSError):  # not empty: it has the result
            parent.rmdir()


def beside(folder: Path, suffix: str) -> Path:
    """Return the path of a hidden file or folder beside this one; a long name is hashed, so that there is room."""
    name, encoded = folder.name, os.fsencode(folder.name)
    if len(encoded) + len(suffix) + _RANDOM >= _LONG_NAME:
        name = hashlib.sha256(encoded).hexdigest()
    return folder.with_name(f".{name}{suffix}")


def require_writable(folder: Path) -> None:
    """Refuse a path that is too long, or whose nearest existing parent is not writable."""
    path = Path(os.path.abspath(folder))
    parent = next((parent for parent in path.parents if os.path.exists(parent)), None)  # pathlib raises on long names
    if parent is None:
        raise OutputError(f"'{folder}' is the root folder", "choose another folder")
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise OutputError(f"nothing can be written into '{parent}'", "choose another folder")
    for name in path.relative_to(parent).parts:
        _require_short(parent / name, f"the name '{name}' is too long for a file system")
    inside, count = beside(path, _SCRATCH) / _ASIDE / _LONGEST_INNER, len(os.fsencode(path))
    _require_short(inside, f"the path to '{path.name}' is too long: {count:,} bytes")


def _require_short(path: Path, cause: str) -> None:
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise OutputError(cause, "choose a shorter one") from error


def require_room(
    folder: Path, size: int | None, what: str = "the result", elsewhere: str = "choose a folder on another disk"
) -> None:
    """Refuse `size` bytes that the folder's disk has no room for."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if size is not None and size > free:
        raise OutputError(
            f"{what} takes about {size_text(size)}, and the disk of '{existing}' has {size_text(free)} left",
            f"free some space, or {elsewhere}",
        )


def scratch_beside(folder: Path) -> Path:
    """Make a hidden folder on the same disk; if this run is killed, the next one deletes it."""
    return Path(tempfile.mkdtemp(prefix=beside(folder, _SCRATCH).name, dir=folder.parent))


def put_in_place(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`; an existing folder is moved aside first, and restored on failure."""
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
        if not any(aside.iterdir()):  # an old result that could not be restored stays here
            aside.rmdir()


def clear_leftovers(folder: Path) -> None:
    """Delete the scratch folders of killed runs; restore an old result that one had moved aside."""
    pattern = glob.escape(beside(folder, _SCRATCH).name) + "?" * _RANDOM
    for left in folder.parent.glob(pattern):
        if (left / _ASIDE).is_dir() and not folder.exists():
            (left / _ASIDE).rename(folder)
        shutil.rmtree(left, ignore_errors=True)


def require_free(folder: Path, overwrite: bool, replaced: Collection[str] = ()) -> None:
    """Refuse a path that is not writable, or an existing folder unless hf-bico wrote it and it may be replaced.

    Files named in `replaced` are such as hf-bico writes: a folder that holds nothing else is taken for its own.
    """
    if not os.path.exists(folder):  # pathlib raises on long names
        require_writable(folder)
        return
    if Path.cwd().is_relative_to(folder.resolve()):  # it is moved aside when it is replaced
        raise OutputExistsError(f"'{folder}' is the current folder, or contains it", "choose another folder")
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else {""}
    if not names:
        return
    if RECORD_FILE not in names and not names <= set(replaced):
        raise OutputExistsError(
            f"'{folder}' exists and was not written by hf-bico (it holds no {RECORD_FILE})",
            "choose another folder with -o",
        )
    if not overwrite:
        raise OutputExistsError(
            f"the output folder '{folder}' exists", "choose another folder with -o, or replace it with --overwrite"
        )


def require_apart(folder: Path, needed: Path | None) -> None:
    """Refuse to replace a folder that holds the model which the result is a change of."""
    if needed is not None and Path(os.path.realpath(needed)).is_relative_to(os.path.realpath(folder)):
        raise OutputExistsError(f"'{folder}' holds the model that this is a change of", "choose another folder with -o")


@contextmanager
def reserved(
    folder: Path, overwrite: bool = False, size: int | None = None, replaced: Collection[str] = ()
) -> Iterator[None]:
    """Lock an output folder from the start of a run, so that a refusal comes before the work."""
    with locked_folder(folder, size):
        require_free(folder, overwrite, replaced)
        yield


@contextmanager
def atomic_folder(folder: Path, overwrite: bool = False, replaced: Collection[str] = ()) -> Iterator[Path]:
    """Yield a scratch folder to write into; it becomes `folder` at the end, and is deleted on failure."""
    from safetensors import SafetensorError

    with reserved(folder, overwrite, replaced=replaced):
        place = Path(os.path.realpath(folder))  # a link stays, and what it names is written
        try:
            scratch = scratch_beside(place)
        except OSError as error:
            raise OutputError(f"'{folder}' cannot be written: {error.strerror}", "choose another folder") from error
        try:
            yield scratch
            scratch.chmod(0o755)  # mkdtemp makes private folders
            require_free(folder, overwrite, replaced)
            put_in_place(scratch, place)
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"'{folder.name}' cannot be written: {error}", "free some space or choose another folder"
            ) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def write_file(file: Path, content: bytes) -> None:
    """Write a file atomically."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def write_files(folder: Path, content: Mapping[str, str | bytes | None]) -> tuple[Path, ...]:
    """Write files in order, each atomically, delete those without content, and return the paths written."""
    written = {name: data for name, data in content.items() if data is not None}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in content.keys() - written.keys():  # of an earlier run
            (folder / name).unlink(missing_ok=True)
        for name, data in written.items():
            write_file(folder / name, data.encode(errors="backslashreplace") if isinstance(data, str) else data)
    except OSError as error:
        raise OutputError(
            f"'{folder}' cannot be written: {error.strerror}", "free some space or choose another folder"
        ) from error
    return tuple(folder / name for name in written)


def read_text(folder: Path, name: str, what: str) -> str:
    """Read a text file that `write_files` wrote; `what` names its folder in errors."""
    try:
        return read_bytes(folder / name, MAX_RESULT_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        raise RecordError(f"'{folder}' holds no {name} that can be read", f"name the folder of {what}") from error
