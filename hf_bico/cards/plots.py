"""The record to the picture of its alignment that stands on its card."""

from __future__ import annotations

from hf_bico.heat_strips import alignment_picture, panels
from hf_bico.record import Record

PICTURE_FILE = "alignment.png"


def has_alignment(record: Record) -> bool:
    """Whether calibration left anything to draw: a method without statistics does not."""
    return bool(record_panels(record))


def record_panels(record: Record) -> dict[str, str]:
    """The values that are drawn, with their titles."""
    return panels(record.sites, len(record.method.layers))


def record_picture(record: Record) -> bytes | None:
    """PNG: the heat strips of the record's sites; the same record gives the same bytes."""
    return alignment_picture(record.sites, len(record.method.layers))
