"""JSON data files that pyarrow would not survive, refused before it sees them. Reads bytes; knows no rows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

LONGEST_LINE, DEEPEST = 256_000_000, 500
_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]')


def require_sound_json(files: Iterable[Path]) -> None:
    """A ValueError for a file with a row that is null, one that is nested without end, or a line without end."""
    for file in files:
        if file.suffix in (".json", ".jsonl", ".ndjson") and file.is_file():
            _require_sound(file)


def _require_sound(file: Path) -> None:
    depth = 0
    with file.open("rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE), b""), start=1):
            text = line.strip()
            if len(line) == LONGEST_LINE:
                raise ValueError(f"line {number} of '{file.name}' has more than {LONGEST_LINE:,} bytes")
            if depth == 0 and text.startswith(b"null"):
                raise ValueError(f"line {number} of '{file.name}' is null, and no row")
            is_row = depth == 0 and text.startswith(b"{") and text.endswith(b"}")
            if is_row and text.count(b"[") + text.count(b"{") <= DEEPEST:
                continue  # the usual line of such a file
            depth = 0 if is_row else depth
            for token in _TOKENS.findall(text):
                depth += 1 if token in b"[{" else -1 if token in b"]}" else 0
                if depth > DEEPEST:
                    raise ValueError(f"line {number} of '{file.name}' is nested too deeply")
            depth = 0 if is_row else max(depth, 0)
