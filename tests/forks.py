"""Commands in processes of their own that can be killed, without seconds of imports for each: forks of one process.

As a script it is that process: it has imported everything, and runs each line of JSON that it is given in a fork.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

HERE = Path(__file__).parent
_TOUCHING = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "shutil.rmtree", "open")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Ended:
    """How a command ended: by an exit code, or, where that is below zero, by a signal."""

    code: int
    seconds: float
    stdout: str
    stderr: str
    events: int
    """How often it touched the files of its folder, where that was counted."""


class Running:
    """A command that was started."""

    def __init__(self, pid: int, answers: IO[str]) -> None:
        self.pid, self._answers = pid, answers

    def signal(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal; nothing is done where it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self) -> Ended:
        return Ended(**json.loads(self._answers.readline()))


class Forks:
    """The process that forks; a context manager."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(environment)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def start(self, folder: Path, *words: str, **options: Any) -> Running:
        """Run `hf-bico WORDS` in a folder; with `counts` touches of files there are counted.

        With `dies_at` it kills itself, as by `kill -9`, when it would do that one of them; `most` limits the bytes of a
        file.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        print(json.dumps({"folder": str(folder), "words": words, **options}), file=stdin, flush=True)
        return Running(json.loads(stdout.readline())["pid"], stdout)

    def run(self, folder: Path, *words: str, **options: Any) -> Ended:
        return self.start(folder, *words, **options).wait()


def _import_everything() -> None:
    import datasets
    import open_clip
    import peft
    import transformers

    import hf_bico.cli
    import hf_bico.drawing
    import hf_bico.edge.bars
    import hf_bico.edge.console
    import hf_bico.evaluation
    import hf_bico.pipeline
    import hf_bico.pushing

    for package in (datasets, open_clip, peft, transformers, hf_bico):
        assert package.__name__


def _serve() -> None:
    _import_everything()
    said = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        asked = json.loads(line)
        scratch = Path(asked["folder"]).parent / ".said"
        scratch.mkdir(exist_ok=True)
        started = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            _run(asked, scratch)
        print(json.dumps({"pid": pid}), file=said, flush=True)
        _, status = os.waitpid(pid, 0)
        texts = {name: (scratch / name).read_text(errors="replace") for name in ("stdout", "stderr")}
        events = int((scratch / "events").read_text() or 0) if (scratch / "events").exists() else 0
        found = Ended(os.waitstatus_to_exitcode(status), time.perf_counter() - started, events=events, **texts)
        print(json.dumps(vars(found)), file=said, flush=True)


def _run(asked: dict[str, Any], scratch: Path) -> None:
    """In the child: never returns."""
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for name, place in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(scratch / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), place)
        os.chdir(asked["folder"])
        if asked.get("most"):
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (asked["most"], resource.RLIM_INFINITY))
        if asked.get("counts") or asked.get("dies_at"):
            _watch_files(asked["folder"], scratch / "events", asked.get("dies_at"))
        from hf_bico.cli import main

        main(list(asked["words"]), prog_name="hf-bico")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _watch_files(folder: str, counted: Path, dies_at: int | None) -> None:
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
        if dies_at is None:
            with open(os.open(counted, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
                file.write(str(done))

    sys.addaudithook(seen)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    _serve()
