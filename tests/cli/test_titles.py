"""`--title`: the title of a card, kept in the record, so that every later card has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import hf_bico
from hf_bico.cli.main import main
from hf_bico.porting.rerun import rerun
from hf_bico.reports.record import read_record
from support.hub import Hub
from support.records import headings
from support.toys import WRITERS, Toy, random_state

pytestmark = pytest.mark.quick
TITLE, ESCAPED = "Digits *for*\n# the wide one", "Digits \\*for\\* \\# the wide one"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for seed, name in enumerate(("base", "target", "tuned")):
        WRITERS["open_clip"](tmp_path / name, Toy(), random_state(Toy(), seed))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> Result:
    done = CliRunner().invoke(main, list(words))
    assert done.exit_code == 0, done.output
    return done


def port(*words: str) -> Result:
    options = ("--method", "naive", "--alpha", "1", "--no-eval", "--force", "-q", "-o", "out")
    return run("port", "tuned", "--base", "base", "--to", "target", *options, *words)


def title_of(folder: Path) -> str:
    return headings((folder / "README.md").read_text())[0]


def test_a_title_is_kept_until_another_is_given(models: Path) -> None:
    out = models / "out"
    port("--title", TITLE)
    assert title_of(out) == ESCAPED
    record = read_record(out)
    assert record.output is not None
    assert record.output.title == TITLE
    assert "title" not in str(record.command)
    run("card", "out")
    assert title_of(out) == ESCAPED
    run("card", "out", "--title", "Another")
    assert title_of(out) == "Another"
    run("card", "out", "--title", " ")
    assert title_of(out) == "tuned ported to target"
    assert '"title"' not in (out / "bico.json").read_text()


def test_a_port_repeated_from_its_record_keeps_the_title(models: Path) -> None:
    port("--title", TITLE)
    rerun("out", folder="again", force=True)
    assert title_of(models / "again") == ESCAPED


def test_a_title_goes_to_the_hub(models: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_user("user", "hf_user")
    monkeypatch.setenv("HF_TOKEN", "hf_user")
    port("--title", TITLE)
    run("push", "out", "user/pushed")
    assert headings(hub.repo("user/pushed").read("README.md").decode())[0] == ESCAPED
    options = {"method": "naive", "alpha": 1.0, "evaluate": False, "force": True}
    ported = hf_bico.port("tuned", base="base", to="target", **options)
    ported.push_to_hub("user/from-python", title=TITLE)
    assert headings(hub.repo("user/from-python").read("README.md").decode())[0] == ESCAPED
    assert title_of(ported.save("saved", title=TITLE)) == ESCAPED
