"""Run code on data that strangers wrote, in a child process with a limit on time and memory. Knows no task."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import suppress
from queue import Empty, Queue
from typing import Any, Self

from hf_bico.errors import DeviceError

START_SECONDS = 120.0
MEMORY = 2**30
"""Bytes that an answer may take."""

_LOOP = """
import json, sys
try:
    import resource
    with open("/proc/self/statm") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.RLIM_INFINITY))
except (ImportError, OSError, ValueError):
    pass  # where there are no such limits, time is the limit
print("ready", flush=True)
for line in sys.stdin:
    try:
        text = json.dumps(["answer", answer(json.loads(line))])
    except Exception as error:
        text = json.dumps(["error", " ".join(f"{type(error).__name__}: {error}".split())[:300]])
    print(text, flush=True)
"""


class Sandbox:
    """A Python process that answers questions by the function `answer` of its `code`; it is killed when it is late."""

    def __init__(self, code: str, *options: str) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, *options, "-c", f"MEMORY = {MEMORY}\n{code}\n{_LOOP}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._lines: Queue[bytes] = Queue()
            self._listener = threading.Thread(target=self._listen, daemon=True)
            self._listener.start()
            self.alive = True
            self._next_line(START_SECONDS)
        except (OSError, EOFError) as error:
            raise DeviceError(
                f"no second Python can be started, which reads what strangers wrote: {error or 'it ends at once'}",
                "close other programs, or raise the limits on processes, open files and memory",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, question: Any, seconds: float) -> Any:
        """Return the answer to a JSON value, or raise a ValueError with the reason.

        A TimeoutError, EOFError or other OSError says that the process was late, died now, or had died before.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question, default=str).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self.end()
            raise
        kind, value = json.loads(self._next_line(seconds))
        if kind == "error":
            raise ValueError(value)
        return value

    def end(self) -> None:
        self.alive = False
        self._process.kill()
        self._listener.join()
        with suppress(OSError):  # a question that nobody read
            self._process.communicate()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def _next_line(self, seconds: float) -> bytes:
        try:
            line = self._lines.get(timeout=seconds)
        except Empty:
            self.end()
            raise TimeoutError(f"it does not answer within {seconds:g} seconds") from None
        except BaseException:  # an interrupt: this answer would be taken for the next one's
            self.end()
            raise
        if not line:
            self.end()
            raise EOFError
        return line
