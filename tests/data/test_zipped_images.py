"""Zipped images, as people have them: labels and splits are found as in folders, on the Hub and on the disk."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from hf_bico.data.draw import open_data
from hf_bico.errors import DataNotFoundError
from hf_bico.settings import Settings
from support.hub import Hub

COLOURS = {"ant": 200, "bee": 20}
BOTH = {"train": {"ant": 3, "bee": 3}, "test": {"ant": 3, "bee": 3}}
TRAIN = {"train": {"ant": 3, "bee": 3}}


def picture(name: str) -> bytes:
    """An image of the class's own brightness."""
    out = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), COLOURS[name], dtype=np.uint8)).save(out, "PNG")
    return out.getvalue()


def classes(prefix: str = "", suffix: str = ".png") -> dict[str, bytes]:
    return {f"{prefix}{name}/{number}{suffix}": picture(name) for name in COLOURS for number in range(3)}


def loose(name: str, prefix: str = "", first: int = 0) -> dict[str, bytes]:
    return {f"{prefix}{number}.png": picture(name) for number in range(first, first + 3)}


def zipped(files: Mapping[str, bytes | str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def table(prefix: str = "") -> str:
    rows = [f"{prefix}{number}.png,{'ant' if number < 3 else 'bee'}" for number in range(6)]
    return "\n".join(["file_name,label", *rows]) + "\n"


SIX = loose("ant") | loose("bee", first=3)
SPLITS = "[{split: train, path: a.zip}, {split: test, path: b.zip}]"
CARD = f"---\nconfigs:\n- config_name: default\n  data_files: {SPLITS}\n---\n"
LABELLED: dict[str, tuple[dict[str, bytes | str], Any]] = {
    "train": ({"train.zip": zipped(classes())}, TRAIN),
    "train and test": ({"train.zip": zipped(classes()), "test.zip": zipped(classes())}, BOTH),
    "in a folder": ({"data/train.zip": zipped(classes()), "data/test.zip": zipped(classes())}, BOTH),
    "with a root": ({"train.zip": zipped(classes("train/")), "test.zip": zipped(classes("test/"))}, BOTH),
    "splits inside": ({"pets.zip": zipped(classes("train/") | classes("test/"))}, BOTH),
    "splits deep inside": ({"pets.zip": zipped(classes("pets/train/") | classes("pets/test/"))}, BOTH),
    "splits inside, test in its name": ({"my-test-set.zip": zipped(classes("train/") | classes("test/"))}, BOTH),
    "classes inside": ({"pets.zip": zipped(classes())}, TRAIN),
    "classes below a root": ({"pets.zip": zipped(classes("pets/"))}, TRAIN),
    "one for each class": ({f"{name}.zip": zipped(loose(name)) for name in COLOURS}, TRAIN),
    "one for each class, with roots": ({f"{name}.zip": zipped(loose(name, f"{name}/")) for name in COLOURS}, TRAIN),
    "one for each class and split": (
        {f"{split}/{name}.zip": zipped(loose(name)) for name in COLOURS for split in BOTH},
        BOTH,
    ),
    "parts in folders of classes": (
        {f"{name}/part{n}.zip": zipped({f"{n}.png": picture(name)}) for name in COLOURS for n in range(3)},
        TRAIN,
    ),
    "parts with the same names": (
        {f"part{n}.zip": zipped({f"{name}/x.png": picture(name) for name in COLOURS}) for n in range(3)},
        TRAIN,
    ),
    "a table inside": ({"train.zip": zipped(SIX | {"metadata.csv": table()})}, TRAIN),
    "a table beside": ({"images.zip": zipped(SIX), "metadata.csv": table()}, TRAIN),
    "a table beside, with folders": ({"images.zip": zipped(SIX), "metadata.csv": table("images/")}, TRAIN),
    "as macOS packs": (
        {"train.zip": zipped({"ant/": b"", **classes(), "__MACOSX/ant/._0.png": b"x", ".DS_Store": b"x"})},
        TRAIN,
    ),
    "capital letters": ({"train.zip": zipped(classes(suffix=".PNG"))}, TRAIN),
    "notes beside": ({"train.zip": zipped(classes() | {"readme.txt": "x", "ant/notes.txt": "x"})}, TRAIN),
    "by the card": ({"README.md": CARD, "a.zip": zipped(classes()), "b.zip": zipped(classes())}, BOTH),
}
UNLABELLED: dict[str, dict[str, bytes | str]] = {
    "no folders": {"train.zip": zipped(SIX)},
    "one folder": {"train.zip": zipped(loose("ant", "all/"))},
    "splits": {"train.zip": zipped(SIX), "test.zip": zipped(SIX)},
    "parts": {f"images_00{n}.zip": zipped(SIX) for n in range(3)},
    "parts of a split": {f"train-{n}.zip": zipped(SIX) for n in range(3)},
    "numbers, which may be parts or classes": {f"{n}.zip": zipped(SIX) for n in range(3)},
}


def opened(where: str, files: Mapping[str, bytes | str], hub: Hub, folder: Path, **options: Any) -> Any:
    if where == "hub":
        hub.create("user/x", type="dataset").commit(dict(files))
        return open_data("user/x", Settings(**options))
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return open_data(str(folder), Settings(**options))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.mark.parametrize(
    ("where", "name"),
    [
        *(("hub", name) for name in LABELLED),
        *(
            ("folder", name)
            for name in ("train", "splits inside", "one for each class", "a table beside", "by the card")
        ),
    ],
)
def test_classes_and_splits_are_found(hub: Hub, tmp_path: Path, where: str, name: str) -> None:
    files, expected = LABELLED[name]
    data = opened(where, files, hub, tmp_path / "data")
    assert data.class_names == tuple(COLOURS)
    found: dict[str, dict[str, int]] = {}
    for split in data.splits:
        samples = data.samples(split, list(data.labels(split)))
        for images, labels in samples.batches(4):
            for image, label in zip(images, labels, strict=True):
                own = data.class_names[label]
                assert np.asarray(image)[0, 0, 0] == COLOURS[own], "the image is the label's"
                found.setdefault(split, dict.fromkeys(COLOURS, 0))[own] += 1
    assert found == expected


@pytest.mark.parametrize(("where", "name"), [*(("hub", name) for name in UNLABELLED), ("folder", "parts")])
def test_classes_are_not_made_up(hub: Hub, tmp_path: Path, where: str, name: str) -> None:
    data = opened(where, UNLABELLED[name], hub, tmp_path / "data", class_names=list(COLOURS))
    assert not data.labelled
    for split, rows in data.splits.items():
        images, _ = next(data.samples(split, range(len(rows))).batches(100))
        assert {image.size for image in images} == {(4, 4)}
    assert len(data.splits["train"]) == sum(map(len, map(_names, UNLABELLED[name].values()))) // len(data.splits)


def _names(archive: bytes | str) -> list[str]:
    assert isinstance(archive, bytes)
    return zipfile.ZipFile(io.BytesIO(archive)).namelist()


def _encrypted() -> bytes:
    """An archive that says of each image that it wants a password."""
    content = bytearray(zipped(classes()))
    for magic, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = content.find(magic)
        while start >= 0:
            content[start + place] |= 1
            start = content.find(magic, start + 4)
    return bytes(content)


@pytest.mark.parametrize("where", ["hub", "folder"])
@pytest.mark.parametrize(
    ("files", "cause"),
    [
        ({"train.zip": zipped(classes())[:-40]}, "not a zip file"),
        ({"train.zip": b"no archive"}, "zip"),
        ({"train.zip": _encrypted()}, "password|encrypted"),
        ({"train.zip": zipped({})}, "cannot be read as a data set"),
        (
            {"train.zip": zipped(loose("ant") | {"metadata.csv": table()})},
            "metadata name an image '3.png', and no files",
        ),
        (
            {"a.zip": zipped(classes("a/")), "metadata.csv": "file_name,label\n0.png,ant\n1.png,bee\n"},
            "metadata name an image '0.png', and 2 files",
        ),
    ],
    ids=["cut short", "no archive", "encrypted", "empty", "missing images", "ambiguous images"],
)
def test_what_cannot_be_known_is_refused(
    hub: Hub, tmp_path: Path, where: str, files: dict[str, bytes | str], cause: str
) -> None:
    with pytest.raises(DataNotFoundError, match=cause):
        opened(where, files, hub, tmp_path / "data")


def test_names_that_lead_out_of_an_archive_are_left_alone(hub: Hub, tmp_path: Path) -> None:
    outside = {
        "../../pwned/0.png": picture("ant"),
        "/tmp/pwned/1.png": picture("ant"),
        "a\\..\\b/2.png": picture("ant"),
    }
    data = opened("hub", {"train.zip": zipped(classes() | outside)}, hub, tmp_path)
    assert data.class_names == tuple(COLOURS)
    assert len(data.splits["train"]) == 6
    assert not list(tmp_path.rglob("pwned"))


def test_zipped_images_are_read_once(hub: Hub, tmp_path: Path) -> None:
    """Other images under the same name are other rows; the same ones come from the cache."""
    folder = tmp_path / "data"
    first = opened("folder", {"train.zip": zipped(classes())}, hub, folder)
    again = opened("folder", {}, hub, folder)
    assert first.splits["train"].cache_files == again.splits["train"].cache_files
    (folder / "train.zip").unlink()
    swapped = {name: picture("bee" if "ant" in name else "ant") for name in classes()}
    other = opened("folder", {"train.zip": zipped(swapped)}, hub, folder)
    [image], [label] = next(other.samples("train", [0]).batches(1))
    assert np.asarray(image)[0, 0, 0] != COLOURS[other.class_names[label]]
