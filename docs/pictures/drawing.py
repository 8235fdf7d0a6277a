"""Writes a drawn picture as a file: SVG, or PNG to look at; the same drawing gives the same bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

STYLE: dict[str, Any] = {
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",  # it comes with matplotlib: the same on every machine
}


def picture_bytes(draw: Callable[[], Figure], style: Mapping[str, Any], format: str = "svg") -> bytes:
    stream = BytesIO()
    with matplotlib.rc_context({**STYLE, **style}):
        figure = draw()
        FigureCanvasAgg(figure)
        metadata = {"Date": None, "Creator": None} if format == "svg" else {"Software": None}
        figure.savefig(stream, format=format, dpi=144, facecolor="white", metadata=metadata)
    return stream.getvalue()


def write_picture(as_bytes: Callable[[str], bytes], usual: Path) -> None:
    """Write a picture to the file that the command line names, or to its usual place."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else usual
    file.write_bytes(as_bytes(file.suffix.removeprefix(".")))
