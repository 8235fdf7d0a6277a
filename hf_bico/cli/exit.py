"""Ends a command: errors as two lines and an exit code, signals, and jobs of several processes.

Exit code 0 is success, 1 a job that failed, 2 a wrong command line, 3 a port that the samples held back, 130 a stop by
Ctrl-C, 143 one by SIGTERM. Knows launchers and signals, not the commands.
"""

from __future__ import annotations

import errno
import logging
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
from traceback import format_exception, walk_stack
from types import FrameType, TracebackType
from typing import Any, NoReturn

import click

from hf_bico.cli.console import echo, echo_json
from hf_bico.cli.options import typed_line
from hf_bico.errors import BicoError, ProcessLostError, UsageError
from hf_bico.runtime.distributed import has_joined, is_first_process, process_count, process_rank
from hf_bico.runtime.late_imports import postpone_imports
from hf_bico.runtime.library_errors import as_bico_error, is_debugging, is_failure
from hf_bico.runtime.limits import require_address_space
from hf_bico.utils.text import visible

FAILED, WRONG, HELD_BACK, STOPPED, TERMINATED = 1, 2, 3, 130, 143
LIGHT_COMMANDS = ("plan", "card", "push", "completion", "skill")
"""The commands that load no model."""
DISTRIBUTED_COMMANDS = ("port", "plan")
"""The commands that several processes can run together."""
LAUNCHER_ENDED = "another process of this job, or its launcher, has ended"
_REPORT_DELAY = 8.0
"""Seconds that the other processes wait before they report: if the first has failed alike, the launcher ends them."""
_GRACE = 4.0
"""Seconds from a signal to the end of a process that waits inside of torch, where no exception reaches it."""
_RESEND_DELAY = 0.01
"""Seconds until a lost signal is sent again."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HANGUP = getattr(signal, "SIGHUP", signal.SIGTERM)  # Windows has none


class TerminatedBySignal(BaseException):
    """A single process has received SIGTERM or SIGHUP."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


class TerminatedByLauncher(BaseException):
    """SIGTERM from a launcher: another process has ended, or the launcher itself was stopped."""


# errors


@dataclass
class Ending:
    """Describes the state that an interruption of the running command leaves behind."""

    interrupted: str = "nothing was written"


_running: list[Ending] = []
"""The commands that are running, one inside of another; the first of them ends the process."""


@contextmanager
def exit_on_error() -> Iterator[Ending]:
    """Turn an error into two lines and an exit code: 2 for the command line itself, 1 for the rest.

    A command that runs another one handles the errors of both.
    """
    ending, context = Ending(), click.get_current_context(silent=True)
    as_json = context is not None and bool(context.params.get("as_json"))
    _running.append(ending)
    try:
        with _quiet_libraries():
            if context is not None and context.info_name not in LIGHT_COMMANDS and len(_running) == 1:
                require_address_space()
                postpone_imports()
            yield ending
    except BaseException as error:
        if len(_running) > 1 or not _is_handled(error):
            raise
        _exit_after(error, ending.interrupted, as_json)
    finally:
        _running.pop()


@contextmanager
def exit_process_on_error(as_json: bool) -> Iterator[None]:
    """Do the same outside of any command: for a wrong command line, or a stop before it was parsed."""
    install_signal_handlers(lambda: _report_stop(TerminatedByLauncher(), "nothing was written", as_json))
    try:
        yield
    except click.ClickException as error:
        if _reports(error):
            _print_usage_error(error)
        if as_json:
            context = error.ctx if isinstance(error, click.UsageError) else None
            command = "hf-bico" if context is None else context.command_path
            _print_json_error(type(error).__name__, error.format_message(), f"see '{command} --help'")
        sys.exit(error.exit_code)
    except BaseException as error:
        if not _is_handled(error):
            raise
        _exit_after(error, "nothing was done", as_json)


def print_error(error: BicoError) -> None:
    """Print cause and remedy on stderr."""
    echo(_with_process_number(error.cause), err=True, head="Error:", fg="red", bold=True)
    echo(error.remedy, err=True, head="Remedy:", bold=True)
    context = click.get_current_context(silent=True)
    if error.add and context is not None:
        echo(f"{typed_line(str(context.info_name), leave_out=('token', 'base'))} {error.add}", err=True, head="Next:")


