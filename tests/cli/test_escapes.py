"""No text of a stranger's acts on the terminal: whatever a name or a record holds, it is shown and does nothing."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import unicodedata
import warnings
from pathlib import Path

import datasets
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from hf_bico.cli.exit import exit_on_error
from hf_bico.cli.main import main
from hf_bico.utils.text import Line, Table, format_table, visible
from support.fuzz_readers import make_llama
from support.paper import PAPER_WORDS
from support.scenes import Scene, make_scene
from support.terminals import run_in_terminal

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b8A\u202e\u2066\u200b\r\nFAKE LINE\x7f"
"""Sets the title, wipes the screen, moves up, turns the text, and begins a line of its own."""
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b8A\u202e\u2066\u200b\r\nFAKE LINE\x7f"
DATA, SHOWN_DATA = (
    "data\x1b]0;owned\x07\x9b8A\u202e\u2066\u200b\x7f",
    r"data\x1b]0;owned\x07\x9b8A\u202e\u2066\u200b\x7f",
)
"""Without brackets and line breaks, which are patterns to `datasets`."""
WEIGHTS = "open_clip_model.safetensors"


def require_harmless(text: str) -> None:
    """Our own colours and cursor movements may be there, but nothing of `EVIL`."""
    for hidden in ("\x1b]", "\x07", "\x1b[2J", "\x9b", "\u202e", "\u2066", "\u200b", "\x7f", "\nFAKE", "\rFAKE"):
        assert hidden not in text, repr(text[max(0, text.index(hidden) - 200) :][:400])


def test_what_acts_is_shown() -> None:
    assert visible(EVIL) == SHOWN
    require_harmless(visible(EVIL))
    assert visible("\udcff\t\x00\u2028\ufeff\U000e0041") == r"\udcff\t\x00\u2028\ufeff\U000e0041"
    assert visible(SHOWN) == SHOWN


def test_every_control_is_shown() -> None:
    """Of the format characters, only those stay that are seen: signs over numbers, and joints of hieroglyphs."""
    seen = re.compile("[\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd\U00013430-\U0001345f]")
    for number in range(0x110000):
        letter = chr(number)
        hidden = unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp") and not seen.match(letter)
        if hidden:
            assert visible(letter).isascii(), hex(number)
            assert visible(f"a{letter}b").isascii(), hex(number)
            assert visible(f"\u4e2d{letter}{letter}\u6587").count(letter) < 2, "none of many is kept"


@pytest.mark.parametrize(
    "text",
    [
        "annual crop, Straße, naïve, cafe\u0301, Łódź, ﬁne",
        "中文 日本語 한국어 葛\U000e0100飾区",
        "غابة مي\u200cرفت עברית",
        "क्\u200dष हिन्दी தமிழ் ไทย བོད་ཡིག ᠮᠣᠩᠭᠣᠯ",
        "\u2764\ufe0f\u200d\U0001f525 \U0001f469\U0001f3fd\u200d\U0001f680 1\ufe0f\u20e3 \U0001f1e9\U0001f1ea",
        "a\\x1b C:\\new  50 % — „…“ ½ ≤ π\u00a0€\u3000。",
    ],
)
def test_letters_of_every_script_and_emoji_stay(text: str) -> None:
    assert visible(text) == text


def test_tables_keep_their_lines() -> None:
    text = format_table([["model", EVIL], [EVIL, "1"]])
    assert len(text.splitlines()) == 2
    require_harmless(text)
    from io import StringIO

    from rich.console import Console

    console = Console(file=StringIO(), width=400, color_system=None)
    console.print(Table(["model", EVIL], [Line([EVIL, "1"], "best")]))
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    require_harmless(drawn)
    assert drawn.count(SHOWN) == 2


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Folders, a tensor, a class, a split's file and a column that are named by a stranger."""
    folder = tmp_path_factory.mktemp("scene")
    made = make_scene(folder)
    tuned, data = folder / f"tuned{EVIL}", folder / DATA
    shutil.copytree(made.tuned, tuned)
    state = load_file(tuned / WEIGHTS)
    save_file({**state, f"visual.{EVIL}": torch.ones(2)}, tuned / WEIGHTS)
    for split in ("train", "test"):
        rows = datasets.load_dataset("parquet", data_files=str(next(made.data.rglob(f"{split}-*"))), split="train")
        names = [f"{name}{EVIL}" for name in rows.features["label"].names]
        rows = rows.cast_column("label", datasets.ClassLabel(names=names)).add_column(EVIL, [EVIL] * len(rows))
        (data / "data").mkdir(parents=True, exist_ok=True)
        rows.to_parquet(data / "data" / f"{split}-00000-of-00001.parquet")
    return Scene(folder, tuned, made.base, made.target, data)


