"""Spoilt copies of good inputs: bytes, JSON, safetensors and YAML, changed a little at random. Knows formats only."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import yaml

LONGEST = 65_536
"""Bytes of a spoilt input: what is wrong shows in small ones."""

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 10**3, 10**6, 10**9, 10**12, 2**31, 2**63, 2**64, -(2**63), 10**30),
    *(0.0, 0.5, -0.5, 1.5, 1e-9, 1e9, 1e300, -1e300, float("inf"), float("nan")),
    *("", " ", "\x00", "a", "1", "null", "none", "auto", "../x", "/etc/passwd", "a" * 300, "é", "\ud800", "(a+)+$"),
    *("(", "*", "[", "{{", "model", "weight", "cuda", "float32", "int8", "BF16", "F8_E4M3", "I64", "BOOL", "C64"),
    *([], {}, [[]], [{}], {"a": 1}, [0], [1, 2], [-1], [None], ["a"], [["a", "b"]], [10**9, 10**9], [0] * 50),
)
WORDS = (
    *(b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\r\n", b"\t", b"---\n", b"{", b"}", b"[", b"]", b'"', b","),
    *(b":", b"null", b"true", b"NaN", b"Infinity", b"-1", b"1e999", b"9" * 30, b"&a ", b"*a", b"<<: *a\n", b"!!int "),
    *(b"!!python/object/apply:os.system ['true']\n", b"? [a]\n: b\n", b"- ", b"#", b"%", b"\\u0000", b"\\ud800"),
    *(b"../", b"lora_A", b"weight", b".0.", b"\x89PNG\r\n", b"PAR1", b"{% for a in range(9) %}", b"{{ x }}"),
)

Mutation = Callable[[bytes, random.Random, Sequence[bytes]], bytes]


def spoilt(content: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    """The content after one to four changes, each by a way that fits it; `others` are contents to take parts from."""
    ways = _ways(content)
    for _ in range(generator.choice((1, 1, 1, 2, 2, 3, 4))):
        content = generator.choice(ways)(content, generator, others)
    return content[:LONGEST]


def _ways(content: bytes) -> list[Mutation]:
    if _header(content) is not None:
        return [_safetensors, _safetensors, _bytes]
    if content.lstrip()[:3] == b"---":
        return [_card, _card, _bytes]
    if content.lstrip()[:1] in (b"{", b"["):
        return [_json, _json, _json, _json, _bytes] if _is_json(content) else [_json_lines, _json_lines, _bytes]
    return [_bytes]


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def _bytes(content: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    """A piece of the content cut out, doubled, turned round, or replaced by another."""
    start = generator.randint(0, len(content))
    end = min(len(content), start + generator.choice((0, 1, 1, 2, 4, 8, 64, 1024)))
    piece = content[start:end]
    other = generator.choice(others) if others else b""
    place = generator.randint(0, len(other))
    options = (
        b"",
        piece * generator.choice((2, 3, 50)),
        piece[::-1],
        generator.choice(WORDS),
        generator.choice(WORDS) * generator.choice((1, 2, 300)),
        bytes(generator.randrange(256) for _ in piece) or bytes([generator.randrange(256)]),
        other[place : place + generator.choice((1, 16, 256))],
    )
    changed = content[:start] + generator.choice(options) + content[end:]
    return changed[: generator.randint(0, len(changed))] if generator.random() < 0.1 else changed


def _json(content: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return _bytes(content, generator, others)
    return _dumped(change(value, generator))


def _json_lines(content: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    lines = content.splitlines(keepends=True)
    if len(lines) < 2:
        return _json(content, generator, others)
    place = generator.randrange(len(lines))
    return b"".join([*lines[:place], _json(lines[place], generator, others) + b"\n", *lines[place + 1 :]])


def _card(content: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    _, head, body = [*content.split(b"---", 2), b"", b""][:3]
    try:
        value = change(yaml.safe_load(head), generator)
        head = b"\n" + yaml.safe_dump(value).encode(errors="surrogatepass")
    except (yaml.YAMLError, ValueError, LookupError, RecursionError, TypeError):
        return _bytes(content, generator, others)
    return b"---" + head + b"---" + body


def _header(content: bytes) -> dict[str, Any] | None:
    """The header of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 10 or length > len(content) - 8:
        return None
    try:
        found = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _safetensors(content: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    header = _header(content)
    if header is None:
        return _bytes(content, generator, others)
    if generator.random() < 0.6:
        return _repacked(content, header, generator)
    rest = content[8 + int.from_bytes(content[:8], "little") :]
    chance = generator.random()
    if chance < 0.2:
        rest = _bytes(rest, generator, others)
    text = _dumped(_metadata(header, generator) if chance > 0.8 else change(header, generator))
    length = generator.choice((len(text),) * 8 + (0, 2**60, 2**31, len(text) - 1))
    return max(length, 0).to_bytes(8, "little") + text + rest


_ALIKE = {2: ("F16", "BF16", "I16", "U16"), 4: ("F32", "I32", "U32"), 8: ("F64", "I64", "C64"), 1: ("F8_E4M3", "BOOL")}
"""Types by the bytes that a number takes."""


def _repacked(content: bytes, header: dict[str, Any], generator: random.Random) -> bytes:
    """A sound file in which one tensor is of another name, type, shape or content, or is not there."""
    start = 8 + int.from_bytes(content[:8], "little")
    try:
        tensors = {
            name: (entry["dtype"], list(entry["shape"]), content[start + entry["data_offsets"][0] :][: _length(entry)])
            for name, entry in header.items()
            if name != "__metadata__"
        }
        if not tensors:
            return content
        _change_tensor(tensors, generator.choice(list(tensors)), generator)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return content
    entries, data = {key: value for key, value in header.items() if key == "__metadata__"}, b""
    for name, (dtype, shape, own) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(own)]}
        data += own
    text = _dumped(entries)
    return len(text).to_bytes(8, "little") + text + data


