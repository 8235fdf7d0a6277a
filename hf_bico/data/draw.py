"""Calibration and held-out samples; copies among them.

Which samples: opening a data set as far as they need it, and drawing from it by a seed.

Knows splits, rows and labels; neither models nor files. Takes anything that `datasets` loads, or a list of rows.

Samples that are there more than once: among those of calibration, and in what is measured on.

Compares rows as they are stored, byte by byte; knows neither models nor what is measured.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_bico.data.columns import (
    Columns,
    Rows,
    class_names,
    column_kinds,
    feature_kinds,
    find_columns,
    known_task,
    undecoded,
)
from hf_bico.data.dataset import DataSet, Samples
from hf_bico.data.loading import ParquetFiles, large_parquet, open_folder, open_whole
from hf_bico.data.remote_parquet import Chosen, RowGroups
from hf_bico.data.sampling import Strategy, Wanted, draw_order
from hf_bico.errors import DataNotFoundError, SampleCountError, UsageError
from hf_bico.hub.client import Hub
from hf_bico.hub.references import HubReference, parse
from hf_bico.settings import DEFAULT_MEASURED, Settings
from hf_bico.utils.samples import IMAGES, TEXTS

if TYPE_CHECKING:
    from torch import Tensor


EVALUATION_SPLITS = ("test", "validation", "valid", "val", "validation_matched")


@dataclass(frozen=True)
class CalibrationDraw:
    """Calibration samples, and where they come from.

    Where it `needs_features`, the samples are only candidates, of which `chosen` takes those that were asked for.
    """

    data: DataSet
    split: str
    samples: Samples
    labels: str = "dataset"
    """Whose the labels are: the "dataset"'s, or "pseudo", each -1 until `with_labels`."""
    strategy: Strategy = field(default_factory=Strategy)
    needs_features: bool = False

    def chosen(self, features: Tensor) -> CalibrationDraw:
        """The samples that were asked for, by the candidates' features: one row for each, in their order."""
        if not self.needs_features:
            return self
        if features.ndim != 2 or len(features) != len(self.samples):
            raise ValueError(f"features of shape {tuple(features.shape)} for {len(self.samples)} candidates")
        labels = self.data.labels(self.split)
        sizes = Counter(labels.values())
        rows = self.strategy.by_centroid(self.samples.indices, labels, sizes, features)
        return replace(self, samples=self.data.samples(self.split, rows), needs_features=False)

    def with_labels(self, labels: Sequence[int]) -> CalibrationDraw:
        """The samples with these labels, one for each, in their order."""
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
    """Open a data set and draw the calibration samples that the settings ask for."""
    return draw_from(open_data(data, settings, hub, known_names=known_names, reads=reads), settings)


def draw_from(opened: DataSet, settings: Settings) -> CalibrationDraw:
    """Draw the calibration samples that the settings ask for."""
    split = calibration_split(opened, settings.split)
    strategy = Strategy.of(settings)
    samples = calibration_samples(opened, split, settings)
    labels = "dataset" if _knows_labels(_columns_of(opened, split, settings), settings) else "pseudo"
    return CalibrationDraw(opened, split, samples, labels, strategy, strategy.needs_features)


def open_data(
    data: Any,
    settings: Settings | None = None,
    hub: Hub | None = None,
    *,
    known_names: Sequence[str] | None = None,
    measure: bool = False,
    reads: str = IMAGES,
) -> DataSet:
    """Open a data set: a Hub id, a folder of images or of parquet, JSON or CSV files, a `datasets` object, or rows.

    Columns and class names are those of the settings, or found by what the models read, "images" or "texts", by the
    columns' types and, of texts, by their names; `known_names` stand for numbers that nothing else names. To calibrate
    on, but not to measure, a data set of images may be without labels; one of texts always may. Of a large Hub repo
    only what the settings need is read: for calibration and its evaluation, or, to `measure` a model, `n` rows or all
    of one split.
    """
    settings = settings or Settings()
    reader = _Reader(settings, known_names, measure, reads)
    if not isinstance(data, str | Path | HubReference):
        splits = _given_splits(data)
        return reader.described("data", splits, task_of=_origin(splits, settings))
    place = data if isinstance(data, HubReference) else parse(data, "the data set", files=True)
    if isinstance(place, Path):
        opened = open_folder(place, place.name, settings.config)
        return reader.described(place.name, opened.splits, named=True, config=opened.config)
    repo = (hub or Hub()).repo(place, "the data set", "dataset")
    files = large_parquet(repo, settings.config)
    if files is not None:
        return _read_in_part(files, reader)
    opened = open_whole(repo, settings.config, settings.max_download)
    return reader.described(repo.id, opened.splits, named=True, repo=repo, config=opened.config)


