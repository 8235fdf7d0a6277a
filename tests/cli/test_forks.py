"""Forks of the warm process are processes of their own: directory, environment, files, signals and exit codes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from support import forks


def test_a_fork_has_its_own_words_directory_and_environment(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['WORD'], file=sys.stderr); print(input())"
    reader, writer = os.pipe()
    os.write(writer, b"read\n")
    os.close(writer)
    done = forks.run("a", "b c", code=code, cwd=tmp_path, env={**os.environ, "WORD": "own"}, stdin=reader)
    os.close(reader)
    assert (done.returncode, done.stdout, done.stderr) == (0, "read\n", f"['a', 'b c'] {tmp_path} own\n")
    assert "WORD" not in os.environ


def test_libraries_read_the_environment_of_the_fork(tmp_path: Path) -> None:
    code = (
        "from huggingface_hub import HfApi, constants; import datasets; "
        "print(HfApi().endpoint, constants.HF_HUB_OFFLINE, constants.HF_HUB_CACHE, datasets.config.HF_DATASETS_CACHE)"
    )
    own = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = forks.run(code=code, env={**os.environ, **own}, check=True)
    assert done.stdout == f"http://127.0.0.1:9 True {tmp_path}/hub {tmp_path}/datasets\n"


@pytest.mark.parametrize(
    ("code", "ended"),
    [("raise SystemExit(7)", 7), ("raise SystemExit('why')", 1), ("1 / 0", 1), ("", 0), ("import os; os.abort()", -6)],
)
def test_a_fork_ends_as_a_process_does(code: str, ended: int) -> None:
    done = forks.run(code=code)
    assert done.returncode == ended
    assert ("ZeroDivisionError" in done.stderr) == ("/ 0" in code)


def test_a_fork_takes_signals_and_runs_beside_others() -> None:
    waiting = [forks.start(code="print('here', flush=True); import time; time.sleep(60)") for _ in range(2)]
    for one in waiting:
        assert one.stdout is not None
        assert one.stdout.readline() == "here\n"
        assert one.poll() is None
    for one, number in zip(waiting, (signal.SIGTERM, signal.SIGINT), strict=True):
        one.send_signal(number)
    assert [one.communicate()[1].strip().rpartition("\n")[2] for one in waiting] == ["", "KeyboardInterrupt"]
    assert [one.returncode for one in waiting] == [-signal.SIGTERM, 1]


def test_a_fork_that_nobody_waits_for_any_more_ends() -> None:
    left = forks.start(code="import time; time.sleep(60)")
    left._connection.close()
    for _ in range(1000):
        try:
            os.kill(left.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail("it is still there")
