"""Accuracy of live models: zero-shot and by a probe, through `evaluate`, without the network."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image

import hf_bico
from hf_bico.alignment.objectives.clip import ZeroShotHead, zero_shot_head
from hf_bico.cli.main import main
from hf_bico.data import loading as data_files
from hf_bico.data import remote_parquet
from hf_bico.data.dataset import DataSet, Samples
from hf_bico.data.draw import open_data
from hf_bico.errors import MissingTextTowerError, NonFiniteWeightsError, SampleCountError, UsageError
from hf_bico.models.families.live import LiveModel
from hf_bico.models.inference import features_of, logits_of, prepare_alike, probe_accuracy
from hf_bico.models.metrics import accuracy
from hf_bico.models.model import Model
from hf_bico.porting.evaluate import _probe_samples
from support import forks
from support.hub import Hub
from support.paper import PAPER
from support.scenes import Scene, make_scene, write_images
from support.toys import CLASS_NAMES, random_rows

TEMPLATES = ("a photo of a {}.",)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def tower(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision tower alone, as transformers writes one."""
    from transformers import CLIPVisionModel

    folder = tmp_path_factory.mktemp("tower")
    whole = make_scene(folder / "scene", ("transformers", "transformers")).base
    CLIPVisionModel.from_pretrained(whole).save_pretrained(folder / "tower")
    shutil.copy(whole / "preprocessor_config.json", folder / "tower")
    return folder / "tower"


@pytest.fixture
def model(scene: Scene) -> LiveModel:
    return load(scene.target)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LiveModel:
    return Model.open(folder, "the model").load(torch.device("cpu"), dtype)


def head_of(model: LiveModel) -> ZeroShotHead:
    return zero_shot_head(model, CLASS_NAMES, TEMPLATES)


def samples_of(data: DataSet, split: str, count: int | None = None) -> Samples:
    return data.samples(split, data.order(split, 0)[:count])


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def one_by_one(model: LiveModel, samples: Samples) -> torch.Tensor:
    """Features, an image at a time, by the library's own encoder."""
    module: Any = model.module.eval()
    with torch.no_grad():
        return torch.cat([module.encode_image(model.pixels(images)) for images, _ in samples.batches(1)])


def by_scikit_learn(training: torch.Tensor, labels: tuple[int, ...], test: torch.Tensor) -> list[int]:
    from sklearn.linear_model import LogisticRegression

    mean, deviation = training.double().mean(0), training.double().std(0, correction=0)
    fitted = LogisticRegression(max_iter=1000).fit(((training.double() - mean) / deviation).numpy(), labels)
    predicted: list[int] = fitted.predict(((test.double() - mean) / deviation).numpy()).tolist()
    return predicted


def share(predicted: list[int], labels: tuple[int, ...]) -> float:
    return sum(a == b for a, b in zip(predicted, labels, strict=True)) / len(labels)


def test_zero_shot_accuracy_is_that_of_a_literal_loop(scene: Scene, model: LiveModel) -> None:
    samples, head = samples_of(open_data(scene.data), "train"), head_of(model)
    features = one_by_one(model, samples)
    right = 0
    for feature, label in zip(features, samples.labels, strict=True):
        scores = [float(feature @ text / feature.norm()) for text in head.classes]
        right += scores.index(max(scores)) == label
    assert head.measure(model, samples, 7) == right / len(samples)
    assert 0 < right < len(samples)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_features_and_logits_of_every_sample_in_order(scene: Scene, dtype: torch.dtype) -> None:
    model = load(scene.target, dtype)
    samples, head = samples_of(open_data(scene.data), "test"), head_of(model)
    features, logits = features_of(model, samples, 7), logits_of(model, head, samples, 7)
    expected = one_by_one(model, samples)
    assert features.dtype == logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(features, expected.to(features.dtype), **close)
    assert logits.shape == (len(samples), len(CLASS_NAMES))
    if dtype != torch.bfloat16:
        torch.testing.assert_close(logits, head.logits(expected), **close)
    assert not features.requires_grad


OTHER_WAYS = [
    ("open_clip", {}, {"mean": [0.1, 0.2, 0.3]}),
    # open_clip's padding does not show its colour
    ("open_clip", {"resize_mode": "longest", "fill_color": 0}, {"resize_mode": "longest", "fill_color": 200}),
    ("transformers", {}, {"image_mean": [0.1, 0.2, 0.3]}),
]


