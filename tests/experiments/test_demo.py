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

from hf_bico.cli.first_steps import outcome
from hf_bico.cli.main import main
from hf_bico.experiments.compare.cells import Cell, method_label
from hf_bico.experiments.compare.comparison import Comparison
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
    """Mean of three draws: BiCo at alpha 1 is 5 points above zero-shot, naive and THESEUS, and BiCo-path above that."""
    folder, printed = shown
    methods = ["target", "naive@1", "theseus@1", "bico@1", "bico", "bico-path", "target fine-tuned"]
    names = [method_label(method) for method in methods]
    table = printed.partition("Both tasks")[2]
    assert "models of seed 0" in table
    found = {}
    for column, task in enumerate(("inverted", "plain")):
        cells = json.loads((folder / f"compared-{task}" / "comparison.json").read_text())["cells"]
        for name, method in zip(names, methods, strict=True):
            values = [cell["value"] for cell in cells if cell["method"] == method and cell["n"] in (None, 100)]
            assert len(values) == (1 if method in ("target", "naive@1", "target fine-tuned") else 3)
            found[task, name] = 100 * fmean(values)
            line = next(line for line in table.splitlines() if line.startswith(f"{name}  "))
            assert line.removeprefix(name).split()[column] == f"{found[task, name]:.1f}"
    for other in ("target, zero-shot", "naive (padded), alpha 1", "THESEUS, alpha 1"):
        assert found["inverted", "BiCo, alpha 1"] >= found["inverted", other] + 5
    assert found["inverted", "BiCo-path"] >= found["inverted", "BiCo, alpha 1"]
    assert found["plain", "BiCo, alpha 1"] <= found["plain", "target, zero-shot"] + 1


def test_it_says_whether_a_port_by_default_helps(shown: tuple[Path, str]) -> None:
    folder, printed = shown
    lines = printed.partition("What a port does by default")[2].splitlines()[1:3]
    gains = {}
    for task in ("inverted", "plain"):
        rows = Comparison.load(folder / f"compared-{task}").rows()
        gains[task] = next(100 * (row.gain or 0) for row in rows if (row.method, row.n) == ("bico-path", 100))
    assert lines == [
        f"  inverted: +{gains['inverted']:.1f} points, helped",
        "  plain: held back, the target stays as it is",
    ]
    assert gains["inverted"] > 10
    assert gains["plain"] == pytest.approx(0)


@pytest.mark.parametrize(
    ("values", "held_back", "said"),
    [
        ((0.7, 0.6, 0.5), 0, "+10.0 points, helped"),
        ((0.4, 0.5, 0.5), 0, "-3.3 points, hurt"),
        ((0.5, 0.5, 0.4998), 0, "+0.0 points, changed nothing"),
        ((0.5, 0.5, 0.65), 2, "+5.0 points, helped; held back in 2 of 3 draws"),
        ((0.5, 0.5, 0.5), 3, "held back, the target stays as it is"),
    ],
)
def test_a_port_by_default_helps_or_hurts_or_is_held_back(values: tuple[float, ...], held_back: int, said: str) -> None:
    cells = [
        Cell("digits", "bico-path", value, n=100, seed=seed, held_back=seed < held_back)
        for seed, value in enumerate(values)
    ]
    other = Cell("digits", "bico-path", 0.9, n=10, seed=0)
    assert outcome(Comparison("a", "b", (Cell("digits", "target", 0.5), other, *cells))) == said


def test_a_port_that_is_held_back_leaves_out_what_needs_it(
    shown: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo ends well all the same; here nothing passes the veto."""
    folder = tmp_path / "world"
    shutil.copytree(shown[0], folder)
    shutil.rmtree(folder / "ported")
    monkeypatch.setattr("hf_bico.porting.transfer.passes_veto", lambda gain: False)
    ran = CliRunner().invoke(main, ["demo", str(folder)])
    assert ran.exit_code == 0, ran.output
    lines = [line.split()[2] for line in ran.stdout.splitlines() if line.startswith("$ hf-bico ")]
    assert lines == ["plan", "port", "compare", "compare"]
    assert "There is no port to measure" in ran.stdout
    assert not (folder / "ported").exists()
    after = ran.stdout.partition("Look at")[2]
    assert "ported/" not in after
    assert "rerun" not in after
    as_json = CliRunner().invoke(main, ["demo", str(folder), "--json"])
    assert as_json.exit_code == 0, as_json.output
    assert json.loads(as_json.stdout)["record"] is None


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
    assert (blocked.exit_code, "nothing can be written into" in blocked.stderr) == (1, True)
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
