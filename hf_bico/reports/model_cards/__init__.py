"""Write_card, render_card.

The record to the model card and the picture beside it, whatever job wrote the record.

Model cards: from the record alone to text and picture.
"""

from __future__ import annotations

from pathlib import Path

from hf_bico.reports.model_cards.change_card import render_made_card
from hf_bico.reports.model_cards.port_card import render_port_card
from hf_bico.reports.pictures import PICTURE_FILE, record_picture
from hf_bico.reports.record import ChangeRecord, Record

CARD_FILE = "README.md"


def write_card(record: Record | ChangeRecord, folder: Path) -> Path:
    """Write the card, and the picture of the alignment where there is one to draw; returns the card's path."""
    picture = record_picture(record) if isinstance(record, Record) else None
    if picture is not None:
        (folder / PICTURE_FILE).write_bytes(picture)
    file = folder / CARD_FILE
    file.write_text(render_card(record), encoding="utf-8", newline="\n")
    return file


def render_card(record: Record | ChangeRecord) -> str:
    """The whole card: metadata, then the body."""
    return render_port_card(record) if isinstance(record, Record) else render_made_card(record)
