"""Read small files from strangers within bounds, hash files, and convert data classes to JSON and back.

Knows formats, not the meaning of their content. A bad file raises OSError or ValueError with a one-line message.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from math import inf
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, BinaryIO, Union, get_args, get_origin, get_type_hints

MAX_FILE_BYTES = 16_000_000
"""Twice the index of a model with thousands of shards, ten times the largest cards."""
_HASH_CHUNK = 2**24
_MAX_YAML_DEPTH = 200
_MAX_YAML_COPIES = 4_000_000
"""Letters that the aliases of a card may stand for in all: as many as the largest cards have."""
_WHOLE_NUMBER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_CARD_METADATA = re.compile(r"\s*---(?:\r\n|\r|\n)(?P<yaml>[\S\s]*?)(?:\r\n|\r|\n)---[ \t]*(?:\r\n|\n|$)")
_YAML_TYPES = ("null", "bool", "str", "seq", "map")
_MAX_INT = 2**63
"""Above any count, index or file size, and the limit of the libraries that read them."""
_MAX_DATA_LINE, _MAX_DATA_DEPTH = 256_000_000, 500
_MAX_CELLS, _FEW_COLUMNS = 50_000_000, 16
"""Cells of a table that may be empty: more than that, and more than the file has bytes, is no table."""
_JSON_KEY_END = re.compile(rb'"\s*:')
_JSON_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]|\b(?:null|NaN|Infinity)\b')


def expanded(path: str | Path) -> Path:
    """Expand `~`; unlike pathlib, leave the `~` of an unknown user, so that the path is simply not found."""
    return Path(os.path.expanduser(path))


_called: dict[Path, str] = {}


def call_folder(folder: Path, name: str) -> None:
    """Let a folder in a cache, whose own name is a hash, be called after the model that was put there."""
    _called[folder] = name


def folder_name(folder: Path) -> str:
    """Return the name of a folder, or of the model that it is called after: the repo id of a snapshot of the Hub's.

    >>> folder_name(Path("hub/models--org--name/snapshots/0123"))
    'org/name'
    """
    if folder in _called:
        return _called[folder]
    if folder.parent.name != "snapshots":
        return folder.name
    return folder.parent.parent.name.partition("--")[2].replace("--", "/") or folder.name


def without_folder(text: object, folder: Path) -> str:
    """Put the name of a folder into a library's message instead of its path, on one line.

    >>> without_folder("no file in here/models/mine", Path("here/models/mine"))
    'no file in mine'
    """
    return " ".join(str(text).replace(str(folder), folder_name(folder)).split())


def sha256_of(files: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of each file, by file name."""
    return {file.name: _sha256(file) for file in files}


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_HASH_CHUNK):  # large: hashing a chunk releases the GIL
            digest.update(chunk)
    return digest.hexdigest()


def read_bytes(file: Path, most: int = MAX_FILE_BYTES) -> bytes:
    """Read a regular file of at most `most` bytes: a pipe or device could block for ever."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a file")
    if status.st_size > most:
        raise ValueError(f"it has {status.st_size:,} bytes, more than {most:,}")
    with file.open("rb") as stream:
        return stream.read(most)


def read_json(file: Path, most: int = MAX_FILE_BYTES) -> Any:
    return parse_json(read_bytes(file, most))


def parse_json(content: bytes | str) -> Any:
    """Parse JSON; refuse deep nesting and text that cannot be encoded again."""
    text = content if isinstance(content, str) else content.decode("utf-8")
    try:
        value = json.loads(text)
        if "\\u" in text:  # half a surrogate pair cannot be written to a file
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON file that contains one object."""
    value = read_json(file)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def read_card_metadata(file: Path, most: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """Read the YAML metadata at the top of a card; empty if it has none."""
    block = _CARD_METADATA.match(read_bytes(file, most).decode("utf-8-sig"))
    return {} if block is None else _parse_yaml(block["yaml"])


def read_yaml(file: Path, most: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """Read a YAML file that contains one mapping, within the same bounds as a card's metadata."""
    return _parse_yaml(read_bytes(file, most).decode("utf-8"))


def _parse_yaml(text: str) -> dict[str, Any]:
    """Parse one mapping of texts, booleans, whole numbers, lists and mappings; dates and the like become None.

    Refuses what can expand without bound: merge keys (`<<`), and aliases that stand for too much text.

    >>> _parse_yaml("a: !!int ''\\nb: !!bool x\\nc: 2000-01-01\\nd: yes")
    {'a': None, 'b': None, 'c': None, 'd': True}
    """
    import yaml

    try:
        _require_bounded(yaml.parse(text, Loader=_loader()))
        metadata = yaml.load(text, Loader=_loader())
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    if metadata is not None and not isinstance(metadata, dict):
        raise ValueError("they are no mapping")
    return metadata or {}


def _require_bounded(events: Iterable[Any]) -> None:
    """Raise ValueError for deep nesting, and for aliases that copy too much: each counts as all that it stands for."""
    import yaml

    sizes: dict[str | None, int] = {}
    open_nodes: list[tuple[str | None, int]] = []
    size = by_alias = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in sizes:  # one that is unknown, or stands for itself, is for the loader to refuse
                by_alias += sizes[event.anchor]
                size += sizes[event.anchor]
            elif any(anchor == event.anchor for anchor, _ in open_nodes):
                raise ValueError("a part of them contains itself")
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, size))
            sizes.pop(event.anchor, None)
            size += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            sizes.update({} if anchor is None else {anchor: size - before})
        elif isinstance(event, yaml.ScalarEvent):
            size += 1 + len(event.value)
            sizes.update({} if event.anchor is None else {event.anchor: 1 + len(event.value)})
        if len(open_nodes) > _MAX_YAML_DEPTH:  # the loader in C would overflow its stack
            raise ValueError("they are nested too deeply")
        if by_alias > _MAX_YAML_COPIES:
            raise ValueError("their aliases (*) stand for too much text")


