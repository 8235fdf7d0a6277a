"""Small files that others wrote, read within bounds: JSON, and the metadata of cards. Knows formats, not what they say.

Whatever is wrong with a file is an OSError or a ValueError, of one line.
"""

from __future__ import annotations

import json
import re
import stat
from functools import cache
from pathlib import Path
from typing import Any

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
