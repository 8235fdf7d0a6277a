"""The columns of a data set: what they hold, which are the image and the label, and what the classes are called.

Knows rows and their types; neither files nor samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hf_bico.errors import ClassNamesError, ColumnError
from hf_bico.settings import Settings

Rows = Any
"""Indexable rows: a `datasets.Dataset` or a list of dictionaries."""
NAMES_REMEDY = "give a file with one class name a line: --class-names FILE"


class Columns(NamedTuple):
    """The names of the columns; a data set without labels has no `label`."""

    image: str
    label: str | None


def undecoded(rows: Rows, image: str) -> Rows:
    """The rows with their images as stored, bytes or a path."""
    import datasets

    return rows.cast_column(image, datasets.Image(decode=False))


def column(rows: Rows, name: str) -> list[Any]:
    """All values of one column."""
    return list(rows[name]) if hasattr(rows, "features") else [row[name] for row in rows]


def find_columns(
    kinds: Mapping[str, str], image: str | None, label: str | None, *, needs_labels: bool = True
) -> Columns:
    """The columns that were named, else the only ones that hold images and classes.

    Where labels are not needed, a data set in which no column could hold any is taken as it is.
    """
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
    if label is None and not needs_labels and not {"integer", "string"} & set(kinds.values()):
        return Columns(image, None)
    return Columns(image, label or _only(kinds, ("integer", "string"), "label", remedy))


def _only(kinds: Mapping[str, str], wanted: Sequence[str], what: str, remedy: str) -> str:
    found = [name for name, kind in kinds.items() if kind in wanted]
    if len(found) == 1:
        return found[0]
    seen = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    problem = "several columns could be" if found else "no column looks like"
    raise ColumnError(f"{problem} the {what} column; the columns are: {seen}", remedy)


def column_kinds(rows: Rows) -> dict[str, str]:
    """What each column holds, by its declared type or by the first row's value."""
    if hasattr(rows, "features"):
        return feature_kinds(rows.features)
    if len(rows) == 0:
        return {}
    if not isinstance(rows[0], Mapping):
        raise ColumnError(
            f"the rows are of type {type(rows[0]).__name__}, without named columns",
            "give rows as dictionaries: [{'image': ..., 'label': ...}, ...]",
        )
    return {name: _kind_of_value(value) for name, value in rows[0].items()}


def feature_kinds(features: Mapping[str, Any]) -> dict[str, str]:
    """What columns of these declared types hold."""
    import datasets

    kinds = {}
    for name, feature in features.items():
        if isinstance(feature, datasets.Image):
            kinds[name] = "image"
        elif isinstance(feature, datasets.ClassLabel):
            kinds[name] = "class"
        else:
            dtype = str(getattr(feature, "dtype", type(feature).__name__))
            kinds[name] = "integer" if "int" in dtype else "string" if "string" in dtype else dtype
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


def class_names(
    splits: Any, label: str | None, settings: Settings, known_names: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Names as given, from the features, the sorted distinct strings of all splits, or known from elsewhere.

    An objective of the caller's own needs no names: numbers then stand for themselves, and without labels there are
    none.
    """
    splits, given = list(splits), settings.class_names
    if label is None:
        return _names_without_labels(given or known_names, settings)
    declarations = [getattr(getattr(rows, "features", {}).get(label), "names", None) for rows in splits]
    declared = next((names for names in declarations if names is not None), None)
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
    labels = [column(rows, label) for rows in splits if label in column_kinds(rows)]
    values = {value for some in labels for value in some if value is not None}
    if values and all(isinstance(value, str) for value in values):
        return tuple(sorted(values))
    if values and known_names:
        return tuple(known_names)
    if values and not settings.zero_shot:
        return tuple(str(number) for number in range(int(max(values)) + 1))
    raise ClassNamesError(
        f"the column '{label}' holds numbers without names",
        f"{NAMES_REMEDY} (class_names=[...] in Python)",
    )


def _names_without_labels(names: Sequence[str] | None, settings: Settings) -> tuple[str, ...]:
    if not names and settings.zero_shot:
        raise ClassNamesError(
            "no column looks like the label column, and nothing names the classes",
            f"{NAMES_REMEDY}, or name the column with --label-column",
        )
    return tuple(names or ())