@dataclass(frozen=True)
class _Reader:
    """How the rows of a data set are to be understood."""

    settings: Settings
    known_names: Sequence[str] | None
    measure: bool
    reads: str

    def columns(self, kinds: Mapping[str, str], name: str, config: str | None) -> Columns:
        needs_labels = self.measure or self.settings.labels == "dataset"
        task = known_task(name, config, kinds) if self.reads == TEXTS else None
        return find_columns(kinds, self.settings, self.reads, needs_labels=needs_labels, task=task)

    def described(
        self, name: str, splits: Mapping[str, Rows], task_of: tuple[str, str | None] | None = None, **where: Any
    ) -> DataSet:
        """All splits as one data set; `task_of` is the name and configuration by which it may be known."""
        kinds = column_kinds(next(iter(splits.values())))
        columns = self.columns(kinds, *(task_of or (name, where.get("config"))))
        return DataSet(name, splits, columns, self.class_names(splits.values(), columns), **where)

    def class_names(self, splits: Iterable[Rows], columns: Columns) -> tuple[str, ...]:
        return class_names(splits, columns, self.settings, self.known_names)


def _read_in_part(files: ParquetFiles, reader: _Reader) -> DataSet:
    """Those rows of a large data set that are needed."""
    settings, measure = reader.settings, reader.measure
    groups = RowGroups(files, settings.seed, settings.max_download)
    preferred = (*EVALUATION_SPLITS, "train") if measure else ("train",)
    split = _choose_split(files.repo.id, files.splits, settings.split, preferred)
    kinds = feature_kinds(groups.features(split))
    columns = reader.columns(kinds, files.repo.id, files.config)
    if measure and settings.split is None:
        split = _labelled_split(groups, columns, split)
    if columns.label is not None and kinds[columns.label] == "string" and settings.class_names is None:
        settings = replace(settings, class_names=groups.names(columns.label))
        reader = replace(reader, settings=settings)
    where: dict[str, Any] = {"named": True, "repo": files.repo, "config": files.config}
    if measure and settings.n is None:
        return reader.described(files.repo.id, {split: groups.read_whole(split, columns)}, **where)

    if not measure:
        _require_labels(files.repo.id, columns, settings)
    chosen = _choose_row_groups(groups, split, columns, reader)
    labels = {name: some.labels for name, some in chosen.items()}
    data = DataSet(files.repo.id, labels, columns, reader.class_names(labels.values(), columns), **where)
    if not measure:  # labels are enough to draw by: what cannot be drawn is not downloaded
        _calibration_rows(data, split, settings)
    whole = {split} if settings.trains_on_all and not measure else set()
    rows = {
        name: groups.read_whole(name, columns, training=True) if name in whole else groups.read(name, some, columns)
        for name, some in chosen.items()
    }
    return replace(data, splits=rows, parts={name: some.parts for name, some in chosen.items() if name not in whole})


def _labelled_split(groups: RowGroups, columns: Columns, split: str) -> str:
    """The split to measure on: of a known data set its own, of any other the first that has labels."""
    label = columns.label
    for name in _measured_first(columns):
        if name in groups.splits and (label is None or not groups.lacks_labels(name, label)):
            return name
    return split


def _measured_first(columns: Columns) -> tuple[str, ...]:
    """The splits to measure on, the best first."""
    return EVALUATION_SPLITS if columns.task is None else (columns.task.measured_on, *EVALUATION_SPLITS)


