"""Writing a result: a folder or files that appear whole or not at all. Knows folders; not what is written into them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from hf_bico.claims import claimed, put_in_place, require_writable, scratch_beside
from hf_bico.errors import OutputError, OutputExistsError, RecordError
from hf_bico.record import RECORD_FILE
from hf_bico.utils.files import read_bytes

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
    with claimed(folder, size):
        require_free(folder, overwrite)
        yield


@contextmanager
def whole_folder(folder: Path, overwrite: bool = False) -> Iterator[Path]:
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
