"""Several processes do one job: real ones, of torchrun, of accelerate and of our own, on the CPU."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hf_bico
from hf_bico.alignment.statistics import Kind, Statistics
from hf_bico.cli.main import main
from hf_bico.errors import UsageError
from hf_bico.runtime.distributed import ALONE, ProcessGroup, is_first_process, join, local_device
from support import forks
from support.paper import PAPER, PAPER_WORDS
from support.rotated_clips import make_turned_scene
from support.scenes import Scene, make_scene

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# accelerate starts several processes without GPUs too, but only if it is told that there are some
ACCELERATE = (
    *("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"),
)
MODELS = ("tuned", "--base", "base", "--to", "target", "--data", "pictures", *PAPER_WORDS)
ODD = 23


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture(autouse=True)
def _here(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(scene.folder)


def launched(launcher: tuple[str, ...], *words: str, temporary: Path) -> subprocess.CompletedProcess[str]:
    """Two processes, of a module or a script; one that hangs is an error."""
    temporary.mkdir()
    own = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", *launcher, *words]
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=150)


def forked(*words: str, code: str | None = None, temporary: Path) -> list[subprocess.CompletedProcess[str]]:
    """The two processes as forks, with what a launcher does: it tells them by their environment who they are, and ends
    the one when the other has failed."""
    temporary.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    job = {**os.environ, **meet, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TMPDIR": str(temporary)}
    ranks = [forks.start(*words, code=code, env={**job, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    with ThreadPoolExecutor(2) as readers:
        written = [readers.submit(rank.communicate) for rank in ranks]
        while not any(rank.returncode for rank in ranks) and not all(found.done() for found in written):
            time.sleep(0.05)
        for rank in ranks:
            if rank.returncode is None:
                rank.send_signal(signal.SIGTERM)
    return [
        subprocess.CompletedProcess(words, rank.wait(), *found.result())
        for rank, found in zip(ranks, written, strict=True)
    ]


def ours(stderr: str) -> list[str]:
    """The lines that say how our processes end."""
    return [line for line in stderr.splitlines() if line.startswith(("Error: ", "Stopped: ", "Process "))]


def require_same(folder: Path, alone: Path, target: Path, losses: bool = False) -> None:
    """The same port: samples and all else that is recorded, and changes of the weights to 1e-5.

    Of the samples' `losses`, if alpha was chosen by them, the last digits may be others.
    """
    records = [json.loads((one / "bico.json").read_text()) for one in (folder, alone)]
    assert [record["run"]["processes"] for record in records] == [2, 1]
    if losses:
        found, wanted = (record["method"].pop("curve") for record in records)
        assert [point["alpha"] for point in found] == [point["alpha"] for point in wanted]
        for name in ("mean", "accuracy"):
            assert [point[name] for point in found] == pytest.approx([point[name] for point in wanted], rel=1e-4)
        vetos = [record["method"].pop("veto") for record in records]
        assert vetos[0] == pytest.approx(vetos[1], rel=1e-4)
        tried = [record["method"].pop("candidates") for record in records]
        chosen = [[(one["method"], one["alpha"], one["held_back"]) for one in some] for some in tried]
        assert chosen[0] == chosen[1]
    for part in ("data", "method", "objective"):
        assert records[0][part] == records[1][part]
    assert records[0].get("evaluation") == records[1].get("evaluation")
    ranks = [[(site["name"], site["rank_in"], site["rank_out"]) for site in record["sites"]] for record in records]
    assert ranks[0] == ranks[1]
    found, wanted, before = (load_file(one / "open_clip_model.safetensors") for one in (folder, alone, target))
    assert found.keys() == wanted.keys()
    changed = [name for name in wanted if not torch.equal(wanted[name], before[name])]
    assert changed
    for name in wanted:
        change = (wanted[name] - before[name]).norm()
        assert (found[name] - wanted[name]).norm() <= 1e-5 * change


def test_sums_stand_in_one_order_in_all_processes() -> None:
    kinds = [Kind.INPUTS, Kind.GRADIENTS, Kind.OUTPUTS]
    found = [list(Statistics.zeros([], some, torch.device("cpu")).sums) for some in (kinds, kinds[::-1])]
    assert found[0] == found[1]
    assert set(found[0]) == set(kinds)


@pytest.mark.parametrize(("items", "size"), [(0, 2), (1, 2), (5, 2), (6, 2), (5, 4), (3, 4)])
def test_shares_are_everything_once_and_even(items: int, size: int) -> None:
    shares = [ProcessGroup(rank, size).share(range(items)) for rank in range(size)]
    assert [item for share in shares for item in share] == list(range(items))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1


def test_alone_nothing_is_shared() -> None:
    assert join(torch.device("cpu")) is ALONE
    tensor, found = torch.ones(3), {"a": torch.ones(2)}
    ALONE.all_reduce([tensor])
    ALONE.leave()
    assert torch.equal(tensor, torch.ones(3))
    assert ALONE.gather(found) is found
    assert ALONE.broadcast(found) is found
    assert list(ALONE.share([1, 2, 3])) == [1, 2, 3]


def test_each_process_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local_device("auto") == "auto"
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert [local_device(name) for name in ("auto", "cuda", "cpu", "cuda:0")] == ["cuda:1", "cuda:1", "cpu", "cuda:0"]
    assert not is_first_process()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert local_device("auto") == "auto"


def test_what_several_processes_cannot_do_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="'eval' runs in one process, and 2 were started"):
        main(["eval", "target", "--data", "pictures"], standalone_mode=False)
    with pytest.raises(SystemExit) as ended:
        main(["port", *MODELS, "--device", "cuda:1"], standalone_mode=False)
    assert ended.value.code == 2


SCRIPT = """
import sys, time
import torch, hf_bico
from hf_bico.runtime.distributed import join

