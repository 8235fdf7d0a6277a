"""How far a job is: told to whoever wants to show it. Knows nothing of the jobs."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (stage, steps done, steps in all)."""


def silent(stage: str, done: int, total: int) -> None:
    """No progress shown."""