def _choose_row_groups(groups: RowGroups, split: str, columns: Columns, reader: _Reader) -> dict[str, Chosen]:
    """Row groups of the split with enough samples in them, and of the split that `evaluation_samples` will take."""
    settings, measure, label = reader.settings, reader.measure, columns.label
    features = groups.features(split)
    known = reader.known_names if columns.task is None else columns.task.classes
    names = settings.class_names or getattr(features.get(label), "names", None) or known or ()
    if label is not None and (measure or _knows_labels(columns, settings)):
        is_text = feature_kinds(features)[label] == "string"
        wanted = Strategy.of(settings).wanted(list(names if is_text else range(len(names))))
    else:
        wanted = Wanted(Strategy.of(settings).n, labelled=False)
    chosen = {split: groups.choose(split, columns, wanted)}
    unmeasured = label is None and not columns.is_self_supervised
    if measure or not settings.evaluate or settings.own_objective or unmeasured:
        return chosen
    # the usual number is there in any case
    more = settings.eval_samples if settings.eval_samples > DEFAULT_MEASURED else 0
    for other in (name for name in _measured_first(columns) if name in groups.splits and name != split):
        held_out = groups.choose(other, columns, Wanted(more), after=chosen[split])
        if held_out.labelled or label is None:
            return chosen | {other: held_out}
    return chosen


def calibration_split(data: DataSet, split: str | None) -> str:
    """The split to calibrate on: the one asked for, else `train`, else the only one."""
    return _choose_split(data.name, data.splits, split, ("train",))


def evaluation_split(data: DataSet, split: str | None) -> str:
    """The split to measure on: the one asked for, else test, else validation, else train, else the only one.

    Those of a contest, whose labels are held back, are passed over; a known data set has a split of its own for it.
    """
    if split is None:
        for name in _measured_first(data.columns):
            if data.can_evaluate_on(name):
                return name
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
    """The samples that the settings ask for, the same ones on every machine; candidates where features decide."""
    rows = _calibration_rows(data, split, settings)
    return data.samples(split, rows, labelled=_knows_labels(_columns_of(data, split, settings), settings))


def _columns_of(data: DataSet, split: str, settings: Settings) -> Columns:
    """Those of one split: only others may have labels, and then it has none, unless it must."""
    has_labels = settings.labels == "dataset" or data.columns.label in column_kinds(data.splits[split])
    return data.columns if has_labels else data.columns.without_label()


def _calibration_rows(data: DataSet, split: str, settings: Settings) -> list[int]:
    columns = _columns_of(data, split, settings)
    _require_labels(data.name, columns, settings)
    strategy = Strategy.of(settings)
    if not _knows_labels(columns, settings):
        size = len(data.splits[split])
        _require_rows(strategy.n, size, f"split '{split}' of '{data.name}' has {size}")
        rows = data.usable_rows(split, draw_order(size, strategy.seed), strategy.n)
        _require_rows(strategy.n, len(rows), f"split '{split}' of '{data.name}' has {len(rows)} with a text to learn")
        return rows
    labels = data.labels(split)
    if not labels:
        raise DataNotFoundError(
            f"split '{split}' of '{data.name}' has no labels", "choose another with --split, or use --labels pseudo"
        )
    _require_enough(data, split, strategy, Counter(labels.values()))
    return strategy.rows(data.order(split, strategy.seed), labels)


def _knows_labels(columns: Columns, settings: Settings) -> bool:
    """Whether calibration sees labels of the data set."""
    return columns.label is not None and settings.labels != "pseudo"


def _require_labels(name: str, columns: Columns, settings: Settings) -> None:
    strategy = Strategy.of(settings)
    if not strategy.needs_labels or _knows_labels(columns, settings):
        return
    option = "-k" if strategy.name == "random" else f"--sampling {strategy.name}"
    reason = f"'{name}' has none" if columns.label is None else "--labels pseudo does not look at them"
    raise UsageError(f"{option} needs labels, and {reason}", "use -n with --sampling random")


def _require_rows(wanted: int, size: int, has: str) -> None:
    if wanted > size:
        raise SampleCountError(f"{wanted} samples were asked for and {has}", f"use -n {size} or less")