def run(*words: object, code: int = 0) -> Result:
    """`hf-bico` as if to a terminal, so that click strips nothing."""
    result = CliRunner().invoke(main, [str(word) for word in words], color=True)
    assert result.exit_code == code, result.output
    require_harmless(result.stdout)
    require_harmless(result.stderr)
    return result


@pytest.fixture(scope="module")
def ported(scene: Scene) -> Path:
    """A port of theirs, and a record that says more than it should."""
    folder = scene.folder / f"ported{EVIL}"
    done = run(*scene.port_by_paper, "-o", folder)
    assert f"visual.{SHOWN}" in done.stdout, "the notice names the tensor"
    assert SHOWN_DATA in done.stdout
    return folder


def evil_record(ported: Path, place: Path) -> Path:
    folder = Path(shutil.copytree(ported, place))
    record = json.loads((folder / "bico.json").read_text())
    record["notices"] = [EVIL]
    record["run"]["versions"] |= {f"torch{EVIL}": EVIL, "torch": EVIL}
    record["output"]["files"] |= {f"more{EVIL}": "ab" * 32}
    record["hf_bico"] = EVIL
    (folder / "bico.json").write_text(json.dumps(record))
    return folder


def test_a_plan(scene: Scene) -> None:
    words = [scene.tuned, "--base", scene.base, "--to", scene.target, "--data", scene.data]
    shown = run("plan", *words).stdout
    assert f"tuned{SHOWN}" in shown
    assert shown.splitlines().count("Ready to port.") == 1
    as_json = run("plan", *words, "--json").stdout
    assert as_json.isascii()
    command = json.loads(as_json)["command"]
    assert command.isprintable()
    typed = subprocess.run(["sh", "-c", f"printf '%s' {command}"], capture_output=True, check=True)
    assert EVIL.encode() in typed.stdout


