"""Unlabelled samples beside the calibration samples: what is read, what is left out, and what is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hf_bico.data import loading as data_files
from hf_bico.data import remote_parquet
from hf_bico.data.draw import CalibrationDraw, Unlabelled, draw, draw_unlabelled, evaluation_samples
from hf_bico.data.sampling import draw_order
from hf_bico.errors import ColumnError, DataNotFoundError, DownloadTooLargeError, SampleCountError
from hf_bico.settings import Settings
from hf_bico.utils.samples import IMAGES, TEXTS, Text
from support.hub import Hub

pytestmark = pytest.mark.quick

NAMES = ["cat", "dog", "owl"]


def picture(value: int) -> Image.Image:
    return Image.fromarray(np.full((4, 4, 3), value, dtype=np.uint8))


def encoded(value: int) -> bytes:
    out = io.BytesIO()
    picture(value).save(out, "PNG")
    return out.getvalue()


def table(values: Sequence[int]) -> datasets.Dataset:
    """Images of one grey value each, with labels."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    rows = {"image": [picture(value) for value in values], "label": [value % 3 for value in values]}
    return datasets.Dataset.from_dict(rows, features=features)


def plain_folder(folder: Path, values: Sequence[int]) -> Path:
    """Images without classes."""
    folder.mkdir(parents=True)
    for value in values:
        (folder / f"{value:03}.png").write_bytes(encoded(value))
    return folder


def class_folder(folder: Path, **splits: Sequence[int]) -> Path:
    for split, values in splits.items():
        for value in values:
            file = folder / split / NAMES[value % 3] / f"{value:03}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded(value))
    return folder


def grey(samples: Any) -> list[int]:
    """The grey values of images, in the samples' order."""
    return [image.convert("RGB").getpixel((0, 0))[0] for images, _ in samples.batches(10) for image in images]


def drawn_from(data: Any, reads: str = IMAGES, **options: Any) -> CalibrationDraw:
    return draw(data, Settings(**{"n": 6, **options}), reads=reads)


def held_out_of(drawn: CalibrationDraw, most: int = 1000) -> Any:
    return evaluation_samples(drawn.data, drawn.samples, drawn.split, drawn.strategy.seed, most)[1]


def unlabelled(
    data: Any, drawn: CalibrationDraw, held_out: Any = None, reads: str = IMAGES, **options: Any
) -> Unlabelled:
    return draw_unlabelled(data, drawn, held_out, Settings(**options), None, known_names=None, reads=reads)


# What is read


def test_a_folder_of_images_without_classes(tmp_path: Path) -> None:
    drawn = drawn_from(class_folder(tmp_path / "animals", train=range(12)))
    more = unlabelled(plain_folder(tmp_path / "plain", range(100, 120)), drawn, unlabelled_samples=8)
    assert (more.data.name, more.split, more.data.labelled) == ("plain", "train", False)
    assert more.samples.labels == (-1,) * 8
    assert list(more.samples.indices) == draw_order(20, seed=0)[:8], "the seed's own order, and no more than asked for"
    assert grey(more.samples) == [100 + index for index in more.samples.indices], "images of this data set"
    other = unlabelled(tmp_path / "plain", drawn, unlabelled_samples=8, seed=1)
    assert list(other.samples.indices) == draw_order(20, seed=1)[:8]
    assert len(unlabelled(tmp_path / "plain", drawn).samples) == 20, "fewer than asked for is fine"


def test_labels_are_not_looked_at() -> None:
    """Nor are names, which other columns might be taken for."""
    drawn = drawn_from(table(range(12)))
    rows = table(range(100, 110)).rename_column("label", "kind").cast_column("kind", datasets.Value("int64"))
    rows = rows.add_column("file", [f"{row}.png" for row in range(10)]).add_column("number", list(range(10)))
    more = unlabelled(rows, drawn)
    assert more.data.columns.by_role == {"image": "image"}
    assert set(more.samples.labels) == {-1}
    strange = table(range(100, 110)).cast_column("label", datasets.ClassLabel(names=["a", "A", "b"]))
    assert len(unlabelled({"train": strange}, drawn).samples) == 10


@pytest.mark.parametrize("given", ["datasets", "dictionary", "list"])
def test_rows_from_python(given: str) -> None:
    drawn, rows = drawn_from(table(range(12))), table(range(100, 106)).remove_columns("label")
    data = {"datasets": rows, "dictionary": datasets.DatasetDict({"test": rows}), "list": list(rows)}[given]
    more = unlabelled(data, drawn)
    assert sorted(grey(more.samples)) == list(range(100, 106))
    assert more.split == ("test" if given == "dictionary" else "train"), "the only one"
    assert not more.data.named


