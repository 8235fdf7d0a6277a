"""Which samples: opening a data set, finding its columns and classes, and drawing from it by a seed.

Knows rows, columns and labels; not models. Takes anything that `datasets` loads, or a plain list of rows.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_bico.checkpoints import expanded
from hf_bico.errors import (
    ClassNamesError,
    ColumnError,
    DataNotFoundError,
    SampleCountError,
    UnreadableSampleError,
)
from hf_bico.settings import DEFAULT_SAMPLES, Settings

EVALUATION_SPLITS = ("test", "validation", "valid", "val")
EVALUATION_LIMIT = 1000
UNLABELLED = -1

Rows = Any
"""Indexable rows: a `datasets.Dataset` or a list of dictionaries."""


@dataclass(frozen=True)
class Columns:
    image: str
    label: str


@dataclass(frozen=True)
class DataSet:
    """The splits of a data set, and what its columns and classes are."""

    name: str
    splits: Mapping[str, Rows]
    columns: Columns
    class_names: tuple[str, ...]
    named: bool = False
    """Whether it was opened by a name, and not passed as rows."""
    _labels: dict[str, dict[int, int]] = field(default_factory=dict, repr=False, compare=False)

    def labels(self, split: str) -> dict[int, int]:
        """The class of each labelled row of a split; rows without a label (none, or -1) are left out."""
        if split not in self._labels:
            self._labels[split] = self._read_labels(split)
        return self._labels[split]

    def _read_labels(self, split: str) -> dict[int, int]:
        if self.columns.label not in _column_kinds(self.splits[split]):
            raise ColumnError(f"split '{split}' has no column '{self.columns.label}'", "choose another with --split")
        index_of = {name: index for index, name in enumerate(self.class_names)}
        labels = {}
        for row, value in enumerate(_column(self.splits[split], self.columns.label)):
            if value is None or value == UNLABELLED:
                continue
            label = index_of.get(value, UNLABELLED) if isinstance(value, str) else int(value)
            if not 0 <= label < len(self.class_names):
                raise ClassNamesError(
                    f"row {row} of split '{split}' has the label {value!r}, outside of the "
                    f"{len(self.class_names)} classes",
                    "give the names of all classes with --class-names",
                )
            labels[row] = label
        return labels

    def can_measure_on(self, split: str) -> bool:
        """Whether a split is there, with images and labels."""
        if split not in self.splits:
            return False
        kinds = _column_kinds(self.splits[split])
        return self.columns.image in kinds and self.columns.label in kinds and bool(self.labels(split))

    def order(self, split: str, seed: int) -> list[int]:
        """The labelled rows of a split in the order in which the seed draws them."""
        labels = self.labels(split)
        return [index for index in draw_order(len(self.splits[split]), seed) if index in labels]

    def samples(self, split: str, indices: Sequence[int]) -> Samples:
        labels = self.labels(split)
        chosen = tuple(labels[index] for index in indices)
        return Samples(self.splits[split], self.columns.image, tuple(indices), chosen)


@dataclass(frozen=True)
class Samples:
    """Chosen rows of one split: images are decoded when a batch is taken."""

    rows: Rows
    image_column: str
    indices: tuple[int, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.indices)

    def batches(self, size: int) -> Iterator[tuple[list[Any], list[int]]]:
        """(images, labels), `size` at a time."""
        for start in range(0, len(self.indices), size):
            chosen = self.indices[start : start + size]
            images = [self._image(index) for index in chosen]
            yield images, list(self.labels[start : start + size])

    def _image(self, index: int) -> Any:
        try:
            image = self.rows[index][self.image_column]
            if image is None:
                raise ValueError("there is none")
            if hasattr(image, "load"):
                image.load()  # PIL decodes when it must: do it here, where the row is known
        except (OSError, SyntaxError, ValueError) as error:
            raise UnreadableSampleError(
                f"the image of row {index} cannot be decoded: {error}", "remove or replace the broken image"
            ) from error
        return image


@dataclass(frozen=True)
class Drawn:
    """Calibration samples, and where they come from."""

    data: DataSet
    split: str
    samples: Samples


def draw(data: Any, settings: Settings) -> Drawn:
    """Open a data set and draw the calibration samples that the settings ask for."""
    opened = open_data(data, settings)
    split = calibration_split(opened, settings.split)
    return Drawn(opened, split, calibration_samples(opened, split, settings.n, settings.per_class, settings.seed))


def open_data(data: Any, settings: Settings | None = None) -> DataSet:
    """Open a data set: a folder of images or parquet files, a parquet file, a `datasets` object, or a list of rows.

    Columns and class names are those of the settings, or found by their types.
    """
    settings = settings or Settings()
    name, splits = _splits(data)
    columns = _find_columns(next(iter(splits.values())), settings.image_column, settings.label_column)
    names = _class_names(splits.values(), columns.label, settings)
    return DataSet(name, splits, columns, names, named=isinstance(data, str | Path))


def calibration_split(data: DataSet, split: str | None) -> str:
    """The split to calibrate on: the one asked for, else `train`, else the only one."""
    return _choose_split(data, split, ("train",))


def evaluation_split(data: DataSet, split: str | None) -> str:
    """The split to measure on: the one asked for, else test, else validation, else train, else the only one."""
    return _choose_split(data, split, (*EVALUATION_SPLITS, "train"))


def _choose_split(data: DataSet, split: str | None, preferred: Sequence[str]) -> str:
    if split is not None:
        if split not in data.splits:
            raise DataNotFoundError(f"'{data.name}' has no split '{split}'", f"use one of: {', '.join(data.splits)}")
        return split
    only = list(data.splits) if len(data.splits) == 1 else []
    for name in (*preferred, *only):
        if name in data.splits:
            return name
    raise DataNotFoundError(
        f"'{data.name}' has no split '{preferred[0]}'", f"choose one with --split: {', '.join(data.splits)}"
    )


def calibration_samples(data: DataSet, split: str, n: int | None, per_class: int | None, seed: int) -> Samples:
    """`n` samples drawn uniformly, or `per_class` of each class; the same ones on every machine."""
    labels = data.labels(split)
    order = data.order(split, seed)
    if per_class is None:
        wanted = DEFAULT_SAMPLES if n is None else n
        if wanted > len(labels):
            raise SampleCountError(
                f"{wanted} samples were asked for and split '{split}' of '{data.name}' has {len(labels)} with labels",
                f"use -n {len(labels)} or less",
            )
        return data.samples(split, order[:wanted])
    chosen: dict[int, list[int]] = defaultdict(list)
    for index in order:
        if len(chosen[labels[index]]) < per_class:
            chosen[labels[index]].append(index)
    for label, name in enumerate(data.class_names):
        if len(chosen[label]) < per_class:
            raise SampleCountError(
                f"{per_class} samples a class were asked for and '{name}' has {len(chosen[label])} in '{split}'",
                f"use -k {len(chosen[label])} or less, or -n",
            )
    picked = {index for indices in chosen.values() for index in indices}
    return data.samples(split, [index for index in order if index in picked])


def evaluation_samples(data: DataSet, calibration: Samples, split: str, seed: int) -> tuple[str, Samples]:
    """Up to 1,000 held-out samples: of test, else validation, else what calibration on `split` did not use.

    Where calibration used all of its split, any other labelled split will do.
    """
    others = [name for name in EVALUATION_SPLITS if name != split and data.can_measure_on(name)]
    used = set(calibration.indices)
    unused = [index for index in data.order(split, seed) if index not in used]
    if not others and not unused:
        others = [name for name in data.splits if name != split and data.can_measure_on(name)]
    if not others:
        return split, data.samples(split, unused[:EVALUATION_LIMIT])
    return others[0], data.samples(others[0], data.order(others[0], seed)[:EVALUATION_LIMIT])


def draw_order(size: int, seed: int) -> list[int]:
    """A random order of `size` rows that depends on the seed alone: rows sorted by a hash of seed and index.

    The first n of it are the sample, so smaller samples are part of larger ones.

    >>> draw_order(5, seed=0)
    [3, 1, 2, 0, 4]
    """
    return sorted(range(size), key=lambda index: hashlib.blake2b(f"{seed}:{index}".encode()).digest())


def _splits(data: Any) -> tuple[str, Mapping[str, Rows]]:
    if isinstance(data, str | Path):
        return _open_local(expanded(data))
    if isinstance(data, Mapping) and data:  # datasets.DatasetDict is a dict
        return "data", dict(data)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or len(data) == 0:
        raise DataNotFoundError(f"a data set of type {type(data).__name__} has no rows", "pass a data set with rows")
    return "data", {str(getattr(data, "split", None) or "train"): data}


def _open_local(path: Path) -> tuple[str, Mapping[str, Rows]]:
    if not os.path.exists(path):
        raise DataNotFoundError(
            f"there is no data set at '{path}'",
            "name a local folder or parquet file with --data; "
            "'hf download ORG/NAME --repo-type dataset --local-dir FOLDER' fetches one from the Hub",
        )
    import datasets
    import yaml

    datasets.disable_progress_bars()
    try:
        if path.is_file():
            loaded = datasets.load_dataset("parquet", data_files=str(path))
        elif (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path))
    except (datasets.exceptions.DatasetsError, OSError, ValueError, KeyError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataNotFoundError(
            f"'{path.name}' cannot be read as a data set: {reason}",
            "give a folder with one sub-folder of images a class, or parquet files",
        ) from error
    splits = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {str(loaded.split or "train"): loaded}
    return path.name, splits


def _column(rows: Rows, name: str) -> list[Any]:
    return list(rows[name]) if hasattr(rows, "features") else [row[name] for row in rows]


def _find_columns(rows: Rows, image: str | None, label: str | None) -> Columns:
    kinds = _column_kinds(rows)
    for given, option in ((image, "--image-column"), (label, "--label-column")):
        if given is not None and given not in kinds:
            raise ColumnError(f"there is no column '{given}'", f"use one of: {', '.join(kinds)} ({option})")
    if image is not None and kinds[image] != "image":
        raise ColumnError(f"the column '{image}' holds {kinds[image]}, not images", "name another with --image-column")
    if label is not None and kinds[label] not in ("class", "integer", "string"):
        raise ColumnError(f"the column '{label}' holds {kinds[label]}, not labels", "name another with --label-column")
    image = image or _only(kinds, ("image",), "image", "name it with --image-column")
    remedy = "name it with --label-column; in a folder of images, put those of each class into a sub-folder of its name"
    if label is None and "class" in kinds.values():
        label = _only(kinds, ("class",), "label", remedy)
    return Columns(image, label or _only(kinds, ("integer", "string"), "label", remedy))


def _only(kinds: Mapping[str, str], wanted: Sequence[str], what: str, remedy: str) -> str:
    found = [name for name, kind in kinds.items() if kind in wanted]
    if len(found) == 1:
        return found[0]
    seen = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    problem = "several columns could be" if found else "no column looks like"
    raise ColumnError(f"{problem} the {what} column; the columns are: {seen}", remedy)


def _column_kinds(rows: Rows) -> dict[str, str]:
    """What each column holds, by its declared type or by the first row's value."""
    if not hasattr(rows, "features"):
        if len(rows) == 0:
            return {}
        if not isinstance(rows[0], Mapping):
            raise ColumnError(
                f"the rows are of type {type(rows[0]).__name__}, without named columns",
                "give rows as dictionaries: [{'image': ..., 'label': ...}, ...]",
            )
        return {name: _kind_of_value(value) for name, value in rows[0].items()}
    import datasets

    kinds = {}
    for name, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            kinds[name] = "image"
        elif isinstance(feature, datasets.ClassLabel):
            kinds[name] = "class"
        else:
            dtype = str(getattr(feature, "dtype", type(feature).__name__))
            kinds[name] = "integer" if "int" in dtype else dtype
    return kinds


