"""Open a data set as far as its samples need it, and draw calibration and held-out samples from it.

Knows splits, rows and labels; neither models nor files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_bico.data.classes import class_names, difference, near_duplicates
from hf_bico.data.columns import (
    Columns,
    RowSequence,
    column_kinds,
    feature_kinds,
    find_columns,
    find_unlabelled_columns,
    known_task,
)
from hf_bico.data.dataset import DataSet, Samples
from hf_bico.data.digests import digests
from hf_bico.data.given import given_splits
from hf_bico.data.loading import ParquetFiles, large_parquet, named_config, open_folder, open_whole
from hf_bico.data.remote_parquet import ChosenRowGroups, RowGroups
from hf_bico.data.sampling import RequiredRows, Strategy, draw_order
from hf_bico.errors import ClassNamesError, DataNotFoundError, SampleCountError, UsageError
from hf_bico.hub.client import Hub
from hf_bico.hub.references import HubReference, parse
from hf_bico.settings import DEFAULT_MEASURED, Settings
from hf_bico.utils.samples import IMAGES, TEXTS

if TYPE_CHECKING:
    from torch import Tensor


EVALUATION_SPLITS = ("test", "validation", "valid", "val", "validation_matched")


@dataclass(frozen=True)
class Unlabelled:
    """More samples, without labels, and the split they were drawn from; each label is -1."""

    data: DataSet
    split: str
    samples: Samples


@dataclass(frozen=True)
class CalibrationDraw:
    """Calibration samples and the split they were drawn from.

    If it `needs_features`, the samples are only candidates, from which `chosen` selects.
    """

    data: DataSet
    split: str
    samples: Samples
    labels: str = "dataset"
    """Origin of the labels: "dataset", or "pseudo", each -1 until `with_labels`."""
    strategy: Strategy = field(default_factory=Strategy)
    needs_features: bool = False
    unlabelled: Unlabelled | None = None

    @property
    def mixed(self) -> bool:
        """Whether the unlabelled samples are of another data set, which may be unlike this one."""
        if self.unlabelled is None:
            return False
        first, other = ((one.data.name, len(one.data.splits[one.split])) for one in (self, self.unlabelled))
        return first != other

    def chosen(self, features: Tensor) -> CalibrationDraw:
        """Select the samples by the candidates' features, one row for each, in their order."""
        if not self.needs_features:
            return self
        if features.ndim != 2 or len(features) != len(self.samples):
            raise ValueError(f"features of shape {tuple(features.shape)} for {len(self.samples)} candidates")
        labels = self.data.labels(self.split)
        sizes = Counter(labels.values())
        rows = self.strategy.by_centroid(self.samples.indices, labels, sizes, features)
        return replace(self, samples=self.data.samples(self.split, rows), needs_features=False)

    def with_labels(self, labels: Sequence[int]) -> CalibrationDraw:
        """Replace the labels of all samples."""
        if len(labels) != len(self.samples):
            raise ValueError(f"{len(labels)} labels for {len(self.samples)} samples")
        return replace(self, samples=replace(self.samples, labels=tuple(int(label) for label in labels)))


def draw(
    data: Any,
    settings: Settings,
    hub: Hub | None = None,
    *,
    known_names: Sequence[str] | None = None,
    reads: str = IMAGES,
) -> CalibrationDraw:
    return draw_from(open_data(data, settings, hub, known_names=known_names, reads=reads), settings)


def draw_from(data: DataSet, settings: Settings) -> CalibrationDraw:
    split = calibration_split(data, settings.split)
    uses_labels = _uses_labels(_columns_of(data, split, settings), settings)
    rows, strategy = _calibration_rows(data, split, settings)
    samples = data.samples(split, rows, labelled=uses_labels)
    labels = "dataset" if uses_labels else "pseudo"
    return CalibrationDraw(data, split, samples, labels, strategy, strategy.needs_features)


def open_data(
    data: Any,
    settings: Settings | None = None,
    hub: Hub | None = None,
    *,
    known_names: Sequence[str] | None = None,
    measure: bool = False,
    reads: str = IMAGES,
) -> DataSet:
    """Open a data set: a Hub id, a folder of images or of parquet, JSON or CSV files, or what `given_splits` takes.

    The settings name columns and classes; otherwise columns are found by their types and names for models that read
    "images" or "texts", and `known_names` name numbered classes. Labels are required only to `measure` models on
    images. Of a large Hub repo only the rows that the settings need are read: for calibration and its evaluation or, to
    `measure` a model, `n` rows or all of one split.
    """
    return _open(data, _Reader(settings or Settings(), known_names, measure, reads), hub)


