"""Killed, stopped, out of room, or two at once: what is there is whole, and the same command again succeeds."""

from __future__ import annotations

import fcntl
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hf_bico.errors import OutputError
from hf_bico.reports.record import read_record
from hf_bico.runtime.output import locked_folder
from hf_bico.utils.files import sha256_of
from support.forks import Running, start
from support.hub import Fault, Hub
from support.hub_scenes import SOURCE, TARGET, publish
from support.paper import PAPER_WORDS

REPO = "user/ported"
PORT = ["port", SOURCE, "--to", TARGET, "-n", "8", *PAPER_WORDS, "--no-eval", "-o", "out"]
PUSHED = [*PORT, "--push-to", REPO]
SPENT = ("seconds: ", "Carrying it took ")
"""How the lines begin that a port prints on stderr when it is written."""


@dataclass(frozen=True)
class Ended:
    """How a command ended: by an exit code, or, where that is below zero, by a signal."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    events: int


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of commands here, whose cache all of them share."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scene")


@pytest.fixture
def folder(hub: Hub, scene: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands run, with the models on the Hub and in the cache."""
    monkeypatch.setenv("HF_HOME", str(home))
    shutil.rmtree(scene)
    publish(hub, scene)
    place = tmp_path / "work"
    place.mkdir()
    if not any(home.iterdir()):
        assert run(place, *PORT).code == 0
        shutil.rmtree(place / "out")
    return place


def ended(running: Running) -> Ended:
    output, error = running.communicate()
    return Ended(running.wait(), output, error, running.seconds, running.events)


def run(folder: Path, *words: str, **watched: int) -> Ended:
    return ended(start(*words, cwd=folder, **watched))


def require_whole(out: Path) -> None:
    """A folder is absent, or holds a record, a card, and the weights that the record speaks of."""
    if not out.exists():
        return
    record = read_record(out)
    assert record.output is not None
    assert record.output.files == sha256_of(out / name for name in record.output.files)
    assert (out / "README.md").is_file()


def require_whole_remote(hub: Hub, out: Path) -> str:
    """A repo is absent, empty, or holds every file of the folder."""
    if ("model", REPO) not in hub.repos:
        return "absent"
    files = hub.repo(REPO).files()
    if not set(files) - {".gitattributes"}:
        return "empty"
    assert {file.name for file in out.iterdir() if not file.name.startswith(".")} <= set(files)
    return "whole"


def again(hub: Hub, folder: Path, words: list[str] = PUSHED) -> Ended:
    """The same command, undisturbed; afterwards there is the result and nothing else."""
    done = run(folder, *words)
    assert done.code == 0, done.stderr
    require_whole(folder / "out")
    assert (folder / "out").is_dir()
    assert [path.name for path in folder.iterdir()] == ["out"], "leftovers of the killed run are gone"
    return done


def wait_until(due: Callable[[], bool]) -> None:
    for _ in range(60_000):
        if due():
            return
        time.sleep(0.001)
    pytest.fail("it never came to that")


