"""`hf-bico demo`: the whole job on models of its own, by the commands that a user would type."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
from click.testing import CliRunner

from hf_bico.cli.main import main
from hf_bico.experiments.demo.world import World
from support import forks


@pytest.fixture(scope="module")
def shown(worlds: Callable[[int], World], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The demo's folder, and what it printed; the trained models are those of the other tests."""
    folder = tmp_path_factory.mktemp("demo") / "small world"  # a blank in the name, as people have them
    shutil.copytree(worlds(0).folder, folder)
    ran = forks.run("demo", folder.name, cwd=folder.parent)
    assert ran.returncode == 0, ran.stderr
    return folder, ran.stdout


def test_every_step_is_a_command_that_can_be_typed(shown: tuple[Path, str]) -> None:
    lines = [line for line in shown[1].splitlines() if line.startswith("$ hf-bico ")]
    assert [line.split()[2] for line in lines] == ["plan", "port", "eval", "compare", "compare", "card"]


def test_the_table_is_what_the_comparisons_measured(shown: tuple[Path, str]) -> None:
    """Mean of three draws: BiCo is 5 points above zero-shot, naive and THESEUS; on plain digits it does not help."""
    folder, printed = shown
    names = ["target, zero-shot", "naive (padded)", "THESEUS", "BiCo", "BiCo-Fisher", "BiCo-path", "target, fine-tuned"]
    table = printed.partition("Both tasks")[2]
    assert "models of seed 0" in table
    found = {}
    for column, task in enumerate(("inverted", "plain")):
        cells = json.loads((folder / f"compared-{task}" / "comparison.json").read_text())["cells"]
        for name, method in zip(
            names, ["target", "naive", "theseus", "bico", "bico-fisher", "bico-path", "target fine-tuned"], strict=True
        ):
            values = [cell["value"] for cell in cells if cell["method"] == method and cell["n"] in (None, 100)]
            assert len(values) == (1 if method in ("target", "naive", "target fine-tuned") else 3)
            found[task, name] = 100 * fmean(values)
            line = next(line for line in table.splitlines() if line.startswith(f"{name}  "))
            assert line.removeprefix(name).split()[column] == f"{found[task, name]:.1f}"
    for other in ("target, zero-shot", "naive (padded)", "THESEUS"):
        assert found["inverted", "BiCo"] >= found["inverted", other] + 5
    assert found["plain", "BiCo"] <= found["plain", "target, zero-shot"] + 1


def test_the_card_s_own_snippet_loads_what_was_written(shown: tuple[Path, str]) -> None:
    ported = shown[0] / "ported"
    snippet = (ported / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    ran = forks.run(code=snippet, cwd=ported)
    assert ran.returncode == 0, ran.stderr
    assert len(re.findall(r"^[\d.]+%  \w+$", ran.stdout, re.MULTILINE)) == 5


def test_what_to_look_at_is_there_and_what_to_try_works(
    shown: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, printed = shown
    look, _, following = printed.partition("Look at")[2].partition("Try next:")
    files = [line.split()[0] for line in look.splitlines()[1:] if line]
    assert len(files) == 3
    assert all((folder / file).stat().st_size > 1000 for file in files)
    lines = [shlex.split(line) for line in following.splitlines() if line.strip()]
    if not shutil.which("hf-bico"):
        dot, script = lines.pop(0)
        assert (dot, (folder.parent / script).samefile(Path(sys.prefix) / "bin" / "activate")) == (".", True)
    assert lines[0] == ["cd", folder.name]
    monkeypatch.chdir(folder)
    ran = []
    for line in lines[1:]:
        if "OWNER/YOUR-FINE-TUNE" not in line:
            result = CliRunner().invoke(main, line[1:])
            assert result.exit_code == 0, (line, result.output)
            ran.append(line[1])
    assert ran == ["port", "port", "rerun"]


def test_a_second_time_it_keeps_what_is_there(shown: tuple[Path, str]) -> None:
    folder, printed = shown
    files = [*folder.glob("models/*/*.safetensors"), *folder.glob("compared-*/cells.jsonl")]
    before = {file: file.stat().st_mtime_ns for file in files}
    assert len(before) >= 6
    again = CliRunner().invoke(main, ["demo", str(folder), "--json"])
    assert again.exit_code == 0, again.output
    assert {file: file.stat().st_mtime_ns for file in before} == before
    found = json.loads(again.stdout)
    assert set(found["comparisons"]) == {"inverted", "plain"}
    assert (found["seed"], found["folder"]) == (0, str(folder))
    ported = next(entry["value"] for entry in found["record"]["evaluation"] if entry["model"] == "ported")
    assert f"Accuracy {ported:.1%}" in printed


def test_another_seed_or_a_folder_of_ones_own_is_left_alone(shown: tuple[Path, str], tmp_path: Path) -> None:
    other = CliRunner().invoke(main, ["demo", str(shown[0]), "--seed", "1"])
    assert (other.exit_code, "holds the small world of seed 0" in other.stderr) == (1, True)
    (tmp_path / "notes.txt").write_text("mine")
    own = CliRunner().invoke(main, ["demo", str(tmp_path)])
    assert (own.exit_code, "is not empty" in own.stderr) == (1, True)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    blocked = CliRunner().invoke(main, ["demo", str(tmp_path / "notes.txt" / "below")])
    assert (blocked.exit_code, "cannot be written" in blocked.stderr) == (1, True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "small-world.json").write_text("[]")
    broken = CliRunner().invoke(main, ["demo", str(tmp_path / "broken")])
    assert (broken.exit_code, "is not what this tool writes" in broken.stderr) == (1, True)


def test_ctrl_c_while_a_model_is_trained_leaves_no_half_of_it(tmp_path: Path) -> None:
    process = forks.start("demo", "small", cwd=tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if "pretraining narrow" in line:
            process.send_signal(signal.SIGINT)
            break
    rest = process.communicate()[1]
    assert process.returncode == 130
    assert rest.strip() == "Interrupted: the same command goes on from what is made."
    assert {path.name for path in (tmp_path / "small").iterdir()} == {"small-world.json", "data"}, "no half of a model"