@pytest.mark.parametrize(("library", "one_way", "other_way"), OTHER_WAYS)
def test_models_prepare_alike_if_their_processors_do_the_same(
    library: str, one_way: dict[str, Any], other_way: dict[str, Any], tmp_path: Path
) -> None:
    base = make_scene(tmp_path / "scene", (library, library)).base
    one, again, other = (
        load(preparing(base, tmp_path / name, **way))
        for name, way in (("one", one_way), ("again", one_way), ("other", other_way))
    )
    assert prepare_alike(one, again)
    assert not prepare_alike(one, other)
    assert not prepare_alike(one, load(tmp_path / "one", torch.bfloat16))
    wide = [Image.new("RGB", (40, 10), "red")]
    assert torch.equal(one.pixels(wide), again.pixels(wide))
    assert not torch.equal(one.pixels(wide), other.pixels(wide))


def preparing(model: Path, copy: Path, **way: Any) -> Path:
    """A copy of a model that prepares images in another way."""
    shutil.copytree(model, copy)
    file = copy / "open_clip_config.json"
    if file.exists():
        settings = json.loads(file.read_text())
        settings["preprocess_cfg"] |= way
    else:
        file = copy / "preprocessor_config.json"
        settings = json.loads(file.read_text()) | way
    file.write_text(json.dumps(settings))
    return copy


@pytest.mark.parametrize(("library", "way"), [("open_clip", "mean"), ("transformers", "image_mean")])
def test_a_port_measures_the_source_on_images_as_the_source_prepares_them(
    library: str, way: str, tmp_path: Path
) -> None:
    made = make_scene(tmp_path / "scene", (library, library))
    target = preparing(made.base, tmp_path / "target", **{way: [0.1, 0.2, 0.3]})
    seen: list[torch.Tensor] = []

    def watched(model: LiveModel, head: Any, samples: Any, batch_size: int) -> torch.Tensor:
        rows = logits_of(model, head, samples, batch_size)
        seen.append(rows)
        return rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_bico.alignment.objectives.base.logits_of", watched)
        hf_bico.port(made.tuned, to=target, base=made.base, data=made.data, n=9, **PAPER)
        ported = seen[-1]
        hf_bico.evaluate_model(made.tuned, made.data)
    assert torch.allclose(ported, seen[-1], atol=1e-5)


def test_models_of_two_libraries_do_not_prepare_alike(tmp_path: Path) -> None:
    made = make_scene(tmp_path / "scene", ("open_clip", "transformers"))
    assert not prepare_alike(load(made.base), load(made.target))


def test_measuring_leaves_the_model_as_it_was(scene: Scene, model: LiveModel) -> None:
    model.module.train().requires_grad_(True)
    samples = samples_of(open_data(scene.data), "test", 6)
    probe_accuracy(model, samples, samples, 4)
    assert all(module.training for module in model.module.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.module.parameters())


def test_probe_is_scikit_learns_on_standardised_features(scene: Scene, model: LiveModel) -> None:
    data = open_data(scene.data)
    training, test = samples_of(data, "train", 30), samples_of(data, "test")
    predicted = by_scikit_learn(one_by_one(model, training), training.labels, one_by_one(model, test))
    assert probe_accuracy(model, training, test, 8) == share(predicted, test.labels)
    assert probe_accuracy(model, training, test, 8) == probe_accuracy(model, training, test, 1)


def test_probe_learns_what_can_be_told_apart(model: LiveModel) -> None:
    """Bright and dark images, with labels that no prompt names."""
    rows = [{**row, "image": row["image"] + 2 * (-1) ** i, "label": i % 2} for i, row in enumerate(random_rows(60, 20))]
    data = open_data({"train": rows[:40], "test": rows[40:]}, hf_bico.Settings(class_names=["a", "b"]))
    assert probe_accuracy(model, samples_of(data, "train"), samples_of(data, "test"), 16) == 1.0


def test_probe_of_one_class_predicts_it(scene: Scene, model: LiveModel) -> None:
    data = open_data(scene.data)
    one = [row for row, label in data.labels("train").items() if label == 2][:5]
    test = samples_of(data, "test")
    assert probe_accuracy(model, data.samples("train", one), test, 8) == test.labels.count(2) / len(test)


def test_probe_of_broken_weights_is_refused(scene: Scene, model: LiveModel) -> None:
    next(model.module.visual.parameters()).data.fill_(torch.nan)  # type: ignore[union-attr, operator]
    samples = samples_of(open_data(scene.data), "test")
    with pytest.raises(NonFiniteWeightsError, match="features hold NaN"):
        probe_accuracy(model, samples, samples, 8)