def clear(hub: Hub, folder: Path) -> None:
    """As before the first run, but for the cache."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    if ("model", REPO) in hub.repos:
        hub.delete(REPO)


def killed(hub: Hub, folder: Path, due: Callable[[], bool]) -> tuple[str, str]:
    """Kill a port that is pushed when that is due; in which state folder and repo are then."""
    running = start(*PUSHED, cwd=folder)
    wait_until(lambda: due() or running.poll() is not None)  # at the last of its requests it may be faster
    running.kill()
    found = ended(running)
    assert found.code in (-signal.SIGKILL, 0), found.stderr
    require_whole(folder / "out")
    local = "whole" if (folder / "out").exists() else "absent"
    return local, require_whole_remote(hub, folder / "out")


@pytest.mark.parametrize("moments", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_requests_spread_over_port_and_push(moments: int, hub: Hub, folder: Path) -> None:
    before = len(hub.log)
    again(hub, folder)
    requests = len(hub.log) - before
    rows, states = [], set()
    for moment in range(moments):
        clear(hub, folder)
        begun, request = len(hub.log), 1 + moment * (requests - 2) // (moments - 1)
        local, remote = killed(hub, folder, lambda: len(hub.log) - begun >= request)  # noqa: B023
        done = again(hub, folder)
        assert require_whole_remote(hub, folder / "out") == "whole"
        states.add((local, remote))
        rows.append(f"| {request} of {requests} | {local} | {remote} | well, in {done.seconds:.1f} s |")
    print("\n| killed at request | output folder | repo | same command again |\n|---|---|---|---|", *rows, sep="\n")
    assert {("absent", "absent"), ("whole", "absent"), ("whole", "empty")} <= states, "the moments are spread"


def test_killed_at_every_touch_of_a_file(hub: Hub, folder: Path) -> None:
    """Of a port that replaces an older one: each moment between making, writing, and renaming."""
    words = [*PORT, "--method", "naive", "--overwrite"]
    again(hub, folder, words)
    events = run(folder, *words, counts=True).events
    assert events > 10
    lost = 0
    for event in range(1, events + 1):
        assert run(folder, *words, dies_at=event).code == -signal.SIGKILL
        require_whole(folder / "out")
        if not (folder / "out").exists():
            lost += 1
            refused = run(folder, *PORT)  # without --overwrite, which shows that the old one is back
            assert refused.code == 1
            assert "the output folder 'out' exists" in refused.stderr
        with locked_folder(folder / "out"):  # as the next run would, and it touches the same files in the same order
            require_whole(folder / "out")
            assert (folder / "out").is_dir(), "the old one is back"
        assert [path.name for path in folder.iterdir()] == ["out"]
    assert lost == 1, "only between putting the old one aside and the new one in its place"
    again(hub, folder, words)


def test_killed_while_a_request_of_the_push_is_under_way(hub: Hub, folder: Path) -> None:
    for method, path in (
        ("PUT", ""),  # first: what the Hub has once stored is not sent again
        ("POST", "/api/repos/create"),
        ("POST", "/preupload/"),
        ("POST", "/info/lfs/objects/batch"),
        ("POST", "/commit/"),
    ):
        fault = Fault(method, path, kind="slow", seconds=0.3)
        hub.inject(fault)
        running = start(*PUSHED, cwd=folder)
        wait_until(lambda: fault.fired > 0)  # noqa: B023
        running.kill()
        assert ended(running).code == -signal.SIGKILL, path
        time.sleep(0.4)  # the Hub may carry out what it was asked
        hub.forgive()
        require_whole(folder / "out")
        assert (folder / "out").is_dir(), "the port was whole before it was pushed"
        state = require_whole_remote(hub, folder / "out")
        done = again(hub, folder)
        assert "This port is in out already: it is pushed as it is." in done.stdout
        assert require_whole_remote(hub, folder / "out") == "whole"
        print(f"{method} {path}: {state}")
        clear(hub, folder)


def is_held(lock: Path) -> bool:
    """Whether a lock's file is there, and somebody has taken it."""
    if not lock.exists():
        return False
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_two_runs_into_one_folder(hub: Hub, folder: Path, scene: Path) -> None:
    """The second is refused at once, not when it has done the work."""
    with locked_folder(folder / "out"):
        second = run(folder, *PORT)
    assert second.code == 1
    assert second.stderr.startswith("Error: another run is writing into 'out'\n")
    assert list(folder.iterdir()) == []
    first = start(*PORT, cwd=folder)
    wait_until(lambda: is_held(folder / ".out.lock"))
    first.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(OutputError, match="another run is writing into"), locked_folder(folder / "out"):
            pytest.fail("two runs hold one place")
    finally:
        first.send_signal(signal.SIGCONT)
    assert ended(first).code == 0
    require_whole(folder / "out")
    assert [path.name for path in folder.iterdir()] == ["out"]


STOPS: dict[str, tuple[int, int, str, int]] = {
    "Ctrl-C": (signal.SIGINT, 130, "Interrupted: ", 5),
    "SIGTERM": (signal.SIGTERM, 143, "Stopped by SIGTERM: ", 3),
    "a closed terminal": (signal.SIGHUP, 129, "Stopped by SIGHUP: ", 2),
}
"""The signal, the exit code, how the line begins, and at how many moments."""
SIGNALLED = """
import signal, sys
import hf_bico.cli.progress
from hf_bico.cli.main import main

moment, number, *words = sys.argv[1:]
announced, calls = hf_bico.cli.progress._announce_download, 0

def signalled(stage, done, total):
    global calls
    announced(stage, done, total)
    calls += 1
    if calls == int(moment):
        signal.raise_signal(int(number))

hf_bico.cli.progress._announce_download = signalled
try:
    main(words, prog_name="hf-bico")
finally:
    if moment == "0":
        print(calls)
"""


@pytest.mark.parametrize("name", STOPS)
def test_stopped_at_any_stage(name: str, hub: Hub, folder: Path) -> None:
    """By a real signal, each time that the work has come to a certain point."""
    number, code, said, moments = STOPS[name]
    undisturbed = ended(start("0", "0", *PUSHED, cwd=folder, code=SIGNALLED))
    assert undisturbed.code == 0, undisturbed.stderr
    calls = int(undisturbed.stdout.splitlines()[-1])
    for moment in range(moments):
        clear(hub, folder)
        call = 1 + moment * (calls - 1) // (moments - 1)
        end = ended(start(str(call), str(int(number)), *PUSHED, cwd=folder, code=SIGNALLED))
        assert (end.code, end.stderr) == (code, f"{said}nothing was written.\n")
        assert list(folder.iterdir()) == []
        assert require_whole_remote(hub, folder / "out") == "absent"
    again(hub, folder)