def _print_usage_error(error: click.ClickException) -> None:
    """Print what click would, but through our own echo: it quotes arguments, which may be names of foreign files."""
    if type(error).__name__ == "NoArgsIsHelpError":  # whose message is the help; not in click 8.1
        echo(*error.format_message().split("\n"), err=True)
        return
    if isinstance(error, click.UsageError) and error.ctx is not None:
        hint = f"Try '{error.ctx.command_path} --help' for help."
        echo(*error.ctx.get_usage().split("\n"), hint, "", err=True)
    echo(f"Error: {error.format_message()}", err=True)


class _VisibleRecord(logging.LogRecord):
    """A line of a library's log in which a stranger's text does not act on the terminal."""

    def getMessage(self) -> str:
        if self.exc_info and not self.exc_text:
            self.exc_text = "\n".join(map(visible, logging.Formatter().formatException(self.exc_info).split("\n")))
        return visible(super().getMessage())


def _format_warning(message: object, category: type[Warning], filename: str, lineno: int, line: object = None) -> str:
    return f"{visible(f'{filename}:{lineno}: {category.__name__}: {message}')}\n"


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    echo(*"".join(format_exception(kind, error, trace)).rstrip("\n").split("\n"), err=True)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keep libraries from printing but for errors and warnings, and those from acting on the terminal."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger().setLevel(logging.ERROR)
    before = logging.getLogRecordFactory(), warnings.formatwarning
    logging.setLogRecordFactory(_VisibleRecord)
    warnings.formatwarning = _format_warning
    try:
        yield
    finally:
        logging.setLogRecordFactory(before[0])
        warnings.formatwarning = before[1]


def _is_handled(error: BaseException) -> bool:
    """Return True for failures and stops; an exit is neither."""
    return is_failure(error) or isinstance(error, KeyboardInterrupt | TerminatedBySignal | TerminatedByLauncher)


def _exit_after(error: BaseException, interrupted: str, as_json: bool) -> NoReturn:
    """Report the error and exit with its code; click's own errors are raised again."""
    # a library's C code may turn the exception of a signal into another one
    error = _received[0] if _received else error
    if isinstance(error, KeyboardInterrupt | click.Abort | TerminatedBySignal | TerminatedByLauncher):
        sys.exit(_report_stop(error, interrupted, as_json))
    closed = isinstance(error, OSError) and error.errno == errno.EPIPE  # by `head`: nobody reads any more
    if closed or isinstance(error, click.ClickException | click.exceptions.Exit):
        raise error
    if is_debugging():
        sys.excepthook = _print_traceback
        raise error
    error = as_bico_error(error)
    if _reports(error):
        print_error(error)
    if as_json:
        _print_json_error(type(error).__name__, error.cause, error.remedy)
    sys.exit(WRONG if isinstance(error, UsageError) else FAILED)


def _report_stop(error: BaseException, interrupted: str, as_json: bool) -> int:
    """Report why the command stops, and return its exit code."""
    kind, reason, code = "KeyboardInterrupt", f"interrupted: {interrupted}", STOPPED
    if isinstance(error, TerminatedByLauncher):
        kind, reason, code = "ProcessLostError", f"stopped: {LAUNCHER_ENDED}; {interrupted}", FAILED
    elif isinstance(error, TerminatedBySignal):
        kind, reason, code = str(error), f"stopped by {error}: {interrupted}", 128 + error.number  # as shells have it
    if _reports(error):
        text = _with_process_number(reason)
        with suppress(OSError):  # the terminal may be gone
            echo(f"{text[0].upper()}{text[1:]}.", err=True)
    if as_json:
        _print_json_error(kind, reason, "run the same command again")
    return code


def _print_json_error(kind: str, cause: str, remedy: str) -> None:
    with suppress(OSError):  # where nothing can be written, the exit code says it
        echo_json({"error": {"kind": kind, "cause": cause, "remedy": remedy}})


# several processes


def require_single_process(command: str) -> None:
    """Refuse a command that each of several processes would run as a whole."""
    if process_count() > 1 and command not in DISTRIBUTED_COMMANDS:
        raise UsageError(
            f"'{command}' runs in one process, and {process_count()} were started",
            "start it without torchrun or accelerate launch",
        )


