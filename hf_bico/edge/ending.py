"""Where a command ends: errors as two lines and an exit code, the libraries' own chatter kept off the terminal.

Exit code 0 is success, 1 a job that failed, 2 a wrong command line, 130 a stop by Ctrl-C, 143 one by SIGTERM.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

import click

from hf_bico.edge.screen import is_plain
from hf_bico.edge.several import LAUNCHER_ENDED, Ended, EndedByLauncher, named, speaks_for, take_part, told_to_end
from hf_bico.errors import BicoError, UsageError
from hf_bico.runtime.library_errors import as_ours, is_debugging, is_failure

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
        error = as_ours(error)
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
