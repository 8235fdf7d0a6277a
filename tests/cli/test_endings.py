"""How commands end: one JSON object whatever happens, one line on Ctrl-C and nothing left, no traceback for anybody."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import hf_bico
from hf_bico import errors
from hf_bico.cli.exit import print_error
from hf_bico.cli.main import main
from support import forks
from support.hub import Hub
from support.loopback import TOKEN
from support.paper import PAPER, PAPER_WORDS
from support.scenes import SOURCE, Scene, make_scene
from support.toys import WRITERS, random_state

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """The usual one, with a target of the source's architecture, a LoRA of the fine-tune, and a port."""
    made = make_scene(tmp_path_factory.mktemp("scene"))
    WRITERS["open_clip"](made.folder / "twin", SOURCE, random_state(SOURCE, 3))
    hf_bico.extract(made.tuned, made.base, rank=2).save(made.folder / "lora")
    where: dict[str, Any] = {"base": made.base, "data": str(made.data)}
    hf_bico.port(made.tuned, made.target, **where, n=8, evaluate=False, **PAPER).save(made.folder / "ported")
    return made


@pytest.fixture(autouse=True)
def _here(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(scene.folder)


MODELS = ["tuned", "--base", "base", "--to", "target"]
SMALL = [*MODELS, "--data", "pictures", "-n", "8"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="hf-bico")


def the_object(result: Result) -> dict[str, Any]:
    """Stdout, which is one JSON object in one line."""
    assert result.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(result.stdout)
    return found


SUCCESSES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "port": (lambda out: [*SMALL, *PAPER_WORDS, "--no-eval", "-o", str(out)], "record"),
    "plan": (lambda out: MODELS, "sites"),
    "compare": (lambda out: [*SMALL, "--methods", "naive", "--seeds", "1", "-o", str(out)], "comparison"),
    "eval": (lambda out: ["target", "--data", "pictures", "-n", "5"], "value"),
    "diagnose": (lambda out: [*SMALL, "-o", str(out)], "diagnosis"),
    "reproduce": (lambda out: [], "tables"),
    "extract": (lambda out: ["tuned", "--base", "base", "--rank", "2", "-o", str(out)], "record"),
    "apply": (lambda out: ["lora", "--to", "base", "-o", str(out)], "record"),
    "rerun": (lambda out: ["ported"], "same"),
    "card": (lambda out: ["ported"], "card"),
    "push": (lambda out: ["ported", "user/pushed"], "commit"),
    "completion": (lambda out: ["zsh"], "script"),
    "skill": (lambda out: [], "skill"),
}
ELSEWHERE = {"demo"}
"""Takes a minute: its JSON is read in its own tests."""


def test_every_command_is_here() -> None:
    assert set(SUCCESSES) | ELSEWHERE == set(main.commands)


@pytest.mark.parametrize("name", SUCCESSES)
def test_success_is_one_object(name: str, hub: Hub, tmp_path: Path) -> None:
    words, key = SUCCESSES[name]
    result = run(name, *words(tmp_path / "out"), "--json")
    assert result.exit_code == 0, result.output
    found = the_object(result)
    assert key in found
    assert "error" not in found