def require_no_device_number(device: str) -> None:
    """Refuse a device with a number if there are several processes: all would use it."""
    if process_count() > 1 and ":" in device:
        raise UsageError(
            f"--device {device} is one device, and {process_count()} processes were started",
            "leave --device out: each process takes a GPU of its own",
        )


def finish_alone() -> None:
    """Stop the forced exit after a signal: from here on this process waits for no other and may finish its work."""
    if process_count() > 1:
        signal.set_wakeup_fd(-1)


def _reports(error: BaseException) -> bool:
    """Return True if this process reports the error: the first one, and another if the first does not fail alike.

    The others wait, so that the launcher can end them if the first has failed alike. A lost process is reported by the
    second one too once they work together: the first may be the one that is lost.
    """
    if is_first_process():
        _set_handlers(signal.SIG_IGN)  # it is ending already
        return True
    if isinstance(error, ProcessLostError | TerminatedByLauncher):
        return process_rank() == 1 and has_joined()
    _set_handlers(signal.SIG_DFL)
    time.sleep(_REPORT_DELAY)
    return not isinstance(error, KeyboardInterrupt | click.Abort | click.ClickException)


def _with_process_number(cause: str) -> str:
    return cause if is_first_process() else f"process {process_rank() + 1} of {process_count()}: {cause}"


# signals

_received: list[BaseException] = []
"""The exceptions that signals have raised in this single process since its command began."""
_previous_hooks: list[Callable[[Any], object]] = []


def install_signal_handlers(before_exit: Callable[[], object]) -> None:
    """Raise exceptions at signals, so that nothing is left half done; as one of several processes, print only errors.

    `before_exit` is called by one of several processes that waits inside of torch, before it is forced to exit.
    """
    if process_count() == 1:
        _install_single_process_handlers()
        return
    if not is_first_process():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # of stdout
        warnings.simplefilter("ignore")
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.detach())
    _set_handlers(_raise_in_job)
    threading.Thread(target=_force_exit, args=(receiver, before_exit), daemon=True).start()


def _install_single_process_handlers() -> None:
    """Keep signals ignored that the caller has set to be ignored (nohup)."""
    _received.clear()
    if threading.current_thread() is not threading.main_thread():  # no other may
        return
    for number in (*_STOP_SIGNALS, _HANGUP):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _raise_alone)
    if sys.unraisablehook is not _resend_lost_signal:
        _previous_hooks.append(sys.unraisablehook)
        sys.unraisablehook = _resend_lost_signal


def _raise_alone(number: int, frame: FrameType | None) -> None:
    error = KeyboardInterrupt() if number == signal.SIGINT else TerminatedBySignal(number)
    _received.append(error)
    if number != signal.SIGINT:  # who presses Ctrl-C twice means it
        signal.signal(number, signal.SIG_IGN)
    raise error


def _resend_lost_signal(lost: Any) -> None:
    """Send a signal again that came where Python can raise nothing, such as in a finalizer."""
    if lost.exc_value not in _received:
        _previous_hooks[-1](lost)
        return
    number = lost.exc_value.number if isinstance(lost.exc_value, TerminatedBySignal) else signal.SIGINT
    signal.signal(number, _raise_alone)
    threading.Timer(_RESEND_DELAY, _send_again, (number,)).start()


def _send_again(number: int) -> None:
    """Send a signal to the main thread once it has left the hook, where the signal would be lost once more."""
    main, hook = threading.main_thread().ident or 0, _resend_lost_signal.__code__
    while any(frame.f_code is hook for frame, _ in walk_stack(sys._current_frames()[main])):
        time.sleep(_RESEND_DELAY)
    os.kill(os.getpid(), number)


def _raise_in_job(number: int, frame: FrameType | None) -> None:
    _set_handlers(signal.SIG_IGN)  # a launcher repeats its signal, and the unwinding must not be stopped
    raise KeyboardInterrupt if number == signal.SIGINT else TerminatedByLauncher


def _set_handlers(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    if process_count() > 1 and threading.current_thread() is threading.main_thread():  # no other may
        for number in _STOP_SIGNALS:
            signal.signal(number, handler)


def _force_exit(receiver: socket.socket, before_exit: Callable[[], object]) -> None:
    """Exit some seconds after a signal: torch lets no exception through while it waits for other processes."""
    while receiver.recv(1)[0] not in _STOP_SIGNALS:
        pass
    time.sleep(_GRACE)
    before_exit()
    os._exit(1)