def test_stopped_at_any_time(hub: Hub, folder: Path) -> None:
    """By the clock: on a busy machine it may be done before."""
    whole = again(hub, folder).seconds
    for share in (0.3, 0.6, 0.9):
        clear(hub, folder)
        running = start(*PUSHED, cwd=folder)
        time.sleep(whole * share)
        running.send_signal(signal.SIGINT)
        end = ended(running)
        require_whole(folder / "out")
        there = (folder / "out").exists()
        assert end.code in (0, 130), end.stderr
        if end.code:
            *before, last = end.stderr.splitlines()
            assert last == f"Interrupted: {'the result is in out' if there else 'nothing was written'}."
            assert all(there and line.startswith(SPENT) for line in before), "what a port says when it is whole"
        assert [path.name for path in folder.iterdir()] == ["out"] * there, "nothing is left beside it"
        assert require_whole_remote(hub, folder / "out") != "empty", "a repo that could not be filled is taken back"


def test_stopped_while_it_is_pushed(hub: Hub, folder: Path) -> None:
    fault = Fault("POST", "/preupload/", kind="slow", seconds=0.5)
    hub.inject(fault)
    running = start(*PUSHED, cwd=folder)
    wait_until(lambda: fault.fired > 0)
    running.send_signal(signal.SIGINT)
    end = ended(running)
    hub.forgive()
    assert end.code == 130
    *spent, last = end.stderr.splitlines()
    assert [line.startswith(one) for line, one in zip(spent, SPENT, strict=True)] == [True, True]
    assert last == "Interrupted: the result is in out."
    require_whole(folder / "out")
    assert require_whole_remote(hub, folder / "out") == "absent", "the repo was made for it, and is taken back"
    assert "This port is in out already: it is pushed as it is." in again(hub, folder).stdout


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A disk of so many bytes, where this account may mount one."""
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        place = tmp_path / f"disk-{len(mounted)}"
        place.mkdir()
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True)
        if made.returncode:
            pytest.skip("only root may mount a disk")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", place], check=True)


def test_a_disk_that_is_too_small_is_told_before_anything_is_done(
    hub: Hub, folder: Path, small_disk: Callable[[int], Path]
) -> None:
    disk = small_disk(16 * 1024)
    done = run(folder, *PORT[:-1], str(disk / "out"))
    assert done.code == 1
    assert "the result takes about" in done.stderr
    assert "left" in done.stderr
    assert list(disk.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing(hub: Hub, folder: Path, small_disk: Callable[[int], Path]) -> None:
    """There is room for the weights, and not for all that is written beside them."""
    again(hub, folder, PORT)
    size = sum(file.stat().st_size for file in (folder / "out").glob("*.safetensors"))
    codes = []
    for room in range(0, 5):
        disk = small_disk((size // 4096 + 1 + 3 * room) * 4096)
        done = run(folder, *PORT[:-1], str(disk / "out"))
        codes.append(done.code)
        assert "Traceback" not in done.stderr
        if done.code:
            assert done.code == 1
            assert "Remedy: free some space" in done.stderr
            assert list(disk.iterdir()) == []
        else:
            require_whole(disk / "out")
    assert 1 in codes


def test_a_limit_on_the_size_of_files_leaves_nothing(hub: Hub, folder: Path) -> None:
    """What every account can have: a write that fails in the middle."""
    again(hub, folder, PORT)
    size = max(file.stat().st_size for file in (folder / "out").iterdir())
    shutil.rmtree(folder / "out")
    for most in (4000, size // 2, size - 1):
        done = run(folder, *PORT, most=most)
        assert done.code == 1, (most, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        assert "unexpected" not in done.stderr
        assert list(folder.iterdir()) == []


def test_a_folder_that_may_only_be_read(hub: Hub, folder: Path, tmp_path: Path) -> None:
    """By a disk that is mounted so, as root may write where others may not."""
    place = tmp_path / "locked"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", place], capture_output=True).returncode:
        place.chmod(0o500)
    try:
        done = run(folder, *PORT[:-1], str(place / "out"))
    finally:
        subprocess.run(["umount", place], capture_output=True)
        place.chmod(0o700)
    assert done.code == 1
    assert f"nothing can be written into '{place}'" in done.stderr
    assert done.stdout == ""
