"""Metrics of the `evaluate` library: a local script, or one on the Hub if its code is trusted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from sklearn.metrics import f1_score

import hf_bico
from hf_bico.alignment.objectives.clip import zero_shot_head
from hf_bico.cli.main import main
from hf_bico.data.draw import open_data
from hf_bico.errors import UsageError
from hf_bico.models.metrics import Metric
from hf_bico.models.model import Model
from hf_bico.settings import DEFAULT_TEMPLATES
from support.hub import Hub
from support.language_toys import write_decoder
from support.loopback import TOKEN
from support.scenes import Scene, make_scene

SCRIPT = """
import datasets
import evaluate
from sklearn.metrics import f1_score


class OwnF1(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int32"), "references": datasets.Value("int32")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references, average="binary"):
        open("ran", "w").close()
        return {"own_f1": VALUE}
"""
VALUE = "float(f1_score(references, predictions, average=average))"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


def write_metric(folder: Path, value: str = VALUE) -> Path:
    """A folder with a metric's script of its name."""
    folder.mkdir(parents=True)
    (folder / f"{folder.name}.py").write_text(SCRIPT.replace("VALUE", value))
    return folder


def expected(scene: Scene) -> float:
    """The mean F1 over the classes, by scikit-learn."""
    model = Model.open(scene.target, "the model").load(torch.device("cpu"), torch.float32)
    data = open_data(scene.data)
    samples = data.samples("test", data.order("test", 0))
    predicted = zero_shot_head(model, data.class_names, DEFAULT_TEMPLATES).predictions(model, samples, 8)
    return float(f1_score(samples.labels, predicted, average="macro"))


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["eval", *map(str, words)])


def test_a_local_script_is_the_metric(scene: Scene, here: Path) -> None:
    metric = write_metric(here / "own_f1")
    found = hf_bico.evaluate_model(scene.target, scene.data, metric=str(metric))
    assert (found.metric, found.n) == ("own_f1", 20)
    assert found.value == pytest.approx(expected(scene))
    assert found.notices == ("The metric 'own_f1' is the mean over the classes (average='macro').",)
    result = run(scene.target, "--data", scene.data, "--metric", metric / "own_f1.py")
    assert result.stdout == f"own_f1 {found.value:.4g} (20 samples of split test of pictures)\n"


def test_a_probe_is_scored_too(scene: Scene, here: Path) -> None:
    metric = write_metric(here / "own_f1")
    result = run(scene.target, "--data", scene.data, "--metric", metric, "--probe", "30", "--json")
    found = json.loads(result.stdout)
    assert (found["metric"], found["protocol"], found["trained_on"]) == ("own_f1", "probe", 30)


def test_the_accuracy_by_name_needs_no_library(scene: Scene) -> None:
    plain, named = (hf_bico.evaluate_model(scene.target, scene.data, metric=metric) for metric in (None, "accuracy"))
    assert plain == named


def test_trust_without_a_metric_is_refused(scene: Scene) -> None:
    result = run(scene.target, "--data", scene.data, "--trust-remote-code")
    assert result.exit_code == 2
    assert "--trust-remote-code works only with --metric" in result.stderr


@pytest.mark.parametrize("name", ["f1", "someone/f1", "own_f1/missing.py"])
def test_a_script_of_the_hub_is_not_run_unless_it_is_trusted(name: str, scene: Scene, here: Path) -> None:
    (here / "f1").mkdir()  # a folder without a script is none
    result = run(scene.target, "--data", scene.data, "--metric", name)
    assert result.exit_code == 2
    assert f"the metric '{name}' is a script on the Hub, which would run on this machine" in result.stderr
    assert "--trust-remote-code" in result.stderr
    with pytest.raises(UsageError, match="add trust_remote_code=True"):
        hf_bico.evaluate_model(scene.target, scene.data, metric=name)
    assert not (here / "ran").exists()


def test_a_trusted_metric_comes_from_the_hub(scene: Scene, hub: Hub, tmp_path: Path, here: Path) -> None:
    script = SCRIPT.replace("VALUE", VALUE)
    hub.create("evaluate-metric/own_f1", type="space").commit({"own_f1.py": script})
    words = ["eval", str(scene.target), "--data", str(scene.data), "--metric", "own_f1", "--json"]

    def run_there(*more: str) -> subprocess.CompletedProcess[str]:
        environment = hub.environment(tmp_path / "home", TOKEN)
        return subprocess.run(
            [sys.executable, "-m", "hf_bico", *words, *more], env=environment, capture_output=True, text=True
        )

    assert run_there().returncode == 2
    assert not (here / "ran").exists()
    done = run_there("--trust-remote-code")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["value"] == pytest.approx(expected(scene))
    assert (here / "ran").exists()


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("float('nan')", "gave nan, not a number"),
        ("[0.5, 0.5]", "gave [0.5, 0.5], not a number"),
        ("int('x')", "cannot score classes: invalid literal"),
    ],
)
def test_a_metric_that_gives_no_number_is_refused(value: str, cause: str, here: Path) -> None:
    metric = Metric.named(str(write_metric(here / "own_f1", value)))
    with pytest.raises(UsageError) as caught:
        metric([0, 1], [0, 1])
    assert cause in caught.value.cause


def test_a_script_that_cannot_be_loaded_is_refused(here: Path) -> None:
    (here / "own").mkdir()
    (here / "own" / "own.py").write_text("import evaluate\nimport no_such_package\n")
    with pytest.raises(UsageError, match="no_such_package"):
        Metric.named("own")


def test_a_model_that_is_measured_by_its_loss_has_no_classes_to_score(here: Path) -> None:
    model = write_decoder(here / "decoder")
    (here / "texts.txt").write_text("the river runs to the sea\n" * 8)
    result = run(model, "--data", here / "texts.txt", "--metric", "accuracy")
    assert result.exit_code == 2
    assert "--metric scores predicted classes, and this model is measured by its loss" in result.stderr
