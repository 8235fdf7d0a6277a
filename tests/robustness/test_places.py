"""Where a command runs: names of every length and kind, the lines that it suggests, and how much memory it may have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hf_bico.cli.main import main
from hf_bico.hub.push import PushOptions, push_command
from hf_bico.reports.record import read_any
from hf_bico.runtime.output import RECORD_FILE
from hf_bico.utils.text import command_line
from support import forks
from support.hub import Hub
from support.scenes import Scene, make_scene

ODD = {
    "dash": "-rf",
    "option": "--help",
    "spaces": " a  b ",
    "quotes": """it's "q" `x`""",
    "substitution": "$(touch pwned) $HOME",
    "newlines": "-a\nb\n",
    "escapes": "\x1b[2J\u202e%s\\n",
    "glob": "*;[x]?!~",
    "NFC": "caf\u00e9",
    "NFD": "cafe\u0301",
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words), prog_name="hf-bico")


def extract(scene: Scene, folder: str, *more: str) -> Result:
    return run("extract", str(scene.tuned), "--base", str(scene.base), "--rank", "2", "-o", folder, *more)


LONG = {
    "255 bytes": "x" * 255,
    "250 bytes": "y" * 250,
    "238 bytes": "z" * 238,
    "255 bytes in 128 letters": "ü" * 127 + "x",
}


@pytest.mark.parametrize("name", LONG)
def test_the_longest_name_that_a_file_system_allows_is_written(name: str, scene: Scene, here: Path) -> None:
    """Also what is beside it meanwhile, of which the name would be longer."""
    for more in ([], ["--overwrite"]):
        done = extract(scene, LONG[name], *more)
        assert done.exit_code == 0, done.output
        assert [path.name for path in here.iterdir()] == [LONG[name]]
        assert (here / LONG[name] / RECORD_FILE).is_file()


MODELS = ["user/nowhere", "--base", "user/nobody", "--to", "user/nothing"]
WRITING = {
    "port": MODELS,
    "compare": MODELS,
    "diagnose": MODELS,
    "extract": MODELS[:3],
    "apply": ["user/nowhere"],
    "rerun": ["user/nowhere"],
    "reproduce": ["1", "--tasks", "eurosat"],
    "demo": [],
}


@pytest.mark.parametrize("command", WRITING)
@pytest.mark.parametrize(
    ("folder", "cause"),
    [
        ("a/b/" + "x" * 256, "Error: the name 'xxx"),
        ("ü" * 128 + "/b", "Error: the name 'üüü"),
        ("/".join(["a" * 100] * 41), "Error: the path to 'aaa"),
        ("~nobody-here/out", "Error: the home folder in '~nobody-here/out' is not known"),
        (os.fsdecode(b"\xff/out"), "Error: '\\udcff/out' is not valid UTF-8"),
        ("/dev/null/out", "Error: nothing can be written into '/dev/null'"),
    ],
    ids=["name", "parent", "path", "home", "bytes", "file"],
)
def test_a_folder_that_cannot_be_made_is_told_before_any_work(
    command: str, folder: str, cause: str, hub: Hub, here: Path
) -> None:
    """Before a request: the models that are named are not on the Hub, which is not asked."""
    done = run(command, *WRITING[command], *([folder] if command == "demo" else ["-o", folder]))
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(cause)
    assert len(done.stderr.splitlines()) == 2
    assert hub.log == []
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "cause"),
    [
        (".", "'.' is the current folder, or contains it"),
        ("../here", "'../here' is the current folder, or contains it"),
        ("..", "'..' is the current folder, or contains it"),
        ("/", "'/' is the root folder"),
    ],
)
def test_the_folder_that_a_command_runs_in_is_not_moved_aside(
    folder: str, cause: str, scene: Scene, here: Path
) -> None:
    done = extract(scene, folder)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"Error: {cause}")
    assert list(here.parent.rglob("*")) == [here]


def test_what_a_command_made_for_its_lock_is_gone_after_a_refusal(scene: Scene, here: Path) -> None:
    done = run("extract", str(scene.folder / "nowhere"), "-o", "a/b/c")
    assert done.exit_code == 1
    assert list(here.iterdir()) == []


def test_a_model_whose_name_is_no_text_is_told_before_any_work(scene: Scene, here: Path) -> None:
    source = os.fsdecode(b"\xff")
    shutil.copytree(scene.tuned, here / source)
    done = run("extract", source, "--base", str(scene.base), "-o", "out")
    assert (done.exit_code, done.stderr.splitlines()[0]) == (
        1,
        "Error: the fine-tuned model: the name '\\udcff' is not valid UTF-8",
    )
    assert not (here / "out").exists()


