"""Read a few row groups of parquet files on the Hub: choose those with enough samples, and load their rows.

Knows files, row groups and labels; neither how files make up splits, nor which samples are drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import chain, groupby, islice, zip_longest
from pathlib import Path
from typing import Any

from hf_bico.data.classes import NAMES_REMEDY, UNLABELLED, distinct_names, is_label
from hf_bico.data.columns import Columns
from hf_bico.data.loading import ParquetFiles, fetch, image_features, in_parallel, readable
from hf_bico.data.sampling import RequiredRows, shuffled
from hf_bico.data.unpacking import UnpackedSize, group_size, read_row_group
from hf_bico.errors import ClassNamesError, DownloadTooLargeError, SampleCountError
from hf_bico.hub.client import RemoteFile, translate_hub_errors
from hf_bico.utils.samples import FilePart
from hf_bico.utils.text import size_text

MIN_BUDGET, BUDGET_SHARE, MAX_BUDGET = 8_000_000, 0.02, 200_000_000
"""Bytes of a split that are read for variety: a share of it, within bounds."""
SPREAD = 64
"""Row groups to read within the budget: data sets are often sorted by class."""
FOOTERS_AT_ONCE = 16
"""Files whose footers are read at the same time, each with one request."""
MAX_SEARCHED = 1024
"""Row groups that are searched for labels, each with one request."""


@dataclass(frozen=True, order=True)
class RowGroup:
    """A row group: `size` in bytes of the columns to read, and what they unpack to by the file's own account; `bounds`
    of its labels, if the file knows them.
    """

    file: str
    index: int
    rows: int = field(compare=False)
    size: int = field(compare=False)
    unpacked: int = field(compare=False)
    bounds: tuple[int, int] | None = field(compare=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.index}"


@dataclass(frozen=True)
class ChosenRowGroups:
    """Row groups of one split, sorted by file and index, and their rows with labels alone."""

    groups: tuple[RowGroup, ...]
    labels: Any
    labelled: int
    """The number of labelled rows."""

    @property
    def size(self) -> int:
        return sum(group.size for group in self.groups)

    @property
    def unpacked(self) -> int:
        return sum(group.unpacked for group in self.groups)

    @property
    def parts(self) -> list[FilePart]:
        return [
            FilePart(file, [group.index for group in groups], sum(group.rows for group in groups))
            for file, groups in ((file, list(some)) for file, some in groupby(self.groups, lambda group: group.file))
        ]


class RowGroups:
    """The row groups of a Hub data set, read by Range requests.

    Files are taken in an order that the seed gives, 16 at a time, and of these one row group each, then another one
    each, also in an order that the seed gives. The first of them are read: at least as many as hold the required rows,
    and up to 64 while they stay within a budget (2 % of the split's bytes, at least 8 MB and at most 200 MB). As long
    as the required rows fit into the budget, the row groups depend on the commit, the seed and the columns alone, so
    that smaller samples are part of larger ones; beyond it, more rows take more row groups, and samples are drawn anew.
    Where classes are missing, row groups without any of them are skipped; classes that are only desirable may double
    the budget. Labels are read first, so that nothing is downloaded that cannot be drawn. Cached files are read from
    the cache, which changes nothing else.
    """

    def __init__(self, files: ParquetFiles, seed: int, limit: int) -> None:
        self.repo = files.repo
        self.splits = files.splits
        self._declared = files.features
        self._seed = seed
        self._limit = limit
        packed = sum(self.repo.files[file] for files in self.splits.values() for file in files)
        self._unpacked = UnpackedSize(self.repo.id, packed, limit)
        self._footers: dict[str, Any] = {}
        self._features: dict[str, Any] = {}
        self._labels: dict[tuple[RowGroup, str], Any] = {}

    def features(self, split: str) -> Any:
        """Return the types of a split's columns: as declared by the card, else by its first file."""
        import datasets

        if self._declared:
            return self._declared
        if split not in self._features:
            first = self._files(split)[0]
            self._read_footers([first])
            stored = datasets.Features.from_arrow_schema(self._footers[first].schema.to_arrow_schema())
            self._features[split] = image_features(stored)
        return self._features[split]

    def choose(
        self, split: str, columns: Columns, required: RequiredRows, after: ChosenRowGroups | None = None
    ) -> ChosenRowGroups:
        """Choose row groups of a split; those chosen before, `after`, count towards the download limit."""
        label = columns.label
        share = int(BUDGET_SHARE * sum(self.repo.files[file] for file in self.splits[split]))
        # of the limit, not of what is left to download: the cache must not change the samples
        budget = min(max(MIN_BUDGET, min(share, MAX_BUDGET)), self._limit - (after.size if after else 0))
        with self._reading():
            taken, rest = self._spread(split, columns, required, after, budget)
            if label is None:
                return ChosenRowGroups(tuple(sorted(taken)), [{}] * sum(group.rows for group in taken), 0)
            found = self._complete(split, label, required, taken, rest, 2 * budget)
            self._require_allowed(self._cost(taken), after, sum(group.size for group in taken))
            taken.sort()
            labels = self._rows(split, {label: self._read_labels(split, taken, label)})
            return ChosenRowGroups(tuple(taken), labels, found.total())

    def _complete(
        self, split: str, label: str, required: RequiredRows, taken: list[RowGroup], rest: Iterator[RowGroup], most: int
    ) -> Counter[Any]:
        """Add row groups with missing labels to `taken`, merely desirable ones up to `most` bytes; count the labels."""
        found = _count_labels(self._read_labels(split, taken, label))
        helpful = (group for group in rest if required.may_be_within(group.bounds, found))
        searched, size = 0, sum(group.size for group in taken)
        while not required.is_met(found) and (batch := list(islice(helpful, FOOTERS_AT_ONCE))):
            searched += len(batch)
            if searched > MAX_SEARCHED and required.suffices(found):
                break
            if searched > MAX_SEARCHED:
                raise SampleCountError(
                    f"{MAX_SEARCHED} more row groups of split '{split}' of '{self.repo.id}' hold too few labels",
                    "ask for fewer samples, or use -n with --sampling random",
                )
            for group, values in zip(batch, self._read_labels(split, batch, label), strict=True):
                some = _count_labels([values])
                if required.is_met(found) or not required.helps(some, found):
                    continue
                if required.suffices(found) and size + group.size > min(most, self._limit):
                    return found
                taken.append(group)
                size += group.size
                found.update(some)
        return found

    def names(self, label: str) -> tuple[str, ...]:
        """Return all distinct labels of all splits, where strings are the only class names."""
        by_split = list[set[str]]()
        for split in self.splits:
            with self._reading():
                groups = list(islice(self._ordered(split, [label], label), MAX_SEARCHED + 1))
                if len(groups) > MAX_SEARCHED:
                    raise ClassNamesError(
                        f"the column '{label}' of '{self.repo.id}' is too long to look for the names of classes in it",
                        f"{NAMES_REMEDY} (class_names=[...] in Python)",
                    )
                by_split.append(set(_count_labels(self._read_labels(split, groups, label))))
        return distinct_names(by_split)

    def lacks_labels(self, split: str, label: str) -> bool:
        """Return True if the first file's statistics say that no row has a label, as in contests."""
        first = self._files(split)[0]
        self._read_footers([first])
        return {group.bounds for group in self._groups(first, [label], label)} == {(UNLABELLED, UNLABELLED)}

    def read(self, split: str, chosen: ChosenRowGroups, columns: Columns) -> Any:
        """Return the rows of the chosen row groups, concatenated, as a `datasets.Dataset`."""
        names = list(columns.parts.values())
        self._unpacked.require(self._unpacked.total + chosen.unpacked)
        with self._reading():
            tables = in_parallel(lambda group: self._read_columns(split, group, names), chosen.groups)
            pieces = {name: [table[name] for table in tables] for name in names}
            if columns.label is not None:
                pieces[columns.label] = self._read_labels(split, chosen.groups, columns.label)
            return self._rows(split, pieces)

    def read_whole(self, split: str, columns: Columns, training: bool = False) -> Any:
        """Return all rows of a split, for evaluation or `training`, from files fetched through the cache."""
        import datasets

        files = self.splits[split]
        size = self.repo.to_download(files)
        if size > self._limit:
            fewer = "" if training else "measure on fewer samples with --eval-samples, or "
            raise DownloadTooLargeError(
                f"split '{split}' of '{self.repo.id}' is a download of {size_text(size)}; "
                f"{size_text(self._limit)} are allowed",
                f"{fewer}allow more with --max-download",
            )
        features = self._some_features(split, columns.names)
        folder = fetch(self.repo, files)
        unpacked = UnpackedSize(self.repo.id, sum(self.repo.files[file] for file in files), self._limit)
        with readable(self.repo.id):
            for file in files:
                unpacked.add_file(folder / file, "parquet")
            return datasets.Dataset.from_parquet(
                [str(folder / file) for file in files],
                split=datasets.NamedSplit(split),
                features=features,
                columns=list(features),
            )

    def _spread(
        self, split: str, columns: Columns, required: RequiredRows, after: ChosenRowGroups | None, budget: int
    ) -> tuple[list[RowGroup], Iterator[RowGroup]]:
        """Take row groups until the required rows are reached and the budget is used; return them and the rest."""
        ordered = self._ordered(split, columns.names, columns.label)
        taken: list[RowGroup] = []
        rows = size = cost = 0
        for group in ordered:
            if taken and rows >= required.rows and (len(taken) >= SPREAD or size + group.size > budget):
                return taken, chain([group], ordered)
            taken.append(group)
            rows, size, cost = rows + group.rows, size + group.size, cost + self._cost([group])
            self._require_allowed(cost, after, size * max(required.rows, rows) // max(rows, 1))
        return taken, ordered

    def _cost(self, groups: Sequence[RowGroup]) -> int:
        """Return the bytes to download."""
        return sum(group.size for group in groups if self._cached[group.file] is None)

    def _require_allowed(self, cost: int, after: ChosenRowGroups | None, estimate: int) -> None:
        before = self._cost(after.groups) if after else 0
        if before + cost > self._limit:
            raise DownloadTooLargeError(
                f"the samples of '{self.repo.id}' are a download of about {size_text(before + estimate)}; "
                f"{size_text(self._limit)} are allowed",
                f"allow more with --max-download, or {'leave out the evaluation' if after else 'use fewer samples'}",
            )

    def _ordered(self, split: str, names: Sequence[str], label: str | None) -> Iterator[RowGroup]:
        """Yield all row groups in the order in which they are taken, reading footers as needed."""
        files = self._files(split)
        for start in range(0, len(files), FOOTERS_AT_ONCE):
            some = files[start : start + FOOTERS_AT_ONCE]
            self._read_footers(some)
            columns = [shuffled(self._groups(file, names, label), self._seed) for file in some]
            for one_of_each in zip_longest(*columns):  # one of each file, another one of each, ...
                yield from (group for group in one_of_each if group is not None)

    def _groups(self, file: str, names: Sequence[str], label: str | None) -> Iterator[RowGroup]:
        footer = self._footers[file]
        starts = tuple(f"{name}." for name in names)
        for index in range(footer.num_row_groups):
            group = footer.row_group(index)
            chunks = [group.column(number) for number in range(group.num_columns)]
            # an image is a column of several chunks: image.bytes, image.path; so are messages
            read = [chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(starts)]
            size = sum(chunk.total_compressed_size for chunk in read)
            unpacked = group_size(footer, index, names)
            bounds = next((_bounds(chunk) for chunk in read if chunk.path_in_schema == label), None)
            yield RowGroup(file, index, group.num_rows, size, unpacked, bounds)

    def _files(self, split: str) -> list[str]:
        return shuffled(self.splits[split], self._seed)

    @cached_property
    def _cached(self) -> dict[str, Path | None]:
        return {file: self.repo.cached(file) for files in self.splits.values() for file in files}

    def _read_footers(self, files: Sequence[str]) -> None:
        import pyarrow.parquet

        def footer(file: str) -> Any:
            with self._open(file) as source:
                return pyarrow.parquet.read_metadata(source)

        new = [file for file in files if file not in self._footers]
        with self._reading():
            self._footers.update(zip(new, in_parallel(footer, new), strict=True))

    def _open(self, file: str) -> Any:
        path = self._cached[file]
        return RemoteFile(self.repo, file) if path is None else path.open("rb")

    def _some_features(self, split: str, names: Iterable[str]) -> Any:
        import datasets

        return datasets.Features({name: self.features(split)[name] for name in names})

    def _read_columns(self, split: str, group: RowGroup, names: Sequence[str]) -> Any:
        """Read some columns of a row group, cast to the declared types."""
        import pyarrow
        from datasets.table import table_cast

        footer = self._footers[group.file]
        schema = footer.schema.to_arrow_schema()
        stored = pyarrow.schema([schema.field(name) for name in names if name in schema.names])
        with self._open(group.file) as source:
            batches = read_row_group(footer, group.index, lambda: nullcontext(source), self._unpacked, stored.names)
        table = pyarrow.Table.from_batches([batch.select(stored.names).cast(stored) for batch in batches], stored)
        for name in names:
            if name not in table.column_names:  # a split may have no labels
                table = table.append_column(name, pyarrow.nulls(group.rows))
        return table_cast(table.select(names), self._some_features(split, names).arrow_schema)

    def _read_labels(self, split: str, groups: Sequence[RowGroup], label: str) -> list[Any]:
        new = [group for group in groups if (group, label) not in self._labels]
        columns = in_parallel(lambda group: self._read_columns(split, group, [label])[label], new)
        self._labels.update(zip(((group, label) for group in new), columns, strict=True))
        return [self._labels[group, label] for group in groups]

    def _rows(self, split: str, columns: Mapping[str, Sequence[Any]]) -> Any:
        """Join the columns of several row groups to a data set."""
        import datasets
        import pyarrow

        features = self._some_features(split, columns)
        chunks = [[chunk for piece in pieces for chunk in piece.chunks] for pieces in columns.values()]
        arrays = [
            pyarrow.chunked_array(some, field.type) for some, field in zip(chunks, features.arrow_schema, strict=True)
        ]
        table = pyarrow.Table.from_arrays(arrays, schema=features.arrow_schema)
        info, name = datasets.DatasetInfo(features=features), datasets.NamedSplit(split)
        # a fingerprint of our own: `datasets` would hash all images
        origin = f"{self.repo.id}@{self.repo.commit}:{split}:{self._seed}:{len(table)}:{table.column_names}"
        fingerprint = blake2b(origin.encode(), digest_size=8).hexdigest()
        return datasets.Dataset(table, info=info, split=name, fingerprint=fingerprint)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with readable(self.repo.id), translate_hub_errors(self.repo.requested, self.repo.type, f"'{self.repo.id}'"):
            yield


def _count_labels(columns: Iterable[Any]) -> Counter[Any]:
    """Count the labels, without rows that have none."""
    values = (value for column in columns for value in column.to_pylist())
    return Counter(value for value in values if is_label(value))


def _bounds(chunk: Any) -> tuple[int, int] | None:
    statistics = chunk.statistics if chunk.is_stats_set else None
    if statistics is None or not statistics.has_min_max or not isinstance(statistics.min, int):
        return None
    return statistics.min, statistics.max
