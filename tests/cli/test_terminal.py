"""On a real terminal: tables that fit its width, colours unless they are unwanted, bars that go away again."""

from __future__ import annotations

import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hf_bico.cli.main import main
from hf_bico.cli.progress import PORT_SHARES, STAGES
from hf_bico.utils.text import BEST, WORSE, Line, Table
from support.paper import PAPER_WORDS
from support.scenes import Scene, make_scene
from support.terminals import Seen, run_in_terminal

DONE = "\N{CHECK MARK}"
CLOCK = r"\d:\d\d:\d\d"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture
def shown(scene: Scene, tmp_path: Path) -> Callable[..., Seen]:
    def run(command: str, columns: int, *options: str, pipe_stdout: bool = False, **environment: str) -> Seen:
        recipe = PAPER_WORDS if command == "port" else ()
        words = [command, *scene.arguments, *recipe, *options, "-o", str(tmp_path / "out"), "--overwrite"]
        return run_in_terminal(words, columns, pipe_stdout, **environment)

    return run


def test_a_port_on_a_narrow_terminal(shown: Callable[..., Seen]) -> None:
    seen = shown("port", 60)
    assert seen.code == 0, seen.text
    assert seen.coloured
    screen = seen.screen
    assert [line for line in screen if line.startswith("Outlook: ")], "the bars that go on do not wipe it off"
    assert not [line for line in screen if "━━" in line]
    table = screen[screen.index(next(line for line in screen if line.startswith("model"))) :]
    assert [line for line in table if line.startswith(("target, ported", "target, zero-shot"))]
    header = next(line for line in table if line.startswith("role"))
    roles = [line for line in table if line.startswith(("attn.", "mlp.", "proj"))]
    assert len(roles) % 7 == 0
    assert all(len(line) <= 60 for line in [header, *roles])
    assert "…" not in "".join(table), "nothing is cut off"


def test_stages_keep_their_seconds_and_the_bar_goes_away(shown: Callable[..., Seen]) -> None:
    seen = shown("port", 120, "--batch-size", "3", pipe_stdout=True)
    assert seen.code == 0, seen.text
    assert re.search(r"running both models on the samples +\d+/24\b", seen.text), "the current stage counts"
    assert re.search(rf"━+ +{CLOCK} +left", seen.text)
    *left, last = [line for line in seen.screen if line]
    assert last.startswith("Carrying it took ")
    stages = [re.fullmatch(rf"{DONE} (.+?) +\d+\.\d s", line) for line in left]
    assert {stage and stage[1] for stage in stages} == {STAGES[name] for name in (*PORT_SHARES, "download")}
    assert "\x1b" not in seen.piped
    assert DONE not in seen.piped


def test_what_is_piped_is_the_plain_text(shown: Callable[..., Seen], scene: Scene, tmp_path: Path) -> None:
    dumb = shown("port", 60, TERM="dumb")
    words = [*scene.port_by_paper, "-o", str(tmp_path / "out"), "--overwrite"]
    plain = CliRunner().invoke(main, words).stdout
    told = [line for line in dumb.written.splitlines() if not line.startswith(("seconds:", "Carrying it took "))]
    assert told == plain.splitlines()
    assert "\x1b" not in dumb.written


def test_a_comparison_without_colours(shown: Callable[..., Seen], tmp_path: Path) -> None:
    methods = ["--methods", "naive,theseus,bico", "--seeds", "1", "-n", "8,12"]
    seen = shown("compare", 120, *methods, NO_COLOR="1")
    assert seen.code == 0, seen.text
    assert not seen.coloured
    assert re.search(r"comparing +\d+/\d+", seen.text)
    assert re.search(rf"━+ +(?:{CLOCK}|-:--:--) +left", seen.text)
    screen = [line for line in seen.screen if line]
    assert screen[0] == "tuned to target"
    assert screen[-1] == f"Written to {tmp_path / 'out'}"
    assert not any("left" in line or "━━" in line for line in screen)
    best = [line for line in screen if line.endswith(BEST)]
    worse = [line for line in screen if line.endswith(WORSE)]
    assert best or worse, "how good a method is can be read without colours"
    assert all(re.search(r" -\d+\.\d+ ", line) for line in worse)
    assert len([line for line in screen if line.startswith(("THESEUS", "BiCo"))]) == 4


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_sentences_wrap_between_words_and_commands_stay_whole(columns: int, scene: Scene) -> None:
    words = ["plan", str(scene.tuned), "--to", str(scene.target), "--base", str(scene.base), "--data", str(scene.data)]
    written = run_in_terminal(words, columns).text.splitlines()
    plain = CliRunner().invoke(main, words).stdout.splitlines()
    assert [line for line in written if line.startswith("Next: ")] == [plain[-1]]
    assert all(len(line) <= columns for line in written if not line.startswith("Next: "))
    assert " ".join(" ".join(written).split()) == " ".join(" ".join(plain).split()), "no word is broken"
    folder = "long/" * 20 + "x"
    assert f"'{folder}'" in run_in_terminal(["card", folder], columns).text.splitlines(), "what is quoted stays whole"


def test_an_error_is_coloured_unless_no_colours_are_wanted() -> None:
    words = ["card", "nowhere-at-all"]
    plain = "Error: there is no folder 'nowhere-at-all'\nRemedy: name a folder that hf-bico wrote\n"
    seen = run_in_terminal(words, 80)
    assert seen.coloured
    assert seen.text == plain
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert run_in_terminal(words, 80, **environment).written == plain


def test_no_color_reaches_all_that_click_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    import click

    @click.command()
    def coloured() -> None:
        click.secho("red", fg="red")

    monkeypatch.setitem(main.commands, "coloured", coloured)
    monkeypatch.setattr("hf_bico.cli.console.is_screen", lambda stream: True)
    assert CliRunner().invoke(main, ["coloured"], color=True).output == "\x1b[31mred\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert CliRunner().invoke(main, ["coloured"], color=True).output == "red\n"


@given(
    st.lists(st.text(alphabet="abc de", min_size=1, max_size=12), min_size=2, max_size=9),
    st.integers(min_value=30, max_value=120),
)
def test_a_table_of_any_width_keeps_every_cell(header: list[str], width: int) -> None:
    lines = [Line([f"{row}-{column}" for column, _ in enumerate(header)], BEST if row else "") for row in range(3)]
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(Table(header, lines))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in shown.splitlines())
    assert all(cell in shown.split() for line in lines for cell in (*line.cells, *line.mark.split()))


def test_columns_that_do_not_fit_stand_below_with_their_lines() -> None:
    console = Console(file=StringIO(), width=30, color_system=None)
    console.print(Table(["model", "first column", "second"], [Line(["a long name", "1.0", "22.0"], WORSE)]))
    shown = [line.split() for line in console.file.getvalue().splitlines() if line.strip()]  # type: ignore[attr-defined]
    assert ["a", "long", "name", "1.0", "22.0"] in shown
    assert ["a", "long", "name", "worse"] in shown
