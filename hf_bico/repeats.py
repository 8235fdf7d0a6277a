"""Samples that are there more than once: among those of calibration, and in what is measured on.

Compares rows as they are stored, byte by byte; knows neither models nor what is measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_bico.data.calibration import Drawn
from hf_bico.data.columns import undecoded
from hf_bico.data.dataset import Samples

MOST_COPIES = 0.5
"""Above this share of calibration samples that are copies of others, so many are not what was asked for."""
MOST_LEAKED = 0.05
"""Above this share of held-out samples that were calibrated on, what is measured is worth a word: below, it cannot
move an accuracy by more than so many points."""


def repeat_notices(drawn: Drawn, held_out: Samples | None) -> list[str]:
    """What to know about samples that are copies; `held_out` are those that were measured on."""
    own = list(_digests(drawn.samples))
    known, notices = set(own), []
    if len(own) - len(known) > MOST_COPIES * len(own):
        notices.append(f"Of the {len(own)} calibration samples only {len(known)} are different.")
    if held_out is not None:
        leaked = sum(digest in known for digest in _digests(held_out))
        if leaked > MOST_LEAKED * len(held_out):
            notices.append(f"Of the {len(held_out)} samples that were measured on, {leaked} were calibrated on.")
    return notices


def _digests(samples: Samples) -> Iterator[bytes]:
    """What tells each sample from others, by what it is made of."""
    rows, image = samples.rows, samples.columns.image
    if image is not None and hasattr(rows, "cast_column"):
        rows = undecoded(rows, image)
    elif image is None and hasattr(rows, "select_columns"):
        rows = rows.select_columns(list(samples.columns.parts.values()))
    for index in samples.indices:
        row = rows[index]
        found = hashlib.blake2b(digest_size=16)
        for name in samples.columns.parts.values():
            found.update(_bytes_of(row[name], trusted=samples.decode is None))
        yield found.digest()


def _bytes_of(value: Any, trusted: bool) -> bytes:
    """A value as bytes; a file only of one's own data set: what a stranger's points at is not opened for this."""
    if isinstance(value, dict) and {"bytes", "path"} <= value.keys():
        if value["bytes"] is not None:
            return bytes(value["bytes"])
        file = Path(value["path"])
        return file.read_bytes() if trusted and file.is_file() else str(file).encode()
    if hasattr(value, "tobytes"):  # PIL's images and numpy's arrays
        return f"{getattr(value, 'mode', '')} {getattr(value, 'size', '')} ".encode() + bytes(value.tobytes())
    if hasattr(value, "numpy"):
        return bytes(value.detach().cpu().contiguous().numpy().tobytes())
    return repr(value).encode()
