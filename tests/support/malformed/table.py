"""The table of malformed inputs: each spoils one thing in a copy of a good scene, and says which error tells of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Spoiler = Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """One malformed input."""

    name: str
    entry: str
    """What is done with it: a name of `entries.ENTRIES`."""
    error: str
    """The exact class of the error that it ends in."""
    spoil: Spoiler


CASES: dict[str, Case] = {}


def add(name: str, entry: str, error: str, spoil: Spoiler) -> None:
    assert name not in CASES, name
    CASES[name] = Case(name, entry, error, spoil)


def spoils(entry: str, error: str) -> Callable[[Spoiler], Spoiler]:
    """Enter a function that spoils a scene into the table, under its own name."""

    def enter(spoil: Spoiler) -> Spoiler:
        add(spoil.__name__, entry, error, spoil)
        return spoil

    return enter


def put(file: Path, content: bytes | str) -> None:
    """A new file in the place of an old one, which other scenes share."""
    file.unlink(missing_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)


def put_json(file: Path, value: Any) -> None:
    put(file, json.dumps(value))


def change_json(file: Path, *path: str | int, to: Any) -> None:
    """The JSON file with another value at this path."""
    content = json.loads(file.read_text())
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    put_json(file, content)


def word(value: Any) -> str:
    """A value as a part of a name."""
    text = str(value)[:60]
    said = "".join(letter for letter in text if letter.isalnum())[:20]
    return f"{type(value).__name__}_{said}" + (f"_{len(text)}_long" if len(said) < 3 and len(text) > 2 else "")


def deep(depth: int = 100_000) -> str:
    """JSON that is nested without end."""
    return '{"a":' * depth + "1" + "}" * depth
