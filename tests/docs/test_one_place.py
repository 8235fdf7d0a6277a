"""An option and a method are declared in one place: everything else knows them from there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import hf_bico
from hf_bico.alignment.methods.aligned import Aligner
from hf_bico.alignment.statistics import Kind
from hf_bico.cli.main import main
from hf_bico.errors import UsageError
from hf_bico.experiments.compare.picture import method_style
from hf_bico.settings import METHODS, OPTIONS, Settings, read_alpha
from support import ROOT
from support.scenes import Scene, make_scene

DECLARED = """    sharpness: float = option(
        1.5, _METHOD, "How sharp.", group="aligning", type=float, least=1, decisive=True)
"""
USED = """
import sys
from click.testing import CliRunner
from hf_bico.cli.main import main
from hf_bico.experiments.compare.run import _decisive
from hf_bico.settings import Settings
import hf_bico

for command in ("port", "compare", "diagnose"):
    help = CliRunner().invoke(main, [command, "--help-all"]).output
    assert "--sharpness FLOAT" in help and "How sharp.  [default: 1.5]" in help, help
assert "sharpness: How sharp." in Settings.__doc__
refused = CliRunner().invoke(main, ["port", "tuned", "--to", "target", "--sharpness", "0.5"])
assert refused.exit_code == 2 and "--sharpness is 0.5" in refused.stderr, refused.stderr
named = {"base": "base", "data": "pictures", "n": 4, "device": "cpu", "evaluate": False, "method": "bico", "alpha": 1.0}
ported = hf_bico.port("tuned", "target", **named, sharpness=2.5)
assert "--sharpness 2.5" in ported.record.command, ported.record.command
usual = hf_bico.port("tuned", "target", **named)
assert "--sharpness" not in usual.record.command
assert "sharpness" in _decisive(Settings())
"""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


def test_an_option_is_one_field(scene: Scene, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "hf_bico", tmp_path / "hf_bico", ignore=shutil.ignore_patterns("__pycache__"))
    settings = tmp_path / "hf_bico" / "settings.py"
    before, field, after = settings.read_text().partition("    path_steps: int | None = option(")
    assert field
    settings.write_text(before + DECLARED + field + after)
    done = subprocess.run(
        [sys.executable, "-c", USED],
        capture_output=True,
        text=True,
        cwd=scene.folder,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stderr[-2000:]) == (0, "")


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, one in OPTIONS.items()
        if one.choices or one.type is float or one.least is not None or one.read is read_alpha
    ],
)
@pytest.mark.parametrize("value", [None, 5j, ["auto"], b"auto"], ids=repr)
def test_what_an_option_does_not_take_is_refused(name: str, value: Any) -> None:
    if value is None and vars(Settings())[name] is None:
        assert vars(Settings(**{name: None}))[name] is None
        return
    with pytest.raises(UsageError, match=re.escape(OPTIONS[name].typed_as(name))):
        Settings(**{name: value})


class Halves(Aligner):
    """Inputs on the one side, outputs on the other: a method that nothing else knows of."""

    input_kind = Kind.INPUTS
    output_kind = Kind.OUTPUTS


@pytest.fixture
def _registered() -> Iterator[None]:
    hf_bico.register_method(
        "halves",
        Halves,
        label="Two halves",
        sentence="It turns one half, and then the other.",
        uses_loss=False,
        options=("completion",),
        style=("#123456", "8"),
    )
    yield
    del METHODS["halves"]


@pytest.mark.usefixtures("_registered")
def test_a_method_is_one_class_and_one_call(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(scene.folder)
    named = {"base": "base", "data": "pictures", "n": 6, "device": "cpu"}
    ported = hf_bico.port("tuned", "target", method="halves", alpha=1.0, completion="svd", **named)
    assert "--method halves" in str(ported.record.command)
    assert "--completion svd" in str(ported.record.command)
    assert ported.record.method.completion == "svd"
    card = (ported.save(tmp_path / "ported") / "README.md").read_text()
    assert "It turns one half, and then the other." in card
    assert hf_bico.rerun(str(tmp_path / "ported"), device="cpu").same

    compared = hf_bico.compare("tuned", "target", methods=["halves", "theseus"], seeds=1, **named)
    assert "Two halves" in compared.table()
    values = {cell.method: cell.value for cell in compared.cells}
    assert values["halves"] == values["theseus"], "it is the same method, by another name"
    assert method_style("halves") == ("#123456", "8")


def test_a_method_that_is_not_registered_is_refused() -> None:
    result = CliRunner().invoke(main, ["compare", "a", "--to", "b", "--methods", "halves"])
    assert result.exit_code == 2
    assert "there is no method 'halves'" in result.stderr
