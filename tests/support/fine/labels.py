"""Cases of labels and class names that look fine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unicodedata import normalize

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from PIL import Image as Pillow

from hf_bico.errors import ClassNamesError
from hf_bico.experiments.demo.digits import CLASS_NAMES
from support.fine.cases import Outcome, Refused, Right, Said, Stage, State, case, reconfigure, rewrite
from support.fine.data import LABELS, SPLITS, rows_of
from support.language_toys import fine_tuned, write_vit

TWELVE = range(12)
AS_TEXT = sorted(map(str, TWELVE))
"""The numbers of twelve classes as texts sort them: 0, 1, 10, 11, 2, ..."""


def _twelve(
    stage: Stage, label: Callable[[int], Any], names: Sequence[str] = (), order: Sequence[int] = TWELVE
) -> Outcome:
    """A port of a ViT of twelve classes, in this order in its head, which names them so, on pictures with labels."""
    from transformers import ViTForImageClassification

    base = stage.once("twelve base", lambda: write_vit(stage.place("base"), labels=12))
    tuned = stage.once("twelve", lambda: fine_tuned(base, stage.place("tuned"), ViTForImageClassification))
    target = stage.once("twelve target", lambda: write_vit(stage.place("target"), width=24, heads=3, seed=1))
    tuned = stage.copied(tuned)
    for file in base.glob("pre*"):
        (tuned / file.name).write_bytes(file.read_bytes())

    def reordered(state: State) -> State:
        own = {name: tensor for name, tensor in state.items() if name.startswith("classifier.")}
        return {**state, **{name: tensor[list(order)] for name, tensor in own.items()}}

    rewrite(tuned / "model.safetensors", reordered)
    if names:
        numbers = {str(number): name for number, name in enumerate(names)}
        reconfigure(tuned / "config.json", id2label=numbers, label2id={name: int(n) for n, name in numbers.items()})
    pixels = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
    rows = [{"image": Pillow.fromarray(image), "label": label(row % 12)} for row, image in enumerate(pixels)]
    return stage.port(tuned, base=base, to=target, data=rows, n=48)


def _by_number(stage: Stage) -> Outcome:
    return stage.once("by number", lambda: _twelve(stage, int))


@case(
    LABELS,
    "a classifier of twelve classes without names",
    "the data set's labels are the texts 0 to 11, which sort as 0, 1, 10, 11, 2",
    Right(
        clean=_by_number,
        because="they are sorted by their numbers",
        sentence=(
            "The fine-tuned model does not name its classes, and the data set's were paired with them in sorted order: "
            "'0' is its class 0, '1' is its class 1, ..., '11' is its class 11. --class-names gives another order."
        ),
    ),
)
def numbers_as_texts(stage: Stage) -> Outcome:
    return _twelve(stage, str)


@case(
    LABELS,
    "a classifier of twelve classes without names",
    "the data set's labels are texts that count from 1",
    Right(
        clean=_by_number,
        because="they are paired in the order of their numbers",
        sentence=(
            "The fine-tuned model does not name its classes, and the data set's were paired with them in sorted order: "
            "'1' is its class 0, '2' is its class 1, ..., '12' is its class 11. --class-names gives another order."
        ),
    ),
)
def texts_that_count_from_one(stage: Stage) -> Outcome:
    return _twelve(stage, lambda number: str(number + 1))


@case(
    LABELS,
    "a classifier of twelve classes without names",
    "the data set's labels are numbers that count from 1",
    Refused(ClassNamesError, "the fine-tuned model tells 12 classes apart, and the data set has 13"),
)
def numbers_that_count_from_one(stage: Stage) -> Outcome:
    return _twelve(stage, lambda number: number + 1)


@case(
    LABELS,
    "a classifier of the classes 0 to 11",
    "its head has them as texts sort them, as its configuration says",
    Right(clean=_by_number, because="its head is put into the data set's order, by the names"),
)
def head_sorted_as_texts(stage: Stage) -> Outcome:
    return _twelve(stage, str, AS_TEXT, [int(name) for name in AS_TEXT])


@case(
    LABELS,
    "a classifier of the classes LABEL_0 to LABEL_11",
    "the data set has these as texts, which sort as LABEL_0, LABEL_1, LABEL_10",
    Right(
        clean=lambda stage: _twelve(stage, lambda number: AS_TEXT.index(str(number)), order=[int(n) for n in AS_TEXT]),
        because="its head is put into the data set's order, by the names",
    ),
)
def numbered_names(stage: Stage) -> Outcome:
    return _twelve(stage, lambda number: f"LABEL_{number}")


@case(
    LABELS,
    "a classifier of as many classes, without names",
    "the data set's labels are words, whose order says nothing of the head's",
    Said(
        "The fine-tuned model does not name its classes, and the data set's were paired with them in sorted order: "
        "'ant' is its class 0, 'bee' is its class 1, ..., 'owl' is its class 11. --class-names gives another order."
    ),
)
def words_for_a_head_without_names(stage: Stage) -> Outcome:
    words = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibex", "jay", "koi", "owl")
    return _twelve(stage, lambda number: words[number])


# -- the same class under two spellings, or under none


def _spelt(stage: Stage, train: Callable[[int], str | None], test: Callable[[int], str | None]) -> DatasetDict:
    """The data set with labels that are texts."""

    def one(rows: Dataset, spell: Callable[[int], str | None]) -> Dataset:
        features = Features({"image": Image(), "label": Value("string")})
        return Dataset.from_dict({"image": list(rows["image"]), "label": list(map(spell, rows["label"]))}, features)

    rows = rows_of(stage)
    return DatasetDict({"train": one(rows["train"], train), "test": one(rows["test"].select(range(120)), test)})


def _name(label: int) -> str:
    return CLASS_NAMES[label]


def _with_accent(label: int) -> str:
    """The name, with an accent in 'séven': the others are known to the tokenizer."""
    return CLASS_NAMES[label].replace("sev", "s\u00e9v")


def _accented(stage: Stage) -> Outcome:
    return stage.once("accented", lambda: stage.port(data=_spelt(stage, _with_accent, _with_accent)))


def _of_two_lists(stage: Stage, train: Sequence[str], test: Sequence[str]) -> DatasetDict:
    """The data set with labels that are numbers of one list of names, in which each split has its own."""
    names = list(dict.fromkeys([*test, *train]))

    def one(rows: Dataset, own: Sequence[str]) -> Dataset:
        features = Features({"image": Image(), "label": ClassLabel(names=names)})
        labels = [names.index(own[label]) for label in rows["label"]]
        return Dataset.from_dict({"image": list(rows["image"]), "label": labels}, features)

    rows = rows_of(stage)
    return DatasetDict({"train": one(rows["train"], train), "test": one(rows["test"], test)})


def _plainly_spelt(stage: Stage) -> Outcome:
    return stage.once("plainly spelt", lambda: stage.port(data=_spelt(stage, _name, _name)))


@case(
    LABELS,
    "a training and a test split of ten classes, as texts",
    "the test split writes them in capitals: twenty different texts",
    Right(
        clean=_plainly_spelt,
        because="capitals do not make a class of a split's own",
        sentence="The label 'FIVE' was taken as the class 'five', and 9 more labels likewise.",
    ),
)
def capitals_in_the_test_split(stage: Stage) -> Outcome:
    return stage.port(data=_spelt(stage, _name, lambda label: _name(label).upper()))


@case(
    LABELS,
    "a training and a test split of ten classes, as texts",
    "one has an accent, which one split stores as NFC and the other as NFD, as some systems do",
    Right(clean=_accented, because="a letter and its accent are the same in one character or in two"),
)
def accents_stored_otherwise(stage: Stage) -> Outcome:
    return stage.port(data=_spelt(stage, _with_accent, lambda label: normalize("NFD", _with_accent(label))))


@case(
    LABELS,
    "a training and a test split of ten classes, one folder for each",
    "one folder has an accent, which one split stores as NFC and the other as NFD: eleven classes",
    Refused(
        ClassNamesError,
        "the class 'se\u0301ven' of split 'test' is called 's\u00e9ven' in split 'train': the names differ only in how "
        "accents are stored (NFC or NFD)",
    ),
)
def folders_with_accents_stored_otherwise(stage: Stage) -> Outcome:
    names = list(map(_with_accent, range(len(CLASS_NAMES))))
    return stage.port(data=_of_two_lists(stage, names, [normalize("NFD", name) for name in names]))


@case(
    LABELS,
    "a training split of ten classes, as texts",
    "some labels have a space behind them",
    Right(
        clean=_plainly_spelt,
        because="spaces around a label do not count",
        sentence="The label 'three ' was taken as the class 'three'.",
    ),
)
def labels_with_spaces(stage: Stage) -> Outcome:
    count = iter(range(10**6))
    return stage.port(data=_spelt(stage, lambda label: _name(label) + " " * (label == 3 and next(count) % 2), _name))


@case(
    LABELS,
    "a training and a test split of ten classes, one folder for each",
    "the folders of the test split are written in capitals: twenty classes",
    Refused(
        ClassNamesError,
        "the class 'ZERO' of split 'test' is called 'zero' in split 'train': the names differ only in capitals",
    ),
)
def capitals_in_the_test_folders(stage: Stage) -> Outcome:
    return stage.port(data=_of_two_lists(stage, CLASS_NAMES, [name.upper() for name in CLASS_NAMES]))


@case(
    LABELS,
    "a training split of labels that are texts",
    "it writes one of them in two ways, which may be two classes, as of letters",
    Said("The classes 'THREE' and 'three' differ only in capitals, and were taken as two."),
)
def two_spellings_in_one_split(stage: Stage) -> Outcome:
    count = iter(range(10**6))
    mixed = _spelt(stage, lambda label: "THREE" if label == 3 and next(count) % 2 else _name(label), _name)
    return stage.port(data=mixed)


@case(
    LABELS,
    "a data set of labels that are texts",
    "some of them are empty",
    Right(
        clean=lambda stage: stage.port(data=_spelt(stage, lambda label: None if label == 3 else _name(label), _name)),
        because="they are rows without a label, as they would be with none",
        sentence="Of the 1200 rows of split 'train', 118 have no label and were left out.",
    ),
)
def empty_labels(stage: Stage) -> Outcome:
    return stage.port(data=_spelt(stage, lambda label: "" if label == 3 else _name(label), _name))


@case(
    LABELS,
    "labels that are numbers",
    "one of them is -1, which stands for a row without a label",
    Said("Of the 1200 rows of split 'train', 120 have no label and were left out."),
)
def a_class_called_minus_one(stage: Stage) -> Outcome:
    rows = [{**row, "label": row["label"] - 1} for row in rows_of(stage)["train"]]
    return stage.port(data=rows, class_names=CLASS_NAMES)


@case(
    LABELS,
    "a column of labels, and the names of ten classes",
    "the labels are fractions, as a table with gaps is read",
    Said("The column 'label' holds float, not classes, and was not read."),
)
def labels_that_are_fractions(stage: Stage) -> Outcome:
    rows = [{**row, "label": float(row["label"])} for row in rows_of(stage)["train"].select(range(120))]
    return stage.port(data=rows, class_names=CLASS_NAMES)


@case(
    LABELS,
    "ten classes with their names",
    "one of the names is empty: a photo of a .",
    Refused(ClassNamesError, "class 3 has an empty name, which no prompt can ask for"),
)
def empty_class_name(stage: Stage) -> Outcome:
    return stage.port(class_names=[*CLASS_NAMES[:3], " ", *CLASS_NAMES[4:]])


@case(
    SPLITS,
    "a training split and a test split",
    "the test split is of one class",
    Said("The 50 samples that were measured on are of 1 of 10 classes: the results say nothing about the others."),
)
def measured_on_one_class(stage: Stage) -> Outcome:
    rows = rows_of(stage)
    threes = [index for index, label in enumerate(rows["test"]["label"]) if label == 3][:50]
    return stage.port(data=DatasetDict({"train": rows["train"], "test": rows["test"].select(threes)}), evaluate=True)
