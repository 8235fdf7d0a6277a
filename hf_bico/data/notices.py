"""What a report says of the samples themselves: too few, of one class, without labels, or there twice.

Knows data sets and samples; no model.
"""

from __future__ import annotations

from itertools import islice

from hf_bico.data.classes import SHOWN, difference, near_duplicates
from hf_bico.data.columns import LABELS, column_kinds
from hf_bico.data.dataset import DataSet, Samples
from hf_bico.data.digests import digests
from hf_bico.data.draw import CalibrationDraw
from hf_bico.settings import DEFAULT_SAMPLES, Settings

MAX_DUPLICATES = 0.5
"""Share of duplicates among the calibration samples above which a notice says so."""
MAX_UNLABELLED = 0.05
"""Share of rows without a label above which a notice says so."""
MAX_LEAKED = 0.05
"""Share of held-out samples seen in calibration above which a notice says so; fewer move an accuracy by 5 points at
most."""


def calibration_notices(drawn: CalibrationDraw, settings: Settings) -> list[str]:
    """Return notices if calibration samples are few, of one class or of few of them, or if many rows have no label."""
    data, split, notices = drawn.data, drawn.split, list[str]()
    known, rows = len(data.class_names), len(data.splits[split])
    classes = len({label for label in drawn.samples.labels if label >= 0})
    if classes == 1:
        notices.append("All calibration samples are of one class.")
    elif classes and split in data.parts and 2 * classes < min(known, len(drawn.samples)):
        notices.append(f"The samples are of {classes} of {known} classes, read from a part of the data set: see -k.")
    if settings.n is None and settings.per_class is None and len(drawn.samples) < DEFAULT_SAMPLES:
        notices.append(
            f"Only {len(drawn.samples)} calibration samples were used, not the usual {DEFAULT_SAMPLES}: "
            f"split '{split}' has {rows} rows."
        )
    kinds = column_kinds(data.splits[split]) if data.columns.image is not None and not data.labelled else {}
    for name in (name for name in LABELS if name in kinds and name not in data.columns.names):
        notices.append(f"The column '{name}' holds {kinds[name]}, not classes, and was not read.")
    usable = len(data.labels(split)) if data.labelled and drawn.labels == "dataset" else rows
    if rows - usable > MAX_UNLABELLED * rows:
        lack = "no label" if data.columns.image is not None else "no label or no text"
        notices.append(f"Of the {rows} rows of split '{split}', {rows - usable} have {lack} and were left out.")
    return notices


def class_notices(data: DataSet, measured: Samples | None) -> list[str]:
    """Return notices about names that do not tell classes apart, and about classes that were not `measured`."""
    names, notices = data.class_names, list[str]()
    found = 0 if measured is None else len({label for label in measured.labels if label >= 0})
    if measured is not None and found < len(names) and (found == 1 or 0 < 2 * found < min(len(names), len(measured))):
        notices.append(
            f"The {len(measured)} samples that were measured on are of {found} of {len(names)} classes: the results "
            "say nothing about the others."
        )
    if len(set(names)) < len(names):
        notices.append("Several classes have the same name and cannot be told apart.")
    for one, other, *_ in near_duplicates(names)[:1]:
        notices.append(
            f"The classes '{names[one][:SHOWN]}' and '{names[other][:SHOWN]}' differ only in "
            f"{difference(names[one], names[other])}, and were taken as two."
        )
    for label, name in islice(data.respelt.items(), 1):
        more = f", and {len(data.respelt) - 1} more labels likewise" if len(data.respelt) > 1 else ""
        notices.append(f"The label '{label[:SHOWN]}' was taken as the class '{name[:SHOWN]}'{more}.")
    return notices


def repeat_notices(drawn: CalibrationDraw, held_out: Samples | None) -> list[str]:
    """Return notices about duplicate calibration samples, and `held_out` samples that were calibrated on."""
    calibrated = list(digests(drawn.samples))
    distinct, notices = set(calibrated), []
    if len(calibrated) - len(distinct) > MAX_DUPLICATES * len(calibrated):
        notices.append(f"Of the {len(calibrated)} calibration samples only {len(distinct)} are different.")
    if held_out is not None:
        leaked = sum(digest in distinct for digest in digests(held_out))
        if leaked > MAX_LEAKED * len(held_out):
            notices.append(f"Of the {len(held_out)} samples that were measured on, {leaked} were calibrated on.")
    return notices