def _open(data: Any, reader: _Reader, hub: Hub | None) -> DataSet:
    settings = reader.settings
    if not isinstance(data, str | Path | HubReference):
        rows = given_splits(data)
        info = getattr(next(iter(rows.values())), "info", None)  # how `datasets` loaded the rows
        name, config = getattr(info, "dataset_name", None), settings.config or getattr(info, "config_name", None)
        return reader.data_set("data", rows, task_of=(name or "data", named_config(config)))
    reference = data if isinstance(data, HubReference) else parse(data, "the data set", files=True)
    if isinstance(reference, Path):
        splits, config = open_folder(reference, reference.name, settings.config)
        return reader.data_set(reference.name, splits, named=True, config=config)
    repo = (hub or Hub()).repo(reference, "the data set", "dataset")
    files = large_parquet(repo, settings.config)
    if files is not None:
        return _open_in_part(files, reader)
    splits, config = open_whole(repo, settings.config, settings.max_download)
    return reader.data_set(repo.id, splits, named=True, repo=repo, config=config)


@dataclass(frozen=True)
class _Reader:
    """The settings that turn rows into a data set."""

    settings: Settings
    known_names: Sequence[str] | None
    measure: bool
    reads: str
    calibration: Columns | None = None
    """Of data to read without labels: the columns of the calibration data."""

    def columns(self, kinds: Mapping[str, str], name: str, config: str | None) -> Columns:
        if self.calibration is not None:
            return find_unlabelled_columns(kinds, self.calibration, self.reads)
        needs_labels = self.measure or self.settings.labels == "dataset"
        task = known_task(name, config, kinds) if self.reads == TEXTS else None
        return find_columns(kinds, self.settings, self.reads, needs_labels=needs_labels, task=task)

    def data_set(
        self, name: str, splits: Mapping[str, RowSequence], task_of: tuple[str, str | None] | None = None, **where: Any
    ) -> DataSet:
        """Combine all splits; `task_of` is the name and configuration to recognise a known task by."""
        kinds = column_kinds(next(iter(splits.values())))
        columns = self.columns(kinds, *(task_of or (name, where.get("config"))))
        data = DataSet(name, splits, columns, self.class_names(splits, columns), **where)
        if self.settings.class_names is None and self.calibration is None:
            _require_one_spelling(data)
        return data

    def class_names(self, splits: Mapping[str, RowSequence], columns: Columns) -> tuple[str, ...]:
        if self.calibration is not None:
            return tuple(self.known_names or ())
        return class_names(splits.values(), columns, self.settings, self.known_names)


def _require_one_spelling(data: DataSet) -> None:
    """Refuse classes that two splits spell differently: each split would have classes of its own."""
    names, groups = data.class_names, near_duplicates(data.class_names)
    used = {split: set(data.labels(split).values()) for split in data.splits if groups and data.can_evaluate_on(split)}
    for group in groups:
        places = [(number, split) for number in group for split in used if number in used[split]]
        others = [place for place in places if place[0] != places[0][0]]
        if others and len({split for _, split in places}) == len(places):  # no split has both
            (one, split), (other, other_split) = places[0], others[0]
            raise ClassNamesError(
                f"the class '{names[one]}' of split '{split}' is called '{names[other]}' in split '{other_split}': the "
                f"names differ only in {difference(names[one], names[other])}",
                "spell the classes alike in all splits",
            )