FAILURES: dict[str, list[str]] = {
    "port": ["no/such folder", "--to", "target"],
    "plan": ["no/such folder", "--to", "target"],
    "compare": ["no/such folder", "--to", "target"],
    "eval": ["no/such folder", "--data", "pictures"],
    "diagnose": ["no/such folder", "--to", "target"],
    "extract": ["no/such folder"],
    "apply": ["no/such folder"],
    "rerun": ["no/such folder"],
    "card": ["no/such folder"],
    "push": ["no/such folder", "user/pushed"],
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_one_object_and_two_lines(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(name, *FAILURES[name], "--json")
    assert result.exit_code == 1
    error = the_object(result)["error"]
    assert result.stderr == f"Error: {error['cause']}\nRemedy: {error['remedy']}\n"
    assert issubclass(getattr(errors, error["kind"]), errors.BicoError)
    assert "no/such folder" in error["cause"]


def test_every_command_that_can_fail_is_here() -> None:
    # what reproduce names is on the Hub: it fails in its own tests
    assert set(FAILURES) | {"completion", "reproduce", "skill"} | ELSEWHERE == set(main.commands)


@pytest.mark.parametrize("name", sorted(main.commands))
def test_a_wrong_command_line_is_one_object_too(name: str) -> None:
    result = run(name, "--no-such-option", "--json")
    assert result.exit_code == 2
    error = the_object(result)["error"]
    assert error["kind"] == "NoSuchOption"
    assert "--no-such-option" in error["cause"]
    assert error["remedy"] == f"see 'hf-bico {name} --help'"
    assert error["cause"] in result.stderr


def test_wrong_words_that_we_find_ourselves_are_one_object_too() -> None:
    result = run("port", "a", "--to", "b", "--rank", "none", "--json")
    assert result.exit_code == 2
    assert the_object(result)["error"]["kind"] == "RankError"
    mistyped = run("prot", "--json")
    assert mistyped.exit_code == 2
    assert "Did you mean 'port'?" in the_object(mistyped)["error"]["cause"]


def test_without_json_nothing_of_a_failure_is_on_stdout() -> None:
    for words in (["card", "no/such folder"], ["port", "--no-such-option"], ["prot"]):
        assert run(*words).stdout == ""


def interrupt(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_is_one_object_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_bico.reports.model_cards.write_card", interrupt)
    result = run("card", "ported", "--json")
    assert result.exit_code == 130
    assert result.stderr == "Interrupted: nothing was written.\n"
    error = the_object(result)["error"]
    assert error["kind"] == "KeyboardInterrupt"
    assert error["cause"] == "interrupted: nothing was written"


def test_ctrl_c_before_a_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main.commands["card"], "invoke", interrupt)
    result = run("card", "ported")
    assert result.exit_code == 130
    assert result.stderr == "Interrupted: nothing was done.\n"


MOMENTS: dict[str, tuple[list[str], str, str]] = {
    "plan": (["plan", *MODELS], "hf_bico.porting.planner.make_plan", "nothing was written"),
    "extract": (
        ["extract", "tuned", "--base", "base", "-o", "OUT"],
        "hf_bico.porting.task_arithmetic.format_change",
        "nothing was written",
    ),
    "extract, while writing": (
        ["extract", "tuned", "--base", "base", "-o", "OUT"],
        "hf_bico.porting.result.write_card",
        "nothing was written",
    ),
    "apply": (
        ["apply", "lora", "--to", "base", "-o", "OUT"],
        "hf_bico.porting.result.write_card",
        "nothing was written",
    ),
    "eval": (
        ["eval", "target", "--data", "pictures"],
        "hf_bico.alignment.objectives.base.logits_of",
        "nothing was written",
    ),
    "port, while writing": (
        ["port", *SMALL, *PAPER_WORDS, "--no-eval", "-o", "OUT"],
        "hf_bico.porting.result.write_card",
        "nothing was written",
    ),
    "rerun": (["rerun", "ported", "-o", "OUT"], "hf_bico.porting.result.write_card", "nothing was written"),
    "rerun, kept nowhere": (["rerun", "ported"], "hf_bico.porting.result.write_change", "nothing was written"),
}
_INTERRUPT = (
    "import importlib, signal, sys\n"
    "place, _, name = {place!r}.rpartition('.')\n"
    "def stopped(*arguments, **options):\n"
    "    signal.raise_signal(signal.SIGINT)\n"
    "target = importlib.import_module(place)\n"
    "assert hasattr(target, name)\n"
    "setattr(target, name, stopped)\n"
    "from hf_bico.cli.main import main\n"
    "main({arguments!r}, prog_name='hf-bico')\n"
)


def stopped(arguments: list[str], place: str, temporary: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that sends itself SIGINT where it would call this function."""
    temporary.mkdir()
    code = _INTERRUPT.format(place=place, arguments=arguments)
    own = {**os.environ, "TMPDIR": str(temporary), **environment}
    return forks.run(code=code, env=own)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_real_interrupt_leaves_one_line_and_nothing_else(moment: str, scene: Scene, tmp_path: Path) -> None:
    words, place, said = MOMENTS[moment]
    arguments = [str(tmp_path / "out") if word == "OUT" else word for word in words]
    before = sorted(scene.folder.iterdir())
    done = stopped(arguments, place, tmp_path / "temporary")
    assert done.returncode == 130
    assert done.stdout == "" or (moment == "port, while writing" and done.stdout.startswith("Outlook: "))
    assert done.stderr == f"Interrupted: {said}.\n"
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "temporary"], "neither a result nor a scratch folder stays"
    assert sorted(scene.folder.iterdir()) == before


def test_a_real_interrupt_of_a_push_takes_the_empty_repo_back(hub: Hub, scene: Scene, tmp_path: Path) -> None:
    environment = hub.environment(tmp_path / "home", TOKEN)
    arguments = ["push", "ported", "user/pushed"]
    done = stopped(arguments, "hf_bico.hub.push._commit", tmp_path / "temporary", **environment)
    assert done.returncode == 130
    assert done.stderr == "Interrupted: look at user/pushed before you push again.\n"
    assert ("model", "user/pushed") not in hub.repos
    assert list((tmp_path / "temporary").iterdir()) == []


_LOST = """
import signal, sys, time, weakref
from hf_bico.cli import exit
from hf_bico.cli.exit import install_signal_handlers
exit._RESEND_DELAY = float(sys.argv[2])
class Thing: pass
install_signal_handlers(lambda: None)
thing = Thing()
seen = weakref.ref(thing, lambda _: signal.raise_signal(int(sys.argv[1])))
try:
    del thing  # Python can raise nothing from there, says so with a traceback, and goes on
    time.sleep(30)
except BaseException as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "TerminatedBySignal")]
)
@pytest.mark.parametrize("delay", [0, 0.01])  # at once, it may come where the first one was lost
def test_a_signal_in_a_finalizer_is_not_lost(number: int, raised: str, delay: float) -> None:
    done = forks.run(str(int(number)), str(delay), code=_LOST)
    assert (done.stdout, done.stderr) == (f"{raised}\n", "")


