"""A command as one of several processes: the first speaks for all, and all end when one has.

Knows launchers and signals; not the commands.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import click

from hf_bico.errors import ProcessLostError, UsageError
from hf_bico.runtime.distributed import has_met_others, is_first_process, process_count, process_rank

TOGETHER = ("port", "plan")
"""The commands that several processes can run together."""
_A_MOMENT = 8.0
"""Seconds: what the first process says too need not be said again, and the launcher ends the others when it has."""
_GRACE = 4.0
"""Seconds from a signal to the end of a process that waits inside of torch, where no exception reaches it."""
LAUNCHER_ENDED = "another process of this job, or its launcher, has ended"
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_HANGING_UP = getattr(signal, "SIGHUP", signal.SIGTERM)  # Windows has none
_SOON = 0.01
"""Seconds, after which a signal that was lost is sent once more."""


class Ended(BaseException):
    """A process alone is told to end: `kill`, a machine that goes down, a terminal that is closed."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


_received: list[BaseException] = []
"""What signals have told this process, alone, since its command began."""
_others_hook: list[Callable[[Any], object]] = []


class EndedByLauncher(BaseException):
    """SIGTERM: what a launcher sends to the other processes when one has ended, or when it is stopped itself."""


def require_together(command: str) -> None:
    """Refuse a command that every one of several processes would run from its beginning to its end."""
    if process_count() > 1 and command not in TOGETHER:
        raise UsageError(
            f"'{command}' runs in one process, and {process_count()} were started",
            "start it without torchrun or accelerate launch",
        )


def require_device_for_each(device: str) -> None:
    """Refuse a device with a number, on which all processes would meet."""
    if process_count() > 1 and ":" in device:
        raise UsageError(
            f"--device {device} is one device, and {process_count()} processes were started",
            "leave --device out: each process takes a GPU of its own",
        )


def take_part(last_words: Callable[[], None]) -> None:
    """Behave as one of several processes, from here on; alone, only unwind before ending where that is asked for.

    The last words are those of a process that waits for others inside of torch, and is told to end.
    """
    if process_count() == 1:
        _unwind_when_told()
        return
    if not is_first_process():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # of stdout
        warnings.simplefilter("ignore")
    told, tell = socket.socketpair()
    tell.setblocking(False)
    signal.set_wakeup_fd(tell.detach())
    _at_signals(_stop)
    threading.Thread(target=_end_for_certain, args=(told, last_words), daemon=True).start()


def go_on_alone() -> None:
    """From here on this process waits for no other: told to end, it takes the time to leave nothing half done."""
    if process_count() > 1:
        signal.set_wakeup_fd(-1)


def speaks_for(error: BaseException) -> bool:
    """Whether this process says why it ends: the first, and any other for what the first does not say too.

    The others wait a moment, in which the launcher ends them if the first has failed alike. That a process is lost is
    said by the second too, once they work together: the first may be the one.
    """
    if is_first_process():
        _at_signals(signal.SIG_IGN)  # it is ending already
        return True
    if isinstance(error, ProcessLostError | EndedByLauncher):
        return process_rank() == 1 and has_met_others()
    _at_signals(signal.SIG_DFL)
    time.sleep(_A_MOMENT)
    return not isinstance(error, KeyboardInterrupt | click.Abort | click.ClickException)


def named(cause: str) -> str:
    """A cause with the process that it is of, unless that is the first."""
    return cause if is_first_process() else f"process {process_rank() + 1} of {process_count()}: {cause}"


def _unwind_when_told() -> None:
    """Leave nothing half done when told to end; what the caller has set to be ignored (nohup) stays so."""
    _received.clear()
    if threading.current_thread() is not threading.main_thread():  # no other may
        return
    for number in (signal.SIGINT, signal.SIGTERM, _HANGING_UP):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _exit_at_signal)
    if sys.unraisablehook is not _not_lost:
        _others_hook.append(sys.unraisablehook)
        sys.unraisablehook = _not_lost


def _not_lost(lost: Any) -> None:
    """Send a signal once more that came where Python can raise nothing, as in a finalizer, and would be forgotten."""
    if lost.exc_value not in _received:
        _others_hook[-1](lost)
        return
    number = lost.exc_value.number if isinstance(lost.exc_value, Ended) else signal.SIGINT
    signal.signal(number, _exit_at_signal)
    threading.Timer(_SOON, os.kill, (os.getpid(), number)).start()


def _exit_at_signal(number: int, frame: FrameType | None) -> None:
    told = KeyboardInterrupt() if number == signal.SIGINT else Ended(number)
    _received.append(told)
    if number != signal.SIGINT:  # who presses Ctrl-C twice means it
        signal.signal(number, signal.SIG_IGN)
    raise told


def told_to_end(error: BaseException) -> BaseException:
    """Why a process that ends with this error does so: a library's C code may make another error of a signal's."""
    return _received[0] if _received else error


def _stop(number: int, frame: FrameType | None) -> None:
    _at_signals(signal.SIG_IGN)  # a launcher repeats itself, and what is unwound now must not be stopped
    raise KeyboardInterrupt if number == signal.SIGINT else EndedByLauncher


def _at_signals(do: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    if process_count() > 1 and threading.current_thread() is threading.main_thread():  # no other may
        for number in _STOPPING:
            signal.signal(number, do)


def _end_for_certain(told: socket.socket, last_words: Callable[[], None]) -> None:
    """End a process that has been told to and cannot: torch lets no signal through while it waits for others."""
    while told.recv(1)[0] not in _STOPPING:
        pass
    time.sleep(_GRACE)
    last_words()
    os._exit(1)
