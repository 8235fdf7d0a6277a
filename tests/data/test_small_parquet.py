"""Small folders of parquet files, read without `datasets`: the same as `datasets` reads, or left to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from hf_bico.data.columns import column_kinds, undecoded
from hf_bico.data.draw import draw
from hf_bico.data.small_parquet import SmallParquet, open_small
from hf_bico.settings import Settings

NAMES = ["cat", "dog"]


def picture(number: int) -> Image.Image:
    image = Image.new("RGB" if number % 2 else "L", (4 + number, 5), number)
    image.putpixel((0, 0), 200)
    return image


def turned() -> Image.Image:
    """A picture that its EXIF block turns."""
    image = picture(3)
    image.getexif()[274] = 6
    return image


def write(folder: Path, name: str, rows: dict[str, list[Any]], features: datasets.Features | None = None) -> None:
    file = folder / "data" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(file))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES), "note": datasets.Value("string")}
    )
    images = [picture(number) for number in range(5)] + [turned()]
    rows = {"image": images, "label": [0, 1, 0, 1, -1, 0], "note": ["a", "b", "", None, "ä", "f"]}
    some = {name: values[:2] for name, values in rows.items()}
    write(tmp_path / "pictures", "test-00000-of-00001.parquet", some, features)
    write(tmp_path / "pictures", "train-00000-of-00002.parquet", rows, features)
    write(tmp_path / "pictures", "train-00001-of-00002.parquet", some, features)
    return tmp_path / "pictures"


def test_rows_are_those_of_datasets(folder: Path) -> None:
    ours, theirs = open_small(folder), datasets.load_dataset(str(folder))
    assert ours is not None
    assert list(ours) == list(theirs)
    for split, rows in ours.items():
        assert len(rows) == len(theirs[split])
        assert column_kinds(rows) == column_kinds(theirs[split])
        assert rows.features["label"].names == tuple(theirs[split].features["label"].names)
        assert [rows["label"], rows["note"]] == [list(theirs[split][name]) for name in ("label", "note")]
        for index in range(len(rows)):
            own, other = rows[index], theirs[split][index]
            assert (own["image"].mode, own["image"].size) == (other["image"].mode, other["image"].size)
            assert own["image"].tobytes() == other["image"].tobytes()
            assert {**own, "image": None} == {**other, "image": None}
            assert undecoded(rows, "image")[index]["image"] == undecoded(theirs[split], "image")[index]["image"]


def test_a_draw_is_the_same_as_from_datasets(folder: Path) -> None:
    ours, theirs = (draw(data, Settings(n=4)) for data in (str(folder), datasets.load_dataset(str(folder))))
    assert isinstance(ours.samples.rows, SmallParquet)
    assert (ours.samples.indices, ours.samples.labels) == (theirs.samples.indices, theirs.samples.labels)


def readme(folder: Path) -> None:
    (folder / "README.md").write_text("---\nconfigs: []\n---\n")


def missing_shard(folder: Path) -> None:
    (folder / "data" / "train-00001-of-00002.parquet").unlink()


def another_file(folder: Path) -> None:
    (folder / "data" / "more.parquet").write_bytes((folder / "data" / "test-00000-of-00001.parquet").read_bytes())


def broken(folder: Path) -> None:
    (folder / "data" / "test-00000-of-00001.parquet").write_bytes(b"PAR1 and no more")


def image_by_path(folder: Path) -> None:
    picture(1).save(folder.parent / "one.png")
    for name in ("test-00000-of-00001.parquet", "train-00000-of-00002.parquet", "train-00001-of-00002.parquet"):
        rows = {"image": [{"bytes": None, "path": str(folder.parent / "one.png")}]}
        write(folder, name, rows, datasets.Features({"image": datasets.Image()}))


def nested(folder: Path) -> None:
    for name in ("test-00000-of-00001.parquet", "train-00000-of-00002.parquet", "train-00001-of-00002.parquet"):
        write(folder, name, {"texts": [["a", "b"]]})


@pytest.mark.parametrize("change", [readme, missing_shard, another_file, broken, image_by_path, nested])
def test_anything_else_is_left_to_datasets(folder: Path, change: Callable[[Path], None]) -> None:
    assert open_small(folder) is not None
    change(folder)
    assert open_small(folder) is None
