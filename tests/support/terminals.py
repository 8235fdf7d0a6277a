"""A command in a real terminal of some width: all that it wrote there, and what is left on the screen at the end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Sequence
from dataclasses import dataclass

from support import forks

_PIECES = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")
_COLOURS = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7])(?:;\d+)*m")


@dataclass(frozen=True)
class Seen:
    """What came of a command."""

    code: int
    written: str
    """All that went to the terminal, with its escapes."""
    piped: str
    """What went to stdout, where that was a pipe."""

    @property
    def screen(self) -> list[str]:
        """The lines that are left."""
        return _screen(self.written)

    @property
    def text(self) -> str:
        """Everything that was ever shown, without escapes."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.written)

    @property
    def coloured(self) -> bool:
        return _COLOURS.search(self.written) is not None


def run_in_terminal(arguments: Sequence[str], columns: int, pipe_stdout: bool = False, **environment: str) -> Seen:
    """`hf-bico` with these arguments; with `pipe_stdout`, only stderr and stdin are the terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    process = forks.start(
        *arguments,
        stdin=theirs,
        stdout=None if pipe_stdout else theirs,
        stderr=theirs,
        env={**kept, "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    written = _read_all(ours)
    piped, _ = process.communicate()
    return Seen(process.wait(), written.replace("\r\n", "\n"), piped)


def _read_all(descriptor: int) -> str:
    parts = []
    while True:
        try:
            part = os.read(descriptor, 65536)
        except OSError:  # what Linux says when the other side is closed
            part = b""
        if not part:
            os.close(descriptor)
            return b"".join(parts).decode()
        parts.append(part)


def _screen(written: str) -> list[str]:
    """What a terminal makes of text, of cursor movements and of erased lines."""
    lines, row, column = [""], 0, 0
    for piece in _PIECES.finditer(written):
        text, (number, letter) = piece[0], piece.groups()
        if text == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif text == "\r":
            column = 0
        elif letter == "A":
            row = max(0, row - int(number or 1))
        elif letter == "K":
            lines[row] = "" if number == "2" else lines[row][:column]
        elif letter is None:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + text + line[column + len(text) :]
            column += len(text)
    return [line.rstrip() for line in lines]
