"""Data sets by Hub id: small ones whole, large ones by row groups, against a Hub that counts the bytes it serves."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from huggingface_hub import hf_hub_download
from PIL import Image

import hf_bico.hub.client
from hf_bico.data import loading as data_files
from hf_bico.data import remote_parquet
from hf_bico.data.dataset import DataSet
from hf_bico.data.draw import CalibrationDraw, draw, evaluation_samples, evaluation_split, open_data
from hf_bico.errors import (
    BicoError,
    ClassNamesError,
    ColumnError,
    DataNotFoundError,
    DownloadTooLargeError,
    HubUnavailableError,
    RepoNotFoundError,
    SampleCountError,
    UnreadableSampleError,
    UsageError,
)
from hf_bico.settings import Settings
from support import forks
from support.hub import Fault, Hub
from support.hub_scenes import SOURCE, TARGET, publish
from support.paper import PAPER

NAMES = ["ant", "bee", "cat", "dog", "elk", "fox"]
CARD = "---\nconfigs:\n{}---\n# A data set\n"


def encoded(seed: int, side: int = 4, format: str = "PNG") -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, format, quality=90)
    return out.getvalue()


def declared(names: Sequence[str] = NAMES) -> dict[bytes, bytes]:
    """What `datasets` writes into a parquet file to say that one column holds images, and one classes."""
    features = {"image": {"_type": "Image"}, "label": {"names": list(names), "_type": "ClassLabel"}}
    return {b"huggingface": json.dumps({"info": {"features": features}}).encode()}


def table(
    prefix: str, labels: Sequence[Any], metadata: dict[bytes, bytes] | None = None, size: int = 0, side: int = 4
) -> pa.Table:
    """Rows of small images, each with its own path, in the order of the labels given; `size` bytes beside them."""
    images = pa.StructArray.from_arrays(
        [
            pa.array([encoded(row % 50, side) for row in range(len(labels))]),
            [f"{prefix}-{row}" for row in range(len(labels))],
        ],
        ["bytes", "path"],
    )
    beside = [np.random.default_rng(row).bytes(size) for row in range(len(labels))]
    columns = {"beside": pa.array(beside, pa.binary()), "image": images, "label": pa.array(labels)}
    return pa.table(columns).replace_schema_metadata(declared() if metadata is None else metadata)


def parquet(rows: pa.Table, group: int = 10) -> bytes:
    out = io.BytesIO()
    pq.write_table(rows, out, row_group_size=group, use_dictionary=False)
    return out.getvalue()


def in_order(count: int = 20) -> list[int]:
    """Labels as in a data set that is sorted by class."""
    return [label for label in range(len(NAMES)) for _ in range(count)]


def sorted_files(prefix: str, files: int = 3) -> dict[str, bytes]:
    """A split in several files of six classes, sorted by class over all of them."""
    rows = table(prefix, in_order(), size=500)
    size = len(rows) // files
    return {
        f"data/{prefix}-{number:05}-of-{files:05}.parquet": parquet(rows.slice(number * size, size))
        for number in range(files)
    }


def paths(data: DataSet, split: str, indices: Sequence[int]) -> list[str]:
    rows = data.splits[split].cast_column("image", datasets.Image(decode=False))
    return [rows[index]["image"]["path"] for index in indices]


def sample_paths(drawn: CalibrationDraw) -> list[str]:
    return paths(drawn.data, drawn.split, drawn.samples.indices)


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every data set counts as large, and a few row groups as many."""
    monkeypatch.setattr(data_files, "SMALL_REPO", 0)
    monkeypatch.setattr(remote_parquet, "MIN_BUDGET", 4_000)


@pytest.fixture(scope="module")
def five_hundred_megabytes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """25,000 images of 20 kB in row groups of 100, 1,000 classes one after the other; and 2,000 more to measure on."""
    folder = tmp_path_factory.mktemp("large")
    images = pa.array([encoded(seed, 140, "JPEG") for seed in range(200)], pa.binary())
    files = {}
    for split, count, rows in (("train", 5, 5000), ("test", 1, 2000)):
        for number in range(count):
            start = number * rows
            labels = np.arange(start, start + rows) * 1000 // (count * rows)
            names = pa.array([f"{split}-{row}" for row in range(start, start + rows)])
            column = pa.StructArray.from_arrays(
                [images.take(pa.array(np.arange(rows) % 200)), names], ["bytes", "path"]
            )
            content = pa.table({"image": column, "label": labels})
            path = folder / f"{split}-{number}.parquet"
            metadata = declared([f"class {label}" for label in range(1000)])
            pq.write_table(
                content.replace_schema_metadata(metadata),
                path,
                row_group_size=100,
                compression="none",
                use_dictionary=False,
            )
            files[f"data/{split}-{number:05}-of-{count:05}.parquet"] = path
    yield files
    shutil.rmtree(folder)  # pytest would keep it for three runs


