"""Errors, exit codes, signals.

A command as one of several processes: the first speaks for all, and all end when one has.

Knows launchers and signals; not the commands.

Where a command ends: errors as two lines and an exit code, the libraries' own chatter kept off the terminal.

Exit code 0 is success, 1 a job that failed, 2 a wrong command line, 130 a stop by Ctrl-C, 143 one by SIGTERM.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import click

from hf_bico.cli.console import is_plain
from hf_bico.errors import BicoError, ProcessLostError, UsageError
from hf_bico.runtime.distributed import has_joined, is_first_process, process_count, process_rank
from hf_bico.runtime.library_errors import as_bico_error, is_debugging, is_failure

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
        return process_rank() == 1 and has_joined()
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


FAILED, WRONG, STOPPED, TERMINATED = 1, 2, 130, 143


def _quiet_libraries() -> None:
    """Keep the libraries' own notices and bars off the terminal: what matters is said here."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import logging

    logging.getLogger().setLevel(logging.ERROR)


@dataclass
class Edge:
    """Where a command ends."""

    interrupted: str = "nothing was written"
    """What is true when the user stops it."""


_open: list[Edge] = []
"""The edges that are being run in; the first of them ends the process."""


@contextmanager
def edge() -> Iterator[Edge]:
    """Turn an error into two lines and an exit code: 2 for the command line itself, 1 for the rest.

    A command that runs another ends for both.
    """
    at, context = Edge(), click.get_current_context(silent=True)
    as_json = context is not None and bool(context.params.get("as_json"))
    _open.append(at)
    try:
        _quiet_libraries()
        yield at
    except BaseException as error:
        if len(_open) > 1 or not _is_end(error):
            raise
        _exit_after(error, at.interrupted, as_json)
    finally:
        _open.pop()


@contextmanager
def whole_process(as_json: bool) -> Iterator[None]:
    """The same for what happens outside of any command: a wrong command line, or a stop before it was read."""
    take_part(lambda: _say_stopped(EndedByLauncher(), "nothing was written", as_json))
    try:
        yield
    except click.ClickException as error:
        if speaks_for(error):
            error.show()
        if as_json:
            context = error.ctx if isinstance(error, click.UsageError) else None
            command = "hf-bico" if context is None else context.command_path
            _as_object(type(error).__name__, error.format_message(), f"see '{command} --help'")
        sys.exit(error.exit_code)
    except BaseException as error:
        if not _is_end(error):
            raise
        _exit_after(error, "nothing was done", as_json)


def _is_end(error: BaseException) -> bool:
    """Whether it is for us to say: a failure, or a wish to stop; an exit is neither."""
    return is_failure(error) or isinstance(error, KeyboardInterrupt | Ended | EndedByLauncher)


def _exit_after(error: BaseException, interrupted: str, as_json: bool) -> NoReturn:
    """Say what happened, and leave with its exit code; what click itself ends by is left to it."""
    error = told_to_end(error)
    if isinstance(error, KeyboardInterrupt | click.Abort | Ended | EndedByLauncher):
        _say_stopped(error, interrupted, as_json)
        sys.exit(_stop_code(error))
    closed = isinstance(error, OSError) and error.errno == errno.EPIPE  # by `head`: nobody reads any more
    if closed or isinstance(error, click.ClickException | click.exceptions.Exit) or is_debugging():
        raise error
    if not isinstance(error, BicoError):
        error = as_bico_error(error)
    if speaks_for(error):
        tell(error)
    if as_json:
        _as_object(type(error).__name__, error.cause, error.remedy)
    sys.exit(WRONG if isinstance(error, UsageError) else FAILED)


def _stop_code(error: BaseException) -> int:
    if isinstance(error, Ended):
        return 128 + error.number  # as shells have it
    return FAILED if isinstance(error, EndedByLauncher) else STOPPED


def _say_stopped(error: BaseException, interrupted: str, as_json: bool) -> None:
    """One line, of the process that speaks."""
    kind, why = "KeyboardInterrupt", f"interrupted: {interrupted}"
    if isinstance(error, EndedByLauncher):
        kind, why = "ProcessLostError", f"stopped: {LAUNCHER_ENDED}; {interrupted}"
    elif isinstance(error, Ended):
        kind, why = str(error), f"stopped by {error}: {interrupted}"
    if speaks_for(error):
        said = named(why)
        with suppress(OSError):  # the terminal may be gone
            click.echo(f"{said[0].upper()}{said[1:]}.", err=True)
    if as_json:
        _as_object(kind, why, "run the same command again")


def tell(error: BicoError) -> None:
    """Two lines on stderr."""
    colour = False if is_plain(sys.stderr) else None
    # what a stranger's file says is in it too: no control characters reach the terminal
    cause, remedy = _printable(named(error.cause)), _printable(error.remedy)
    click.echo(f"{click.style('Error:', fg='red', bold=True)} {cause}", err=True, color=colour)
    click.echo(f"{click.style('Remedy:', bold=True)} {remedy}", err=True, color=colour)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _as_object(kind: str, cause: str, remedy: str) -> None:
    with suppress(OSError):  # where nothing can be written, the exit code says it
        click.echo(json.dumps({"error": {"kind": kind, "cause": cause, "remedy": remedy}}))
