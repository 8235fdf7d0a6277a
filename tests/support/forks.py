"""Commands in processes of their own, without seconds of imports for each: forks of one warm process.

`run` and `start` stand for `subprocess.run` and `Popen`, of `hf-bico` or of Python code. The first call starts a
process that imports everything once; each command is a fork of it, with a directory, an environment and files of its
own. What a start imports, and how long it takes, cannot be seen here: that needs `subprocess`.

As a script it is the warm process, and serves a Unix socket until its standard input ends.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

WARM = ("datasets", "evaluate", "matplotlib.figure", "open_clip", "peft", "sklearn.linear_model", "transformers")
OURS = ("cli", "commands", "demo", "drawing", "edge.bars", "edge.console", "evaluation", "pipeline", "pushing")
READ_ENVIRONMENT_ONCE = ("huggingface_hub.constants", "datasets.config", "evaluate.config")
_TOUCHING = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "shutil.rmtree", "open")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_NUMBER = struct.Struct("q")


class Running:
    """A command that was started; `stdout` and `stderr` are what it writes, where nothing else was given for them."""

    def __init__(self, connection: socket.socket, stdout: IO[str] | None, stderr: IO[str] | None) -> None:
        self._connection = connection
        self.stdout, self.stderr = stdout, stderr
        self.pid: int = _NUMBER.unpack(connection.recv(_NUMBER.size, socket.MSG_WAITALL))[0]
        self.returncode: int | None = None
        self.seconds, self.events = 0.0, 0
        """How long it ran, and how often it touched files of its directory, where that was counted."""

    def send_signal(self, number: int) -> None:
        """Send it a signal; nothing is done where it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Its exit code, below zero for a signal; None while it runs."""
        ended = self.returncode is not None or bool(select.select([self._connection], [], [], 0)[0])
        return self.wait() if ended else None

    def wait(self) -> int:
        if self.returncode is None:
            with self._connection.makefile() as told:
                self.__dict__.update(json.load(told))
            self._connection.close()
        assert self.returncode is not None
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        """All that it writes from now on."""
        with ThreadPoolExecutor(2) as readers:
            output, error = readers.map(_read_to_the_end, (self.stdout, self.stderr))
        self.wait()
        return output, error


def start(
    *words: str,
    code: str | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    **watched: int,
) -> Running:
    """Start `hf-bico WORDS`, or `python -c CODE WORDS`; files are given by their descriptors.

    With `counts=True` touches of files below its directory are counted, and with `dies_at` it ends as by `kill -9` when
    it would do that one of them; `most` limits the bytes of a file.
    """
    given = [os.open(os.devnull, os.O_RDONLY) if stdin is None else os.dup(stdin)]
    read: list[IO[str] | None] = []
    for descriptor in (stdout, stderr):
        ours, theirs = os.pipe() if descriptor is None else (None, os.dup(descriptor))
        read.append(None if ours is None else os.fdopen(ours, encoding="utf-8", errors="replace"))
        given.append(theirs)
    about = {"cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env), **watched}
    content = json.dumps({"words": words, "code": code, **about}).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_warm_process())
    socket.send_fds(connection, [_NUMBER.pack(len(content))], given)
    connection.sendall(content)
    for descriptor in given:
        os.close(descriptor)
    return Running(connection, *read)


def run(*words: str, check: bool = False, timeout: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
    """As `start`, and wait for the end; what takes too long is killed."""
    running = start(*words, **options)
    limit = threading.Timer(timeout, running.kill)
    limit.start()
    output, error = running.communicate()
    limit.cancel()
    if check:
        assert running.returncode == 0, error
    return subprocess.CompletedProcess(list(words), running.wait(), output, error)


def _read_to_the_end(file: IO[str] | None) -> str:
    if file is None or file.closed:
        return ""
    with file:
        return file.read()


@cache
def _warm_process() -> str:
    """Start the warm process of this one, which ends with it; returns the address of its socket."""
    folder = tempfile.mkdtemp(prefix="forks-")
    process = subprocess.Popen(
        [sys.executable, __file__, f"{folder}/socket"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for who started it
    )

    def end() -> None:
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    assert process.stdout is not None
    assert process.stdout.readline() == b"listening\n"
    return f"{folder}/socket"


# In the warm process


def _serve(address: str) -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    del sys.path[0]  # the folder of this file
    for name in (*WARM, *(f"hf_bico.{name}" for name in OURS)):
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    gc.collect()
    gc.freeze()  # forks share what they do not touch
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    os.write(1, b"listening\n")
    while listener in select.select([listener, 0], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _keep(connection)
        connection.close()


def _keep(connection: socket.socket) -> NoReturn:
    """Run what is asked for in a fork, and tell its number and its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, files, _, _ = socket.recv_fds(connection, _NUMBER.size, 3)
    asked = json.loads(connection.recv(_NUMBER.unpack(length)[0], socket.MSG_WAITALL))
    with tempfile.NamedTemporaryFile("r") as counted:
        started = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            connection.close()
            _run(asked, files, counted.name)
        for descriptor in files:
            os.close(descriptor)
        connection.sendall(_NUMBER.pack(pid))
        if connection.fileno() in select.select([os.pidfd_open(pid), connection.fileno()], [], [])[0]:  # nobody listens
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        seconds, events = time.perf_counter() - started, int(counted.read() or 0)
    with suppress(BrokenPipeError):  # who asked may be gone
        connection.sendall(json.dumps({"returncode": code, "seconds": seconds, "events": events}).encode())
    os._exit(0)


def _run(asked: dict[str, Any], files: list[int], counted: str) -> NoReturn:
    """Be the process that was asked for."""
    code = 1
    try:
        _settle(asked, files)
        if asked.get("counts") or asked.get("dies_at"):
            _watch_files(asked["cwd"], counted, asked.get("dies_at"))
        if asked["code"] is None:
            from hf_bico.cli import main

            main(list(asked["words"]), prog_name="hf-bico")
        else:
            exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        atexit._run_exitfuncs()
        os._exit(code)


def _settle(asked: dict[str, Any], files: list[int]) -> None:
    """Files, directory and environment of the new process, and what was made of those of the warm one."""
    for descriptor, place in zip(files, range(3), strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    if asked["code"] is None:
        sys.argv = ["hf-bico", *asked["words"]]
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # as the command does before it imports them
    else:
        sys.argv = ["-c", *asked["words"]]
        sys.path.insert(0, "")
    sys.stdin = os.fdopen(0, encoding="utf-8")
    sys.stdout = os.fdopen(1, "w", buffering=1 if os.isatty(1) else -1, encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    tempfile.tempdir = None
    for name in READ_ENVIRONMENT_ONCE:
        importlib.reload(sys.modules[name])
    from huggingface_hub import constants, hf_api

    hf_api.api.endpoint = constants.ENDPOINT
    if asked.get("most"):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (asked["most"], resource.RLIM_INFINITY))


def _watch_files(folder: str, counted: str, dies_at: int | None) -> None:
    """Count what is done to files below a folder, and die where that one is due."""
    done = 0

    def seen(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal done
        if event not in _TOUCHING or not arguments or not isinstance(arguments[0], str | os.PathLike):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING):
            return
        if not os.path.abspath(arguments[0]).startswith(folder + os.sep):
            return
        done += 1
        if done == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        with open(os.open(counted, os.O_WRONLY | os.O_TRUNC), "w") as file:
            file.write(str(done))

    sys.addaudithook(seen)


if __name__ == "__main__":
    _serve(sys.argv[1])
