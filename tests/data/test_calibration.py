"""Which samples: loading, columns, classes, and draws that are the same on every machine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from hf_bico.data.draw import (
    calibration_samples,
    calibration_split,
    draw,
    evaluation_samples,
    evaluation_split,
    open_data,
)
from hf_bico.data.sampling import draw_order
from hf_bico.errors import (
    ClassNamesError,
    ColumnError,
    DataNotFoundError,
    RepoNotFoundError,
    SampleCountError,
    UsageError,
)
from hf_bico.settings import Settings

pytestmark = pytest.mark.quick

NAMES = ["cat", "dog", "owl"]


def picture(value: int) -> Image.Image:
    return Image.fromarray(np.full((4, 4, 3), value, dtype=np.uint8))


def table(count: int = 30, **columns: object) -> datasets.Dataset:
    rows = {"image": [picture(i) for i in range(count)], "label": [i % 3 for i in range(count)], **columns}
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    for name, values in columns.items():
        features[name] = datasets.Value("int64" if isinstance(values[0], int) else "string")  # type: ignore[index]
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def image_folder(folder: Path) -> Path:
    for split, count in (("train", 5), ("test", 2)):
        for number, name in enumerate(NAMES):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                picture(10 * number + index).save(folder / split / name / f"{index}.png")
    return folder


def test_image_folder(tmp_path: Path) -> None:
    data = open_data(image_folder(tmp_path / "animals"))
    assert data.name == "animals"
    assert set(data.splits) == {"train", "test"}
    assert data.class_names == tuple(NAMES)
    images, labels = next(calibration_samples(data, "train", Settings(n=15)).batches(15))
    for image, label in zip(images, labels, strict=True):
        assert image.getpixel((0, 0))[0] // 10 == label


def test_parquet_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table().to_parquet(tmp_path / "data" / "train.parquet")
    for path in (tmp_path, tmp_path / "data" / "train.parquet"):
        data = open_data(path)
        assert data.columns.image == "image"
        assert data.class_names == tuple(NAMES)
        assert len(data.labels("train")) == 30


def test_configurations_of_a_folder(tmp_path: Path) -> None:
    entries = "".join(f"- config_name: {name}\n  data_files: {name}.parquet\n" for name in ("few", "many"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
    table(3).to_parquet(tmp_path / "few.parquet")
    table(30).to_parquet(tmp_path / "many.parquet")
    with pytest.raises(DataNotFoundError, match="has several configurations") as caught:
        open_data(tmp_path)
    assert caught.value.remedy == "choose one with --config: few, many"
    data = open_data(tmp_path, Settings(config="few"))
    assert (len(data.splits["train"]), data.config, data.repo) == (3, "few", None)
    with pytest.raises(DataNotFoundError, match="no configurations"):
        open_data(tmp_path / "few.parquet", Settings(config="few"))


def test_saved_to_disk(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": table(), "test": table(6)}).save_to_disk(tmp_path / "saved")
    assert {name: len(rows) for name, rows in open_data(tmp_path / "saved").splits.items()} == {"train": 30, "test": 6}


def test_several_candidates_ask_for_the_option() -> None:
    rows = table().rename_column("label", "kind").cast_column("kind", datasets.Value("int64"))
    data = rows.add_column("id", list(range(30)))
    with pytest.raises(ColumnError, match="several columns could be the label column") as caught:
        open_data(data, Settings(class_names=NAMES))
    assert "--label-column" in caught.value.remedy
    assert open_data(data, Settings(label_column="kind", class_names=NAMES)).columns.label == "kind"
    with pytest.raises(ColumnError, match="no column 'nope'"):
        open_data(data, Settings(label_column="nope", class_names=NAMES))


def test_class_label_is_preferred_to_other_numbers() -> None:
    assert open_data(table(id=list(range(30)))).columns.label == "label"


def test_no_labels_column() -> None:
    with pytest.raises(ColumnError, match="no column looks like the label column"):
        open_data(table().remove_columns("label"), Settings(labels="dataset", class_names=NAMES))
    with pytest.raises(ColumnError, match="no column looks like the label column"):
        open_data(table().remove_columns("label"), Settings(class_names=NAMES), measure=True)
    with pytest.raises(ClassNamesError, match="no column looks like the label column, and nothing names") as caught:
        open_data(table().remove_columns("label"))
    assert "--class-names" in caught.value.remedy


def test_no_image_column() -> None:
    with pytest.raises(ColumnError, match="no column looks like the image column"):
        open_data(table().remove_columns("image"))


def test_string_labels_are_sorted_classes() -> None:
    words = [["owl", "cat", "dog"][i % 3] for i in range(30)]
    rows = [{"image": picture(i), "label": word} for i, word in enumerate(words)]
    data = open_data(rows)
    assert data.class_names == ("cat", "dog", "owl")
    assert data.labels("train") == {i: [2, 0, 1][i % 3] for i in range(30)}


def texts(*labels: str | None) -> list[dict[str, Any]]:
    return [{"image": picture(i), "label": label} for i, label in enumerate(labels)]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (("10", "9", "1", "0"), ("0", "1", "9", "10")),
        (("12", "3", "7"), ("3", "7", "12")),
        (("10.0", "9.0"), ("9.0", "10.0")),
        (("1", "-1", "-10", "0"), ("-10", "-1", "0", "1")),
        (("10", "01", "9", "1"), ("01", "1", "9", "10")),
        (("9" * 5000, "10"), ("10", "9" * 5000)),
        (("10", "9", "b"), ("10", "9", "b")),
        (("class 10", "class 9"), ("class 10", "class 9")),
        (("\u0661\u0660", "9"), ("9", "\u0661\u0660")),
        (("\u00b2", "10", "9"), ("10", "9", "\u00b2")),
    ],
)
def test_labels_that_are_all_numbers_are_sorted_by_number(labels: tuple[str, ...], names: tuple[str, ...]) -> None:
    assert open_data(texts(*labels)).class_names == names


def test_given_names_keep_their_order() -> None:
    then = ("0", "1", "10", "2")  # as earlier versions sorted and recorded them
    data = open_data(texts("0", "1", "2", "10"), Settings(class_names=then))
    assert (data.class_names, data.labels("train")) == (then, {0: 0, 1: 1, 2: 3, 3: 2})


def test_a_folder_of_images_keeps_the_order_of_datasets(tmp_path: Path) -> None:
    for name in ("0", "2", "10"):
        (tmp_path / "train" / name).mkdir(parents=True)
        picture(int(name)).save(tmp_path / "train" / name / "0.png")
    assert open_data(tmp_path).class_names == ("0", "10", "2")


@pytest.mark.parametrize(
    ("train", "test", "names"),
    [
        (("Cat", "dog"), ("cat", "DOG"), ("Cat", "dog")),
        (("cat ", "dog", "cat"), ("cat", " dog"), ("cat", "dog")),
        ((" <=50K", " >50K"), (" <=50K.",), (" <=50K", " <=50K.", " >50K")),
        (("a", "A"), ("a",), ("A", "a")),
        (("cat", "", None, "  "), ("cat",), ("cat",)),
        (("cat", "dog"), ("dog", "owl"), ("cat", "dog", "owl")),
    ],
)
def test_spellings_of_one_class(train: Any, test: Any, names: tuple[str, ...]) -> None:
    data = open_data({"train": texts(*train), "test": texts(*test)})
    assert data.class_names == names
    for split, labels in (("train", train), ("test", test)):
        found = {row: names[label] for row, label in data.labels(split).items()}
        assert found.keys() == {row for row, label in enumerate(labels) if label and label.strip()}
        assert all(name.strip().lower() == labels[row].strip().lower() for row, name in found.items())
        assert all(name == labels[row] for row, name in found.items() if labels[row] in names)


def test_given_names_are_found_in_other_capitals_unless_two_would_do() -> None:
    assert open_data(texts("Cat", "DOG "), Settings(class_names=["cat", "dog"])).labels("train") == {0: 0, 1: 1}
    with pytest.raises(ClassNamesError, match="row 1 of split 'train' has the label 'CAt', outside of the 2 classes"):
        open_data(texts("Cat", "CAt"), Settings(class_names=["cat", "Cat"])).labels("train")


def test_folders_of_one_class_in_two_spellings(tmp_path: Path) -> None:
    for split, names in (("train", ("Cat", "dog")), ("test", ("cat", "dog"))):
        for name in names:
            (tmp_path / split / name).mkdir(parents=True)
            picture(1).save(tmp_path / split / name / "0.png")
    with pytest.raises(ClassNamesError, match="the class 'Cat' of split 'train' is called 'cat' in split 'test'"):
        open_data(tmp_path)
    (tmp_path / "train" / "cat").mkdir()
    picture(2).save(tmp_path / "train" / "cat" / "0.png")
    assert open_data(tmp_path).class_names == ("Cat", "cat", "dog"), "one split tells them apart"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_of_a_list_are_turned_as_datasets_turns_them(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "0.png", exif=exif)
    options = Settings(class_names=["a"])
    given = [{"image": Image.open(tmp_path / "0.png"), "label": "a"}]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    stored = datasets.Dataset.from_dict({"image": [str(tmp_path / "0.png")], "label": ["a"]}, features)
    (one,), (other,) = (next(open_data(rows, options).samples("train", [0]).batches(1))[0] for rows in (given, stored))
    assert np.array_equal(np.asarray(one), np.asarray(other))
    assert given[0]["image"].getexif().get(0x0112) == orientation, "the caller's image stays as it was"


def test_an_image_whose_exif_block_is_broken_stays_as_it_is(tmp_path: Path) -> None:
    picture(3).save(tmp_path / "0.png", exif=b"xx")
    rows = [{"image": Image.open(tmp_path / "0.png"), "label": "a"}]
    items, _ = next(open_data(rows).samples("train", [0]).batches(1))
    assert items[0].size == (4, 4)


def test_numbers_without_names_ask_for_them() -> None:
    rows = [{"image": picture(i), "label": i % 3} for i in range(9)]
    with pytest.raises(ClassNamesError, match="numbers without names"):
        open_data(rows)
    assert open_data(rows, Settings(class_names=NAMES)).labels("train") == {i: i % 3 for i in range(9)}
    with pytest.raises(ClassNamesError, match="label 2, outside of the 2 classes"):
        open_data(rows, Settings(class_names=NAMES[:2])).labels("train")


def test_known_names_are_for_numbers_without_names() -> None:
    rows = [{"image": picture(i), "label": i % 3} for i in range(9)]
    assert open_data(rows, known_names=NAMES).class_names == tuple(NAMES)
    assert open_data(rows, Settings(class_names=["a", "b", "c"]), known_names=NAMES).class_names == ("a", "b", "c")
    assert open_data(table(), known_names=["a", "b", "c", "d"]).class_names == tuple(NAMES)
    with pytest.raises(ClassNamesError, match="label 2, outside of the 2 classes"):
        open_data(rows, known_names=NAMES[:2]).labels("train")


def test_draw_is_fixed_for_ever() -> None:
    """Literal values: a change of Python, numpy or torch must not change which samples a seed means."""
    assert draw_order(10, 0) == [3, 8, 5, 7, 1, 9, 2, 6, 0, 4]
    assert draw_order(10, 1) == [8, 2, 0, 5, 1, 9, 7, 6, 3, 4]


def test_draw_is_uniform() -> None:
    first = Counter(draw_order(10, seed)[0] for seed in range(5000))
    assert all(400 < first[index] < 600 for index in range(10))


def test_smaller_samples_are_part_of_larger_ones() -> None:
    data = open_data(table())
    ten, twenty = (calibration_samples(data, "train", Settings(n=n, seed=5)).indices for n in (10, 20))
    assert twenty[:10] == ten


def test_per_class() -> None:
    samples = calibration_samples(open_data(table()), "train", Settings(per_class=4))
    assert Counter(samples.labels) == {0: 4, 1: 4, 2: 4}
    with pytest.raises(SampleCountError, match="11 samples a class were asked for and 'cat' has 10"):
        calibration_samples(open_data(table()), "train", Settings(per_class=11))


def test_more_samples_than_there_are() -> None:
    with pytest.raises(
        SampleCountError, match="31 samples were asked for and split 'train' of 'data' has 30 with labels"
    ) as caught:
        calibration_samples(open_data(table()), "train", Settings(n=31))
    assert caught.value.remedy == "use -n 30 or less"


def test_splits_are_chosen_by_purpose() -> None:
    data = open_data({"train": table(), "validation": table(6), "extra": table(3)})
    assert calibration_split(data, None) == "train"
    assert evaluation_split(data, None) == "validation"
    assert calibration_split(data, "extra") == "extra"
    with pytest.raises(DataNotFoundError, match="no split 'nope'"):
        calibration_split(data, "nope")
    with pytest.raises(DataNotFoundError, match="no split 'train'"):
        calibration_split(open_data({"one": table(), "two": table()}), None)


def test_evaluation_never_uses_a_calibration_sample() -> None:
    data = open_data(table())
    used = calibration_samples(data, "train", Settings(n=20))
    split, held_out = evaluation_samples(data, used, "train", 0)
    assert split == "train"
    assert not set(held_out.indices) & set(used.indices)
    assert len(held_out) == 10


def test_data_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RepoNotFoundError, match="the data set: there is no folder"):
        open_data(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataNotFoundError, match="cannot be read as a data set"):
        open_data(tmp_path / "empty")


def test_rows_without_labels_are_never_drawn() -> None:
    rows = [{"image": picture(i), "label": [-1, None, 0, 1][i % 4]} for i in range(40)]
    data = open_data({"train": rows, "test": [{"image": picture(1), "label": -1}] * 5}, Settings(class_names=NAMES))
    samples = calibration_samples(data, "train", Settings(n=12))
    assert all(index % 4 >= 2 for index in samples.indices)
    split, held_out = evaluation_samples(data, samples, "train", 0)
    assert split == "train", "a split without labels measures nothing"
    assert len(held_out) == 8
    with pytest.raises(SampleCountError, match="has 20 with labels"):
        calibration_samples(data, "train", Settings(n=21))


def test_splits_that_name_their_classes_differently() -> None:
    other = table(6).cast_column("label", datasets.ClassLabel(names=NAMES[::-1]))
    with pytest.raises(ClassNamesError, match="differently"):
        open_data({"train": table(), "test": other})


def test_split_without_the_columns_is_not_measured_on() -> None:
    data = open_data({"train": table(), "test": table(6).rename_column("label", "kind")})
    split, _ = evaluation_samples(data, calibration_samples(data, "train", Settings(n=5)), "train", 0)
    assert split == "train"
    with pytest.raises(ColumnError, match="split 'test' has no column 'label'"):
        data.labels("test")


def test_labels_of_another_split_are_measured_on() -> None:
    """What is calibrated on has none."""
    splits = {"test": table(6), "train": table().remove_columns("label")}
    drawn = draw(splits, Settings(n=5))
    assert drawn.labels == "pseudo"
    assert len(drawn.data.samples("train", [])) == 0
    assert drawn.samples.labels == (-1,) * 5
    split, samples = evaluation_samples(drawn.data, drawn.samples, drawn.split, 0)
    assert (split, sorted(samples.indices)) == ("test", list(range(6)))
    with pytest.raises(ColumnError, match="split 'train' has no column 'label'|no column looks like"):
        draw(splits, Settings(n=5, labels="dataset"))


@pytest.mark.parametrize("form", ["numpy", "torch"])
def test_formatted_data_sets(form: str) -> None:
    assert open_data(table().with_format(form)).labels("train") == {i: i % 3 for i in range(30)}


def test_images_given_as_labels_are_refused() -> None:
    with pytest.raises(ColumnError, match="holds image, not labels"):
        open_data(table(), Settings(label_column="image"))


@pytest.mark.parametrize("data", [{}, [], 7])
def test_data_without_rows(data: object) -> None:
    with pytest.raises(DataNotFoundError, match="no rows"):
        open_data(data)


def test_a_stream_has_no_numbered_rows() -> None:
    with pytest.raises(DataNotFoundError, match="is a stream") as caught:
        open_data(iter(()))
    assert "itertools.islice" in caught.value.remedy


def test_rows_without_names() -> None:
    with pytest.raises(ColumnError, match="no \\(image, label\\) pairs"):
        open_data([[picture(1), 0, "more"]])


def plain_images(folder: Path, *splits: str) -> Path:
    for split in splits or ("",):
        (folder / split).mkdir(parents=True)
        for index in range(12):
            picture(index).save(folder / split / f"{index}.png")
    return folder


@pytest.mark.parametrize("kind", ["rows", "tensors", "table", "dictionary", "folder", "folders", "parquet", "saved"])
@pytest.mark.parametrize("labels", ["auto", "pseudo"])
def test_data_without_labels(kind: str, labels: str, tmp_path: Path) -> None:
    unlabelled = table(12).remove_columns("label")
    if kind == "parquet":
        unlabelled.to_parquet(tmp_path / "train.parquet")
    if kind == "saved":
        unlabelled.save_to_disk(tmp_path / "saved")
    data = {
        "rows": lambda: [{"image": picture(i)} for i in range(12)],
        "tensors": lambda: [{"image": torch.full((3, 4, 4), float(i))} for i in range(12)],
        "table": lambda: unlabelled,
        "dictionary": lambda: {"train": unlabelled, "test": unlabelled},
        "folder": lambda: plain_images(tmp_path / "plain"),
        "folders": lambda: plain_images(tmp_path / "plain", "train", "val", "test"),
        "parquet": lambda: tmp_path,
        "saved": lambda: tmp_path / "saved",
    }[kind]()
    drawn = draw(data, Settings(n=5, labels=labels), known_names=NAMES)
    assert (drawn.data.labelled, drawn.labels, drawn.data.columns.label) == (False, "pseudo", None)
    assert drawn.data.class_names == tuple(NAMES)
    assert drawn.samples.labels == (-1,) * 5
    assert list(drawn.samples.indices) == draw_order(12, 0)[:5]
    assert drawn.data.labels("train") == {}
    assert len(next(drawn.samples.batches(5))[0]) == 5
    assert len(evaluation_samples(drawn.data, drawn.samples, drawn.split, 0)[1]) == 0
    named = drawn.with_labels([0, 1, 2, 1, 0])
    assert (named.samples.labels, named.labels) == ((0, 1, 2, 1, 0), "pseudo")
    assert next(named.samples.batches(2))[1] == [0, 1]
    with pytest.raises(ValueError, match="2 labels for 5 samples"):
        drawn.with_labels([0, 1])
    with pytest.raises(SampleCountError, match="13 samples were asked for and split 'train' of .* has 12\n") as caught:
        draw(data, Settings(n=13, labels=labels), known_names=NAMES)
    assert caught.value.remedy == "use -n 12 or less"


def test_folders_that_are_splits_are_no_classes(tmp_path: Path) -> None:
    data = open_data(plain_images(tmp_path / "plain", "train", "test"), Settings(class_names=NAMES))
    assert (set(data.splits), data.labelled) == ({"train", "test"}, False)
    for split, name in (("train", "cat"), ("train", "dog"), ("test", "cat")):
        plain_images(tmp_path / "named" / split / name)
    labelled = open_data(tmp_path / "named")
    assert (labelled.class_names, len(labelled.labels("test"))) == (("cat", "dog"), 12)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"per_class": 2}, "-k"),
        ({"sampling": "class-balanced", "n": 3}, "--sampling class-balanced"),
        ({"sampling": "centroid-near", "n": 3}, "--sampling centroid-near"),
        ({"sampling": "half-class", "per_class": 2}, "--sampling half-class"),
        ({"sampling": "one-class", "n": 3}, "--sampling one-class"),
    ],
)
def test_what_needs_labels(options: dict[str, Any], option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} needs labels, and 'data' has none"):
        draw(table().remove_columns("label"), Settings(class_names=NAMES, **options))
    with pytest.raises(UsageError, match=f"{option} needs labels, and --labels pseudo does not look at them"):
        draw(table(), Settings(labels="pseudo", **options))


def test_labels_that_calibration_is_not_to_know() -> None:
    rows = [{"image": picture(i), "label": [-1, None, 0, 1][i % 4]} for i in range(40)]
    data = {"train": rows, "test": [{"image": picture(i), "label": i % 3} for i in range(9)]}
    drawn = draw(data, Settings(n=20, labels="pseudo", class_names=NAMES))
    assert (drawn.data.labelled, drawn.labels) == (True, "pseudo")
    assert list(drawn.samples.indices) == draw_order(40, 0)[:20], "with or without a label"
    assert drawn.samples.labels == (-1,) * 20
    split, held_out = evaluation_samples(drawn.data, drawn.samples, drawn.split, 0)
    assert (split, sorted(held_out.labels)) == ("test", [0, 0, 0, 1, 1, 1, 2, 2, 2])
    drawn = draw(rows, Settings(n=20, labels="pseudo", class_names=NAMES))
    split, held_out = evaluation_samples(drawn.data, drawn.samples, drawn.split, 0)
    assert split == "train"
    assert not set(held_out.indices) & set(drawn.samples.indices)
    assert all(label == index % 4 - 2 for index, label in zip(held_out.indices, held_out.labels, strict=True))
    assert draw(rows, Settings(n=9, class_names=NAMES)).labels == "dataset"


def test_a_column_without_any_label() -> None:
    rows = [{"image": picture(i), "label": -1} for i in range(9)]
    with pytest.raises(DataNotFoundError, match="has no labels") as caught:
        draw(rows, Settings(n=3, class_names=NAMES))
    assert "--labels pseudo" in caught.value.remedy
    drawn = draw(rows, Settings(n=3, class_names=NAMES, labels="pseudo"))
    assert len(evaluation_samples(drawn.data, drawn.samples, drawn.split, 0)[1]) == 0


def test_a_split_without_the_label_column() -> None:
    data = {"test": table(9), "train": table(9).remove_columns("label")}
    drawn = draw(data, Settings(n=3, labels="pseudo"))
    split, held_out = evaluation_samples(drawn.data, drawn.samples, drawn.split, 0)
    assert (drawn.split, split, len(held_out)) == ("train", "test", 9)


@pytest.mark.parametrize("labels", ["auto", "pseudo", "dataset"])
def test_labels_that_cannot_be_guessed_are_asked_for(labels: str) -> None:
    rows = table(word=["x"] * 30).cast_column("label", datasets.Value("int64")).rename_column("label", "kind")
    with pytest.raises(ColumnError, match="several columns could be the label column") as caught:
        draw(rows, Settings(n=3, labels=labels, class_names=NAMES))
    assert "--label-column" in caught.value.remedy


def test_an_objective_of_the_callers_own_needs_no_names() -> None:
    data = open_data(table().remove_columns("label"), Settings(objective=lambda model, batch: 0))
    assert data.class_names == ()


@pytest.mark.parametrize("count", [2, 3, 4, 7, 30])
def test_rotated(count: int) -> None:
    samples = calibration_samples(open_data(table()), "train", Settings(n=count))
    other = samples.rotated(count // 2)
    assert sorted(other.indices) == sorted(samples.indices)
    assert all(one != two for one, two in zip(samples.indices, other.indices, strict=True))
    assert other.indices == samples.indices[count // 2 :] + samples.indices[: count // 2]
    assert other.labels == tuple(index % 3 for index in other.indices)
    images = [image for some, _ in other.batches(4) for image in some]
    assert [image.getpixel((0, 0))[0] for image in images] == list(other.indices)
