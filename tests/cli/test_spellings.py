"""What people type: a target without --to, long names of short options, and no number of samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hf_bico.cli.main import main
from hf_bico.data.draw import draw
from hf_bico.settings import Settings
from support.paper import PAPER_WORDS
from support.scenes import Scene, make_scene


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


def run(*words: object) -> Result:
    return CliRunner().invoke(main, list(map(str, words)))


def dry_run(*words: object) -> object:
    done = run("port", *words, "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_second_name_is_the_target(scene: Scene) -> None:
    named = "--base", scene.base, "--data", scene.data
    usual = dry_run(scene.tuned, "--to", scene.target, *named)
    assert dry_run(scene.tuned, scene.target, *named) == usual
    assert dry_run(scene.tuned, "--target", scene.target, *named) == usual
    assert f"--to {scene.target}" in usual["command"]  # type: ignore[index]


@pytest.mark.parametrize("command", ["plan", "compare", "diagnose", "port"])
def test_wrong_numbers_of_models_are_usage_errors(command: str) -> None:
    for words, cause in (
        ([], "Missing argument"),
        (["a"], "Missing option '--to'"),
        (["a", "b", "c"], "There are 3 models and no --to."),
        (["a", "b", "--to", "c"], "With --to, all 2 names are sources"),
    ):
        done = run(command, *words)
        assert done.exit_code == 2
        assert cause in done.stderr


def test_long_names_of_short_options(scene: Scene, tmp_path: Path) -> None:
    words = (scene.tuned, scene.target, "--base", scene.base, "--data", scene.data, *PAPER_WORDS, "--no-eval")
    for option, number, typed in (("--samples", 8, "-n 8"), ("--per-class", 2, "-k 2")):
        out = tmp_path / option
        done = run("port", *words, option, number, "--output", out)
        assert done.exit_code == 0, done.output
        record = json.loads((out / "bico.json").read_text())
        assert typed in record["command"]


def test_fewer_than_100_samples_are_all_used_and_said(scene: Scene, tmp_path: Path) -> None:
    words = (scene.tuned, scene.target, "--base", scene.base, "--data", scene.data, *PAPER_WORDS, "--no-eval")
    done = run("port", *words, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "Only 48 calibration samples were used, not the usual 100: split 'train' has 48 rows." in done.output
    record = json.loads((tmp_path / "out" / "bico.json").read_text())
    assert len(record["data"]["indices"]) == 48


def test_a_third_is_left_to_measure_on_where_there_is_one_split() -> None:
    rows = [{"text": f"text number {number}", "label": number % 3} for number in range(60)]
    settings = Settings(class_names=["a", "b", "c"], objective="classification")
    assert len(draw(rows, settings, reads="texts").samples) == 40
    assert len(draw({"train": rows, "test": rows}, settings, reads="texts").samples) == 60
    assert len(draw(rows * 4, settings, reads="texts").samples) == 100


@pytest.mark.parametrize(("sampling", "count"), [("half-class", 20), ("one-class", 12), ("class-balanced", 30)])
def test_no_sampling_asks_for_more_than_there_is(sampling: str, count: int) -> None:
    labels = [0] * 12 + [1] * 10 + [2] * 8
    rows = [{"text": f"text number {number}", "label": label} for number, label in enumerate(labels)]
    settings = Settings(class_names=["a", "b", "c"], sampling=sampling, objective="classification")
    drawn = draw({"train": rows, "test": rows}, settings, reads="texts")
    assert len(drawn.samples) <= count
    assert len(drawn.samples) == drawn.strategy.n
