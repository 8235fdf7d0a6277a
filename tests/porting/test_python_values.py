"""What Python callers pass and get: every kind of data set and of model, numbers, tables and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import to_tensor

import hf_bico
from hf_bico.errors import (
    BaseUnknownError,
    BrokenWeightsError,
    ColumnError,
    DataNotFoundError,
    EmptyTaskVectorError,
    UnreadableSampleError,
    UnsupportedModelError,
)
from hf_bico.models.low_rank import Factors
from hf_bico.utils.html import html_page
from support.paper import PAPER
from support.scenes import Scene, make_scene, write_images
from support.toys import CLASS_NAMES

NAMES = sorted(CLASS_NAMES)
NOISE = np.random.default_rng(0).integers(0, 256, (30, 20, 20, 3), dtype=np.uint8)
ROWS = [{"image": Image.fromarray(one), "label": NAMES[number % len(NAMES)]} for number, one in enumerate(NOISE)]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


def port(scene: Scene, data: Any, source: Any = None, **options: Any) -> hf_bico.Ported:
    given = {"base": scene.base, "data": data, "n": 20, "device": "cpu", **PAPER, **options}
    return hf_bico.port(scene.tuned if source is None else source, scene.target, **given)


class Pairs(Dataset[Any]):
    """A data set as torch has them: it never raises IndexError, and lists neither its labels nor its classes."""

    def __init__(self, image: Callable[[Any], Any] = lambda image: image, label: Callable[[str], Any] = str) -> None:
        self.image, self.label = image, label

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Any:
        row = ROWS[index % len(ROWS)]
        return self.image(row["image"]), self.label(row["label"])


class Named(Pairs):
    """One that does."""

    classes = NAMES

    def __init__(self, image: Callable[[Any], Any] = lambda image: image) -> None:
        super().__init__(image, NAMES.index)
        self.targets = [NAMES.index(row["label"]) for row in ROWS]


class Rows(Pairs):
    """One of dictionaries."""

    def __getitem__(self, index: int) -> Any:
        return ROWS[index % len(ROWS)]


def in_bytes(image: Image.Image) -> dict[str, Any]:
    stream = BytesIO()
    image.save(stream, "png")
    return {"bytes": stream.getvalue(), "path": None}


def as_columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def of_datasets() -> Any:
    import datasets

    return datasets.Dataset.from_dict(as_columns(ROWS))


DATA: dict[str, Callable[[], Any]] = {
    "a list of pairs": lambda: [(row["image"], row["label"]) for row in ROWS],
    "a datasets object": of_datasets,
    "a DataFrame": lambda: pandas.DataFrame(ROWS),
    "a DataFrame of bytes": lambda: pandas.DataFrame([{**row, "image": in_bytes(row["image"])} for row in ROWS]),
    "a DataFrame of categories": lambda: pandas.DataFrame(
        [{**row, "image": in_bytes(row["image"])} for row in ROWS]
    ).astype({"label": pandas.CategoricalDtype(NAMES)}),
    "a torch data set": Pairs,
    "a torch data set of arrays": lambda: Pairs(np.asarray),
    "a torch data set of shares": lambda: Named(to_tensor),
    "a torch data set of bytes": lambda: Named(lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1)),
    "a torch data set of rows": Rows,
    "a part of one": lambda: Subset(Named(), range(len(ROWS))),
    "splits": lambda: {"train": Named()},
}


@pytest.fixture(scope="module")
def by_rows(scene: Scene) -> hf_bico.Ported:
    return port(scene, ROWS)


@pytest.mark.parametrize("kind", DATA)
def test_every_kind_of_data_gives_the_same_port(kind: str, scene: Scene, by_rows: hf_bico.Ported) -> None:
    ported = port(scene, DATA[kind]())
    assert ported.record.data is not None
    assert ported.record.data.class_names == NAMES
    assert ported.task_vector == by_rows.task_vector
    assert ported.record.evaluation == by_rows.record.evaluation


def test_labels_are_listed_without_reading_images(scene: Scene) -> None:
    read = []

    class Watched(Named):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return super().__getitem__(index)

    port(scene, {"train": Subset(Watched(), range(25))}, n=5, evaluate=False)
    assert len(set(read)) <= 5 + 8, "the samples, and a few that show what images are like"


def test_folders_of_torchvision_name_their_classes(scene: Scene, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "pictures")
    splits = {split: ImageFolder(str(folder / split)) for split in ("train", "test")}
    ported = port(scene, splits)
    assert ported.record.data is not None
    assert ported.record.data.class_names == NAMES
    assert {(entry.split, entry.n) for entry in ported.record.evaluation} == {("test", 20)}
    found = hf_bico.evaluate_model(scene.target, splits)
    target = next(entry.value for entry in ported.record.evaluation if entry.model == "target")
    assert (found.value, found.n) == (target, 20)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(ROWS)


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (Stream(), DataNotFoundError, "is a stream(.|\n)*data=list"),
        (iter(ROWS), DataNotFoundError, "is a stream"),
        ([], DataNotFoundError, "has no rows"),
        ([(1, 2, 3)], ColumnError, "no \\(image, label\\) pairs"),
        (["one", "two"], ColumnError, "without named columns"),
        (Pairs(lambda image: torch.ones(5, 4, 4, 4)), UnreadableSampleError, "is no picture"),
    ],
    ids=["a stream", "an iterator", "nothing", "triples", "words", "five dimensions"],
)
def test_other_data_is_refused(data: Any, kind: type[hf_bico.BicoError], words: str, scene: Scene) -> None:
    with pytest.raises(kind, match=words):
        port(scene, data)


def test_tensors_that_are_prepared_stay_so(scene: Scene) -> None:
    """Beyond 0 to 1 they are taken as the models would prepare them, as in rows."""
    pairs = [(2 * to_tensor(row["image"]) - 1, row["label"]) for row in ROWS]
    rows = [{"image": image, "label": label} for image, label in pairs]
    assert port(scene, pairs).task_vector == port(scene, rows).task_vector


# models


def state(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "open_clip_model.safetensors")


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_state_dict_over_a_known_base(prefix: str, scene: Scene, by_rows: hf_bico.Ported) -> None:
    tuned = {prefix + name: tensor for name, tensor in state(scene.tuned).items()}
    ported = port(scene, ROWS, tuned)
    assert ported.task_vector == by_rows.task_vector
    assert ported.accuracy == by_rows.accuracy
    assert ported.record.command is None, "no command line does the same"


def test_state_dicts_elsewhere(scene: Scene, tmp_path: Path) -> None:
    tuned, base = state(scene.tuned), state(scene.base)
    vector = hf_bico.TaskVector.from_models(scene.tuned, base=scene.base)
    assert hf_bico.TaskVector.from_models(tuned, base=scene.base) == vector
    assert hf_bico.TaskVector.from_models(tuned, base=base) == vector
    assert hf_bico.extract(tuned, scene.base, rank=2).task_vector == vector
    given, named = (hf_bico.evaluate_model(one, scene.data, base=scene.base) for one in (tuned, scene.tuned))
    assert (given.value, given.n) == (named.value, named.n)
    options: dict[str, Any] = {"base": scene.base, "data": scene.data, "n": 8, "seeds": 1, "methods": ["naive"]}
    compared = [hf_bico.compare(one, scene.target, **options) for one in (tuned, scene.tuned)]
    assert [cell.value for cell in compared[0].cells] == [cell.value for cell in compared[1].cells]
    planned = hf_bico.plan(tuned, scene.target, base=scene.base)
    assert len(planned.pairs) == len(hf_bico.plan(scene.tuned, scene.target, base=scene.base).pairs)


def test_a_state_dict_alone_names_no_model(scene: Scene) -> None:
    tuned = state(scene.tuned)
    with pytest.raises(UnsupportedModelError, match="the target is a state dict(.|\n)*load it into its model"):
        hf_bico.plan(scene.tuned, tuned, base=scene.base)
    with pytest.raises(UnsupportedModelError, match="the base is a state dict"):
        hf_bico.plan(scene.tuned, scene.target, base=tuned)
    with pytest.raises(UnsupportedModelError, match="the model is a state dict"):
        hf_bico.evaluate_model(tuned, scene.data)
    with pytest.raises(BaseUnknownError, match="base=..."):
        hf_bico.plan(tuned, scene.target)
    with pytest.raises(BrokenWeightsError, match=r"'epoch' of the state dict(.|\n)*checkpoint\['model'\]"):
        hf_bico.plan({"epoch": 3, "model": tuned}, scene.target, base=scene.base)


# progress


def test_progress_is_a_callback_or_bars(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, int, int]] = []
    hf_bico.evaluate_model(scene.target, scene.data, batch_size=8, progress=lambda *step: seen.append(step))
    assert seen == [("evaluate", 8, 20), ("evaluate", 16, 20), ("evaluate", 20, 20)]
    for progress in (None, False):
        hf_bico.evaluate_model(scene.target, scene.data, progress=progress)
    assert capsys.readouterr().err == ""
    hf_bico.evaluate_model(scene.target, scene.data, progress=True)
    assert "evaluate: " in capsys.readouterr().err
    port(scene, ROWS, evaluate=False, progress=True)
    assert "calibrate" in capsys.readouterr().err


# results


def test_a_port_says_its_numbers(by_rows: hf_bico.Ported, tmp_path: Path) -> None:
    values = {entry.model: entry.value for entry in by_rows.record.evaluation}
    assert by_rows.accuracy == values["ported"]
    assert by_rows.gain == values["ported"] - values["target"]
    assert f"accuracy target {values['target']:.1%}, ported {values['ported']:.1%}" in repr(by_rows)
    assert "<table>" in by_rows._repr_html_()
    assert isinstance(by_rows.draw(), Figure)
    assert isinstance(by_rows.draw(tmp_path / "outcome.png"), Figure)
    with Image.open(tmp_path / "outcome.png") as written:
        assert written.width > 1000


def test_what_was_not_measured_has_no_number(scene: Scene) -> None:
    ported = port(scene, ROWS, evaluate=False)
    assert (ported.accuracy, ported.gain) == (None, None)
    assert "accuracy" not in repr(ported)


def test_tables_of_pandas(by_rows: hf_bico.Ported, scene: Scene, tmp_path: Path) -> None:
    sites = by_rows.report.to_pandas()
    assert list(sites.name) == [site.name for site in by_rows.report.sites]
    assert sites.energy.sum() == pytest.approx(sum(site.energy for site in by_rows.report.sites))
    planned = hf_bico.plan(scene.tuned, scene.target, base=scene.base)
    assert list(planned.to_pandas().role) == [pair.target.role for pair in planned.pairs]
    options: dict[str, Any] = {
        "base": scene.base,
        "data": scene.data,
        "n": [8, 12],
        "seeds": 1,
        "methods": ["naive", "bico@1"],
    }
    compared = hf_bico.compare(scene.tuned, scene.target, **options)
    table = compared.to_pandas()
    assert list(table.value) == [cell.value for cell in compared.cells]
    assert set(table.method) == {"target", "source", "naive", "bico@1"}
    assert "best " in repr(compared)
    figure = compared.draw()
    assert isinstance(figure, Figure)
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert isinstance(compared.draw(tmp_path / "one.png"), Figure)
    assert (tmp_path / "one.png").is_file()
    assert "naive (padded)" in compared._repr_html_()


def test_a_diagnosis_shows_itself(scene: Scene, tmp_path: Path) -> None:
    diagnosis = hf_bico.diagnose(scene.tuned, scene.target, base=scene.base, data=scene.data, n=12)
    assert "CKA 0." in repr(diagnosis)
    assert "<th" in diagnosis._repr_html_()
    for picture in ("similarity", "drift", "sites"):
        assert isinstance(diagnosis.draw(tmp_path / f"{picture}.png", picture), Figure)
        assert (tmp_path / f"{picture}.png").is_file()
    assert diagnosis.draw(picture="outputs") is None, "there is no fine-tuned target"
    with pytest.raises(hf_bico.errors.UsageError, match="did you mean 'drift'"):
        diagnosis.draw(picture="drifts")


def test_what_a_plan_knows_of_the_data(scene: Scene) -> None:
    about = {"base": scene.base, "split": "train", "memory": "8GB"}
    planned = hf_bico.plan(scene.tuned, scene.target, data=scene.data, **about)
    found = json.loads(json.dumps(planned.as_dict()))
    assert found["data"] == {"kind": "folder", "id": "pictures", "split": "train", "named_by": "argument"}
    assert found["memory"]["limit"] == 8_000_000_000
    assert hf_bico.plan(scene.tuned, scene.target, **about).as_dict()["data"] is None
    rows = hf_bico.plan(scene.tuned, scene.target, data=ROWS, **about).as_dict()["data"]
    assert rows == {"kind": "rows", "type": "list", "split": "train", "named_by": "argument"}
    assert "of memory" in repr(planned)
    assert planned._repr_html_().count("<tr>") >= len(planned.rows())


def test_a_strangers_name_is_text() -> None:
    page = html_page("<script>x</script>", [["<b>", "1"], ["a&b", '"']], below=["<img src=x>"])
    assert "<script>" not in page
    assert "<img" not in page
    assert "a&amp;b" in page


# task vectors


@pytest.fixture(scope="module")
def vectors(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> dict[str, hf_bico.TaskVector]:
    whole = hf_bico.TaskVector.from_models(scene.tuned, base=scene.base)
    folder = tmp_path_factory.mktemp("lora") / "adapter"
    whole.save_adapter(folder, rank=2)
    low = hf_bico.TaskVector.from_adapter(folder, base=scene.base)
    assert any(isinstance(change, Factors) for _, change in low.changes())
    return {"whole": whole, "low": low, "sum": 0.5 * low + low, "mixed": whole - low}


@pytest.mark.parametrize("name", ["whole", "low", "sum", "mixed"])
def test_norms_and_cosines_are_those_of_dense_tensors(name: str, vectors: dict[str, hf_bico.TaskVector]) -> None:
    vector = vectors[name]
    squares = sum(float(tensor.double().square().sum()) for tensor in vector.values())
    assert vector.norm() == pytest.approx(squares**0.5, rel=1e-6)
    for other in vectors.values():
        shared = [own for own in vector if own in other]
        product = sum(float((vector[own].double() * other[own].double()).sum()) for own in shared)
        assert vector.cosine(other) == pytest.approx(product / vector.norm() / other.norm(), abs=1e-6)
    assert vector.cosine(vector) == pytest.approx(1)
    assert vector.cosine(-2.0 * vector) == pytest.approx(-1)


def test_shares_of_roles(vectors: dict[str, hf_bico.TaskVector], scene: Scene) -> None:
    whole = vectors["whole"]
    shares = whole.by_role()
    assert sum(shares.values()) == pytest.approx(1)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    layers = [name for name in whole if ".mlp.c_fc." in name]
    energy = sum(float(whole[name].double().square().sum()) for name in layers)
    assert shares["mlp.up"] == pytest.approx(energy / whole.norm() ** 2)
    packed = [name for name in whole if name.endswith(("in_proj_weight", "in_proj_bias"))]
    energy = sum(float(whole[name][: len(whole[name]) // 3].double().square().sum()) for name in packed)
    assert shares["attn.q"] == pytest.approx(energy / whole.norm() ** 2)
    assert "other" in shares, "norms, positions and the class token"
    assert "other" not in vectors["low"].by_role(scene.base)
    with pytest.raises(EmptyTaskVectorError):
        hf_bico.TaskVector({"w": torch.zeros(2)}, base=None).cosine(hf_bico.TaskVector({"w": torch.ones(2)}))
