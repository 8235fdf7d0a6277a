"""Row groups of parquet files on the Hub: which of them to read for a few samples, and their rows.

Knows files, row groups and labels; neither how a repo's files make up splits, nor which samples are drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from hf_bico.data.columns import Columns
from hf_bico.data.loading import ParquetFiles, fetch, image_features, in_parallel, readable
from hf_bico.data.sampling import Wanted
from hf_bico.errors import ClassNamesError, DownloadTooLargeError, SampleCountError
from hf_bico.hub.client import RemoteFile
from hf_bico.hub.retries import translate_hub_errors
from hf_bico.utils.samples import FilePart
from hf_bico.utils.text import size_text

UNLABELLED = -1
LEAST_BUDGET, SHARE, MOST_BUDGET = 8_000_000, 0.02, 200_000_000
"""How many bytes of a split are read for the sake of variety: a share of it, within bounds."""
PLACES = 64
"""So many row groups are read where the budget allows: data sets are often sorted by class."""
FOOTERS = 16
"""So many files are looked into at a time; a footer is one request."""
LOOKED_AT = 1024
"""In so many row groups labels are looked for; each is one request."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Group:
    """A row group; `size` counts the bytes of the columns that are read, `bounds` hold its labels where it says so."""

    file: str
    index: int
    rows: int
    size: int
    bounds: tuple[int, int] | None


@dataclass(frozen=True)
class Chosen:
    """Row groups of one split, sorted by file and place, and their rows with nothing but the labels."""

    groups: tuple[Group, ...]
    labels: Any
    labelled: int
    """How many of the rows have a label."""

    @property
    def size(self) -> int:
        return sum(group.size for group in self.groups)

    @property
    def parts(self) -> list[FilePart]:
        found: dict[str, list[Group]] = {}
        for group in self.groups:
            found.setdefault(group.file, []).append(group)
        return [
            FilePart(file, [group.index for group in groups], sum(group.rows for group in groups))
            for file, groups in found.items()
        ]


