"""Let threads share what belongs to the whole process: they take turns, or change it together. Knows no library.

Whoever needs both turns takes the one of jobs first, and waits for no other thread inside of the one of libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from threading import Lock, RLock

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

    Such as the warnings' filters, or how torch initialises weights: of two such parts that overlap, the last to end
    would put back what the other had set. May be nested.
    """
    with _LIBRARIES:
        yield


def changed_together(
    change: Callable[[], AbstractContextManager[None]],
) -> Callable[[], AbstractContextManager[None]]:
    """Let a change of the process hold while any thread is inside: the first makes it, and the last undoes it."""
    lock, inside, made = Lock(), 0, list[AbstractContextManager[None]]()

    @wraps(change)
    @contextmanager
    def shared() -> Iterator[None]:
        nonlocal inside
        with lock:
            if not inside:
                made[:] = [change()]
                made[0].__enter__()
            inside += 1
        try:
            yield
        finally:
            with lock:
                inside -= 1
                if not inside:
                    made[0].__exit__(None, None, None)

    return shared