def test_the_image_column_is_that_of_the_calibration_data_or_the_only_one() -> None:
    drawn = drawn_from(table(range(12)))
    renamed = table(range(100, 104)).rename_column("image", "photo")
    assert unlabelled(renamed, drawn).data.columns.image == "photo"
    masks = table([0] * 4).remove_columns("label").rename_column("image", "mask")
    two = datasets.concatenate_datasets([renamed, masks], axis=1)
    with pytest.raises(ColumnError, match="several columns could be the image column") as caught:
        unlabelled(two, drawn)
    assert caught.value.remedy.endswith("as those of the calibration data: image")
    assert unlabelled(two.rename_column("photo", "image"), drawn).data.columns.image == "image"


def test_texts() -> None:
    texts = [{"text": f"text {row}", "label": row % 2} for row in range(12)]
    drawn = drawn_from(texts, TEXTS)
    more = unlabelled([{"text": f"more {row}"} for row in range(5)], drawn, reads=TEXTS)
    assert sorted(item.first for item in next(more.samples.batches(9))[0]) == [f"more {row}" for row in range(5)]
    assert set(more.samples.labels) == {-1}
    words = [{"words": f"more {row}", "sentiment": "good"} for row in range(5)]
    found = unlabelled(words, drawn, reads=TEXTS)
    assert found.data.columns.by_role == {"text": "words"}, "a label of texts is no text"
    blank = [{"text": "  "}, {"text": "more"}, {"text": ""}]
    assert unlabelled(blank, drawn, reads=TEXTS).samples.indices == (1,)


