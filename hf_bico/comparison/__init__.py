"""Methods side by side: the measured numbers as data, the log that they are kept in, and how they are written.

Knows neither models nor how a number is measured.
"""

from __future__ import annotations

from hf_bico.comparison.cells import LABELS, LOSS, REFERENCES, Cell, CellKey, Refusal
from hf_bico.comparison.log import CellLog
from hf_bico.comparison.results import Comparison
from hf_bico.comparison.rows import Row, Spread
from hf_bico.comparison.tables import live_table

__all__ = [
    "LABELS",
    "LOSS",
    "REFERENCES",
    "Cell",
    "CellKey",
    "CellLog",
    "Comparison",
    "Refusal",
    "Row",
    "Spread",
    "live_table",
]