class RowGroups:
    """The row groups of a Hub data set, read by Range requests.

    Which row groups: files in an order that the seed gives, looked into 16 at a time, and of these one row group each,
    then another one each, in an order that the seed gives too. The first of them are read: at least as many as hold
    the rows wanted, and up to 64 while they stay within a budget (2 % of the split's bytes, but 8 MB at least and
    200 MB at most). So the row groups depend on the commit, the seed and the columns alone as long as the rows wanted
    fit into the budget, and smaller samples are then part of larger ones; beyond it, more rows take more row groups,
    and samples are drawn anew from all of them. Where classes are still missing, row groups are passed over that hold
    none of these; where it is only wished that classes are there, all stays within twice the budget. Labels are read
    first: what cannot be drawn is not downloaded. A file that is in the cache is read there, and changes nothing else.
    """

    def __init__(self, files: ParquetFiles, seed: int, limit: int) -> None:
        self.repo = files.repo
        self.splits = files.splits
        self._declared = files.features
        self._seed = seed
        self._limit = limit
        self._footers: dict[str, Any] = {}
        self._features: dict[str, Any] = {}
        self._labels: dict[tuple[str, int, str], Any] = {}

    def features(self, split: str) -> Any:
        """The types of a split's columns: as the card says, else as its first file does."""
        if split not in self._features:
            self._features[split] = self._declared or self._stored_features(split)
        return self._features[split]

    def choose(self, split: str, columns: Columns, wanted: Wanted, after: Chosen | None = None) -> Chosen:
        """The row groups to read of a split, `after` others were chosen that count towards the limit."""
        label = columns.label
        with self._reading():
            budget = self._budget(split, after)
            taken, rest = self._spread(split, columns, wanted, after, budget)
            if label is None:
                taken.sort(key=_position)
                return Chosen(tuple(taken), [{}] * sum(group.rows for group in taken), 0)
            found = self._complete(split, label, wanted, taken, rest, 2 * budget)
            self._require_allowed(self._cost(taken), after, sum(group.size for group in taken))
            taken.sort(key=_position)
            labels = self._rows(split, {label: self._read_labels(split, taken, label)})
            return Chosen(tuple(taken), labels, found.total())

    def _complete(
        self, split: str, label: str, wanted: Wanted, taken: list[Group], rest: Iterator[Group], most: int
    ) -> Counter[Any]:
        """Take those that hold what is missing too; returns the labels found.

        What is only wished for may bring the row groups to `most` bytes.
        """
        found = _count(self._read_labels(split, taken, label))
        helpful = (group for group in rest if wanted.may_be_within(group.bounds, found))
        looked, size = 0, sum(group.size for group in taken)
        while not wanted.is_met(found) and (batch := list(islice(helpful, FOOTERS))):
            looked += len(batch)
            if looked > LOOKED_AT and not wanted.suffices(found):
                raise SampleCountError(
                    f"{LOOKED_AT} more row groups of split '{split}' of '{self.repo.id}' hold too few labels",
                    "ask for fewer samples, or use -n with --sampling random",
                )
            if looked > LOOKED_AT:
                break
            for group, values in zip(batch, self._read_labels(split, batch, label), strict=True):
                some = _count([values])
                if wanted.is_met(found) or not wanted.helps(some, found):
                    continue
                if wanted.suffices(found) and size + group.size > min(most, self._limit):
                    return found
                taken.append(group)
                size += group.size
                found.update(some)
        return found

    def names(self, label: str) -> list[str]:
        """All the different labels of all splits, where these are strings and nothing else names the classes."""
        found: set[str] = set()
        for split in self.splits:
            with self._reading():
                groups = list(islice(self._ordered(split, [label], label), LOOKED_AT + 1))
                if len(groups) > LOOKED_AT:
                    raise ClassNamesError(
                        f"the column '{label}' of '{self.repo.id}' is too long to look for the names of classes in it",
                        "give a file with one class name a line: --class-names FILE (class_names=[...] in Python)",
                    )
                found |= set(_count(self._read_labels(split, groups, label)))
        return sorted(found)

    def lacks_labels(self, split: str, label: str) -> bool:
        """Whether the first file of a split says that none of its rows has a label, as those of a contest do."""
        first = self._files(split)[0]
        self._look_into([first])
        bounds = [group.bounds for group in self._groups(first, [label], label)]
        return bool(bounds) and all(found == (UNLABELLED, UNLABELLED) for found in bounds)

    def read(self, split: str, chosen: Chosen, columns: Columns) -> Any:
        """The rows of the chosen row groups, one after the other, as a `datasets.Dataset`."""
        names = list(columns.parts.values())
        with self._reading():
            tables = in_parallel(lambda group: self._columns(split, group, names), chosen.groups)
            found = {name: [table[name] for table in tables] for name in names}
            if columns.label is not None:
                found[columns.label] = self._read_labels(split, chosen.groups, columns.label)
            return self._rows(split, found)

    def read_whole(self, split: str, columns: Columns, training: bool = False) -> Any:
        """All rows of a split, to measure on or for `training`; its files are fetched through the cache."""
        import datasets

        files = self.splits[split]
        size = self.repo.to_download(files)
        if size > self._limit:
            raise DownloadTooLargeError(
                f"split '{split}' of '{self.repo.id}' is a download of {size_text(size)}; "
                f"{size_text(self._limit)} are allowed",
                "allow more with --max-download"
                if training
                else "measure on fewer samples with -n, or allow more with --max-download",
            )
        features = self._some_features(split, columns.names)
        folder = fetch(self.repo, files)
        with readable(self.repo.id):
            return datasets.Dataset.from_parquet(
                [str(folder / file) for file in files],
                split=datasets.NamedSplit(split),
                features=features,
                columns=list(features),
            )

    def _budget(self, split: str, after: Chosen | None) -> int:
        share = int(SHARE * sum(self.repo.files[file] for file in self.splits[split]))
        # of the limit, and not of what is left to download: the cache must not change the samples
        return min(max(LEAST_BUDGET, min(share, MOST_BUDGET)), self._limit - (after.size if after else 0))

    def _spread(
        self, split: str, columns: Columns, wanted: Wanted, after: Chosen | None, budget: int
    ) -> tuple[list[Group], Iterator[Group]]:
        """The first row groups, as many as the rows wanted need and the budget allows, and all that follow."""
        ordered = self._ordered(split, columns.names, columns.label)
        taken: list[Group] = []
        rows = size = cost = 0
        for group in ordered:
            if taken and rows >= wanted.rows and (len(taken) >= PLACES or size + group.size > budget):
                return taken, chain([group], ordered)
            taken.append(group)
            rows, size, cost = rows + group.rows, size + group.size, cost + self._cost([group])
            self._require_allowed(cost, after, size * max(wanted.rows, rows) // max(rows, 1))
        return taken, ordered

    def _cost(self, groups: Sequence[Group]) -> int:
        """The bytes to download."""
        return sum(group.size for group in groups if self._cached[group.file] is None)

    def _require_allowed(self, cost: int, after: Chosen | None, estimate: int) -> None:
        before = self._cost(after.groups) if after else 0
        if before + cost > self._limit:
            total = before + estimate
            raise DownloadTooLargeError(
                f"the samples of '{self.repo.id}' are a download of about {size_text(total)}; "
                f"{size_text(self._limit)} are allowed",
                f"allow more with --max-download, or {'leave out the evaluation' if after else 'use fewer samples'}",
            )

    def _ordered(self, split: str, names: Sequence[str], label: str | None) -> Iterator[Group]:
        """All row groups in the order in which they are taken; footers are read when it comes to them."""
        files = self._files(split)
        for start in range(0, len(files), FOOTERS):
            some = files[start : start + FOOTERS]
            self._look_into(some)
            columns = [_seeded(self._groups(file, names, label), self._seed, _place) for file in some]
            for one_of_each in zip_longest(*columns):  # one of each file, another one of each, ...
                yield from (group for group in one_of_each if group is not None)

    def _groups(self, file: str, names: Sequence[str], label: str | None) -> Iterator[Group]:
        footer = self._footers[file]
        starts = tuple(f"{name}." for name in names)
        for index in range(footer.num_row_groups):
            group = footer.row_group(index)
            chunks = [group.column(number) for number in range(group.num_columns)]
            # an image is a column of several chunks: image.bytes, image.path; so are messages
            read = [chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(starts)]
            size = sum(chunk.total_compressed_size for chunk in read)
            bounds = next((_bounds(chunk) for chunk in read if chunk.path_in_schema == label), None)
            yield Group(file, index, group.num_rows, size, bounds)

    def _files(self, split: str) -> list[str]:
        return _seeded(self.splits[split], self._seed, str)

    @cached_property
    def _cached(self) -> dict[str, Path | None]:
        return {file: self.repo.cached(file) for files in self.splits.values() for file in files}

    def _look_into(self, files: Sequence[str]) -> None:
        """Have the footers of these files."""
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

    def _stored_features(self, split: str) -> Any:
        import datasets

        first = self._files(split)[0]
        self._look_into([first])
        return image_features(datasets.Features.from_arrow_schema(self._footers[first].schema.to_arrow_schema()))

    def _some_features(self, split: str, names: Iterable[str]) -> Any:
        import datasets

        return datasets.Features({name: self.features(split)[name] for name in names})

    def _columns(self, split: str, group: Group, names: Sequence[str]) -> Any:
        """Some columns of a row group, in the types that the features say."""
        import pyarrow.parquet
        from datasets.table import table_cast

        with self._open(group.file) as source:
            # with the footer at hand, and the chunks of a column side by side, this is one request
            file = pyarrow.parquet.ParquetFile(source, metadata=self._footers[group.file], pre_buffer=True)
            table = file.read_row_group(group.index, columns=list(names), use_threads=False)
        for name in names:
            if name not in table.column_names:  # a split may have no labels
                table = table.append_column(name, pyarrow.nulls(group.rows))
        return table_cast(table.select(names), self._some_features(split, names).arrow_schema)

    def _read_labels(self, split: str, groups: Sequence[Group], label: str) -> list[Any]:
        places = [(group.file, group.index, label) for group in groups]
        new = [group for group, place in zip(groups, places, strict=True) if place not in self._labels]
        for group, values in zip(new, in_parallel(lambda g: self._columns(split, g, [label])[label], new), strict=True):
            self._labels[group.file, group.index, label] = values
        return [self._labels[place] for place in places]

    def _rows(self, split: str, columns: Mapping[str, Sequence[Any]]) -> Any:
        """Columns, each in the pieces of several row groups, as a data set."""
        import datasets
        import pyarrow

        features = self._some_features(split, columns)
        chunks = [[chunk for piece in pieces for chunk in piece.chunks] for pieces in columns.values()]
        whole = [
            pyarrow.chunked_array(some, field.type) for some, field in zip(chunks, features.arrow_schema, strict=True)
        ]
        table = pyarrow.Table.from_arrays(whole, schema=features.arrow_schema)
        info, name = datasets.DatasetInfo(features=features), datasets.NamedSplit(split)
        # a mark of its own: `datasets` would hash all images for one
        about = f"{self.repo.id}@{self.repo.commit}:{split}:{self._seed}:{len(table)}:{table.column_names}"
        mark = blake2b(about.encode(), digest_size=8).hexdigest()
        return datasets.Dataset(table, info=info, split=name, fingerprint=mark)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with readable(self.repo.id), translate_hub_errors(self.repo.requested, self.repo.type, f"'{self.repo.id}'"):
            yield


def _position(group: Group) -> tuple[str, int]:
    return group.file, group.index


def _place(group: Group) -> str:
    return f"{group.file}:{group.index}"


def _count(columns: Iterable[Any]) -> Counter[Any]:
    """How often each label is there; rows without one are left out."""
    values = (value for column in columns for value in column.to_pylist())
    return Counter(value for value in values if value is not None and value != UNLABELLED)


def _bounds(chunk: Any) -> tuple[int, int] | None:
    statistics = chunk.statistics if chunk.is_stats_set else None
    if statistics is None or not statistics.has_min_max or not isinstance(statistics.min, int):
        return None
    return statistics.min, statistics.max


def _seeded(items: Iterable[Item], seed: int, name: Callable[[Item], str]) -> list[Item]:
    """Items in an order that depends on the seed and their names alone."""
    return sorted(items, key=lambda item: blake2b(f"{seed}:{name(item)}".encode()).digest())
