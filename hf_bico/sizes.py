"""Sizes in bytes, as people write and read them, and that of this machine."""

from __future__ import annotations

import re

from hf_bico.errors import UsageError

_UNITS = ("B", "kB", "MB", "GB", "TB")
_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", re.IGNORECASE)


def size_text(count: float) -> str:
    """A number of bytes in three digits.

    >>> size_text(1_234_567)
    '1.23 MB'
    """
    for unit in _UNITS:
        if count < 999.5 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def read_size(text: str, option: str) -> int:
    """What a text such as 500MB means.

    >>> read_size("1.5 GB", "--max-download")
    1500000000
    """
    found = _WRITTEN.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{option} is '{text}'", "use a size such as 500MB or 2GB")
    return int(float(found[1]) * 1000 ** " kmgt".index(found[2].lower() or " "))


def machine_memory() -> int:
    """Bytes of main memory."""
    import psutil

    return int(psutil.virtual_memory().total)
