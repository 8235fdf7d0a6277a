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
import selectors
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
OURS = (
    "hf_bico.cli.main",
    "hf_bico.experiments.demo.world",
    "hf_bico.reports.pictures",
    "hf_bico.cli.console",
    "hf_bico.cli.console",
    "hf_bico.porting.evaluate",
    "hf_bico.porting.port",
    "hf_bico.hub.push",
)
READ_ENVIRONMENT_ONCE = ("huggingface_hub.constants", "datasets.config", "evaluate.config")
_TOUCHING = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "shutil.rmtree", "open")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_NUMBER = struct.Struct("q")
_NAME = "HF_BICO_FORKS"
_OF_THE_RUN = os.environ.get(_NAME)
"""Where all workers of a run find one warm process."""


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
    """The address of the warm process: that of the run, or one that is started here."""
    address = _OF_THE_RUN or start_warm_process()
    for _ in range(6000):  # it needs some seconds
        if Path(address).exists():
            return address
        time.sleep(0.02)
    raise TimeoutError("the process that is forked did not start")


def start_warm_process() -> str:
    """Start one, which ends with this process; returns the address at which it will be found, from here on for all
    processes that this one starts."""
    folder = tempfile.mkdtemp(prefix="forks-")
    process = subprocess.Popen(
        [sys.executable, __file__, f"{folder}/socket"],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for who started it
        env={**os.environ, "PYTHONHASHSEED": "random"},  # other hashes than here, even where these were chosen
    )

    def end() -> None:
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    os.environ[_NAME] = f"{folder}/socket"
    return os.environ[_NAME]


# In the warm process


def _serve(address: str) -> None:
    os.environ |= {"TOKENIZERS_PARALLELISM": "false"}  # which would have begun threads before the fork
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    del sys.path[0]  # the folder of this file
    for name in (*WARM, *OURS):
        importlib.import_module(name)
    _port_once()
    gc.collect()
    gc.freeze()  # forks share what they do not touch
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}-to-be")
    listener.listen()
    os.rename(f"{address}-to-be", address)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == 0:
                    for other in list(selector.get_map().values()):
                        if isinstance(other.data, _Fork):
                            other.data.left_alone()
                    return
                if key.fileobj is listener:
                    _Fork(listener.accept()[0], selector)
                elif key.fileobj is key.data.connection:
                    key.data.left_alone()
                else:
                    key.data.ended()


def _port_once() -> None:
    """What the libraries only do when they are first used; no gradient, which would not go with forks on a GPU."""
    import torch

    import hf_bico

    tests = str(Path(__file__).parents[1])
    sys.path.insert(0, tests)
    from support.scenes import forget_scenes, make_scene

    sys.path.remove(tests)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # others would not be there in a fork
    with tempfile.TemporaryDirectory() as folder:
        for library in ("open_clip", "transformers"):
            scene = make_scene(Path(folder) / library, (library, library))
            where: dict[str, Any] = {"to": scene.target, "base": scene.base, "data": scene.data}
            ported = hf_bico.port(scene.tuned, **where, n=4, method="theseus", alpha=1.0, device="cpu")
            ported.save(Path(folder) / f"{library}-out")
    forget_scenes()
    torch.set_num_threads(threads)


class _Fork:
    """One command, from the asking to its end."""

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self.connection, self._selector = connection, selector
        length, files, _, _ = socket.recv_fds(connection, _NUMBER.size, 3)
        asked = json.loads(connection.recv(_NUMBER.unpack(length)[0], socket.MSG_WAITALL))
        self._counted = tempfile.NamedTemporaryFile("r")  # noqa: SIM115 - closed at the end
        self._started = time.perf_counter()
        self._pid = os.fork()
        if self._pid == 0:
            for key in list(selector.get_map().values()):
                if key.fd != 0:
                    os.close(key.fd)
            connection.close()
            _run(asked, files, self._counted.name)
        for descriptor in files:
            os.close(descriptor)
        self._ending = os.pidfd_open(self._pid)
        selector.register(self._ending, selectors.EVENT_READ, self)
        selector.register(connection, selectors.EVENT_READ, self)
        connection.sendall(_NUMBER.pack(self._pid))

    def left_alone(self) -> None:
        """Nobody listens any more."""
        if self.connection in self._selector.get_map():  # else it has ended at the same time
            self._selector.unregister(self.connection)
            os.kill(self._pid, signal.SIGKILL)

    def ended(self) -> None:
        self._selector.unregister(self._ending)
        if self.connection in self._selector.get_map():
            self._selector.unregister(self.connection)
        os.close(self._ending)
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        with self._counted, self.connection, suppress(BrokenPipeError):  # who asked may be gone
            about = {"seconds": time.perf_counter() - self._started, "events": int(self._counted.read() or 0)}
            self.connection.sendall(json.dumps({"returncode": code, **about}).encode())


def _run(asked: dict[str, Any], files: list[int], counted: str) -> NoReturn:
    """Be the process that was asked for."""
    code = 1
    try:
        _settle(asked, files)
        if asked.get("counts") or asked.get("dies_at"):
            _watch_files(asked["cwd"], counted, asked.get("dies_at"))
        if asked["code"] is None:
            from hf_bico.cli.main import main

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
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup make test` has set to be ignored
    atexit._clear()  # the libraries' own last acts are slow, and for the warm process
    atexit.register(sys.modules["hf_bico.models.tokenization"]._end)
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
    os._exit(0)  # without what the libraries say at the end