def _length(entry: dict[str, Any]) -> int:
    first, last = entry["data_offsets"]
    return max(0, last - first)


def _change_tensor(tensors: dict[str, Any], name: str, generator: random.Random) -> None:
    dtype, shape, data = tensors[name]
    other = generator.choice(list(tensors))
    way = generator.randrange(7)
    if way == 0:
        tensors[name] = (dtype, shape[::-1], data)
    elif way == 1:
        flat = 1
        for extent in shape:
            flat *= extent
        tensors[name] = (dtype, generator.choice(([flat], [1, flat], [flat, 1], [1, 1, 1, flat])), data)
    elif way == 2:
        wide = len(data) // max(1, len(data) // 2)
        tensors[name] = (generator.choice(_ALIKE.get(wide, _ALIKE[2])), shape, data)
    elif way == 3:
        tensors[name] = (dtype, shape, generator.choice((b"\xff", b"\x00", b"\x7f")) * len(data))
    elif way == 4:
        del tensors[name]
    elif way == 5:
        tensors[generator.choice((other + ".x", other.replace(".0.", ".9."), "a" * 600, "..", other))] = tensors[name]
    else:
        tensors[name] = generator.choice((tensors[other], (dtype, [], data[:2]), (dtype, [0, *shape[1:]], b"")))


def _metadata(header: dict[str, Any], generator: random.Random) -> Any:
    """The header with a change of the JSON that its metadata hold as text."""
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or not metadata:
        return change(header, generator)
    key = generator.choice(list(metadata))
    spoilt_text = _json(str(metadata[key]).encode(errors="replace"), generator, ()).decode(errors="replace")
    return {**header, "__metadata__": {**metadata, key: spoilt_text}}


def change(value: Any, generator: random.Random) -> Any:
    """A copy of plain data with one value, key or entry changed somewhere."""
    if isinstance(value, dict) and value and generator.random() < 0.85:
        return _changed_mapping(value, generator)
    if isinstance(value, list) and value and generator.random() < 0.85:
        place = generator.randrange(len(value))
        inner = [change(value[place], generator)] if generator.random() < 0.8 else generator.choice(([], [value] * 2))
        return [*value[:place], *inner, *value[place + 1 :]]
    if type(value) in (int, float) and abs(value) < 2**1000 and generator.random() < 0.4:  # a float holds no more
        return generator.choice((value + 1, value - 1, -value, value * 2, value * 1000, float(value), str(value)))
    if isinstance(value, str) and generator.random() < 0.4:
        return generator.choice((value[: len(value) // 2], value + value, value.upper(), [value], f"../{value}"))
    return _odd(generator)


def _changed_mapping(value: dict[Any, Any], generator: random.Random) -> dict[Any, Any]:
    key = generator.choice(list(value))
    chance = generator.random()
    if chance < 0.7:
        return {**value, key: change(value[key], generator)}
    if chance < 0.8:
        return {name: inner for name, inner in value.items() if name != key}
    if chance < 0.9:
        other = generator.choice(list(value))
        return {**value, key: value[other]}
    new = generator.choice((f"{key}x", str(_odd(generator))[:50], f"{key}.0", key))
    return {(new if name == key else name): inner for name, inner in value.items()}


def _odd(generator: random.Random) -> Any:
    if generator.random() < 0.01:
        nested: Any = "deep"
        for _ in range(generator.choice((100, 900))):
            nested = [nested] if generator.random() < 0.5 else {"a": nested}
        return nested
    return generator.choice(ODD_VALUES)


def _dumped(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except (RecursionError, ValueError):
        return b"[" * 5000
