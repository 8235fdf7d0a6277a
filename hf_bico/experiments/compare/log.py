"""Keeps the numbers of a comparison in a file that only grows, so that an interrupted run can be resumed.

The first line of `cells.jsonl` identifies the comparison; every other line is a number or a reference model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hf_bico.errors import OutputError, OutputExistsError, RecordError, UsageError
from hf_bico.experiments.compare.cells import Cell, CellKey
from hf_bico.experiments.compare.comparison import RESULT_FILES
from hf_bico.runtime.output import require_free
from hf_bico.utils.files import from_plain, parse_json

LOG_FILE = "cells.jsonl"
_LOCK_FILE, _PARTIAL_FILE = ".cells.lock", ".cells.jsonl.partial"
_FORMAT = {"format": "hf-bico comparison", "schema": 1}
_MOST_DIFFERENCES = 3


class CellLog:
    """The measured cells of one folder, which is locked by one process at a time.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with CellLog.open(folder, {"target": "B"}) as log:
    ...         log.add(Cell("digits", "bico", 0.75, n=100, seed=0))
    ...     with CellLog.open(folder, {"target": "B"}) as log:
    ...         log.has(CellKey("digits", "bico", n=100, seed=0))
    True
    """

    def __init__(self, folder: Path, lock: FileLock) -> None:
        """Use `open`."""
        self.folder = folder
        self._lock = lock
        self._cells: dict[CellKey, Cell] = {}
        self._references: dict[str, Any] = {}

    @classmethod
    @contextmanager
    def open(cls, folder: Path | str, identity: dict[str, Any], overwrite: bool = False) -> Iterator[CellLog]:
        """Start a log in a new folder, or continue an existing one of the same `identity`; lock it meanwhile.

        The identity is plain JSON: the models and the data, with commits or sha256, and the settings that change a
        number; not the methods, sizes or seeds, which may be added later. `overwrite` starts anew in a comparison's
        folder; files that are not a comparison's are never touched.
        """
        folder = Path(folder)
        identity = json.loads(json.dumps(identity, allow_nan=False))
        _require_ours(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            locked = FileLock(folder / _LOCK_FILE).acquire(timeout=0)
        except Timeout:
            raise OutputError(
                f"another process is writing a comparison into '{folder}'",
                "wait for it, or choose another folder with -o",
            ) from None
        except OSError as error:
            raise OutputError(f"'{folder}' cannot be written: {error.strerror}", "choose another folder") from error
        with locked as lock:
            log = cls(folder, lock)
            if overwrite or not log.file.exists():
                log._start(identity)
            else:
                log._read(identity)
            yield log

    @property
    def file(self) -> Path:
        return self.folder / LOG_FILE

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells, in the order of measuring."""
        return tuple(self._cells.values())

    def has(self, key: CellKey) -> bool:
        return key in self._cells

    def chosen(self, keys: Iterable[CellKey]) -> tuple[Cell, ...]:
        """Return the cells of these keys that are measured already."""
        return tuple(self._cells[key] for key in dict.fromkeys(keys) if key in self._cells)

    def add(self, cell: Cell) -> None:
        """Append a number; it is on the disk when this returns."""
        if self.has(cell.key):
            raise ValueError(f"{cell.key} is in the log already")
        self._append({"cell": cell.as_dict()})
        self._cells[cell.key] = cell

    def add_reference(self, name: str, identity: Any) -> None:
        """Record the identity of a reference model; refuse another one of the same name."""
        identity = json.loads(json.dumps(identity, allow_nan=False))
        if name not in self._references:
            self._append({"reference": {name: identity}})
            self._references[name] = identity
        _require_same(self.folder, {name: self._references[name]}, {name: identity})

    def _start(self, identity: dict[str, Any]) -> None:
        partial = self.folder / _PARTIAL_FILE
        try:
            with partial.open("wb") as stream:
                stream.write(_line({**_FORMAT, "identity": identity}))
                stream.flush()
                os.fsync(stream.fileno())
            for name in RESULT_FILES:  # of the comparison that is overwritten
                (self.folder / name).unlink(missing_ok=True)
            os.replace(partial, self.file)
        except OSError as error:
            raise OutputError(f"'{self.file}' cannot be written: {error.strerror}", "choose another folder") from error

    def _read(self, identity: dict[str, Any]) -> None:
        content = self.file.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        first, *others = complete.splitlines()
        known = parse_json(first)["identity"]
        if (tuned := known.pop("fine_tuned", None)) is not None:  # where earlier versions recorded it
            self._references["fine_tuned"] = tuned
        _require_same(self.folder, known, identity)
        for number, line in enumerate(others, start=2):
            try:
                entry = parse_json(line)
                if "reference" in entry:
                    self._references.update(entry["reference"])
                    continue
                cell = from_plain(Cell, entry["cell"])
                if self._cells.setdefault(cell.key, cell) is not cell:
                    raise ValueError("a number occurs twice")
            except (ValueError, TypeError, KeyError) as error:
                raise RecordError(
                    f"line {number} of '{self.file}' cannot be read",
                    "choose another folder with -o, or begin again with --overwrite",
                ) from error
        if len(complete) < len(content):  # a run was stopped while it wrote
            os.truncate(self.file, len(complete))

    def _append(self, entry: dict[str, Any]) -> None:
        line = _line(entry)
        if not self._lock.is_locked:
            raise ValueError("the log is closed")
        with self.file.open("ab", buffering=0) as stream:
            before = stream.tell()
            try:
                if stream.write(line) != len(line):
                    raise OSError(None, "the disk is full")
                os.fsync(stream.fileno())
            except OSError as error:
                with suppress(OSError):
                    stream.truncate(before)
                raise OutputError(
                    f"'{self.file}' cannot be written: {error.strerror}",
                    "free some space, then run again: it goes on where it stopped",
                ) from error


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, allow_nan=False).encode() + b"\n"


