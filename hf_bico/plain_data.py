"""Data classes as plain JSON, without their empty fields, and back: every field is held to its type.

Knows types; not what the data are about.
"""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

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
