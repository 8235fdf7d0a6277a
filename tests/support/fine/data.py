"""Cases of images and labels that look fine."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, load_dataset
from PIL import ExifTags
from PIL import Image as Pillow

from hf_bico.errors import ClassNamesError, UnreadableSampleError
from hf_bico.experiments.demo.digits import CLASS_NAMES
from support.fine.cases import Outcome, Refused, Right, Said, Stage, State, case, reconfigure, rewrite

LABELS = "Labels and classes"
IMAGES = "Images"
SPLITS = "Rows and splits"


def rows_of(stage: Stage) -> DatasetDict:
    return stage.once("rows", lambda: load_dataset(str(stage.data)))


def _relabelled(stage: Stage, relabel: Callable[[list[int]], list[int]], names: tuple[str, ...] = CLASS_NAMES) -> Any:
    """The data set with other labels, or other names for them."""

    def one(rows: Dataset) -> Dataset:
        features = Features({"image": Image(), "label": ClassLabel(names=list(names))})
        columns = {"image": list(rows["image"]), "label": relabel(list(rows["label"]))}
        return Dataset.from_dict(columns, features=features)

    return DatasetDict({split: one(rows) for split, rows in rows_of(stage).items()})


def _shuffled(labels: list[int]) -> list[int]:
    return random.Random(0).sample(labels, len(labels))


@case(
    LABELS,
    "ten classes with their names",
    "the names stand in another order than the labels",
    Said(
        "The fine-tuned source gets 10.1% of 597 samples right, as chance would of 10 classes: "
        "check that it was fine-tuned on these labels and on this base, and that the class names "
        "stand in the labels' order."
    ),
)
def names_in_another_order(stage: Stage) -> Outcome:
    return stage.port(data=_relabelled(stage, list, tuple(sorted(CLASS_NAMES))), evaluate=True)


@case(
    LABELS,
    "a labelled data set",
    "its labels are shuffled",
    Said(
        "The fine-tuned source gets 9.7% of 597 samples right, as chance would of 10 classes: "
        "check that it was fine-tuned on these labels and on this base, and that the class names "
        "stand in the labels' order."
    ),
)
def labels_shuffled(stage: Stage) -> Outcome:
    return stage.port(data=_relabelled(stage, _shuffled), evaluate=True)


@case(
    LABELS,
    "a labelled data set",
    "its labels are off by one",
    Said(
        "The fine-tuned source gets 1.8% of 597 samples right, as chance would of 10 classes: "
        "check that it was fine-tuned on these labels and on this base, and that the class names "
        "stand in the labels' order."
    ),
)
def labels_off_by_one(stage: Stage) -> Outcome:
    return stage.port(data=_relabelled(stage, lambda labels: [(label + 1) % 10 for label in labels]), evaluate=True)


@case(
    LABELS,
    "a labelled data set",
    "its labels are shuffled, and nothing is to be measured",
    Said(
        "The fine-tuned source is NOT clearly better than the target on the samples' labels: 12.0% against 12.0% "
        "(± 3.8 points), so there is little to gain."
    ),
)
def labels_shuffled_unmeasured(stage: Stage) -> Outcome:
    return stage.port(data=_relabelled(stage, _shuffled))


@case(
    LABELS,
    "a labelled data set",
    "its classes are others than those of the fine-tune",
    Said(
        "The fine-tuned source gets 7.9% of 597 samples right, as chance would of 10 classes: "
        "check that it was fine-tuned on these labels and on this base, and that the class names "
        "stand in the labels' order."
    ),
)
def other_classes(stage: Stage) -> Outcome:
    names = ("inverted", "rotated", "upright", "photo", "dark", "bright", "left", "right", "down", "picture")
    return stage.port(data=_relabelled(stage, list, names), evaluate=True)


@case(
    LABELS,
    "a labelled data set",
    "labels go beyond the names of the classes",
    Refused(ClassNamesError, "row 0 of split 'train' has the label 9, outside of the 9 classes"),
)
def more_labels_than_names(stage: Stage) -> Outcome:
    rows = [{"image": row["image"], "label": row["label"]} for row in rows_of(stage)["train"].select(range(120))]
    return stage.port(data=rows, class_names=CLASS_NAMES[:9])


@case(LABELS, "a labelled data set", "all of it is of one class", Said("All calibration samples are of one class."))
def one_class(stage: Stage) -> Outcome:
    rows = rows_of(stage)["train"]
    return stage.port(data=rows.select([i for i, label in enumerate(rows["label"]) if label == 3]))


def _vit(stage: Stage, labels: tuple[str, ...]) -> dict[str, Any]:
    """A ViT classifier of four classes of that name, its base and a target, with random weights."""
    from transformers import ViTForImageClassification

    from support.language_toys import fine_tuned, write_vit
    from support.scenes import write_images

    base = stage.once("vit base", lambda: write_vit(stage.place("base"), labels=4))
    tuned = stage.copied(stage.once("vit", lambda: fine_tuned(base, stage.place("tuned"), ViTForImageClassification)))
    for file in base.glob("pre*"):
        (tuned / file.name).write_bytes(file.read_bytes())
    reconfigure(
        tuned / "config.json",
        id2label={str(number): name for number, name in enumerate(labels)},
        label2id={name: number for number, name in enumerate(labels)},
    )
    target = stage.once("vit target", lambda: write_vit(stage.place("target"), width=24, heads=3, seed=1))
    data = stage.once("pictures", lambda: write_images(stage.place("pictures")))
    return {"source": tuned, "base": base, "to": target, "data": data, "n": 24}


IN_ORDER = ("one", "three", "two", "zero")
"""The classes of the data set of random pictures, as its folders sort."""


def _clean_vit(stage: Stage) -> Outcome:
    return stage.once("clean vit", lambda: stage.port(**_vit(stage, IN_ORDER)))


@case(
    LABELS,
    "a classifier of the data set's classes",
    "it writes them in capitals, and in another order",
    Right(clean=_clean_vit, because="its head is put into the data set's order"),
)
def classes_in_capitals_and_another_order(stage: Stage) -> Outcome:
    inputs = _vit(stage, ("ZERO", "TWO", "THREE", "ONE"))
    order = [3, 2, 1, 0]

    def reordered(state: State) -> State:
        return {name: tensor[order] if name.startswith("classifier.") else tensor for name, tensor in state.items()}

    rewrite(inputs["source"] / "model.safetensors", reordered)
    return stage.port(**inputs)


@case(
    LABELS,
    "a classifier with as many classes as the data set",
    "they have other names",
    Said(
        "The fine-tuned model's classes are called cat, dog, cow, ... and the data set's one, "
        "three, two, ...: they were paired in this order."
    ),
)
def classes_of_other_names(stage: Stage) -> Outcome:
    return stage.port(**_vit(stage, ("cat", "dog", "cow", "hen")))


@case(
    LABELS,
    "a classifier with as many classes as the data set",
    "it shares some of their names, at other places",
    Refused(
        ClassNamesError,
        ("'one' is class 1 of the fine-tuned model and 0 of the data set, and not all of their classes are the same"),
    ),
)
def classes_that_overlap(stage: Stage) -> Outcome:
    return stage.port(**_vit(stage, ("three", "one", "four", "five")))


# -- images


def _redrawn(stage: Stage, redraw: Callable[[Pillow.Image], Pillow.Image]) -> list[dict[str, Any]]:
    rows = rows_of(stage)["train"]
    return [{"image": redraw(row["image"]), "label": CLASS_NAMES[row["label"]]} for row in rows]


def _plain(stage: Stage) -> Outcome:
    return stage.once(
        "plain rows", lambda: stage.port(data=_redrawn(stage, lambda image: image), class_names=CLASS_NAMES)
    )


def _of(stage: Stage, redraw: Callable[[Pillow.Image], Pillow.Image]) -> Outcome:
    return stage.port(data=_redrawn(stage, redraw), class_names=CLASS_NAMES)


@case(IMAGES, "images", "they are grey: one channel", Right(clean=_plain))
def grey_images(stage: Stage) -> Outcome:
    return _of(stage, lambda image: image.convert("L"))


@case(IMAGES, "images", "they have an alpha channel", Right(clean=_plain))
def images_with_alpha(stage: Stage) -> Outcome:
    return _of(stage, lambda image: image.convert("RGBA"))


@case(IMAGES, "images", "they are palettes and indices", Right(clean=_plain))
def palette_images(stage: Stage) -> Outcome:
    return _of(stage, lambda image: image.convert("L").convert("P"))


@case(
    IMAGES,
    "images",
    "their pixels are of 16 bits, which become white when they are cut to 8",
    Refused(UnreadableSampleError, "the images have more than 8 bits a channel (PIL's mode 'I;16')"),
)
def deep_images(stage: Stage) -> Outcome:
    return _of(stage, lambda image: Pillow.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257))


def _sideways(image: Pillow.Image) -> Pillow.Image:
    """The same image as a camera stores it that was held sideways: turned, with a mark in its EXIF block."""
    exif, file = Pillow.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = 6
    image.transpose(Pillow.Transpose.ROTATE_90).save(file, "PNG", exif=exif)
    return Pillow.open(file)


@case(
    IMAGES,
    "images of a list",
    "they are stored sideways, and their EXIF orientation says so",
    Right(clean=_plain, because="they are turned upright, as `datasets` turns the images of its rows"),
)
def images_stored_sideways(stage: Stage) -> Outcome:
    return _of(stage, _sideways)


def _values(image: Pillow.Image) -> torch.Tensor:
    """The channels of an image, from 0 to 255."""
    return torch.tensor(np.asarray(image.convert("RGB"))).permute(2, 0, 1).float()


@case(IMAGES, "images", "they are tensors, prepared as both models prepare images", Right(clean=_plain))
def prepared_tensors(stage: Stage) -> Outcome:
    return _of(stage, lambda image: _values(image) / 127.5 - 1)


@case(
    IMAGES,
    "images",
    "they are tensors of 0 to 255",
    Refused(
        UnreadableSampleError,
        "the image of row 747 of split 'train' is a tensor of values from 0 to 255, and the model takes values from "
        "-1 to 1",
    ),
)
def raw_tensors(stage: Stage) -> Outcome:
    return _of(stage, _values)


@case(
    IMAGES,
    "images",
    "they are tensors of 0 to 1, which may be prepared, but hardly for these models",
    Said(
        "The images are tensors of values from 0 to 1, which both models read as they are; narrow prepares images to "
        "-1 to 1; wide prepares images to -1 to 1."
    ),
)
def unprepared_tensors(stage: Stage) -> Outcome:
    return _of(stage, lambda image: _values(image) / 255)


@case(
    IMAGES,
    "images",
    "they are tensors of (height, width, channels)",
    Refused(
        UnreadableSampleError,
        "the image of row 747 of split 'train' is a tensor of the shape (8, 8, 3), and the model takes (3, height, "
        "width)",
    ),
)
def tensors_with_channels_last(stage: Stage) -> Outcome:
    return _of(stage, lambda image: (_values(image) / 127.5 - 1).permute(1, 2, 0))


@case(
    IMAGES,
    "images",
    "they are tensors, and one value is NaN",
    Refused(UnreadableSampleError, "the image of row 747 of split 'train' holds NaN or infinite values"),
)
def tensors_with_nan(stage: Stage) -> Outcome:
    return _of(stage, lambda image: (_values(image) / 127.5 - 1).index_fill(2, torch.tensor([3]), float("nan")))


@case(
    IMAGES,
    "a fine-tune with its preprocessing",
    "it normalises images otherwise than its base",
    Said(
        "narrow-inverted prepares images with mean [0.0, 0.0, 0.0] and its base with [0.5, 0.5, "
        "0.5], which is used for both."
    ),
)
def another_normalisation(stage: Stage) -> Outcome:
    tuned = stage.copied(stage.tuned)
    preprocess = json.loads((tuned / "open_clip_config.json").read_text())["preprocess_cfg"]
    reconfigure(tuned / "open_clip_config.json", preprocess_cfg={**preprocess, "mean": [0.0] * 3, "std": [1.0] * 3})
    return stage.port(tuned)


# -- rows and splits


@case(
    SPLITS,
    "a hundred calibration samples",
    "most of them are copies of one another",
    Said("Of the 100 calibration samples only 20 are different."),
)
def duplicated_rows(stage: Stage) -> Outcome:
    rows = rows_of(stage)["train"].select(list(range(20)) * 6)
    return stage.port(data=rows)


@case(
    SPLITS,
    "a training split and a test split",
    "the test rows are among the calibration rows",
    Said("Of the 120 samples that were measured on, 100 were calibrated on."),
)
def leak_between_splits(stage: Stage) -> Outcome:
    rows = rows_of(stage)["train"].select(range(120))
    return stage.port(data=DatasetDict({"train": rows, "test": rows}), evaluate=True)


@case(
    SPLITS,
    "the same split asked for twice",
    "samples are measured on that were calibrated on",
    Right(clean=Stage.clean, because="the rows that calibration used are left out of what is measured on"),
)
def one_split_for_both(stage: Stage) -> Outcome:
    return stage.port(data=DatasetDict({"train": rows_of(stage)["train"]}), evaluate=True)
