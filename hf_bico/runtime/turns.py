"""Let threads take turns at what a whole process shares. Knows neither jobs nor libraries.

Whoever needs both turns takes the one of jobs first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

_JOBS, _LIBRARIES = RLock(), RLock()


@contextmanager
def job_turn() -> Iterator[None]:
    """Wait until no other thread's job runs: torch's settings and the weights of loaded models are shared.

    May be nested.
    """
    with _JOBS:
        yield


@contextmanager
def library_turn() -> Iterator[None]:
    """Wait until no other thread is in a part of a library that changes something for the process meanwhile.

    Such as its log's level, the warnings' filters, or how torch initialises weights: of two such parts that overlap,
    the last to end would put back what the other had set. May be nested.
    """
    with _LIBRARIES:
        yield
