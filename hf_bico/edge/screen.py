"""What a stream can show: colours and tables on a terminal, plain text anywhere else. Knows no commands."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console


def is_screen(stream: TextIO | None) -> bool:
    """Whether it is a terminal that can move its cursor; a stream that was closed is none."""
    return stream is not None and stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def is_plain(stream: TextIO | None) -> bool:
    """Whether nothing may be coloured there; by NO_COLOR users ask for it everywhere."""
    return bool(os.environ.get("NO_COLOR")) or not is_screen(stream)


def console_of(stream: TextIO) -> Console:
    """That of a stream; it looks at NO_COLOR itself."""
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False)