def _require_ours(folder: Path) -> None:
    """Refuse a folder with other content than a comparison."""
    file, remedy = folder / LOG_FILE, "choose another folder with -o"
    if os.path.isfile(file):  # False, where pathlib raises, for a name that is too long
        with file.open("rb") as stream:
            first = stream.readline()
        with suppress(ValueError):
            header = parse_json(first)
            ours = isinstance(header, dict) and header.items() >= _FORMAT.items()
            if ours and first.endswith(b"\n") and isinstance(header.get("identity"), dict):
                return
        raise OutputExistsError(f"'{file}' is there and was not written by hf-bico compare", remedy)
    if os.path.isdir(folder):
        if any(path.name not in (_LOCK_FILE, _PARTIAL_FILE) for path in folder.iterdir()):
            raise OutputExistsError(f"'{folder}' exists and holds no comparison (no {LOG_FILE})", remedy)
    elif os.path.lexists(folder):
        raise OutputExistsError(f"'{folder}' is not a folder", remedy)
    else:
        require_free(folder, overwrite=False)


def _require_same(folder: Path, known: dict[str, Any], requested: dict[str, Any]) -> None:
    """Refuse to continue a comparison of something else, and name the differences."""
    before, now = _flat(known), _flat(requested)
    different = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    if not different:
        return
    changes = [f"{name} was {before.get(name, 'not given')}, now {now.get(name, 'not given')}" for name in different]
    more = len(changes) - _MOST_DIFFERENCES
    listed = "; ".join([*changes[:_MOST_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])])
    raise UsageError(
        f"'{folder}' holds another comparison: {listed}",
        "choose another folder with -o, or give up what is there with --overwrite",
    )


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """Map dotted names to values as JSON."""
    if not isinstance(value, dict) or not value:
        return {name: json.dumps(value)}
    parts = [_flat(part, f"{name}.{key}" if name else key) for key, part in value.items()]
    return {inner: text for part in parts for inner, text in part.items()}