told = []

def progress(stage, done, total):
    told.append(stage)

team = join(torch.device("cpu"))
sums = [torch.full((2, 3), team.rank + 1.0, dtype=torch.float64), torch.tensor(team.rank + 1), torch.zeros(0)]
sums += [torch.full((3000, 2000), team.rank + 1.0), torch.full((3, 2), team.rank + 1.0).t()]
team.all_reduce(sums)
shared = torch.arange(3, dtype=torch.bfloat16)
own = {f"{team.rank}, {name}": (shared + team.rank, shared, shared, name) for name in ("a", "b")}
found = team.gather(own if team.rank else {**own, "none": torch.zeros(0)})
agreed = team.broadcast({"rank": team.rank, "mask": torch.tensor(team.rank == 0)})
team.leave()
time.sleep(team.rank)  # the others come later to where the next team meets
again = join(torch.device("cpu")).broadcast(team.rank)
ported = hf_bico.port(
    "tuned", "target", base="base", data="pictures", n=1, method="bico", alpha=1.0, evaluate=False, progress=progress
)
ported.save(sys.argv[1])
torch.save((sums, found, agreed, again, told.count("calibrate")), f"{sys.argv[1]}-{team.rank}.pt")
"""


@pytest.mark.parametrize("launcher", ["forks", pytest.param("accelerate", marks=pytest.mark.slow)])
def test_a_script_of_two_processes_and_fewer_samples(launcher: str, scene: Scene, tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    if launcher == "forks":
        done = forked(str(out), code=SCRIPT, temporary=tmp_path / "temporary")
    else:
        done = [launched(ACCELERATE, str(script), str(out), temporary=tmp_path / "temporary")]
    assert {one.returncode for one in done} == {0}, done
    results: list[Any] = [torch.load(f"{out}-{rank}.pt") for rank in range(2)]
    for sums, found, agreed, again, _ in results:
        assert [sorted(set(total.flatten().tolist())) for total in sums] == [[3], [3], [], [3], [3]]
        assert [total.dtype for total in sums[:2]] == [torch.float64, torch.int64]
        assert list(found) == ["0, a", "0, b", "none", "1, a", "1, b"]
        shifted, first, second, name = found["1, b"]
        assert (shifted.tolist(), shifted.dtype, name) == ([1, 2, 3], torch.bfloat16, "b")
        assert first is second
        assert found["none"].shape == (0,)
        assert agreed["rank"] == 0
        assert bool(agreed["mask"])
        assert again == 0
    seen = [result[-1] for result in results]
    assert seen[0] < seen[1], "one sample is one process's"
    ported = hf_bico.port("tuned", to="target", base="base", data="pictures", n=1, evaluate=False, **PAPER)
    ported.save(tmp_path / "alone")
    require_same(out, tmp_path / "alone", scene.target)
    assert {one.name for one in tmp_path.iterdir() if one.is_dir()} == {"out", "alone", "temporary"}


def test_two_processes_port_as_one_does(scene: Scene, tmp_path: Path) -> None:
    words = ("port", *MODELS, "-n", str(ODD), "--json", "-o", str(tmp_path / "out"))
    done = launched(TORCHRUN, "-m", "hf_bico", *words, temporary=tmp_path / "temporary")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout)["record"]["data"]["n"] == ODD
    assert done.stderr == ""
    hf_bico.port("tuned", to="target", base="base", data="pictures", n=ODD, **PAPER).save(tmp_path / "alone")
    require_same(tmp_path / "out", tmp_path / "alone", scene.target)


def test_two_processes_choose_the_alphas_that_one_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the losses of all samples, of which each process knows its own; for both methods that "auto" tries here."""
    turned = make_turned_scene(tmp_path / "turned")
    monkeypatch.chdir(turned.folder)
    words = ("port", *MODELS[: -len(PAPER_WORDS)], "-n", "15", "--augment", "0", "--no-eval", "--json")
    done = forked(*words, "-o", str(tmp_path / "out"), temporary=tmp_path / "temporary")
    assert {one.returncode for one in done} == {0}, done
    hf_bico.port("tuned", "target", base="base", data="pictures", n=15, augment=0, evaluate=False).save("alone")
    require_same(tmp_path / "out", turned.folder / "alone", turned.target, losses=True)