def test_accuracy_is_the_share_of_equal_classes() -> None:
    assert accuracy([0, 1, 2, 3], (0, 1, 2, 3)) == 1.0
    assert accuracy([0], [1]) == 0.0
    assert accuracy([0, 1, 1], [0, 1, 0]) == 2 / 3


def test_nothing_or_an_unequal_number_has_no_accuracy() -> None:
    for predictions, references in (([0, 1], [0]), ([], [])):
        with pytest.raises(ValueError, match="have no accuracy"):
            accuracy(predictions, references)
    assert accuracy([1], [1]) == 1.0


def test_accuracy_is_quick_and_silent(capfd: pytest.CaptureFixture[str]) -> None:
    accuracy([0], [0])
    started = time.perf_counter()
    for _ in range(100):
        accuracy([0, 1] * 500, [0, 0] * 500)
    assert time.perf_counter() - started < 10
    assert capfd.readouterr() == ("", "")


def alone(code: str, **environment: str) -> forks.Running:
    """A process with an environment of its own, and no way to the network but a closed port."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    guard = (
        "import socket\n"
        "def refuse(*_): raise AssertionError('the network was used')\n"
        "socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse\n"
    )
    return forks.start(code=guard + code, env={**os.environ, "HF_ENDPOINT": endpoint, **environment})


MEASURE = "from hf_bico.models.metrics import accuracy\nprint([accuracy([0, 1], [0, n % 2]) for n in range(20)])"
MEASURED = f"{[0.5, 1.0] * 10}\n"


def test_offline_without_a_cache(tmp_path: Path) -> None:
    process = alone(MEASURE, HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1")
    assert process.communicate() == (MEASURED, "")


def test_where_the_cache_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    process = alone(MEASURE, HF_HOME=str(tmp_path / "file"))
    assert process.communicate() == (MEASURED, "")


def test_two_processes_with_one_new_cache(tmp_path: Path) -> None:
    processes = [alone(MEASURE, HF_HOME=str(tmp_path / "home")) for _ in range(2)]
    assert [process.communicate() for process in processes] == [(MEASURED, "")] * 2


def test_import_loads_neither_evaluate_nor_scikit_learn() -> None:
    code = "import sys, hf_bico.porting.evaluate\nprint({'evaluate', 'sklearn'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_eval_by_a_probe(scene: Scene, model: LiveModel) -> None:
    paths = [str(scene.target), "--data", str(scene.data), "--probe", "30"]
    raw = json.loads(run("eval", *paths, "--json").stdout)
    data = open_data(scene.data)
    value = probe_accuracy(model, samples_of(data, "train", 30), samples_of(data, "test"), 32)
    about = {"model": "target", "data": "pictures", "split": "test", "n": 20, "metric": "accuracy"}
    assert raw == {**about, "value": value, "protocol": "probe", "trained_on": 30}
    text = f"accuracy {value:.1%} by a linear probe on 30 samples (20 samples of split test of pictures)\n"
    assert run("eval", *paths).stdout == text
    fewer = json.loads(run("eval", *paths, "--json", "-n", "7").stdout)
    assert (fewer["n"], fewer["trained_on"]) == (7, 30)


def test_eval_zero_shot_says_nothing_of_probes(scene: Scene) -> None:
    raw = json.loads(run("eval", str(scene.target), "--data", str(scene.data), "--json").stdout)
    assert list(raw) == ["model", "data", "split", "n", "metric", "value"]


@pytest.mark.parametrize("n", [None, 9])
@pytest.mark.parametrize("splits", [("train",), ("test",), ("validation", "test")])
def test_probe_and_test_share_no_sample(splits: tuple[str, ...], n: int | None, scene: Scene) -> None:
    """Where there is no split to train on but the measured one: label noise, so that memory would show."""
    rows = random_rows(48, 20)
    data = dict.fromkeys(splits, rows)
    found = hf_bico.evaluate_model(scene.target, data, n=n, probe=20, class_names=CLASS_NAMES)
    opened = open_data(data, hf_bico.Settings(class_names=CLASS_NAMES))
    order = opened.order(splits[-1], 0)
    training, test = opened.samples(splits[-1], order[:20]), opened.samples(splits[-1], order[20:][:n])
    assert (found.n, found.trained_on, found.split) == (n or 28, 20, splits[-1])
    assert found.value == probe_accuracy(load(scene.target), training, test, 32)


@pytest.mark.parametrize("n", [None, 9])
@pytest.mark.parametrize("splits", [("train",), ("train", "test")])
def test_probe_of_a_data_set_that_is_read_in_part(
    splits: tuple[str, ...], n: int | None, hub: Hub, monkeypatch: pytest.MonkeyPatch, scene: Scene
) -> None:
    monkeypatch.setattr(data_files, "SMALL_REPO", 0)
    monkeypatch.setattr(remote_parquet, "MIN_BUDGET", 4_000)
    files = {f"data/{split}-0.parquet": parquet_of(scene, split) for split in splits}
    hub.create("user/pictures", type="dataset").commit(files)
    _, split, training, test = _probe_samples(partial(open_data, "user/pictures"), hf_bico.Settings(n=n), 12)
    assert (split, len(training)) == (splits[-1], 12)
    assert len(test) == (n or (36 if split == "train" else 20))
    used, held_out = ([samples.rows[row]["image"]["path"] for row in samples.indices] for samples in (training, test))
    assert not set(used) & set(held_out)
    assert len({*used, *held_out}) == 12 + len(test)
    found = hf_bico.evaluate_model(scene.target, "user/pictures", n=n, probe=12)
    assert found.value == probe_accuracy(load(scene.target), training, test, 32)


def parquet_of(scene: Scene, split: str) -> bytes:
    """The images of a split in row groups of four, each with a path that no other has."""
    files = sorted((write_images(scene.folder / f"images of {split}") / split).glob("*/*.png"))
    images = [{"bytes": file.read_bytes(), "path": f"{split}-{number}"} for number, file in enumerate(files)]
    rows = {"image": images, "label": [CLASS_NAMES.index(file.parent.name) for file in files]}
    features = {"image": {"_type": "Image"}, "label": {"names": list(CLASS_NAMES), "_type": "ClassLabel"}}
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    out = io.BytesIO()
    pq.write_table(pa.table(rows).replace_schema_metadata(about), out, row_group_size=4)
    return out.getvalue()


def test_a_probe_needs_no_class_names(scene: Scene) -> None:
    rows = random_rows(40, 20)
    assert hf_bico.evaluate_model(scene.target, {"train": rows[:30], "test": rows[30:]}, probe=12).n == 10


def test_evaluation_by_name(scene: Scene) -> None:
    rows = random_rows(140, 20)
    found = hf_bico.evaluate_model(scene.target, rows, evaluation="probe")
    assert (found.protocol, found.trained_on, found.n) == ("probe", 100, 40)
    with pytest.raises(UsageError, match="choose one"):
        hf_bico.evaluate_model(scene.target, rows, evaluation="both")


def test_a_vision_tower_alone_is_probed(tower: Path, scene: Scene) -> None:
    found = hf_bico.evaluate_model(tower, scene.data, probe=30)
    live, data = load(tower), open_data(scene.data)
    assert found.value == probe_accuracy(live, samples_of(data, "train", 30), samples_of(data, "test"), 32)
    assert features_of(live, samples_of(data, "test"), 8).shape == (20, 16)
    with pytest.raises(MissingTextTowerError):
        hf_bico.evaluate_model(tower, scene.data)


@pytest.mark.parametrize(
    ("arguments", "cause", "remedy"),
    [
        (["--probe", "0"], "--probe is 0", "use a whole number of at least 1"),
        (["--probe", "49"], "49 samples were asked for", "use --probe 48 or less"),
        (["--probe", "48", "--split", "train"], "--probe is 48 and split 'train'", "use --probe 47 or less"),
    ],
)
def test_too_few_samples_for_the_probe(arguments: list[str], cause: str, remedy: str, scene: Scene) -> None:
    result = run("eval", str(scene.target), "--data", str(scene.data), *arguments)
    assert result.exit_code != 0
    assert cause in result.stderr
    assert remedy in result.stderr


def test_too_few_samples_in_python(scene: Scene) -> None:
    with pytest.raises(SampleCountError, match="use a data set with more samples"):
        hf_bico.evaluate_model(scene.target, random_rows(1, 20), probe=1)


def test_a_port_is_measured_on_the_data_of_its_record_and_on_none_of_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is no test split, and the data is a folder: just what the port itself measured."""
    scene = make_scene(tmp_path)
    next(scene.data.glob("data/test-*")).unlink()
    monkeypatch.chdir(tmp_path)
    ported = hf_bico.port(scene.tuned, to=scene.target, base=scene.base, data=scene.data, n=9, device="cpu", **PAPER)
    ported.save("out")
    then = next(entry for entry in ported.record.evaluation if entry.model == "ported")
    assert then.split == "train"
    now = hf_bico.evaluate_model("out", device="cpu")
    assert (now.n, now.value) == (then.n, then.value)
    assert now.n == hf_bico.evaluate_model(scene.target, scene.data, device="cpu").n - 9