def test_a_closed_pipe_ends_without_a_word(tmp_path: Path) -> None:
    command = f"{BIN / 'hf-bico'} plan tuned --base base --to target 2>{tmp_path / 'stderr'} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("source      tuned")
    assert (tmp_path / "stderr").read_text() == ""


def broken(*arguments: Any, **options: Any) -> None:
    raise RuntimeError("a bug\nin two lines")


def test_a_reader_that_went_away_stops_no_push(hub: Hub, scene: Scene, tmp_path: Path) -> None:
    process = forks.start(*scene.port_by_paper, "-o", "out", "--push-to", "user/new", cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    process.communicate()
    assert {"README.md", "bico.json", "open_clip_model.safetensors"} <= set(hub.repo("user/new").files())


def test_what_a_record_says_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(errors.RecordError("made from '\x1b]0;title\x07\x1b[2Jx\u202e'", "look\nfor it"))
    shown = r"Error: made from '\x1b]0;title\x07\x1b[2Jx\u202e'", r"Remedy: look\nfor it"
    assert tuple(capsys.readouterr().err.splitlines()) == shown


@pytest.mark.parametrize("redirected", [">&-", ">/dev/full"])
def test_where_nothing_can_be_written_there_is_no_traceback(redirected: str, tmp_path: Path) -> None:
    line = f"{shlex.quote(sys.executable)} -m hf_bico card nowhere --json {redirected}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "Error: there is no folder 'nowhere'"
    assert "Traceback" not in done.stderr


def test_a_bug_is_two_lines_and_its_traceback_is_there_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_bico.reports.model_cards.write_card", broken)
    result = run("card", "ported", "--json")
    assert result.exit_code == 1
    cause, remedy = result.stderr.splitlines()
    number = re.fullmatch(r"Error: unexpected RuntimeError: a bug \[(bico-[0-9a-f]{8})\]", cause)
    assert number is not None
    assert "HF_BICO_DEBUG=1" in remedy
    assert the_object(result)["error"]["kind"] == "UnforeseenError"
    assert number[1] in run("card", "ported").stderr, "the same bug has the same number"
    monkeypatch.setenv("HF_BICO_DEBUG", "1")
    asked = run("card", "ported")
    assert isinstance(asked.exception, RuntimeError)


def test_a_command_that_runs_another_ends_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the demo does."""
    import click

    from hf_bico.cli.exit import exit_on_error
    from hf_bico.cli.options import output_options

    @click.command()
    @output_options
    def outer(as_json: bool, quiet: bool) -> None:
        with exit_on_error() as ending:
            ending.interrupted = "the outer one knows"
            main(["card", "no/such folder" if quiet else "ported"], prog_name="hf-bico", standalone_mode=False)

    monkeypatch.setitem(main.commands, "outer", outer)
    failed = run("outer", "-q", "--json")
    assert failed.exit_code == 1
    assert the_object(failed)["error"]["kind"] == "RepoNotFoundError"
    monkeypatch.setattr("hf_bico.reports.model_cards.write_card", interrupt)
    assert run("outer").stderr == "Interrupted: the outer one knows.\n"


def test_the_command_of_a_record_holds_nothing_that_would_be_refused(scene: Scene) -> None:
    """From Python a setting that the method does not look at is let through."""
    options: dict[str, Any] = {"n": 8, "evaluate": False, "path_steps": 3, "train_steps": 5, **PAPER}
    ported = hf_bico.port(scene.tuned, scene.target, base=scene.base, data=str(scene.data), **options)
    typed = str(ported.record.command).split()
    assert typed[:2] == ["hf-bico", "port"]
    assert run(*typed[1:], "--dry-run").exit_code == 0


def dry(*words: str) -> Result:
    return run("port", *words, "--dry-run")


def test_a_dry_run_asks_the_method() -> None:
    for method in ("transfusion", "gradfix"):
        refused = dry(*MODELS, "--method", method)
        assert refused.exit_code == 1
        assert "UnsuitableMethodError" in dry(*MODELS, "--method", method, "--json").stdout
        assert dry(*MODELS[:-1], "twin", "--method", method).exit_code == 0
    assert "Ready to port." in dry(*MODELS, "--method", "naive", "--alpha", "1").stdout
    assert "--data DATA" not in dry(*MODELS, "--method", "naive", "--alpha", "1").stdout
    assert "Not yet: the data set to calibrate on is not known" in dry(*MODELS, "--method", "theseus").stdout
    refused = dry(*MODELS, "--data", "pictures", "--method", "naive", "--control")
    assert "naive does not pair any" in refused.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--polish", "--device-map", "auto"], "--device-map spreads models that are not trained"),
        (["--polish", "--objective", "contrastive"], "this objective has neither"),
        (["--unlabelled", "pictures"], "neither was asked for"),
        (["--no-special-tokens"], "reads images"),
        (["--probe"], "--probe fits a classifier's head"),
    ],
)
@pytest.mark.parametrize("method", [[], ["--method", "bico"], ["--method", "naive"]], ids=["auto", "bico", "naive"])
def test_a_dry_run_refuses_what_a_port_refuses(words: list[str], said: str, method: list[str]) -> None:
    line = [*MODELS, "--data", "pictures", *words, *method]
    planned, ported = dry(*line), run("port", *line)
    assert said in planned.stderr
    assert (planned.exit_code, planned.stderr) == (ported.exit_code, ported.stderr)


@pytest.mark.parametrize("words", [["--readout"], ["--polish"], ["--method", "naive", "--alpha", "1", "--polish"]])
def test_a_dry_run_of_what_needs_data_is_ready_with_data(words: list[str]) -> None:
    assert "Not yet: the data set to calibrate on is not known" in dry(*MODELS, *words).stdout
    assert "Ready to port." in dry(*MODELS, "--data", "pictures", *words).stdout


@pytest.mark.parametrize(
    ("method", "options", "form"),
    [
        ("bico", [], "adapter"),
        ("theseus", [], "adapter"),
        ("gradfix", [], "full"),
        ("fewshot", [], "full"),
        ("gradfix", ["--rank", "2"], "adapter"),
        ("gradfix", ["--format", "delta"], "delta"),
    ],
)
def test_a_dry_run_says_the_form_that_a_port_writes(method: str, options: list[str], form: str, tmp_path: Path) -> None:
    words = ["lora", "--base", "base", "--to", "twin", "--data", "pictures", "-n", "8", "--method", method, *options]
    words += ["--alpha", "1"]
    planned = json.loads(dry(*words, "--json").stdout)
    written = json.loads(run("port", *words, "--no-eval", "-o", str(tmp_path / "out"), "--json").stdout)
    assert planned["format"] == written["record"]["output"]["format"] == form


def test_a_dry_run_of_bico_loads_no_torch() -> None:
    arguments = ["port", *MODELS, "--data", "pictures", "--dry-run"]
    code = f"import sys\nfrom hf_bico.cli.main import main\nmain({arguments!r}, standalone_mode=False)\n"
    code += "assert 'hf_bico.porting.planner' in sys.modules\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