def _require_enough(data: DataSet, split: str, strategy: Strategy, sizes: Counter[int]) -> None:
    """Refuse what classes of these sizes cannot give."""
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
    """At `most` so many held-out samples: of test, else validation, else what calibration on `split` did not use.

    Where calibration used all of its split, any other labelled split will do; where none has labels, there are none,
    but of texts and captions, which need none. A known data set has a split of its own to be measured on.
    """
    others = [name for name in _measured_first(data.columns) if name != split and data.can_evaluate_on(name)]
    used = set(calibration.indices)
    order = data.order(split, seed) if data.can_evaluate_on(split) else []
    unused = [index for index in order if index not in used]
    if not others and not unused:
        others = [name for name in data.splits if name != split and data.can_evaluate_on(name)]
    if not others:
        return split, data.samples(split, data.usable_rows(split, unused, most))
    return others[0], data.samples(others[0], data.usable_rows(others[0], data.order(others[0], seed), most))


def _origin(splits: Mapping[str, Rows], settings: Settings) -> tuple[str, str | None]:
    """The name and configuration that given rows were loaded by, as far as they know."""
    info = getattr(next(iter(splits.values())), "info", None)
    name, config = getattr(info, "dataset_name", None), settings.config or getattr(info, "config_name", None)
    return name or "data", None if config == "default" else config


def _given_splits(data: Any) -> Mapping[str, Rows]:
    if isinstance(data, Mapping) and data:  # datasets.DatasetDict is a dict
        return dict(data)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or len(data) == 0:
        raise DataNotFoundError(f"a data set of type {type(data).__name__} has no rows", "pass a data set with rows")
    return {str(getattr(data, "split", None) or "train"): data}


MOST_COPIES = 0.5
"""Above this share of calibration samples that are copies of others, so many are not what was asked for."""
MOST_LEAKED = 0.05
"""Above this share of held-out samples that were calibrated on, what is measured is worth a word: below, it cannot
move an accuracy by more than so many points."""


def repeat_notices(drawn: CalibrationDraw, held_out: Samples | None) -> list[str]:
    """What to know about samples that are copies; `held_out` are those that were measured on."""
    own = list(_digests(drawn.samples))
    known, notices = set(own), []
    if len(own) - len(known) > MOST_COPIES * len(own):
        notices.append(f"Of the {len(own)} calibration samples only {len(known)} are different.")
    if held_out is not None:
        leaked = sum(digest in known for digest in _digests(held_out))
        if leaked > MOST_LEAKED * len(held_out):
            notices.append(f"Of the {len(held_out)} samples that were measured on, {leaked} were calibrated on.")
    return notices


def _digests(samples: Samples) -> Iterator[bytes]:
    """What tells each sample from others, by what it is made of."""
    rows, image = samples.rows, samples.columns.image
    if image is not None and hasattr(rows, "cast_column"):
        rows = undecoded(rows, image)
    elif image is None and hasattr(rows, "select_columns"):
        rows = rows.select_columns(list(samples.columns.parts.values()))
    for index in samples.indices:
        row = rows[index]
        found = hashlib.blake2b(digest_size=16)
        for name in samples.columns.parts.values():
            found.update(_bytes_of(row[name], trusted=samples.decode is None))
        yield found.digest()


def _bytes_of(value: Any, trusted: bool) -> bytes:
    """A value as bytes; a file only of one's own data set: what a stranger's points at is not opened for this."""
    if isinstance(value, dict) and {"bytes", "path"} <= value.keys():
        if value["bytes"] is not None:
            return bytes(value["bytes"])
        file = Path(value["path"])
        return file.read_bytes() if trusted and file.is_file() else str(file).encode()
    if hasattr(value, "tobytes"):  # PIL's images and numpy's arrays
        return f"{getattr(value, 'mode', '')} {getattr(value, 'size', '')} ".encode() + bytes(value.tobytes())
    if hasattr(value, "numpy"):
        return bytes(value.detach().cpu().contiguous().numpy().tobytes())
    return repr(value).encode()
