"""The delta format, `task_vector.safetensors`: changes of weights, factors as factors, and what is known about them.

Knows one file; not where its content comes from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_bico.checkpoints import FileCheckpoint, not_floats, open_safetensors, save_tensors
from hf_bico.deltas import Deltas, Lazy, factor_names
from hf_bico.errors import RecordError
from hf_bico.factors import Factors
from hf_bico.utils.files import parse_json

MADE_FROM = "made_from"
_FORMAT = "hf-bico task vector"
_SCHEMA = 1
_LOW_RANK = "low_rank"


def write_delta(vector: Deltas, about: Mapping[str, Any], file: Path) -> None:
    """Write the changes without loss, with `about` in the file's metadata."""
    tensors: dict[str, Tensor] = {}
    low_rank = []
    for name, change in vector.changes():
        if isinstance(change, Factors):
            low_rank.append(name)
            tensors |= dict(zip(factor_names(name), (change.left, change.right), strict=True))
        else:
            tensors[name] = change
    factors = {_LOW_RANK: low_rank} if low_rank else {}
    header = json.dumps({"format": _FORMAT, "schema": _SCHEMA, **about, **factors}, sort_keys=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    # one metadata entry: safetensors does not promise an order of several
    save_tensors(tensors, file, {"hf_bico": header})


def read_delta(file: Path) -> tuple[Lazy, dict[str, Any]]:
    """The changes, which are read when asked for, and what the file says about them."""
    with open_safetensors(file, "pt") as reader:
        about = _read_header((reader.metadata() or {}).get("hf_bico", "{}"), file.name)
    low_rank, checkpoint = about.pop(_LOW_RANK, []), FileCheckpoint([file])
    for name, dtype in not_floats(checkpoint).items():
        raise RecordError(
            f"'{name}' in '{file.name}' is kept as {dtype}: that is no change",
            "save it again with this tool",
        )
    for name in low_rank:
        left, right = (checkpoint.shapes.get(half, ()) for half in factor_names(name))
        if len(left) != 2 or len(right) != 2 or left[1] != right[0]:
            raise RecordError(f"'{file.name}' does not hold the factors of '{name}'", "save it again with this tool")
    return Lazy(checkpoint, low_rank), about


def _read_header(text: str, name: str) -> dict[str, Any]:
    """What the file says about itself."""
    try:
        header = parse_json(text)
    except ValueError:
        header = None
    known = isinstance(header, dict) and header.pop("format", None) == _FORMAT and header.pop("schema", None) == _SCHEMA
    repos, low_rank = (header.get(key, []) if known else [] for key in (MADE_FROM, _LOW_RANK))
    listed = isinstance(repos, list) and all(
        isinstance(repo, list) and len(repo) == 2 and all(isinstance(part, str) for part in repo) for repo in repos
    )
    named = isinstance(low_rank, list) and all(isinstance(name, str) for name in low_rank)
    if not known or not listed or not named:
        raise RecordError(f"'{name}' is not a task vector of schema {_SCHEMA}", "save it again with this tool")
    about: dict[str, Any] = header
    return about