def test_pairs_of_a_known_task_are_read_as_the_calibration_samples_are(tmp_path: Path) -> None:
    rows = [{"sentence1": f"a {row}", "sentence2": f"b {row}", "label": row % 2} for row in range(20)]
    (tmp_path / "rte").mkdir()
    (tmp_path / "rte" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    drawn = drawn_from(tmp_path / "rte", TEXTS)
    more = unlabelled([{"sentence2": "d", "sentence1": "c"}], drawn, reads=TEXTS)
    assert next(more.samples.batches(1))[0] == [Text("c", "d", ("sentence1", "sentence2"), "rte")]


def test_texts_of_another_kind_are_refused() -> None:
    drawn = drawn_from([{"text": f"text {row}", "label": row % 2} for row in range(12)], TEXTS)
    with pytest.raises(ColumnError, match="unlabelled data has prompt and completion, and the calibration data text"):
        unlabelled([{"prompt": "p", "completion": "c"}], drawn, reads=TEXTS)
    with pytest.raises(ColumnError, match="several columns could be the text column") as caught:
        unlabelled([{"one": "p", "two": "c"}], drawn, reads=TEXTS)
    assert caught.value.remedy.endswith("as those of the calibration data: text")


def test_splits(tmp_path: Path) -> None:
    """The split to calibrate on is that of other data."""
    drawn = drawn_from(class_folder(tmp_path / "animals", train=range(12), test=range(20, 32)), split="test")
    more = unlabelled(class_folder(tmp_path / "more", train=range(100, 106), test=range(106, 112)), drawn, split="test")
    assert more.split == "train"
    with pytest.raises(DataNotFoundError, match="'data' has no split 'train'") as caught:
        unlabelled({"one": table([100]), "two": table([101])}, drawn)
    assert caught.value.remedy == "give unlabelled data with a split 'train' or only one, and with one configuration"


def test_configurations(tmp_path: Path) -> None:
    """That of the calibration data where there is one of its name, else the default."""

    def folder(name: str, **values: Sequence[int]) -> Path:
        place = tmp_path / name
        place.mkdir()
        entries = "".join(f"- config_name: {config}\n  data_files: {config}.parquet\n" for config in values)
        (place / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
        for config, some in values.items():
            table(some).to_parquet(place / f"{config}.parquet")
        return place

    drawn = drawn_from(folder("data", few=range(12), many=range(12, 40)), config="few")
    same = unlabelled(folder("same", few=[100], many=[101]), drawn, config="few")
    assert (same.data.config, grey(same.samples)) == ("few", [100])
    other = unlabelled(folder("other", only=[102]), drawn, config="few")
    assert (other.data.config, grey(other.samples)) == ("only", [102])
    assert len(unlabelled(table([103]), drawn, config="few").samples) == 1
    with pytest.raises(DataNotFoundError, match="'several' has several configurations") as caught:
        unlabelled(folder("several", one=[100], two=[101]), drawn, config="few")
    assert "with one configuration" in caught.value.remedy


# What is left out


def test_of_the_same_data_set_what_was_drawn_and_what_is_measured_on_is_left_out(tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "animals", train=range(30))
    drawn = drawn_from(folder)
    held_out = held_out_of(drawn, most=10)
    used = {*grey(drawn.samples), *grey(held_out)}
    assert len(used) == 16
    more = unlabelled(folder, drawn, held_out)
    assert set(grey(more.samples)) == set(range(30)) - used
    assert sorted(grey(unlabelled(folder, drawn).samples)) == sorted(set(range(30)) - set(grey(drawn.samples)))


def test_copies_in_other_data_are_left_out(tmp_path: Path) -> None:
    drawn = drawn_from(class_folder(tmp_path / "animals", train=range(12), test=range(20, 30)))
    held_out = held_out_of(drawn)
    assert set(grey(held_out)) == set(range(20, 30))
    more = unlabelled(plain_folder(tmp_path / "plain", range(40)), drawn, held_out)
    assert set(grey(more.samples)) == set(range(40)) - set(grey(drawn.samples)) - set(grey(held_out))
    few = unlabelled(tmp_path / "plain", drawn, held_out, unlabelled_samples=20)
    assert len(few.samples) == 20, "others take their places"


def test_copies_of_texts_are_left_out() -> None:
    rows = {split: [{"text": f"{split} {row}", "label": row % 2} for row in range(8)] for split in ("train", "test")}
    drawn = drawn_from(rows, TEXTS)
    given = [{"words": row["text"]} for split in rows.values() for row in split] + [{"words": "new"}]
    more = unlabelled(given, drawn, held_out_of(drawn), reads=TEXTS)
    texts = {item.first for item in next(more.samples.batches(99))[0]}
    calibrated = {item.first for item in next(drawn.samples.batches(99))[0]}
    assert texts == {"new"} | ({f"train {row}" for row in range(8)} - calibrated)
    assert len(texts) == 3


def test_a_caption_does_not_hide_a_copy() -> None:
    rows = [{"image": picture(value), "caption": f"picture {value}"} for value in range(10)]
    drawn = drawn_from(rows)
    assert drawn.data.columns.by_role == {"image": "image", "caption": "caption"}
    more = unlabelled(rows, drawn)
    assert more.data.columns.by_role == {"image": "image"}
    assert set(grey(more.samples)) == set(range(10)) - set(drawn.samples.indices)


def test_none_left_is_refused(tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "animals", train=range(12))
    drawn = drawn_from(folder)
    with pytest.raises(SampleCountError, match="none of the 12 rows of split 'train' of 'animals' is left") as caught:
        unlabelled(folder, drawn, held_out_of(drawn))
    assert "--unlabelled" in caught.value.remedy
    assert len(unlabelled(folder, drawn, held_out_of(drawn, most=5)).samples) == 1


# On the Hub


def parquet(rows: datasets.Dataset, group: int = 5) -> bytes:
    """The rows in row groups, without what says which column is an image, but for the column's type."""
    features = {"image": {"_type": "Image"}, "label": {"names": NAMES, "_type": "ClassLabel"}}
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    stored = rows.cast_column("image", datasets.Image(decode=False))
    images = pa.StructArray.from_arrays(
        [pa.array([row["image"]["bytes"] for row in stored]), pa.array([None] * len(rows), pa.string())],
        ["bytes", "path"],
    )
    content = pa.table({"image": images, "label": pa.array(stored["label"][:])}).replace_schema_metadata(metadata)
    out = io.BytesIO()
    pq.write_table(content, out, row_group_size=group, use_dictionary=False)
    return out.getvalue()


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every data set counts as large, and a few row groups as many."""
    monkeypatch.setattr(data_files, "SMALL_REPO", 0)
    monkeypatch.setattr(remote_parquet, "MIN_BUDGET", 1_000)


@pytest.mark.parametrize("large", [False, True])
def test_a_hub_data_set(hub: Hub, monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    if large:
        monkeypatch.setattr(data_files, "SMALL_REPO", 0)
    commit = hub.create("user/more", type="dataset").commit({"train.parquet": parquet(table(range(100)))})
    drawn = drawn_from(table(range(12)))
    more = unlabelled("user/more", drawn, unlabelled_samples=1000)
    assert more.data.repo is not None
    assert (more.data.name, more.data.repo.commit, more.split) == ("user/more", commit, "train")
    assert set(grey(more.samples)) == set(range(100)) - set(grey(drawn.samples)), "fewer rows than asked for are fine"
    assert (more.split in more.data.parts) == large


def test_a_large_data_set_is_read_in_part(hub: Hub, in_parts: None) -> None:
    """Nor are its labels read, of which the classes may be missing in what is read."""
    content = parquet(table([value % 250 for value in range(1000)]))
    hub.create("user/more", type="dataset").commit({"train.parquet": content})
    drawn = drawn_from(table(range(12)), per_class=2, n=None)
    more = unlabelled("user/more", drawn, unlabelled_samples=20, per_class=2)
    assert len(more.samples) == 20
    assert 20 <= len(more.data.splits["train"]) < 100
    assert more.data.splits["train"].column_names == ["image"]
    assert hub.bytes_sent() < len(content)


def test_no_more_than_max_download_is_read(hub: Hub, in_parts: None) -> None:
    hub.create("user/more", type="dataset").commit({"train.parquet": parquet(table(range(250)))})
    drawn = drawn_from(table(range(12)))
    with pytest.raises(DownloadTooLargeError, match=r"'user/more' are a download of about .*; 2 kB are allowed"):
        unlabelled("user/more", drawn, unlabelled_samples=200, max_download=2_000)
    few = unlabelled("user/more", drawn, unlabelled_samples=5, max_download=2_000)
    assert len(few.samples) == 5


def test_of_the_same_large_data_set_more_is_read_than_is_left_out(hub: Hub, in_parts: None) -> None:
    """The samples to calibrate and to measure on are of the first row groups, which come first here too."""
    hub.create("user/x", type="dataset").commit({"train.parquet": parquet(table(range(250)))})
    drawn = drawn_from("user/x", n=10)
    held_out = held_out_of(drawn)
    assert len(drawn.samples) + len(held_out) == len(drawn.data.splits["train"]) < 50
    more = unlabelled("user/x", drawn, held_out, unlabelled_samples=10)
    assert len(more.samples) == 10
    assert not set(grey(more.samples)) & {*grey(drawn.samples), *grey(held_out)}


def test_files_of_images_on_the_hub_are_told_by_their_content(hub: Hub, tmp_path: Path) -> None:
    """In both directions: the held-out samples may be the Hub's, or the unlabelled ones."""
    files = {
        f"{split}/{NAMES[value % 3]}/{value}.png": encoded(value)
        for split, some in (("train", range(12)), ("test", range(20, 30)))
        for value in some
    }
    hub.create("user/files", type="dataset").commit(files)
    drawn = drawn_from("user/files")
    held_out = held_out_of(drawn)
    used = {*grey(drawn.samples), *grey(held_out)}
    assert len(used) == 16
    here = unlabelled(plain_folder(tmp_path / "plain", range(40)), drawn, held_out)
    assert set(grey(here.samples)) == set(range(40)) - used
    drawn = drawn_from(class_folder(tmp_path / "animals", train=range(3), test=range(3, 9)), n=3)
    there = unlabelled("user/files", drawn, held_out_of(drawn))
    assert set(grey(there.samples)) == {9, 10, 11}


def test_no_file_outside_of_a_hub_data_set_is_opened(hub: Hub, tmp_path: Path) -> None:
    """A stranger's rows may name any path, which is then compared as text."""
    folder = plain_folder(tmp_path / "local", range(6))
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    info = {"info": {"features": {"image": {"_type": "Image"}}}}
    content = pa.table({"image": pa.array([{"bytes": None, "path": str(folder / "003.png")}], image)})
    out = io.BytesIO()
    pq.write_table(content.replace_schema_metadata({b"huggingface": json.dumps(info).encode()}), out)
    hub.create("user/evil", type="dataset").commit({"train.parquet": out.getvalue()})
    drawn = drawn_from(folder, class_names=NAMES)
    assert 3 in grey(drawn.samples)
    more = unlabelled("user/evil", drawn)
    assert len(more.samples) == 1, "had the file been opened, it would have been left out as a copy"
