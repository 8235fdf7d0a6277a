"""A port that was stopped before or while it was pushed: known by the line that made it, and then pushed as it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from hf_bico.runtime.output import RECORD_FILE

_LINE_FILE = ".hf-bico-line"
"""Hidden: it is not pushed."""


class Known(Protocol):
    """A model by what tells it from others: a commit, or else the digests of its files."""

    @property
    def commit(self) -> str | None: ...
    @property
    def sha256(self) -> dict[str, str]: ...


def line_digest(typed: str, models: Iterable[Known]) -> str:
    """What tells one port from another: the line that was typed, and the very models that it names."""
    known = [model.commit or sorted(model.sha256.items()) for model in models]
    return hashlib.sha256(json.dumps([typed, *known]).encode()).hexdigest()


def note_line(folder: Path, digest: str) -> None:
    """Let a folder know which line made it."""
    (folder / _LINE_FILE).write_text(f"{digest}\n", encoding="ascii")


def noted_line(folder: Path) -> str | None:
    """The line that a folder was made by, if it was to be pushed."""
    file = folder / _LINE_FILE
    if not file.is_file() or not (folder / RECORD_FILE).is_file():
        return None
    return file.read_text(encoding="ascii", errors="replace").strip()