def _kind_of_value(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0:  # numpy's and torch's integers too
        return "integer"
    if isinstance(value, str):
        return "string"
    is_image = hasattr(value, "convert") or getattr(value, "ndim", 0) == 3  # PIL, or a prepared tensor
    return "image" if is_image else type(value).__name__


def _class_names(splits: Any, label: str, settings: Settings) -> tuple[str, ...]:
    """Names as given, from the features, or the sorted distinct strings of all splits.

    An objective of the caller's own needs no names: numbers then stand for themselves.
    """
    splits, given = list(splits), settings.class_names
    declarations = [getattr(getattr(rows, "features", {}).get(label), "names", None) for rows in splits]
    declared = declarations[0]
    if any(names is not None and names != declared for names in declarations):
        raise ClassNamesError(
            f"the splits name the classes of '{label}' differently", "give a data set whose splits agree"
        )
    if given is not None and declared is not None and len(given) != len(declared):
        raise ClassNamesError(
            f"{len(given)} class names were given and the data set has {len(declared)} classes",
            "give one name for each class, in the order of the labels",
        )
    known = given or declared
    if known:
        return tuple(known)
    columns = [_column(rows, label) for rows in splits if label in _column_kinds(rows)]
    values = {value for column in columns for value in column if value is not None}
    if values and all(isinstance(value, str) for value in values):
        return tuple(sorted(values))
    if values and not settings.zero_shot:
        return tuple(str(number) for number in range(int(max(values)) + 1))
    raise ClassNamesError(
        f"the column '{label}' holds numbers without names",
        "give a file with one class name a line: --class-names FILE (class_names=[...] in Python)",
    )