@cache
def _loader() -> Any:
    import yaml
    from yaml.constructor import ConstructorError

    safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(safe):
        def flatten_mapping(self, node: Any) -> None:
            if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
                raise ConstructorError(None, None, "a mapping is merged from others (<<)", node.start_mark)

    for tag in [tag for tag in Loader.yaml_constructors if tag is not None]:
        if tag.rpartition(":")[2] not in _YAML_TYPES:
            Loader.add_constructor(tag, lambda loader, node: None)
    # not by PyYAML's own constructor: numbers to the base of sixty take it for ever
    Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: _whole_number(node.value))
    # nor this one: it looks up what is no boolean, and raises a KeyError
    Loader.add_constructor("tag:yaml.org,2002:bool", lambda loader, node: _boolean(loader, node.value))
    return Loader


def _whole_number(text: Any) -> int | None:
    return int(text) if isinstance(text, str) and _WHOLE_NUMBER.fullmatch(text) else None


def _boolean(loader: Any, text: Any) -> bool | None:
    value: bool | None = loader.bool_values.get(text.lower()) if isinstance(text, str) else None
    return value


def to_plain(instance: Any) -> str:
    """Write a data class as JSON, without its empty fields."""
    return json.dumps(_without_empty(asdict(instance)), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


@dataclass(frozen=True)
class Within:
    """Bounds of a number, or of the length of a text, list or dictionary: `Annotated[float, Within(0, 1)]`."""

    least: float
    most: float = inf

    def check(self, value: Any, name: str) -> None:
        if isinstance(value, (str, list, dict)):
            if len(value) > self.most:
                what = "characters" if isinstance(value, str) else "entries"
                raise TypeError(f"'{name}' has {len(value):,} {what}, more than {self.most:,}")
        elif not self.least <= value <= self.most:
            bounds = f"at least {self.least:g}" if self.most == inf else f"between {self.least:g} and {self.most:g}"
            raise TypeError(f"'{name}' is {value}, and not {bounds}")


_TEXT = Within(0, 100_000)
"""Characters of a text in a data class: above any name, sentence or command line."""


def from_plain(kind: Any, value: Any) -> Any:
    """Build a data class from parsed JSON; a value of the wrong type or out of bounds is a TypeError with its field."""
    try:
        return _build(kind, value, "record")
    except RecursionError:
        raise TypeError("it is nested too deeply") from None


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the types of a data class's fields, and those of its lists and dictionaries, which may be left out."""
    hints = get_type_hints(kind, include_extras=True)
    return hints, {name: bare for name, hint in hints.items() if (bare := _bare(hint)) in (list, dict)}


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


@cache
def _bare(kind: Any) -> Any:
    """Return `list` for `Annotated[list[int], ...]`, and `int` for `int`."""
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return get_origin(kind) or kind


def _build(kind: Any, value: Any, name: str) -> Any:
    origin, inner = _parts(kind)
    if origin is Annotated:
        bounds = inner[1]
        if type(value) in (list, dict):  # before its entries are built
            bounds.check(value, name)
        built = _build(inner[0], value, name)
        bounds.check(built, name)
        return built
    if origin in (UnionType, Union):
        if value is None and NoneType in inner:
            return None
        # a rank is a whole number or a share, alpha a number or a list of them
        fitting = [one for one in inner if type(value) is _bare(one)] or inner
        return _build(fitting[0], value, name)
    if origin is list and isinstance(value, list):
        if inner[0] is int and all(type(item) is int and abs(item) < _MAX_INT for item in value):
            return value  # indices may be a million
        return [_build(inner[0], item, name) for item in value]
    if origin is dict and isinstance(value, dict):
        return {_scalar(str, key, name): _build(inner[1], item, name) for key, item in value.items()}
    if origin is tuple and isinstance(value, list) and len(value) == len(inner):
        return tuple(_build(one, item, name) for one, item in zip(inner, value, strict=True))
    return _instance(kind, value) if isinstance(value, dict) and is_dataclass(kind) else _scalar(kind, value, name)


def _instance(kind: Any, value: dict[str, Any]) -> Any:
    hints, left_out = _fields(kind)
    given = {field: _build(hint, value[field], field) for field, hint in hints.items() if field in value}
    return kind(**{field: empty() for field, empty in left_out.items()} | given)


def _scalar(kind: Any, value: Any, name: str) -> Any:
    if kind is Any:
        return value
    if kind is float and type(value) in (int, float) and abs(value) < 1e300:
        return float(value)
    if kind is int and type(value) is int and abs(value) < _MAX_INT:
        return value
    if kind not in (int, float) and isinstance(kind, type) and type(value) is kind:
        if kind is str:
            _TEXT.check(value, name)
        return value
    raise TypeError(f"'{name}' is {str(value)[:60]!r}")


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _without_empty(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item is not None and item != [] and item != {}}
    return [_without_empty(item) for item in value] if isinstance(value, list | tuple) else value


def require_sound_json(name: str, stream: BinaryIO, columns: int = 0) -> None:
    """Raise ValueError for JSON data that crashes pyarrow, or that it would never finish reading.

    These are a null row (which NaN becomes), endless nesting, an endless line, and rows of ever new keys, each of which
    becomes a column. So many `columns` are filled in any case.
    """
    depth = size = number = null = 0
    listed = has_rows = False
    keys = set[bytes]()
    for number, line in enumerate(iter(lambda: stream.readline(_MAX_DATA_LINE), b""), start=1):
        text = line.strip()
        size += len(line)
        ends = [match.start() for match in _JSON_KEY_END.finditer(text)]
        keys.update(text[text.rfind(b'"', 0, end) + 1 : end] for end in ends)
        if max(len(keys), columns) * number > max(_MAX_CELLS, size):
            raise ValueError(f"'{name}' has {max(len(keys), columns):,} columns, of which its lines fill few")
        if len(line) == _MAX_DATA_LINE:
            raise ValueError(f"line {number} of '{name}' has more than {_MAX_DATA_LINE:,} bytes")
        is_row = depth == 0 and text.startswith(b"{") and text.endswith(b"}")
        if is_row and text.count(b"[") + text.count(b"{") <= _MAX_DATA_DEPTH:
            continue  # the usual line of such a file
        depth = 0 if is_row else depth
        for token in (found[0] for found in _JSON_TOKENS.finditer(text)):
            if token in b"[{":
                listed = token == b"[" if depth == 0 else listed
                has_rows |= token == b"{" and depth <= listed
                depth += 1
                if depth > _MAX_DATA_DEPTH:
                    raise ValueError(f"line {number} of '{name}' is nested too deeply")
            elif token in b"]}":
                depth = max(depth - 1, 0)
            elif depth <= listed and not token.startswith(b'"'):
                null = null or number
            if null and (has_rows or not listed):
                raise ValueError(f"line {null} of '{name}' has a row that is null")
        depth = 0 if is_row else depth


def require_sound_csv(name: str, stream: BinaryIO, columns: int = 0) -> None:
    """Raise ValueError for a table with far more columns, by its head or otherwise, than its rows fill."""
    head = stream.readline(_MAX_DATA_LINE)
    columns = max(columns, 1 + max(head.count(separator) for separator in b",;|\t"))
    if columns <= _FEW_COLUMNS:
        return
    size, lines = len(head), 0
    while chunk := stream.read(_HASH_CHUNK):
        size, lines = size + len(chunk), lines + chunk.count(b"\n")
    if columns * lines > max(_MAX_CELLS, size):
        raise ValueError(f"'{name}' has {columns:,} columns, of which its lines fill few")