def test_a_large_data_set_is_not_downloaded_for_a_few_samples(
    hub: Hub, five_hundred_megabytes: dict[str, Path]
) -> None:
    assert sum(path.stat().st_size for path in five_hundred_megabytes.values()) > 500_000_000
    repo = hub.create("user/large", type="dataset")
    commit = repo.commit(five_hundred_megabytes)
    drawn = draw("user/large", Settings())
    print(f"{hub.bytes_sent() / 1e6:.1f} MB served")
    assert hub.bytes_sent() < 20_000_000, "with the samples to measure on"
    assert len(hub.log) < 60
    assert len(drawn.samples) == 100
    assert len(set(drawn.samples.labels)) >= 15
    assert len(drawn.data.parts["train"]) == 5, "from all files"
    assert drawn.data.repo is not None
    assert (drawn.data.name, drawn.data.repo.commit, drawn.data.named) == ("user/large", commit, True)
    assert sum(part.rows for part in drawn.data.parts["train"]) == len(drawn.data.splits["train"])
    images, labels = next(drawn.samples.batches(3))
    assert images[0].size == (140, 140)
    first = sample_paths(drawn)
    assert labels == [int(path.partition("-")[2]) // 25 for path in first[:3]]
    split, held_out = evaluation_samples(drawn.data, drawn.samples, drawn.split, 0)
    assert split == "test"
    assert len(held_out) >= 300

    assert sample_paths(draw("user/large", Settings(evaluate=False))) == first
    assert sample_paths(draw("user/large", Settings(seed=1, evaluate=False))) != first
    part = drawn.data.parts["train"][0].file
    hf_hub_download("user/large", part, repo_type="dataset")
    hub.clear_log()
    assert sample_paths(draw("user/large", Settings(evaluate=False))) == first
    assert all(part not in request.path for request in hub.log), "what the cache holds is not asked for again"


def test_parts_name_the_rows(hub: Hub, in_parts: None) -> None:
    """The record's parts are enough to find the samples again with nothing but pyarrow."""
    files = sorted_files("train")
    hub.create("user/x", type="dataset").commit(files)
    drawn = draw("user/x", Settings(n=15))
    tables = [
        pq.ParquetFile(io.BytesIO(files[part.file])).read_row_groups(part.row_groups)
        for part in drawn.data.parts["train"]
    ]
    rows = pa.concat_tables(tables).to_pylist()
    assert [rows[index]["image"]["path"] for index in drawn.samples.indices] == sample_paths(drawn)
    assert [rows[index]["label"] for index in drawn.samples.indices] == list(drawn.samples.labels)
    assert drawn.data.splits["train"].column_names == ["image", "label"]


def test_other_columns_are_not_read(hub: Hub, in_parts: None) -> None:
    rows = table("train", in_order(), size=100_000)
    hub.create("user/x", type="dataset").commit({"train.parquet": parquet(rows)})
    draw("user/x", Settings(n=120))
    assert hub.bytes_sent() < 250_000 < rows["beside"].nbytes


def test_smaller_samples_are_part_of_larger_ones(hub: Hub, in_parts: None) -> None:
    hub.create("user/x", type="dataset").commit(sorted_files("train"))
    ten, twenty = (sample_paths(draw("user/x", Settings(n=n))) for n in (10, 20))
    assert twenty[:10] == ten


def test_samples_do_not_depend_on_the_evaluation(hub: Hub, in_parts: None) -> None:
    hub.create("user/x", type="dataset").commit(sorted_files("train") | sorted_files("test"))
    assert sample_paths(draw("user/x", Settings(n=10))) == sample_paths(draw("user/x", Settings(n=10, evaluate=False)))


def test_more_samples_take_more_row_groups(hub: Hub, in_parts: None) -> None:
    hub.create("user/x", type="dataset").commit(sorted_files("train"))
    few, many = (draw("user/x", Settings(n=n)) for n in (10, 110))
    assert len(few.data.splits["train"]) < 60
    assert len(many.data.splits["train"]) >= 110
    assert len(set(sample_paths(many))) == 110


def test_samples_to_measure_on_are_not_those_of_calibration(hub: Hub, in_parts: None) -> None:
    hub.create("user/x", type="dataset").commit(sorted_files("train"))
    drawn = draw("user/x", Settings(n=10))
    split, held_out = evaluation_samples(drawn.data, drawn.samples, drawn.split, 0)
    assert split == "train"
    assert len(held_out) > 0
    assert not set(paths(drawn.data, split, held_out.indices)) & set(sample_paths(drawn))


def test_a_split_without_labels_is_not_measured_on(hub: Hub, in_parts: None) -> None:
    unlabelled = {"data/test-00000-of-00001.parquet": parquet(table("test", [-1] * 60))}
    hub.create("user/x", type="dataset").commit(sorted_files("train") | unlabelled | sorted_files("validation"))
    drawn = draw("user/x", Settings(n=10))
    assert evaluation_samples(drawn.data, drawn.samples, drawn.split, 0)[0] == "validation"
    assert set(drawn.data.parts) == {"train", "validation"}


def test_every_class_is_found_in_a_sorted_data_set(hub: Hub, in_parts: None) -> None:
    hub.create("user/x", type="dataset").commit(sorted_files("train"))
    drawn = draw("user/x", Settings(per_class=2))
    assert Counter(drawn.samples.labels) == dict.fromkeys(range(6), 2)
    assert len(drawn.data.splits["train"]) < 100, "what holds no missing class is not read"
    with pytest.raises(SampleCountError, match="21 samples a class were asked for and 'ant' has 20 in 'train'"):
        draw("user/x", Settings(per_class=21))


def test_more_samples_than_rows_cost_no_images(hub: Hub, in_parts: None) -> None:
    labels = [-1 if row % 2 else label for row, label in enumerate(in_order())]
    content = parquet(table("train", labels, side=40))
    hub.create("user/x", type="dataset").commit({"train.parquet": content})
    with pytest.raises(SampleCountError, match="61 samples were asked for and split 'train' of 'user/x' has 60 with"):
        draw("user/x", Settings(n=61))
    assert hub.bytes_sent() < len(content) / 4
    assert len(draw("user/x", Settings(n=60)).samples) == 60


def test_max_download(hub: Hub, in_parts: None) -> None:
    hub.create("user/x", type="dataset").commit(sorted_files("train"))
    with pytest.raises(DownloadTooLargeError, match=r"about .* kB; 2 kB are allowed") as caught:
        draw("user/x", Settings(n=100, max_download=2_000))
    assert "--max-download" in caught.value.remedy
    with pytest.raises(DownloadTooLargeError, match="split 'train' of 'user/x' is a download of") as caught:
        open_data("user/x", Settings(max_download=2_000), measure=True)
    assert "--max-download" in caught.value.remedy


def test_other_formats_are_downloaded_whole_or_not_at_all(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "SMALL_REPO", 100)
    hub.create("user/x", type="dataset").commit(image_files())
    with pytest.raises(DownloadTooLargeError, match="'user/x' can only be read whole") as caught:
        draw("user/x", Settings(max_download=1000))
    assert "--max-download" in caught.value.remedy
    assert "--data user/x@refs/convert/parquet" in caught.value.remedy
    assert len(draw("user/x", Settings(n=12)).samples) == 12


def test_to_measure_a_split_is_read_whole_or_by_rows(hub: Hub, in_parts: None) -> None:
    hub.create("user/x", type="dataset").commit(sorted_files("train") | sorted_files("test"))
    data = open_data("user/x", measure=True)
    assert evaluation_split(data, None) == "test"
    assert Counter(data.labels("test").values()) == dict.fromkeys(range(6), 20)
    assert data.class_names == tuple(NAMES)
    some = open_data("user/x", Settings(n=30, split="train"), measure=True)
    assert list(some.splits) == ["train"]
    assert 30 <= len(some.splits["train"]) < 120
    with pytest.raises(DataNotFoundError, match="'user/x' has no split 'dev'") as caught:
        open_data("user/x", Settings(split="dev"))
    assert caught.value.remedy == "use one of: train, test"


def test_images_and_numbers_that_nothing_describes(hub: Hub, in_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    content = parquet(table("train", in_order(), metadata={}).drop_columns("beside"))
    hub.create("user/x", type="dataset").commit({"train.parquet": content})
    with pytest.raises(ClassNamesError, match="numbers without names"):
        draw("user/x", Settings(n=10))
    drawn = draw("user/x", Settings(n=10), known_names=NAMES)
    assert drawn.data.class_names == tuple(NAMES)
    assert next(drawn.samples.batches(1))[0][0].size == (4, 4)
    with pytest.raises(ClassNamesError, match="outside of the 2 classes"):
        draw("user/x", Settings(n=120), known_names=NAMES[:2])
    monkeypatch.setattr(data_files, "SMALL_REPO", 10**6)
    small = draw("user/x", Settings(n=10, class_names=NAMES))
    assert next(small.samples.batches(1))[0][0].size == (4, 4)


def test_classes_that_are_strings_are_all_found(hub: Hub, in_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table("train", [NAMES[label] for label in in_order()], metadata={}).drop_columns("beside")
    hub.create("user/x", type="dataset").commit({"train.parquet": parquet(rows)})
    drawn = draw("user/x", Settings(n=3))
    assert drawn.data.class_names == tuple(NAMES), "also those of rows that are not read"
    assert len(drawn.data.splits["train"]) < 120
    assert Counter(draw("user/x", Settings(per_class=1)).samples.labels) == dict.fromkeys(range(6), 1)
    monkeypatch.setattr(remote_parquet, "MAX_SEARCHED", 5)
    with pytest.raises(ClassNamesError, match="too long"):
        draw("user/x", Settings(n=3))
    assert draw("user/x", Settings(n=3, class_names=NAMES)).data.class_names == tuple(NAMES)


def test_strings_of_a_large_data_set_are_ordered_as_those_of_a_small_one(hub: Hub, in_parts: None) -> None:
    files = {
        f"{split}.parquet": parquet(table(split, labels, metadata={}).drop_columns("beside"))
        for split, labels in (("train", ["10", "9", "", "1"] * 10), ("test", ["10 ", "9", None, "1"] * 10))
    }
    hub.create("user/x", type="dataset").commit(files)
    drawn = draw("user/x", Settings(per_class=2))
    assert drawn.data.class_names == ("1", "9", "10")
    assert Counter(drawn.samples.labels) == dict.fromkeys(range(3), 2)
    assert set(drawn.data.labels("test").values()) == {0, 1, 2}, "of those rows that were read"


def test_the_card_names_configurations_and_types(hub: Hub, in_parts: None) -> None:
    card = CARD.format(
        "- config_name: small\n  data_files: [{split: train, path: a.parquet}]\n"
        "- config_name: big\n  data_files: [{split: train, path: 'b*.parquet'}]\n"
        "dataset_info:\n- config_name: small\n- config_name: big\n  features:\n"
        "  - name: image\n    dtype: image\n"
        "  - name: label\n    dtype: {class_label: {names: {'0': A, '1': B, '2': C, '3': D, '4': E, '5': F}}}\n"
    )
    plain = parquet(table("b", in_order(), metadata={}).drop_columns("beside"))
    files = {"README.md": card, "a.parquet": parquet(table("a", in_order())), "b1.parquet": plain, "b2.parquet": plain}
    hub.create("user/x", type="dataset").commit(files)
    with pytest.raises(DataNotFoundError, match="'user/x' has several configurations") as caught:
        draw("user/x", Settings(n=10))
    assert caught.value.remedy == "choose one with --config: small, big"
    with pytest.raises(DataNotFoundError, match="no configuration 'huge'") as caught:
        draw("user/x", Settings(n=10, config="huge"))
    assert caught.value.remedy == "use one of these with --config: small, big"
    big = draw("user/x", Settings(n=10, config="big"))
    assert (big.data.config, big.data.class_names) == ("big", tuple("ABCDEF"))
    assert {path[0] for path in sample_paths(big)} == {"b"}
    small = draw("user/x", Settings(n=10, config="small"))
    assert (small.data.config, small.data.class_names) == ("small", tuple(NAMES))


@pytest.mark.parametrize("small", [0, 10**6])
def test_parquet_copies_of_the_hub(hub: Hub, in_parts: None, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr(data_files, "SMALL_REPO", small)
    repo = hub.create("user/x", type="dataset")
    repo.commit({"x.py": "raise SystemExit"})
    repo.branch("refs/convert/parquet")
    content = parquet(table("c", in_order()))
    files = {f"{name}/0000.parquet": content for name in ("one/partial-train", "one/queries", "two/train")}
    repo.commit(files, revision="refs/convert/parquet", delete=["x.py"])
    with pytest.raises(DataNotFoundError, match="runs code") as caught:
        draw("user/x", Settings())
    assert "--data user/x@refs/convert/parquet" in caught.value.remedy
    with pytest.raises(DataNotFoundError, match="several configurations"):
        draw("user/x@refs/convert/parquet", Settings())
    drawn = draw("user/x@refs/convert/parquet", Settings(n=10, config="one"))
    assert (drawn.split, drawn.data.config, drawn.data.name) == ("train", "one", "user/x")
    assert draw("user/x@refs/convert/parquet", Settings(n=10, config="one", split="queries")).split == "queries"


def image_files() -> dict[str, bytes]:
    return {
        f"{split}/{name}/{number}.png": encoded(10 * label + number)
        for split, count in (("train", 2), ("test", 1))
        for label, name in enumerate(NAMES)
        for number in range(count)
    }


def test_small_folder_of_images(hub: Hub) -> None:
    commit = hub.create("animals", type="dataset").commit({**image_files(), "weights.pkl": b"x", "run.py": b"x"})
    drawn = draw("animals", Settings(n=12))
    assert drawn.data.repo is not None
    assert (drawn.data.name, drawn.data.repo.commit, drawn.data.parts) == ("animals", commit, {})
    assert drawn.data.class_names == tuple(NAMES)
    images, labels = next(drawn.samples.batches(12))
    for image, label in zip(images, labels, strict=True):
        expected = [np.asarray(Image.open(io.BytesIO(encoded(10 * label + number)))) for number in range(2)]
        assert any(np.array_equal(np.asarray(image), one) for one in expected)
    assert not [request for request in hub.log if request.path.endswith((".pkl", ".py"))]


def test_small_parquet_is_pinned_to_its_revision(hub: Hub) -> None:
    repo = hub.create("user/x", type="dataset")
    card = CARD.format("- config_name: default\n  data_files: [{split: train, path: x.parquet}]\n")
    old = repo.commit({"README.md": card, "x.parquet": parquet(table("old", in_order(2)))})
    repo.tag("v1")
    new = repo.commit({"x.parquet": parquet(table("new", in_order(2)))})
    for reference, commit, prefix in (
        ("user/x", new, "new"),
        ("user/x@v1", old, "old"),
        (f"user/x@{old}", old, "old"),
        (f"user/x@{new}", new, "new"),
    ):
        drawn = draw(reference, Settings(n=5))
        assert drawn.data.repo is not None
        assert drawn.data.repo.commit == commit
        assert {path.partition("-")[0] for path in sample_paths(drawn)} == {prefix}
    with pytest.raises(DataNotFoundError, match="no configuration 'other'"):
        draw("user/x", Settings(config="other"))


OFFLINE = """
import sys
from hf_bico.data import loading as data_files
from hf_bico.data.draw import draw
from hf_bico.errors import BicoError
from hf_bico.settings import Settings
for name in sys.argv[1:]:
    data_files.SMALL_REPO = 0 if name == "user/large" else data_files.SMALL_REPO
    try:
        print(draw(name, Settings(n=9)).samples.indices)
    except BicoError as error:
        print(type(error).__name__, error.remedy)
"""


def test_what_is_in_the_cache_works_without_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("table", "partly", "large"):
        hub.create(f"user/{name}", type="dataset").commit({"README.md": "# x", **sorted_files("train")})
    for name in ("folder", "never"):
        hub.create(f"user/{name}", type="dataset").commit(image_files())
    samples = [draw(name, Settings(n=9)).samples.indices for name in ("user/folder", "user/table")]
    monkeypatch.setattr(data_files, "SMALL_REPO", 0)
    samples.append(draw("user/large", Settings(n=9)).samples.indices)
    for name in sorted_files("train"):
        hf_hub_download("user/large", name, repo_type="dataset")
    hf_hub_download("user/partly", "data/train-00000-of-00003.parquet", repo_type="dataset")
    environment = hub.environment(tmp_path / "home") | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["HF_HUB_CACHE"] = str(tmp_path / "hub-cache")
    asked = len(hub.log)
    names = [f"user/{name}" for name in ("folder", "table", "partly", "never", "large")]
    done = forks.run(*names, code=OFFLINE, env=environment, check=True)
    folder, rows, partly, never, large = done.stdout.splitlines()
    assert [folder, rows, large] == [str(indices) for indices in samples]
    assert partly.startswith("NotCachedError unset HF_HUB_OFFLINE, or download it once: hf download user/partly")
    assert never.startswith("NotCachedError")
    assert len(hub.log) == asked


def test_a_private_data_set_is_read_with_the_token(hub: Hub, in_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.create("user/x", type="dataset", private=True).commit(sorted_files("train"))
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(RepoNotFoundError):
        draw("user/x", Settings(n=10))
    assert len(draw("user/x", Settings(n=10), hf_bico.hub.client.Hub("hf_secretOfUser")).samples) == 10


def test_a_hub_that_stumbles(hub: Hub, in_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.create("user/x", type="dataset").commit(sorted_files("train"))
    expected = sample_paths(draw("user/x", Settings(n=10)))
    for kind in ("status", "cut", "drop"):
        fault = hub.inject(Fault("GET", r"resolve/.*parquet", kind, times=2))
        assert sample_paths(draw("user/x", Settings(n=10))) == expected
        assert fault.spent
    hub.inject(Fault("GET", r"resolve/.*parquet", "status", times=None))
    with pytest.raises(HubUnavailableError, match="'user/x'"):
        draw("user/x", Settings(n=10))


@pytest.mark.parametrize("small", [0, 10**6])
@pytest.mark.parametrize(
    ("files", "cause"),
    [
        ({"train.parquet": b"PAR1 not at all"}, "'user/x' cannot be read as a data set: "),
        ({"train.parquet": parquet(table("t", in_order()))[:-9]}, "'user/x' cannot be read as a data set: "),
        ({"README.md": "# x", "LICENSE": "x"}, "'user/x' has no data files"),
        ({"README.md": "# x", "x.py": "raise SystemExit"}, "'user/x' is a script, 'x.py'"),
        ({"README.md": "---\nconfigs: [\n---\n", "train.parquet": b"x"}, "'user/x' cannot be read as a data set: "),
    ],
)
def test_broken_repos(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, small: int, files: dict[str, bytes | str], cause: str
) -> None:
    monkeypatch.setattr(data_files, "SMALL_REPO", small)
    hub.create("user/x", type="dataset").commit(files)
    with pytest.raises(BicoError, match=cause) as caught:
        draw("user/x", Settings(n=10))
    assert isinstance(caught.value, DataNotFoundError)
    assert "\n" not in caught.value.cause + caught.value.remedy


def test_a_card_that_names_files_of_this_machine(hub: Hub, tmp_path: Path, in_parts: None) -> None:
    (tmp_path / "secret.parquet").write_bytes(parquet(table("s", in_order())))
    card = CARD.format(f"- config_name: a\n  data_files: {tmp_path}/secret.parquet\n")
    hub.create("user/x", type="dataset").commit({"README.md": card, **sorted_files("train")})
    with pytest.raises(DataNotFoundError, match="names a file outside of the repo"):
        draw("user/x", Settings(n=10))


def test_importing_is_light() -> None:
    heavy = {"torch", "datasets", "huggingface_hub"}
    code = f"import sys, hf_bico.data.remote_parquet; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("small", [0, 10**6])
@pytest.mark.parametrize("kind", ["address", "file"])
def test_rows_of_strangers_open_no_address_and_no_file_of_this_machine(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int, kind: str
) -> None:
    monkeypatch.setattr(data_files, "SMALL_REPO", small)
    (tmp_path / "secret.png").write_bytes(encoded(0))
    path = f"{hub.url}/track" if kind == "address" else str(tmp_path / "secret.png")
    rows = table("x", in_order(4))
    images = pa.StructArray.from_arrays(
        [pa.nulls(len(rows), pa.binary()), pa.array([path] * len(rows))], ["bytes", "path"]
    )
    rows = rows.set_column(rows.column_names.index("image"), "image", images).replace_schema_metadata(declared())
    hub.create("user/x", type="dataset").commit({"data/train-00000-of-00001.parquet": parquet(rows)})
    drawn = draw("user/x", Settings(n=4, evaluate=False))
    hub.clear_log()
    with pytest.raises(UnreadableSampleError, match="not in the data set"):
        list(drawn.samples.batches(2))
    assert hub.log == []


def test_images_of_a_small_repo_are_decoded_from_its_own_files(hub: Hub) -> None:
    files = {f"train/{name}/{index}.png": encoded(index) for name in NAMES for index in range(3)}
    hub.create("user/x", type="dataset").commit(files)
    drawn = draw("user/x", Settings(n=6, evaluate=False))
    assert [image.size for images, _ in drawn.samples.batches(4) for image in images] == [(4, 4)] * 6


def test_a_saved_data_set_of_a_stranger_is_refused(hub: Hub, tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"label": [0]}).save_to_disk(str(tmp_path / "saved"))
    files = {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()}
    hub.create("user/x", type="dataset").commit(files)
    with pytest.raises(DataNotFoundError, match="save_to_disk"):
        draw("user/x", Settings(n=1))


def test_the_limit_of_the_download_is_in_the_record(hub: Hub, tmp_path: Path, in_parts: None) -> None:
    """It changes which row groups are read, so a repeat needs it."""
    import hf_bico

    publish(hub, tmp_path / "scene")
    files = {f"data/train-{index:05}-of-00004.parquet": parquet(table(f"p{index}", in_order())) for index in range(4)}
    hub.create("user/large", type="dataset").commit(files)
    names = ["zero", "one", "two", "three", "four", "five"]
    options = {"n": 12, "evaluate": False, "device": "cpu", "max_download": "6kB", "class_names": names, **PAPER}
    ported = hf_bico.port(SOURCE, TARGET, data="user/large", **options)
    assert ported.record.data is not None
    assert ported.record.data.sampling == "random"
    assert ported.record.data.parts
    assert "--max-download 6000" in (ported.record.command or "")
    again = hf_bico.rerun(ported.save(tmp_path / "out"), device="cpu")
    assert (again.same, again.differences) == (True, [])


@pytest.mark.parametrize("sampling", ["class-balanced", "centroid-near"])
def test_classes_of_a_sorted_data_set_are_read_evenly(hub: Hub, in_parts: None, sampling: str) -> None:
    hub.create("user/x", type="dataset").commit(sorted_files("train"))
    drawn = draw("user/x", Settings(n=12, sampling=sampling, evaluate=False))
    assert len(drawn.data.splits["train"]) < 100, "what holds no missing class is not read"
    assert set(drawn.data.labels("train").values()) == set(range(6))
    if drawn.needs_features:
        rows = torch.tensor(drawn.samples.indices)
        drawn = drawn.chosen(torch.stack([rows.sin(), rows.cos()], 1))
    assert Counter(drawn.samples.labels) == dict.fromkeys(range(6), 2)


def test_a_class_that_has_too_few_rows_stops_nothing(hub: Hub, in_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = [label for label in in_order() if label != 4] + [4]
    hub.create("user/x", type="dataset").commit({"train.parquet": parquet(table("train", labels))})
    drawn = draw("user/x", Settings(n=12, sampling="class-balanced", evaluate=False))
    assert sorted(Counter(drawn.samples.labels).values()) == [1, 2, 2, 2, 2, 3]
    monkeypatch.setattr(remote_parquet, "MAX_SEARCHED", 1)
    assert len(draw("user/x", Settings(n=12, sampling="class-balanced", evaluate=False)).samples) == 12
    with pytest.raises(SampleCountError, match="hold too few labels"):
        draw("user/x", Settings(per_class=2, evaluate=False))


def test_evenness_stays_within_its_budget(hub: Hub, in_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_parquet, "MIN_BUDGET", 1)
    monkeypatch.setattr(remote_parquet, "BUDGET_SHARE", 0)
    hub.create("user/x", type="dataset").commit(sorted_files("train"))
    drawn = draw("user/x", Settings(n=12, sampling="class-balanced", evaluate=False))
    assert len(drawn.data.splits["train"]) == 20, "as many as hold 12 rows"
    assert len(drawn.samples) == 12


@pytest.mark.parametrize("sampling", ["half-class", "one-class"])
@pytest.mark.parametrize("kind", ["numbers", "names"])
def test_some_classes_of_a_sorted_data_set(hub: Hub, in_parts: None, sampling: str, kind: str) -> None:
    names = [NAMES[label] for label in in_order()]
    rows = table("train", in_order()) if kind == "numbers" else table("train", names, metadata={})
    rows = rows if kind == "numbers" else rows.drop_columns("beside")
    hub.create("user/x", type="dataset").commit({"train.parquet": parquet(rows)})
    drawn = draw("user/x", Settings(n=20, sampling=sampling, evaluate=False))
    assert len(drawn.samples) == 20
    there = len(set(drawn.data.labels("train").values()))
    assert len(set(drawn.samples.labels)) <= (1 if sampling == "one-class" else (there + 1) // 2)
    each = draw("user/x", Settings(per_class=3, sampling=sampling, evaluate=False))
    assert set(Counter(each.samples.labels).values()) == {3}
    with pytest.raises(SampleCountError, match="121 samples"):
        draw("user/x", Settings(n=121, sampling=sampling))


def unlabelled_files(prefix: str) -> dict[str, bytes]:
    described = json.dumps({"info": {"features": {"image": {"_type": "Image"}}}}).encode()
    rows = table(prefix, in_order()).select(["image"]).replace_schema_metadata({b"huggingface": described})
    return {f"data/{prefix}-00000-of-00001.parquet": parquet(rows)}


@pytest.mark.parametrize("small", [0, 10**6])
def test_a_data_set_without_labels(hub: Hub, in_parts: None, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr(data_files, "SMALL_REPO", small)
    hub.create("user/x", type="dataset").commit(unlabelled_files("train") | unlabelled_files("test"))
    drawn = draw("user/x", Settings(n=15, class_names=NAMES))
    assert (drawn.labels, drawn.data.labelled, drawn.samples.labels) == ("pseudo", False, (-1,) * 15)
    assert len(set(sample_paths(drawn))) == 15
    assert next(drawn.samples.batches(2))[0][0].size == (4, 4)
    assert len(evaluation_samples(drawn.data, drawn.samples, drawn.split, 0)[1]) == 0
    assert sample_paths(draw("user/x", Settings(n=10, class_names=NAMES))) == sample_paths(drawn)[:10]
    if not small:
        assert list(drawn.data.splits) == ["train"], "there is nothing to measure on"
        assert len(drawn.data.splits["train"]) < 120
    with pytest.raises(ClassNamesError, match="nothing names the classes"):
        draw("user/x", Settings(n=15))
    with pytest.raises(UsageError, match="-k needs labels, and 'user/x' has none"):
        draw("user/x", Settings(per_class=2, class_names=NAMES))
    with pytest.raises(SampleCountError, match="121 samples were asked for and split 'train' of 'user/x' has 120\n"):
        draw("user/x", Settings(n=121, class_names=NAMES))
    with pytest.raises(ColumnError, match="no column looks like the label column"):
        draw("user/x", Settings(n=15, class_names=NAMES, labels="dataset"))
    with pytest.raises(ColumnError, match="no column looks like the label column"):
        open_data("user/x", Settings(class_names=NAMES), measure=True)


def test_labels_that_calibration_is_not_to_know(hub: Hub, in_parts: None) -> None:
    hidden = {"data/train-00000-of-00001.parquet": parquet(table("train", [-1] * 120))}
    hub.create("user/x", type="dataset").commit(hidden | sorted_files("test"))
    drawn = draw("user/x", Settings(n=15, labels="pseudo"))
    assert (drawn.labels, drawn.data.labelled, drawn.samples.labels) == ("pseudo", True, (-1,) * 15)
    assert len(drawn.data.splits["train"]) < 120
    split, held_out = evaluation_samples(drawn.data, drawn.samples, drawn.split, 0)
    assert split == "test"
    assert set(held_out.labels) <= set(range(6))


def test_a_small_folder_of_images_without_classes(hub: Hub) -> None:
    files = {f"{split}/{number}.png": encoded(number) for split in ("train", "test") for number in range(9)}
    hub.create("user/x", type="dataset").commit(files)
    drawn = draw("user/x", Settings(n=5), known_names=NAMES)
    assert (drawn.labels, drawn.split, len(next(drawn.samples.batches(5))[0])) == ("pseudo", "train", 5)