# memory

LITTLE_MEMORY = """
import resource, sys
with open("/proc/self/statm") as statm:
    taken = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken, resource.RLIM_INFINITY))
from hf_bico.cli.main import main
from hf_bico.runtime import limits
limits._ENOUGH = 0  # in which the libraries can be loaded: they are
main(sys.argv[1:], prog_name="hf-bico")
"""


def test_too_small_an_address_space_is_told_before_any_work(scene: Scene, here: Path) -> None:
    """There OpenBLAS and torch end their process, or say that a library cannot be loaded."""
    words = ["extract", str(scene.tuned), "--base", str(scene.base), "-o", "out"]
    line = f"ulimit -v 400000; exec {command_line([sys.executable, '-m', 'hf_bico', *words])}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    cause, remedy = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert cause.startswith("Error: the 410 MB of address space are too little to load torch: ")
    assert remedy == "Remedy: raise the limit with 'ulimit -v unlimited', or run on a machine without one"
    assert list(here.iterdir()) == []


def test_an_address_space_that_is_used_up_leaves_nothing(scene: Scene, here: Path) -> None:
    """Whatever reader meets it, and whatever that makes of it."""
    words = ["port", *scene.arguments, "--method", "theseus", "--alpha", "1", "--no-eval", "-o", "out"]
    done = forks.run(*words, code=LITTLE_MEMORY)
    cause, remedy = done.stderr.splitlines()
    assert done.returncode == 1
    assert "of address space are too little: " in cause
    assert "ulimit -v" in remedy
    assert list(here.iterdir()) == []


# suggested lines


def pasted(line: str, place: Path) -> list[str]:
    """The words that `hf-bico` gets when this line is pasted into a shell."""
    folder = place.parent / "bin"
    folder.mkdir(exist_ok=True)
    script = folder / "hf-bico"
    script.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    script.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(["sh", "-c", line], cwd=place, env={"PATH": path}, capture_output=True, check=True)
    assert not (place / "pwned").exists()
    return [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]


def suggested(done: Result) -> str:
    assert done.exit_code == 0, done.output
    [line] = [line for line in done.stdout.splitlines() if line.startswith("Next: ")]
    return line.removeprefix("Next: ")


@pytest.mark.parametrize("name", ODD)
def test_a_suggested_push_can_be_pasted(name: str, hub: Hub, scene: Scene, here: Path) -> None:
    words = pasted(suggested(extract(scene, ODD[name])), here)
    assert words[-1] == "REPO"
    done = run(*words[:-1], "user/pushed", "--private")
    assert done.exit_code == 0, done.output
    assert "adapter_model.safetensors" in hub.repo("user/pushed").files()


@pytest.mark.parametrize("name", ODD)
def test_a_suggested_port_can_be_pasted(name: str, scene: Scene, here: Path) -> None:
    for source, own in ((scene.tuned, ODD[name]), (scene.target, f"{ODD[name]}2")):
        shutil.copytree(source, here / own)
    models = ["--base", str(scene.base), "--to", f"{ODD[name]}2", "--data", str(scene.data)]
    for words in (["plan", *models], ["port", *models, "--dry-run"]):
        line = suggested(run(*words, "--", ODD[name]))
        done = run(*pasted(line, here), "--dry-run")
        assert done.exit_code == 0, (line, done.output)


@pytest.mark.parametrize("name", ODD)
def test_a_remedy_and_a_recorded_command_can_be_pasted(name: str, scene: Scene, here: Path) -> None:
    """A remedy is one line, whatever the folder's name."""
    shutil.copytree(scene.tuned, here / ODD[name])
    line = push_command(Path(ODD[name]), "user/pushed", PushOptions(message="-m\n'"))
    assert line.isprintable()
    _, folder, *rest = pasted(line, here)
    assert os.path.samefile(folder, ODD[name])
    assert not folder.startswith("-")
    assert rest == ["user/pushed", "--message", "-m\n'"]
    shutil.copytree(scene.base, here / "base")
    assert run("extract", "--base", "base", "-o", "out", "--rank", "2", "--", ODD[name]).exit_code == 0
    again = pasted(str(read_any(here / "out").command), here)
    assert run(*again, "-o", "again").exit_code == 0
