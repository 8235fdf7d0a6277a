"""The paper's recipe, for tests that are about something else than which method and alpha are chosen."""

from __future__ import annotations

from typing import Any

PAPER: dict[str, Any] = {"method": "bico", "alpha": 1.0}
"""As options of Python: no scale, no veto, nothing is held back."""
PAPER_WORDS = ("--method", "bico", "--alpha", "1")
"""As words of a command line."""
