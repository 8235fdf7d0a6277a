"""An open data set and its samples.

From a row to a sample of text: which values become which part of it. Knows rows; neither files nor tokens.

A data set that is open: its splits, labels and samples. Knows rows and columns; neither files nor how to draw.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from PIL.Image import DecompressionBombError

from hf_bico.data.columns import Columns, Rows, column, column_kinds, read_messages, undecoded
from hf_bico.data.loading import own_image
from hf_bico.data.remote_parquet import UNLABELLED
from hf_bico.data.sampling import draw_order
from hf_bico.errors import ClassNamesError, ColumnError, UnreadableSampleError
from hf_bico.hub.client import HubRepo
from hf_bico.utils.samples import Answered, Captioned, Chat, FilePart, Text, TextSample

_SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant"}
"""What others call the two who speak."""


def text_item(row: Mapping[str, Any], columns: Columns, index: int) -> TextSample:
    """The sample of text that a row is; `index` is for errors."""
    parts = columns.parts
    if "messages" in parts:
        return _chat(row[parts["messages"]], parts["messages"], index)
    if "prompt" in parts:
        return _answered(row, columns, index)
    texts = [_string(row[name], name, index) for name in parts.values()]
    task = None if columns.task is None else columns.task.name
    return Text(texts[0], texts[1] if len(texts) > 1 else None, tuple(parts.values()), task)


def teaches(row: Mapping[str, Any], columns: Columns) -> bool:
    """Whether there is anything to learn in a row of text; a broken one is not passed over, but named when it is read.

    Many lines of a book are empty, and some chats end before the assistant speaks.
    """
    try:
        sample = text_item(row, columns, 0)
    except UnreadableSampleError:
        return True
    if isinstance(sample, Chat):
        return any(message["role"] == "assistant" and message["content"].strip() for message in sample.messages)
    learnt = sample.answer if isinstance(sample, Answered) else sample.first + (sample.second or "")
    return bool(learnt.strip())


def caption_of(value: Any, name: str, index: int) -> str:
    """The caption of an image, of several the first."""
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return _string(value, name, index)


def _answered(row: Mapping[str, Any], columns: Columns, index: int) -> Answered:
    """A prompt stands before its completion as it is; an instruction or a question has a line of its own."""
    parts = columns.parts
    prompt = _string(row[parts["prompt"]], parts["prompt"], index)
    about = row[parts["input"]] if "input" in parts else None
    if about:
        prompt = f"{prompt}\n\n{_string(about, parts['input'], index)}"
    answer = _string(row[parts["completion"]], parts["completion"], index)
    together = parts["completion"] == "completion" or prompt[-1:].isspace() or answer[:1].isspace()
    return Answered(prompt if together else f"{prompt}\n", answer)


def _chat(value: Any, name: str, index: int) -> Chat:
    try:
        messages = read_messages(value) if value is not None else []
    except (TypeError, ValueError, AttributeError):
        messages = []
    if not messages:
        raise _broken(index, name, "no messages")
    for speaker, speech in messages:
        if not isinstance(speaker, str) or not isinstance(speech, str):
            raise _broken(index, name, "a message without a role or a text")
    return Chat(tuple({"role": _SPEAKERS.get(who.lower(), who), "content": said} for who, said in messages))


def _string(value: Any, name: str, index: int) -> str:
    if not isinstance(value, str):
        raise _broken(index, name, "no text" if value is None else f"a {type(value).__name__}, not a text")
    return value


def _broken(index: int, name: str, what: str) -> UnreadableSampleError:
    return UnreadableSampleError(f"row {index} has {what} in column '{name}'", "remove or replace the row")


MOST_PIXELS, MOST_OBLONG = 90_000_000, 200
"""How large an image may be: PIL itself warns of more pixels; and how many times as long as it is wide."""
_UNDECODED = (
    *(ArithmeticError, AttributeError, DecompressionBombError, EOFError, LookupError, MemoryError),
    *(OSError, struct.error, SyntaxError, TypeError, ValueError, zlib.error),
)
"""What PIL says about files that are no images."""


@dataclass(frozen=True)
class DataSet:
    """The splits of a data set, and what its columns and classes are."""

    name: str
    splits: Mapping[str, Rows]
    columns: Columns
    class_names: tuple[str, ...]
    named: bool = False
    """Whether it was opened by a name, and not passed as rows."""
    repo: HubRepo | None = None
    config: str | None = None
    parts: Mapping[str, list[FilePart]] = field(default_factory=dict)
    """The row groups that the rows of a split are, where it was not read whole."""
    _labels: dict[str, dict[int, int]] = field(default_factory=dict, repr=False, compare=False)
    _chosen: dict[str, Rows] = field(default_factory=dict, repr=False, compare=False)

    @property
    def labelled(self) -> bool:
        """Whether it has a label column."""
        return self.columns.label is not None

    def labels(self, split: str) -> dict[int, int]:
        """The class of each labelled row of a split; rows without a label (none, or -1) or a text are left out."""
        if split not in self._labels:
            self._labels[split] = self._read_labels(split)
        return self._labels[split]

    def _read_labels(self, split: str) -> dict[int, int]:
        if self.columns.label is None:
            return {}
        if self.columns.label not in column_kinds(self.splits[split]):
            raise ColumnError(f"split '{split}' has no column '{self.columns.label}'", "choose another with --split")
        index_of = {name: index for index, name in enumerate(self.class_names)}
        labels = {}
        for row, value in enumerate(column(self.splits[split], self.columns.label)):
            if value is None or value == UNLABELLED:
                continue
            label = index_of.get(value, UNLABELLED) if isinstance(value, str) else _whole(value)
            if not 0 <= label < len(self.class_names):
                raise ClassNamesError(
                    f"row {row} of split '{split}' has the label {value!r}, outside of the "
                    f"{len(self.class_names)} classes",
                    "give the names of all classes with --class-names",
                )
            labels[row] = label
        return self._without_blank(split, labels)

    def _without_blank(self, split: str, labels: dict[int, int]) -> dict[int, int]:
        """The labels of those rows from which anything can be learnt; whole columns are read much faster than rows."""
        if not self._may_be_blank(split):
            return labels
        names = list(self.columns.parts.values())
        texts = zip(*(column(self.splits[split], name) for name in names), strict=True)
        rows = (dict(zip(names, values, strict=True)) for values in texts)
        return {
            index: labels[index] for index, row in enumerate(rows) if index in labels and teaches(row, self.columns)
        }

    def can_measure_on(self, split: str) -> bool:
        """Whether a split is there, with all that makes up a sample, and with labels where the data set has any."""
        if split not in self.splits:
            return False
        kinds = column_kinds(self.splits[split])
        if not set(self.columns.names) <= set(kinds):
            return False
        return bool(self.labels(split)) if self.labelled else self.columns.teaches_itself

    def order(self, split: str, seed: int) -> list[int]:
        """The rows of a split in the order in which the seed draws them: labelled ones where there are labels."""
        order = draw_order(len(self.splits[split]), seed)
        if not self.labelled and self.columns.teaches_itself:
            return order
        labels = self.labels(split)
        return [index for index in order if index in labels]

    def first_of(self, split: str, order: Iterable[int], count: int) -> list[int]:
        """The first so many rows of a split, in this order, from which anything can be learnt."""
        if not self._may_be_blank(split):
            return list(islice(order, count))
        rows, known = self._rows(split), self._labels.get(split, {})
        taught = (index for index in order if index in known or teaches(_row(rows, index), self.columns))
        return list(islice(taught, count))

    def _may_be_blank(self, split: str) -> bool:
        """Whether rows may hold nothing to learn: not those of images, nor of pairs, which are compared."""
        parts = self.columns.parts
        if self.columns.image is not None or "text_pair" in parts:
            return False
        return set(parts.values()) <= set(column_kinds(self.splits[split]))

    def samples(self, split: str, indices: Sequence[int], *, labelled: bool = True) -> Samples:
        """These rows of a split, with their labels unless these are not to be known."""
        known = labelled and self.labelled and indices
        labels = self.labels(split) if known else dict.fromkeys(indices, UNLABELLED)
        chosen = tuple(labels[index] for index in indices)
        rows, decode, image = self._rows(split) if indices else self.splits[split], None, self.columns.image
        if self.repo is not None and image is not None:  # a stranger's: what it points at is looked at before
            folder = self.repo.hub.snapshot(self.repo.id, self.repo.type, self.repo.commit)
            rows, decode = undecoded(rows, image), lambda value: own_image(value, folder)
        return Samples(rows, self.columns, tuple(indices), chosen, decode)

    def _rows(self, split: str) -> Rows:
        """The rows of a split with nothing but what a sample is made of: no other image is opened for a text."""
        if split not in self._chosen:
            self._chosen[split] = self._choose_columns(split)
        return self._chosen[split]

    def _choose_columns(self, split: str) -> Rows:
        rows, names = self.splits[split], list(self.columns.parts.values())
        kinds = column_kinds(rows)
        for name in names:
            if name not in kinds:
                raise ColumnError(f"split '{split}' has no column '{name}'", "choose another with --split")
        return rows.select_columns(names) if hasattr(rows, "select_columns") else rows


@dataclass(frozen=True)
class Samples:
    """Chosen rows of one split: they are read, and images decoded, when a batch is taken."""

    rows: Rows
    columns: Columns
    indices: tuple[int, ...]
    labels: tuple[int, ...]
    decode: Callable[[Any], Any] | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def batches(self, size: int) -> Iterator[tuple[list[Any], list[int]]]:
        """(items, labels), `size` at a time; an item is an image, alone or captioned, or one of the samples of text."""
        for start in range(0, len(self.indices), size):
            chosen = self.indices[start : start + size]
            items = [self._item(index) for index in chosen]
            yield items, list(self.labels[start : start + size])

    def first(self, count: int) -> Samples:
        return replace(self, indices=self.indices[:count], labels=self.labels[:count])

    def some(self, positions: Sequence[int]) -> Samples:
        """Those at these positions."""
        chosen = tuple(self.indices[position] for position in positions)
        return replace(self, indices=chosen, labels=tuple(self.labels[position] for position in positions))

    def rotated(self, turn: int) -> Samples:
        """The same samples in the same order, but from another one on."""
        return replace(
            self,
            indices=self.indices[turn:] + self.indices[:turn],
            labels=self.labels[turn:] + self.labels[:turn],
        )

    def _item(self, index: int) -> Any:
        if self.columns.image is None:
            return text_item(_row(self.rows, index), self.columns, index)
        row = _row(self.rows, index)
        image = self._image(row[self.columns.image], index)
        caption = self.columns.parts.get("caption")
        return image if caption is None else Captioned(image, caption_of(row[caption], caption, index))

    def _image(self, image: Any, index: int) -> Any:
        try:
            image = image if self.decode is None or image is None else self.decode(image)
            if image is None:
                raise ValueError("there is none")
            if hasattr(image, "load"):
                _require_drawable(image)
                image.load()  # PIL decodes when it must: do it here, where the row is known
        except _UNDECODED as error:
            raise _broken_image(index, error) from error
        return image


def _row(rows: Rows, index: int) -> Any:
    try:
        return rows[index]
    except _UNDECODED as error:
        if not isinstance(error, UnicodeDecodeError):
            raise _broken_image(index, error) from error
        raise UnreadableSampleError(
            f"row {index} cannot be decoded: {error}", "remove or replace the broken row"
        ) from error


def _whole(value: Any) -> int:
    """A label that is a whole number; what is none is outside of all classes."""
    try:
        return int(value) if int(value) == value else UNLABELLED
    except (TypeError, ValueError, OverflowError):
        return UNLABELLED


def _require_drawable(image: Any) -> None:
    """A ValueError for an image that takes too much memory as it is, or when its shorter side is made a model's."""
    width, height = image.size
    if min(width, height) < 1:
        raise ValueError(f"it is {width} x {height} pixels")
    if width * height > MOST_PIXELS or max(width, height) > MOST_OBLONG * min(width, height):
        raise ValueError(f"it is {width:,} x {height:,} pixels, too large or too narrow")


def _broken_image(index: int, error: Exception) -> UnreadableSampleError:
    return UnreadableSampleError(
        f"the image of row {index} cannot be decoded: {error}", "remove or replace the broken image"
    )