def _open_in_part(files: ParquetFiles, reader: _Reader) -> DataSet:
    """Open a large data set with the row groups that are needed."""
    settings, measure = reader.settings, reader.measure
    groups = RowGroups(files, settings.seed, settings.max_download)
    preferred = (*EVALUATION_SPLITS, "train") if measure else ("train",)
    split = _choose_split(files.repo.id, files.splits, settings.split, preferred)
    kinds = feature_kinds(groups.features(split))
    columns = reader.columns(kinds, files.repo.id, files.config)
    label = columns.label
    if measure and settings.split is None:
        usable = (name for name in _evaluation_splits(columns) if name in groups.splits)
        split = next((name for name in usable if label is None or not groups.lacks_labels(name, label)), split)
    if label is not None and kinds[label] == "string" and settings.class_names is None:
        settings = replace(settings, class_names=groups.names(label))
        reader = replace(reader, settings=settings)
    origin: dict[str, Any] = {"named": True, "repo": files.repo, "config": files.config}
    if measure and settings.n is None:
        return reader.data_set(files.repo.id, {split: groups.read_whole(split, columns)}, **origin)

    if not measure:
        _require_labels(files.repo.id, columns, settings)
    chosen = _choose_row_groups(groups, split, columns, reader)
    labels = {name: some.labels for name, some in chosen.items()}
    data = DataSet(files.repo.id, labels, columns, reader.class_names(labels, columns), **origin)
    if not measure and reader.calibration is None:  # labels are enough to draw by: refuse before downloading images
        _calibration_rows(data, split, settings)
    whole = {split} if settings.trains_on_all and not measure else set()
    rows = {
        name: groups.read_whole(name, columns, training=True) if name in whole else groups.read(name, some, columns)
        for name, some in chosen.items()
    }
    return replace(data, splits=rows, parts={name: some.parts for name, some in chosen.items() if name not in whole})


def _evaluation_splits(columns: Columns) -> tuple[str, ...]:
    """Return the names of splits to evaluate on, the best first."""
    return EVALUATION_SPLITS if columns.task is None else (columns.task.measured_on, *EVALUATION_SPLITS)


def _choose_row_groups(groups: RowGroups, split: str, columns: Columns, reader: _Reader) -> dict[str, ChosenRowGroups]:
    """Choose row groups with enough samples, of the split and of the one that `evaluation_samples` will take."""
    settings, measure, label = reader.settings, reader.measure, columns.label
    features = groups.features(split)
    known = reader.known_names if columns.task is None else columns.task.classes
    names = settings.class_names or getattr(features.get(label), "names", None) or known or ()
    if label is not None and (measure or _uses_labels(columns, settings)):
        is_text = feature_kinds(features)[label] == "string"
        required = Strategy.from_settings(settings).requirement(list(names if is_text else range(len(names))))
    else:
        required = RequiredRows(Strategy.from_settings(settings).n, labelled=False)
    chosen = {split: groups.choose(split, columns, required)}
    can_evaluate = label is not None or columns.is_self_supervised
    if measure or not settings.evaluate or settings.own_objective or not can_evaluate:
        return chosen
    # the default number is read in any case
    more = settings.eval_samples if settings.eval_samples > DEFAULT_MEASURED else 0
    for other in (name for name in _evaluation_splits(columns) if name in groups.splits and name != split):
        held_out = groups.choose(other, columns, RequiredRows(more), after=chosen[split])
        if held_out.labelled or label is None:
            return chosen | {other: held_out}
    return chosen


def calibration_split(data: DataSet, split: str | None) -> str:
    """Return the split to calibrate on: the one requested, else `train`, else the only one."""
    return _choose_split(data.name, data.splits, split, ("train",))


def evaluation_split(data: DataSet, split: str | None) -> str:
    """Return the split to evaluate on: the one requested, else test, validation, train, else the only one.

    Splits without labels, as in contests, are skipped; known tasks prefer a split of their own.
    """
    if split is None:
        split = next((name for name in _evaluation_splits(data.columns) if data.can_evaluate_on(name)), None)
    return _choose_split(data.name, data.splits, split, (*EVALUATION_SPLITS, "train"))


def _choose_split(name: str, splits: Collection[str], split: str | None, preferred: Sequence[str]) -> str:
    if split is not None:
        if split not in splits:
            raise DataNotFoundError(f"'{name}' has no split '{split}'", f"use one of: {', '.join(splits)}")
        return split
    only = list(splits) if len(splits) == 1 else []
    for candidate in (*preferred, *only):
        if candidate in splits:
            return candidate
    raise DataNotFoundError(f"'{name}' has no split '{preferred[0]}'", f"choose one with --split: {', '.join(splits)}")


def calibration_samples(data: DataSet, split: str, settings: Settings) -> Samples:
    """Draw the samples that the settings ask for, the same on every machine; candidates if features decide."""
    return draw_from(data, replace(settings, split=split)).samples


