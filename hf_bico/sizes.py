"""Sizes in bytes, as people write and read them, and that of this machine."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB")


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


def machine_memory() -> int:
    """Bytes of main memory."""
    import psutil

    return int(psutil.virtual_memory().total)