def test_a_rerun_and_a_card(ported: Path, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(scene.folder)
    folder = evil_record(ported, tmp_path / f"out{EVIL}")
    shown = run("rerun", folder, "--device", "cpu", code=1).stdout
    assert f"Different: more{SHOWN}" in shown
    assert f"torch was {SHOWN}" in shown
    as_json = run("rerun", folder, "--device", "cpu", "--json", code=1).stdout
    assert as_json.isascii()
    assert f"more{EVIL}" in json.loads(as_json)["files"]
    assert f"out{SHOWN}" in run("card", folder).stdout
    require_harmless((folder / "README.md").read_text())


def test_a_measurement(ported: Path, scene: Scene, tmp_path: Path) -> None:
    assert SHOWN_DATA in run("eval", ported, "--data", scene.data, "--device", "cpu").stdout
    assert json.loads(run("eval", ported, "--data", scene.data, "--json").stdout)["data"] == DATA
    refused = run("eval", ported, "--data", scene.data, "--label-column", "nothing", code=1).stderr
    assert SHOWN in refused, "the columns that there are"


def test_a_comparison_and_a_diagnosis(scene: Scene, tmp_path: Path) -> None:
    some = [*scene.arguments[:-1], "8"]
    compared = run("compare", *some, "--methods", "naive", "--seeds", "1", "-o", tmp_path / "compared")
    assert f"tuned{SHOWN} to target" in compared.stdout
    assert f"{SHOWN_DATA}: " in compared.stderr, "a line for every number"
    diagnosed = run("diagnose", *some, "-o", tmp_path / f"diagnosed{EVIL}")
    assert f"samples of {SHOWN_DATA}" in diagnosed.stdout


def test_an_extract_and_what_it_is_applied_to(scene: Scene, tmp_path: Path) -> None:
    adapter = tmp_path / f"adapter{EVIL}"
    shown = run("extract", scene.tuned, "--base", scene.base, "--rank", "2", "-o", adapter).stdout
    assert f"tuned{SHOWN} over base" in shown
    assert f"visual.{SHOWN}" in shown
    shown = run("apply", adapter, "--to", scene.base, "-o", tmp_path / "applied").stdout
    assert f"adapter{SHOWN}" in shown


def test_errors_and_usage(scene: Scene, tmp_path: Path) -> None:
    assert r"tuned\x1b]0;owned" in run("extract", scene.tuned, code=1).stderr
    assert f"No such option '--{SHOWN}'" in run("plan", "a", "--to", "b", f"--{EVIL}", code=2).stderr
    assert f"No such command '{SHOWN}'" in run(EVIL, code=2).stderr
    assert SHOWN in run("port", "a", "--to", "b", "--method", EVIL, code=2).stderr
    told = run("card", f"no{EVIL}", "--json", code=1)
    assert json.loads(told.stdout)["error"]["cause"] == "there is no folder 'no" + " ".join(EVIL.split()) + "'"
    assert told.stdout.isascii()


def test_an_error_that_quotes_a_file(scene: Scene, tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "llama")
    for name, value in (("model_type", EVIL), ("hidden_act", EVIL), ("rope_parameters", {"rope_type": EVIL})):
        config = {**json.loads((folder / "config.json").read_text()), name: value}
        spoilt = Path(shutil.copytree(folder, tmp_path / name))
        (spoilt / "config.json").write_text(json.dumps(config))
        words = ["--base", spoilt, "--to", spoilt, "--data", scene.data, "-n", "100", "-o", tmp_path / "out"]
        assert "owned" in run("port", spoilt, *words, code=1).stderr, name


def test_logs_and_warnings_of_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    handler, log = logging.StreamHandler(), logging.getLogger("a library")
    log.addHandler(handler)
    before = logging.getLogRecordFactory(), warnings.formatwarning
    try:
        with exit_on_error():
            log.error("cannot read %s", EVIL)
            try:
                raise ValueError(EVIL)
            except ValueError:
                log.exception(EVIL)
            text = warnings.formatwarning(EVIL, UserWarning, f"{EVIL}.py", 3)
    finally:
        log.removeHandler(handler)
    told = capsys.readouterr().err
    assert told.count(SHOWN) == 2
    assert r"ValueError: \x1b]0;owned" in told
    for shown in (told, text):
        for hidden in ("\x1b", "\x07", "\x9b", "\u202e", "\x7f", "\r"):
            assert hidden not in shown
    assert (logging.getLogRecordFactory(), warnings.formatwarning) == before


@pytest.mark.parametrize("command", ["plan", "port", "compare"])
def test_on_a_real_terminal(command: str, scene: Scene, tmp_path: Path) -> None:
    more = {
        "plan": [],
        "port": [*PAPER_WORDS, "-n", "8", "-o", str(tmp_path / EVIL)],
        "compare": ["--methods", "naive", "--seeds", "1", "-n", "8", "-o", str(tmp_path / EVIL)],
    }[command]
    names = [str(scene.tuned), "--base", str(scene.base), "--to", str(scene.target), "--data", str(scene.data)]
    seen = run_in_terminal([command, *names, *more], 200)
    assert seen.code == 0, seen.text
    require_harmless(seen.written)
    assert not [line for line in seen.screen if line.startswith("FAKE")]
    assert r"\x1b]0;owned" in seen.text


def test_a_traceback_for_those_who_ask(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hf_bico", "card", f"no{EVIL}"]
    done = subprocess.run(command, env={**os.environ, "HF_BICO_DEBUG": "1"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert r"there is no folder 'no\x1b]0;owned" in done.stderr
    require_harmless(done.stderr)
