"""Small files of strangers read within bounds; paths and digests; data classes as JSON.

Small files that others wrote, read within bounds: JSON, and the metadata of cards. Knows formats, not what they say.

Whatever is wrong with a file is an OSError or a ValueError, of one line.

Data classes as plain JSON, without their empty fields, and back: every field is held to its type.

Knows types; not what the data are about.

JSON data files that pyarrow would not survive, refused before it sees them. Reads bytes; knows no rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints


def expanded(path: str | Path) -> Path:
    """The path with `~` put in; an unknown user's stays as it is, and is simply not found."""
    return Path(os.path.expanduser(path))


def folder_name(folder: Path) -> str:
    """What to call a folder: its name, or the repo's id where it is a snapshot of the Hub's cache.

    >>> folder_name(Path("hub/models--org--name/snapshots/0123"))
    'org/name'
    """
    if folder.parent.name != "snapshots":
        return folder.name
    return folder.parent.parent.name.partition("--")[2].replace("--", "/") or folder.name


def sha256_of(files: Iterable[Path]) -> dict[str, str]:
    """The SHA-256 of each file, by its name."""
    return {file.name: _sha256(file) for file in files}


def _sha256(file: Path) -> str:
    """In large pieces: during each of them other threads of Python are not held up."""
    found = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        while piece := stream.read(HASHED_AT_ONCE):
            found.update(piece)
    return found.hexdigest()


HASHED_AT_ONCE = 2**24

MOST_BYTES = 16_000_000
"""The index of a model of thousands of shards has half of that, and the largest cards a tenth."""
_DEEPEST = 200
_METADATA = re.compile(r"\s*---(?:\r\n|\r|\n)(?P<yaml>[\S\s]*?)(?:\r\n|\r|\n)---[ \t]*(?:\r\n|\n|$)")
_VALUES_READ = ("null", "bool", "str", "seq", "map")


def read_bytes(file: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a plain file: of a pipe or device one might wait for ever."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no file")
    if found.st_size > most:
        raise ValueError(f"it has {found.st_size:,} bytes, more than {most:,}")
    with file.open("rb") as stream:
        return stream.read(most)


def read_json(file: Path, most: int = MOST_BYTES) -> Any:
    """The value that a JSON file holds."""
    return parse_json(read_bytes(file, most))


def parse_json(content: bytes | str) -> Any:
    """A JSON value of sane depth, in text that can be written again."""
    text = content if isinstance(content, str) else content.decode("utf-8")
    try:
        found = json.loads(text)
        if "\\u" in text:  # half a surrogate pair is a character that no file can hold
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found


def read_object(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    found = read_json(file)
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def read_card_metadata(file: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """The metadata at the head of a card; empty where it has none.

    Of what YAML can say, lists and mappings of texts: a number, a date or the like is None, since nothing here reads
    them. What is merged from elsewhere in the file is refused, for it can grow without end.
    """
    import yaml

    text = read_bytes(file, most).decode("utf-8-sig")
    block = _METADATA.match(text)
    if block is None:
        return {}
    try:
        _require_shallow(block["yaml"])
        found = yaml.load(block["yaml"], Loader=_loader())
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if found is not None and not isinstance(found, dict):
        raise ValueError("they are no mapping")
    return found or {}


def _require_shallow(text: str) -> None:
    """Refuse what is nested deeply before a loader in C follows it down, beyond the end of its stack."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=_loader()):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ValueError("they are nested too deeply")


@cache
def _loader() -> Any:
    import yaml
    from yaml.constructor import ConstructorError

    safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(safe):
        """Texts, lists and mappings, and nothing that takes time to make."""

        def flatten_mapping(self, node: Any) -> None:
            if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
                raise ConstructorError(None, None, "a mapping is merged from others (<<)", node.start_mark)

    for tag in [tag for tag in Loader.yaml_constructors if tag is not None]:
        if tag.rpartition(":")[2] not in _VALUES_READ:
            Loader.add_constructor(tag, lambda loader, node: None)
    return Loader


_MOST = 2**63
"""No count, index or size of bytes is as large, and libraries take no larger ones."""


def to_plain(found: Any) -> str:
    """A data class as JSON, without its empty fields."""
    return json.dumps(_without_empty(asdict(found)), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def from_plain(kind: Any, value: Any) -> Any:
    """What `to_plain` wrote of a data class; what does not fit is a TypeError that names the field."""
    try:
        return _build(kind, value, "record")
    except RecursionError:
        raise TypeError("it is nested too deeply") from None


def _build(kind: Any, value: Any, name: str) -> Any:
    """JSON as the type that a field has; what does not fit is a TypeError that names the field."""
    if is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        known = {field: _build(hint, value[field], field) for field, hint in hints.items() if field in value}
        # lists and dictionaries are absent when empty
        empty = {field: get_origin(hint)() for field, hint in hints.items() if get_origin(hint) in (list, dict)}
        return kind(**{**empty, **known})  # type: ignore[operator]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        kinds = [one for one in inner if one is type(value)] or inner  # a rank is a whole number or a share
        return None if value is None else _build(kinds[0], value, name)
    if origin is list and isinstance(value, list):
        return [_build(inner[0], item, name) for item in value]
    if origin is dict and isinstance(value, dict):
        return {key: _build(inner[1], item, name) for key, item in value.items()}
    if origin is tuple and isinstance(value, list) and len(value) == len(inner):
        return tuple(_build(one, item, name) for one, item in zip(inner, value, strict=True))
    if kind is float and type(value) in (int, float) and abs(value) < 1e300:
        return float(value)
    if kind is int and type(value) is int and abs(value) < _MOST:
        return value
    if kind not in (int, float) and isinstance(kind, type) and type(value) is kind:
        return value
    raise TypeError(f"'{name}' is {str(value)[:60]!r}")


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _without_empty(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item is not None and item != [] and item != {}}
    return [_without_empty(item) for item in value] if isinstance(value, list | tuple) else value


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