def test_two_processes_hold_back_what_one_holds_back(tmp_path: Path) -> None:
    words = ("port", *MODELS[: -len(PAPER_WORDS)], "-n", "5", "--augment", "0", "--json", "-o", str(tmp_path / "out"))
    done = forked(*words, temporary=tmp_path / "temporary")
    assert done[0].returncode == 3, done
    assert done[1].returncode in (3, -signal.SIGTERM), "the launcher ends it if it is the later one"
    told = json.loads("".join(one.stdout for one in done))
    assert told["held_back"]
    assert "".join(one.stderr for one in done) == ""
    alone = hf_bico.port("tuned", "target", base="base", data="pictures", n=5, augment=0)
    assert told["alpha"] == alone.record.method.alpha
    assert sorted(tmp_path.iterdir()) == [tmp_path / "temporary"]


KILLED = """
import os, signal, sys
import hf_bico.cli.progress
from hf_bico.cli.main import main

def deadly(stage, done, total):
    if stage == "calibrate" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

hf_bico.cli.progress.silent = deadly
main(sys.argv[1:], prog_name="hf-bico")
"""


def test_a_process_that_is_killed_ends_the_job(scene: Scene, tmp_path: Path) -> None:
    before = sorted(scene.folder.iterdir())
    words = ("port", *MODELS, "-n", "5", "--json", "-o", str(tmp_path / "out"))
    first, second = forked(*words, code=KILLED, temporary=tmp_path / "temporary")
    assert (first.returncode, second.returncode) == (1, -signal.SIGKILL)
    [line] = ours(first.stderr)
    assert "another process of this job" in line
    assert "has ended" in line
    assert first.stdout.count("\n") == 1
    assert json.loads(first.stdout)["error"]["kind"] == "ProcessLostError"
    assert sorted(tmp_path.iterdir()) == [tmp_path / "temporary"], "neither a result nor a scratch folder"
    assert sorted(scene.folder.iterdir()) == before


STUCK = """
import ctypes, os, signal, threading
from hf_bico.cli.exit import exit_on_error, exit_process_on_error

mutex = ctypes.create_string_buffer(64)
with exit_process_on_error(as_json=True), exit_on_error():
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    for _ in range(2):  # the second waits for the first, for ever
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="how to wait where no signal is heard is known for Linux")
def test_one_that_waits_where_no_exception_reaches_it_ends_when_it_is_told_to() -> None:
    """As inside of torch, for another process."""
    own = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    done = forks.run(code=STUCK, env=own, timeout=50)
    assert done.returncode == 1
    assert done.stderr == "Stopped: another process of this job, or its launcher, has ended; nothing was written.\n"
    assert json.loads(done.stdout)["error"]["kind"] == "ProcessLostError"


BOTH = """
import os, signal, sys, time
from pathlib import Path
import hf_bico.cli.exit as exits
from hf_bico.cli.main import main

waits, set_handlers = Path(os.environ["TMPDIR"], "waits"), exits._set_handlers

def seen(do):
    set_handlers(do)
    if do == signal.SIG_DFL:  # as the second does before it waits for its end
        waits.touch()

exits._set_handlers = seen
exits._REPORT_DELAY = 60  # a busy machine may need long to end it
try:
    main(sys.argv[1:], prog_name="hf-bico")
finally:
    for _ in range(6000):  # the first ends when the second has found the same
        if waits.exists():
            break
        time.sleep(0.01)
"""


def test_what_all_processes_find_is_told_once(tmp_path: Path) -> None:
    words = ("port", "no/such folder", "--to", "target", "--json")
    found = forked(*words, code=BOTH, temporary=tmp_path / "temporary")
    assert [done.returncode for done in found] == [1, -signal.SIGTERM]
    [line] = ours("".join(done.stderr for done in found))
    error = json.loads("".join(done.stdout for done in found))["error"]
    assert line == f"Error: {error['cause']}"
    assert found[0].stderr.count(f"Remedy: {error['remedy']}") == 1
