"""Time limits for what might never come back."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TookTooLongError(BaseException):
    """No Exception, so that nothing on the way takes it for one."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """A TookTooLongError after so many seconds."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TookTooLongError(f"more than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