def _columns_of(data: DataSet, split: str, settings: Settings) -> Columns:
    """Return the columns of one split, which may lack the labels that others have."""
    has_labels = settings.labels == "dataset" or data.columns.label in column_kinds(data.splits[split])
    return data.columns if has_labels else replace(data.columns, label=None)


def _calibration_rows(data: DataSet, split: str, settings: Settings) -> tuple[list[int], Strategy]:
    """Return the rows to calibrate on, or the candidates, and how they were drawn."""
    columns = _columns_of(data, split, settings)
    _require_labels(data.name, columns, settings)
    strategy = _strategy(data, split, settings)
    if not _uses_labels(columns, settings):
        size = len(data.splits[split])
        _require_rows(strategy.n, size, f"split '{split}' of '{data.name}' has {size}")
        rows = data.usable_rows(split, draw_order(size, strategy.seed), strategy.n)
        _require_rows(strategy.n, len(rows), f"split '{split}' of '{data.name}' has {len(rows)} with a text to learn")
        return rows, strategy
    labels = data.labels(split)
    if not labels:
        raise DataNotFoundError(
            f"split '{split}' of '{data.name}' has no labels", "choose another with --split, or use --labels pseudo"
        )
    _require_enough(data, split, strategy, Counter(labels.values()))
    return strategy.rows(data.order(split, strategy.seed), labels), strategy


