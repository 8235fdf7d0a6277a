"""Write the model card of a record, and the pictures and results beside it."""

from __future__ import annotations

from pathlib import Path

from hf_bico.reports.model_cards.change_card import change_card
from hf_bico.reports.model_cards.eval_results import eval_results
from hf_bico.reports.model_cards.port_card import port_card
from hf_bico.reports.outcome_picture import OUTCOME_FILE, outcome_picture
from hf_bico.reports.pictures import ALIGNMENT_FILE, record_picture
from hf_bico.reports.record import ChangeRecord, Record

CARD_FILE = "README.md"
PICTURES = {OUTCOME_FILE: outcome_picture, ALIGNMENT_FILE: record_picture}
"""The pictures of a port's card by file name."""


def write_card(record: Record | ChangeRecord, folder: Path) -> Path:
    """Write the card, and a port's pictures and benchmark results if there are any; return the card's path."""
    pictures = {name: draw(record) for name, draw in PICTURES.items()} if isinstance(record, Record) else {}
    for name, picture in pictures.items():
        if picture is not None:
            (folder / name).write_bytes(picture)
    results = eval_results(port_card(record)) if isinstance(record, Record) else {}
    for name, text in results.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    file = folder / CARD_FILE
    file.write_text(render_card(record), encoding="utf-8", newline="\n")
    return file


def render_card(record: Record | ChangeRecord) -> str:
    """Return the whole card: metadata, then the body."""
    return port_card(record).render() if isinstance(record, Record) else change_card(record).render()
