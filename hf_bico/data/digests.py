"""Hash samples by what is stored of them, so that the same sample is known again wherever it lies.

Knows rows and columns; no model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_bico.data.columns import undecoded
from hf_bico.data.dataset import Samples
from hf_bico.data.loading import file_within


def content_digest(samples: Samples) -> str:
    """Hash the stored values of all samples together."""
    return hashlib.blake2b(b"".join(digests(samples)), digest_size=8).hexdigest()


def digests(samples: Samples, image_alone: bool = False) -> Iterator[bytes]:
    """Hash each sample's stored values; with `image_alone`, a caption does not count."""
    rows, image = samples.rows, samples.columns.image
    names = [image] if image_alone and image is not None else list(samples.columns.parts.values())
    if image is not None:
        rows = undecoded(rows, image)
    elif hasattr(rows, "select_columns"):
        rows = rows.select_columns(names)
    for index in samples.indices:
        row = rows[index]
        values = (_bytes_of(row[name], samples) for name in names)
        yield hashlib.blake2b(b"".join(values), digest_size=16).digest()


def _bytes_of(value: Any, samples: Samples) -> bytes:
    """Return a value as bytes; of a data set from the Hub, no file outside of its own folder is opened."""
    if isinstance(value, dict) and {"bytes", "path"} <= value.keys():
        if value["bytes"] is not None:
            return bytes(value["bytes"])
        file = Path(str(value["path"]))
        own = file_within(file, samples.folder) if samples.folder is not None else file
        return own.read_bytes() if own is not None and own.is_file() else str(file).encode()
    if hasattr(value, "tobytes"):  # PIL's images and numpy's arrays
        return f"{getattr(value, 'mode', '')} {getattr(value, 'size', '')} ".encode() + bytes(value.tobytes())
    if hasattr(value, "numpy"):
        return bytes(value.detach().cpu().contiguous().numpy().tobytes())
    return repr(value).encode()