def _strategy(data: DataSet, split: str, settings: Settings) -> Strategy:
    """Return how to draw from a split: by default no more samples than it has.

    Where models are measured on the same split, a third of it is left for that.
    """
    strategy = Strategy.from_settings(settings)
    if settings.n is not None or settings.per_class is not None:
        return strategy
    if _uses_labels(_columns_of(data, split, settings), settings):
        sizes = Counter(data.labels(split).values())
        if strategy.name == "one-class":
            available = max(sizes.values(), default=0)
        else:
            available = sum(sizes[label] for label in strategy.classes(sizes))
    else:
        rows = range(len(data.splits[split]))
        available = len(data.usable_rows(split, draw_order(len(rows), strategy.seed), strategy.n * 3 // 2))
    others = (name for name in data.splits if name != split)
    shared = settings.evaluate and not any(data.can_evaluate_on(name) for name in others)
    return replace(strategy, n=min(strategy.n, max(1, available * 2 // 3 if shared else available)))


def _uses_labels(columns: Columns, settings: Settings) -> bool:
    """Return True if calibration may look at labels of the data set."""
    return columns.label is not None and settings.labels != "pseudo"


def _require_labels(name: str, columns: Columns, settings: Settings) -> None:
    strategy = Strategy.from_settings(settings)
    if not strategy.needs_labels or _uses_labels(columns, settings):
        return
    option = "-k" if strategy.name == "random" else f"--sampling {strategy.name}"
    reason = f"'{name}' has none" if columns.label is None else "--labels pseudo does not look at them"
    raise UsageError(f"{option} needs labels, and {reason}", "use -n with --sampling random")


def _require_rows(wanted: int, size: int, has: str) -> None:
    if wanted > size:
        raise SampleCountError(f"{wanted} samples were asked for and {has}", f"use -n {size} or less")


def _require_enough(data: DataSet, split: str, strategy: Strategy, sizes: Counter[int]) -> None:
    """Refuse to draw more than classes of these sizes hold."""
    per_class = strategy.per_class
    if strategy.name == "one-class":
        largest = min(sizes, key=lambda label: (-sizes[label], label))
        if not strategy.classes(sizes):
            raise SampleCountError(
                f"{per_class or strategy.n} samples of one class were asked for and the largest, "
                f"'{data.class_names[largest]}', has {sizes[largest]} in '{split}'",
                f"use {'-n' if per_class is None else '-k'} {sizes[largest]} or less",
            )
    elif per_class is not None:
        for label in sorted(strategy.classes(sizes)) if strategy.leaves_out_classes else range(len(data.class_names)):
            if sizes[label] < per_class:
                raise SampleCountError(
                    f"{per_class} samples a class were asked for and '{data.class_names[label]}' has {sizes[label]} "
                    f"in '{split}'",
                    f"use -k {sizes[label]} or less, or -n",
                )
    else:
        _require_rows(strategy.n, sizes.total(), f"split '{split}' of '{data.name}' has {sizes.total()} with labels")
        left = sum(sizes[label] for label in strategy.classes(sizes))
        _require_rows(strategy.n, left, f"the half of the classes that was drawn has {left} in '{split}'")


def evaluation_samples(
    data: DataSet, calibration: Samples, split: str, seed: int, most: int = DEFAULT_MEASURED
) -> tuple[str, Samples]:
    """Draw at `most` so many held-out samples: of test, else validation, else what calibration left of `split`.

    If calibration used all of its split, any other labelled split will do; if none has labels, return no samples,
    except for texts and captions, which need none. Known tasks prefer a split of their own.
    """
    others = [name for name in _evaluation_splits(data.columns) if name != split and data.can_evaluate_on(name)]
    used = set(calibration.indices)
    order = data.order(split, seed) if data.can_evaluate_on(split) else []
    unused = [index for index in order if index not in used]
    if not others and not unused:
        others = [name for name in data.splits if name != split and data.can_evaluate_on(name)]
    chosen, rows = (others[0], data.order(others[0], seed)) if others else (split, unused)
    return chosen, data.samples(chosen, data.usable_rows(chosen, rows, most))


def draw_unlabelled(
    reference: Any,
    drawn: CalibrationDraw,
    held_out: Samples | None,
    settings: Settings,
    hub: Hub | None = None,
    *,
    known_names: Sequence[str] | None = None,
    reads: str = IMAGES,
) -> Unlabelled:
    """Draw samples without labels from a data set, up to `unlabelled_samples`, in the order that the seed gives.

    Whatever has the content of a calibration sample or of a `held_out` sample is left out, so that nothing that is
    measured on is learnt from. The columns and the configuration are those of the calibration data, where the data set
    has them; the split is `train`, else the only one.
    """
    used = [drawn.samples, *([] if held_out is None else [held_out])]
    hub, columns, count = hub or Hub(), drawn.data.columns, settings.unlabelled_samples
    # of the same large data set, as many more rows are read as may have to be left out
    rows = count + (sum(map(len, used)) if _is_from(reference, drawn.data, hub) else 0)
    wanted = Settings(n=rows, seed=settings.seed, max_download=settings.max_download, evaluate=False)
    reader = _Reader(wanted, known_names, measure=False, reads=reads, calibration=columns)
    data, split = _open_unlabelled(reference, reader, drawn.data.config, hub)
    taken = {digest for samples in used for digest in digests(samples, image_alone=True)}
    order = draw_order(len(data.splits[split]), settings.seed)
    found = digests(data.samples(split, order, labelled=False))
    fresh = (index for index, digest in zip(order, found, strict=True) if digest not in taken)
    chosen = data.usable_rows(split, fresh, count)
    if not chosen:
        raise SampleCountError(
            f"none of the {len(order)} rows of split '{split}' of '{data.name}' is left as an unlabelled sample: each "
            "is calibrated on, measured on, or empty",
            "give other data with --unlabelled, or measure on fewer samples with --eval-samples",
        )
    return Unlabelled(data, split, data.samples(split, chosen, labelled=False))


def _is_from(reference: Any, data: DataSet, hub: Hub) -> bool:
    """Return True if the reference names the Hub repo that the data set is from."""
    if isinstance(reference, str):
        reference = parse(reference, "the unlabelled data", files=True)
    if data.repo is None or not isinstance(reference, HubReference):
        return False
    return hub.repo(reference, "the unlabelled data", "dataset").id == data.repo.id


def _open_unlabelled(reference: Any, reader: _Reader, config: str | None, hub: Hub) -> tuple[DataSet, str]:
    """Open data in this configuration if it has it, else in its own default, and choose the split."""
    if config is not None:
        with suppress(DataNotFoundError):
            named = replace(reader, settings=replace(reader.settings, config=config))
            data = _open(reference, named, hub)
            return data, calibration_split(data, None)
    try:
        data = _open(reference, reader, hub)
        return data, calibration_split(data, None)
    except DataNotFoundError as error:
        if "--split" not in error.remedy and "--config" not in error.remedy:
            raise
        remedy = "give unlabelled data with a split 'train' or only one, and with one configuration"
        raise DataNotFoundError(error.cause, remedy) from error
