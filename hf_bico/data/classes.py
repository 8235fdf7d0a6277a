"""Name the classes of a data set, and find the class that a label means.

Knows labels of splits; neither files nor samples.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from decimal import Decimal
from functools import cache
from typing import Any
from unicodedata import normalize

from hf_bico.data.columns import Columns, RowSequence, column, column_kinds
from hf_bico.errors import ClassNamesError, ColumnError
from hf_bico.settings import Settings

UNLABELLED = -1
SHOWN = 60
"""Characters of a class name that a sentence quotes at most: it may be a stranger's."""
NAMES_REMEDY = "give the names of the classes, in the order of their numbers: --class-names FILE"
_MAX_CLASSES = 1_000_000
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")


def composed(name: str) -> str:
    """Return a name with each accented letter as one character: some systems store two (NFD).

    >>> composed("cafe\\u0301") == "caf\\u00e9"
    True
    """
    return normalize("NFC", name)


def trimmed(name: str) -> str:
    """Return a composed name without spaces around it."""
    return composed(name).strip()


def folded(name: str) -> str:
    """Return a trimmed name without capitals."""
    return composed(trimmed(name).casefold())


_FORMS: tuple[Callable[[str], str], ...] = (str, trimmed, folded)
"""Forms of a label that are compared with class names, the strictest first."""


def class_names(
    splits: Any, columns: Columns, settings: Settings, known_names: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Return the class names: as given, as declared, the sorted distinct strings of all splits, or `known_names`.

    Where the objective needs no names, numbers stand for themselves. Zero-shot image classification needs them, and so
    do text answers.
    """
    names = _find_names(list(splits), columns, settings, known_names)
    blank = next((number for number, name in enumerate(names) if not name.strip()), None)
    if blank is not None and settings.names_classes:
        raise ClassNamesError(f"class {blank} has an empty name, which no prompt can ask for", NAMES_REMEDY)
    return names


def _find_names(
    splits: Sequence[RowSequence], columns: Columns, settings: Settings, known_names: Sequence[str] | None
) -> tuple[str, ...]:
    given, label = settings.class_names, columns.label
    answers = label is not None and settings.objective == "text-to-text"
    needs_names = answers or (settings.names_classes and not columns.is_self_supervised)
    known_names = known_names if columns.task is None else columns.task.classes
    if label is None:
        names = given or known_names or ()
        if not names and needs_names:
            raise ClassNamesError(
                "no column looks like the label column, and nothing names the classes",
                f"{NAMES_REMEDY}, or name the column with --label-column",
            )
        return tuple(names)
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
    if known := given or declared:
        return tuple(known)
    by_split = [_distinct_labels(column(rows, label), label) for rows in splits if label in column_kinds(rows)]
    values = set[Any]().union(*by_split)
    if len({isinstance(value, str) for value in values}) > 1:
        raise ColumnError(f"the column '{label}' holds texts and numbers", "name another with --label-column")
    if values and all(isinstance(value, str) for value in values):
        task = columns.task  # its classes have an order
        return task.classes if task is not None and values <= set(task.classes) else distinct_names(by_split)
    if values and known_names:
        return tuple(known_names)
    if values and not needs_names:
        return _numbers_as_names(values, label)
    raise ClassNamesError(
        f"the column '{label}' holds {'numbers without names' if values else 'no labels'}",
        NAMES_REMEDY,
    )


def is_label(value: Any) -> bool:
    """Return False for what stands in rows without a label: None, -1, or an empty text."""
    return bool(value.strip()) if isinstance(value, str) else value is not None and value != UNLABELLED


def sorted_names(names: Iterable[str]) -> tuple[str, ...]:
    """Sort class names: as numbers if all of them are numbers, else as texts.

    >>> sorted_names(["10", "9", "1"]), sorted_names(["10", "9", "b1"])
    (('1', '9', '10'), ('10', '9', 'b1'))
    """
    distinct = set(names)
    if all(_NUMBER.fullmatch(name) for name in distinct):
        return tuple(sorted(distinct, key=lambda name: (Decimal(name), name)))
    return tuple(sorted(distinct))


def distinct_names(by_split: Sequence[Collection[str]]) -> tuple[str, ...]:
    """Return the sorted class names among the labels of each split, which are compared trimmed.

    Capitals do not count either between splits, but of two names within one split they make two classes.

    >>> distinct_names([{"Cat", "dog"}, {"cat", "dog "}]), distinct_names([{"a", "A"}, {"a"}])
    (('Cat', 'dog'), ('A', 'a'))
    """
    found: dict[str, dict[str, str]] = {}
    for labels in by_split:
        for name in filter(is_label, sorted(labels, key=lambda name: (name != trimmed(name), name))):
            found.setdefault(folded(name), {}).setdefault(trimmed(name), name)
    used = [{trimmed(name) for name in labels} for labels in by_split]
    names = list[str]()
    for spellings in found.values():
        apart = any(len(spellings.keys() & labels) > 1 for labels in used)
        names += list(spellings.values()) if apart else [next(iter(spellings.values()))]
    return sorted_names(names)


def numbers_by_label(names: Sequence[str]) -> Callable[[str], int]:
    """Return the function from a label to the number of its class, or UNLABELLED.

    A label that is no class's name is that class's which alone is the same trimmed, or else folded.
    """
    tables = [{name: number for number, name in enumerate(names)}]
    for form in _FORMS[1:]:
        count = Counter(map(form, names))
        tables.append({form(name): number for number, name in enumerate(names) if count[form(name)] == 1})

    @cache
    def number(label: str) -> int:
        found = (table.get(form(label)) for form, table in zip(_FORMS, tables, strict=True))
        return next((one for one in found if one is not None), UNLABELLED)

    return number


def near_duplicates(names: Sequence[str]) -> list[list[int]]:
    """Return the numbers of classes whose names differ only in what `difference` tells."""
    groups: dict[str, dict[str, int]] = {}
    for number, name in enumerate(names):
        groups.setdefault(folded(name), {}).setdefault(name, number)
    return [list(group.values()) for group in groups.values() if len(group) > 1]


def difference(name: str, other: str) -> str:
    """Say what two names that are near duplicates differ in.

    >>> difference("Cat", "cat"), difference("cat", "cat "), difference("caf\\u00e9", "cafe\\u0301")
    ('capitals', 'spaces around them', 'how accents are stored (NFC or NFD)')
    """
    if composed(name) == composed(other):
        return "how accents are stored (NFC or NFD)"
    return "spaces around them" if trimmed(name) == trimmed(other) else "capitals"


def _distinct_labels(labels: Iterable[Any], name: str) -> set[Any]:
    try:
        return {value for value in labels if value == UNLABELLED or is_label(value)}
    except TypeError as error:  # a list, or the like
        raise ColumnError(
            f"the column '{name}' holds more than a label in a row", "name another with --label-column"
        ) from error


def _numbers_as_names(values: set[Any], name: str) -> tuple[str, ...]:
    try:
        largest = int(max(values))
    except (TypeError, ValueError, OverflowError):
        largest = _MAX_CLASSES
    if largest >= _MAX_CLASSES:
        raise ColumnError(
            f"the column '{name}' holds numbers that count no classes", "name another with --label-column"
        )
    return tuple(str(number) for number in range(largest + 1))
