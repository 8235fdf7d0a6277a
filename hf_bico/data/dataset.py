"""An open data set: splits, labels, and samples that are read and decoded batch by batch.

Knows rows and columns; neither files, nor which samples to draw, nor tokens.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import ExifTags, ImageOps
from PIL.Image import DecompressionBombError

from hf_bico.data.classes import UNLABELLED, composed, is_label, numbers_by_label, sorted_names
from hf_bico.data.columns import STRING, Columns, RowSequence, column, column_kinds, read_messages, undecoded
from hf_bico.data.loading import READ_ERRORS, decode_image
from hf_bico.data.sampling import draw_order
from hf_bico.errors import ClassNamesError, ColumnError, MemoryExhaustedError, UnreadableSampleError
from hf_bico.hub.client import HubRepo
from hf_bico.utils.samples import Answered, Captioned, Chat, FilePart, Text, TextSample

MAX_PIXELS = 90_000_000
"""PIL warns of decompression bombs at about as many."""
MAX_ASPECT_RATIO = 200
_FREE_PIXELS, _BYTES_PER_PIXEL = 2**28, 8
"""What a batch may have without a look at the memory, and what preparing it takes beside the images themselves."""
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant"}
"""Names that data sets use for the roles of chat templates."""
_DECODING_ERRORS = (*READ_ERRORS, DecompressionBombError, struct.error, SyntaxError, zlib.error)
"""Errors that PIL raises on files that are not images."""


@dataclass(frozen=True)
class DataSet:
    """The splits of a data set, its columns and its classes."""

    name: str
    splits: Mapping[str, RowSequence]
    columns: Columns
    class_names: tuple[str, ...]
    named: bool = False
    """True if it was opened by name, not passed as rows."""
    repo: HubRepo | None = None
    config: str | None = None
    parts: Mapping[str, list[FilePart]] = field(default_factory=dict)
    """The row groups behind each split that was read in part."""
    respelt: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Labels that were read as the class of a name that is spelt otherwise."""
    _labels: dict[str, dict[int, int]] = field(default_factory=dict, repr=False, compare=False)
    _sample_rows: dict[str, RowSequence] = field(default_factory=dict, repr=False, compare=False)

    @property
    def labelled(self) -> bool:
        return self.columns.label is not None

    @property
    def sorts_classes(self) -> bool:
        """True if labels are texts whose sorted order alone numbers the classes."""
        label = self.columns.label
        kinds = {column_kinds(rows).get(label) for rows in self.splits.values()} if label is not None else {}
        return self.columns.task is None and STRING in kinds and self.class_names == sorted_names(self.class_names)

    def labels(self, split: str) -> dict[int, int]:
        """Return the class of each usable row of a split: without unlabelled rows (None or -1) and blank texts."""
        if split not in self._labels:
            self._labels[split] = self._read_labels(split)
        return self._labels[split]

    def _read_labels(self, split: str) -> dict[int, int]:
        if self.columns.label is None:
            return {}
        self._require_columns(split, [self.columns.label])
        number, blank = numbers_by_label(self.class_names), {name for name in self.class_names if not name.strip()}
        labels = {}
        for row, value in enumerate(column(self.splits[split], self.columns.label)):
            if not is_label(value) and value not in blank:
                continue
            label = number(value) if isinstance(value, str) else _integer(value)
            if not 0 <= label < len(self.class_names):
                raise ClassNamesError(
                    f"row {row} of split '{split}' has the label {value!r}, outside of the "
                    f"{len(self.class_names)} classes",
                    "give the names of all classes with --class-names",
                )
            labels[row] = label
            name = self.class_names[label]
            if isinstance(value, str) and value != name and composed(value) != composed(name):
                self.respelt[value] = name
        return self._without_blank(split, labels)

    def _without_blank(self, split: str, labels: dict[int, int]) -> dict[int, int]:
        """Drop the labels of blank rows, reading whole columns, which is much faster than row by row."""
        if not self._may_be_blank(split):
            return labels
        names = list(self.columns.parts.values())
        texts = zip(*(column(self.splits[split], name) for name in names), strict=True)
        rows = (dict(zip(names, values, strict=True)) for values in texts)
        return {
            index: labels[index]
            for index, row in enumerate(rows)
            if index in labels and not _is_blank(row, self.columns)
        }

    def can_evaluate_on(self, split: str) -> bool:
        """Return True if a split exists, has every column of a sample, and has labels if the data set has any."""
        if split not in self.splits or not set(self.columns.names) <= set(column_kinds(self.splits[split])):
            return False
        return bool(self.labels(split)) if self.labelled else self.columns.is_self_supervised

    def order(self, split: str, seed: int) -> list[int]:
        """Return the rows of a split in the order that the seed draws them, only labelled ones if labels are needed."""
        order = draw_order(len(self.splits[split]), seed)
        if not self.labelled and self.columns.is_self_supervised:
            return order
        labels = self.labels(split)
        return [index for index in order if index in labels]

    def usable_rows(self, split: str, order: Iterable[int], count: int) -> list[int]:
        """Return the first `count` rows of a split, in this order, that are not blank."""
        if not self._may_be_blank(split):
            return list(islice(order, count))
        rows, known = self._rows(split), self._labels.get(split, {})
        usable = (index for index in order if index in known or not _is_blank(_row(rows, index), self.columns))
        return list(islice(usable, count))

    def _may_be_blank(self, split: str) -> bool:
        """Return True for a split of texts; pairs are compared, so that even an empty text says something."""
        parts = self.columns.parts
        if self.columns.image is not None or "text_pair" in parts:
            return False
        return set(parts.values()) <= set(column_kinds(self.splits[split]))

    def samples(self, split: str, indices: Sequence[int], *, labelled: bool = True) -> Samples:
        """Return these rows of a split as samples; with `labelled` False, their labels are not looked at."""
        known = labelled and self.labelled and indices
        labels = self.labels(split) if known else dict.fromkeys(indices, UNLABELLED)
        rows, decode, image = self._rows(split) if indices else self.splits[split], None, self.columns.image
        folder = None
        if self.repo is not None and image is not None:  # from the Hub: check where paths point before opening them
            folder = self.repo.snapshot
            rows, decode = undecoded(rows, image), partial(decode_image, folder=folder)
        return Samples(rows, self.columns, tuple(indices), tuple(labels[index] for index in indices), decode, folder)

    def _rows(self, split: str) -> RowSequence:
        """Return the rows of a split with the columns of a sample alone: no other image is decoded."""
        if split not in self._sample_rows:
            rows, names = self.splits[split], list(self.columns.parts.values())
            self._require_columns(split, names)
            self._sample_rows[split] = rows.select_columns(names) if hasattr(rows, "select_columns") else rows
        return self._sample_rows[split]

    def _require_columns(self, split: str, names: Sequence[str]) -> None:
        kinds = column_kinds(self.splits[split])
        for name in names:
            if name not in kinds:
                raise ColumnError(f"split '{split}' has no column '{name}'", "choose another with --split")


@dataclass(frozen=True)
class Samples:
    """Rows of one split; they are read, and their images decoded, when a batch is taken."""

    rows: RowSequence
    columns: Columns
    indices: tuple[int, ...]
    labels: tuple[int, ...]
    decode: Callable[[Any], Any] | None = None
    folder: Path | None = None
    """Of images from the Hub: the only folder whose files are opened."""

    def __len__(self) -> int:
        return len(self.indices)

    def batches(self, size: int) -> Iterator[tuple[list[Any], list[int]]]:
        """Yield (items, labels), `size` at a time; an item is an image, a captioned image or a text sample."""
        for start in range(0, len(self), size):
            items, pixels = list[Any](), 0
            for index in self.indices[start : start + size]:
                items.append(self._item(index))
                pixels += _pixels(items[-1])
                _require_memory(len(items), pixels)
            yield items, list(self.labels[start : start + size])

    def first(self, count: int) -> Samples:
        return self.select(range(len(self))[:count])

    def select(self, positions: Sequence[int]) -> Samples:
        indices = tuple(self.indices[position] for position in positions)
        return replace(self, indices=indices, labels=tuple(self.labels[position] for position in positions))

    def rotated(self, turn: int) -> Samples:
        """Return the samples from position `turn` on, followed by those before it."""
        positions = range(len(self))
        return self.select([*positions[turn:], *positions[:turn]])

    def _item(self, index: int) -> Any:
        row = _row(self.rows, index)
        if self.columns.image is None:
            return _text_sample(row, self.columns, index)
        image = self._image(row[self.columns.image], index)
        caption = self.columns.parts.get("caption")
        if caption is None:
            return image
        given = row[caption]
        text = given[0] if isinstance(given, list | tuple) and given else given  # the first of several
        return Captioned(image, _string(text, caption, index))

    def _image(self, image: Any, index: int) -> Any:
        try:
            image = image if self.decode is None or image is None else self.decode(image)
            if image is None:
                raise ValueError("there is none")
            if hasattr(image, "load"):
                _require_sane_size(image)
                image.load()  # PIL decodes lazily: decode here, where the row is known
                image = _upright(image)
        except _DECODING_ERRORS as error:
            raise _undecodable_image(index, error) from error
        return image


def _upright(image: Any) -> Any:
    """Turn an image as its EXIF orientation says; what `datasets` decodes is upright already."""
    orientation = None
    with suppress(SyntaxError, ValueError, struct.error):  # an EXIF block that cannot be read turns nothing
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    return image if orientation in (None, 1) else ImageOps.exif_transpose(image)


def _row(rows: RowSequence, index: int) -> Any:
    try:
        return rows[index]
    except UnicodeDecodeError as error:
        remedy = "remove or replace the broken row"
        raise UnreadableSampleError(f"row {index} cannot be decoded: {error}", remedy) from error
    except _DECODING_ERRORS as error:
        raise _undecodable_image(index, error) from error


def _undecodable_image(index: int, error: Exception) -> UnreadableSampleError:
    return UnreadableSampleError(
        f"the image of row {index} cannot be decoded: {error}", "remove or replace the broken image"
    )


def _require_sane_size(image: Any) -> None:
    """Refuse an image that needs too much memory, decoded or with its shorter side scaled to a model's input."""
    width, height = image.size
    if min(width, height) < 1:
        raise ValueError(f"it is {width} x {height} pixels")
    if width * height > MAX_PIXELS or max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ValueError(f"it is {width:,} x {height:,} pixels, too large or too narrow")


def _pixels(item: Any) -> int:
    image = getattr(item, "image", item)  # of a captioned one
    return image.width * image.height if hasattr(image, "getbands") else 0


def _require_memory(images: int, pixels: int) -> None:
    """Refuse a batch of images that, decoded and prepared together, take more memory than there is."""
    if pixels <= _FREE_PIXELS:
        return
    import torch

    from hf_bico.runtime.environment import available_memory

    if _BYTES_PER_PIXEL * pixels > available_memory(torch.device("cpu")):
        raise MemoryExhaustedError(
            f"{images} images of {pixels:,} pixels in all do not fit into memory together",
            "use a smaller --batch-size, or smaller images",
        )


def _integer(label: Any) -> int:
    """Return the label as an integer, or UNLABELLED if it is not a whole number."""
    try:
        return int(label) if int(label) == label else UNLABELLED
    except (TypeError, ValueError, OverflowError):
        return UNLABELLED


def _is_blank(row: Mapping[str, Any], columns: Columns) -> bool:
    """Return True if a row has no text to learn: an empty line, a chat that ends before the assistant speaks."""
    try:
        sample = _text_sample(row, columns, 0)
    except UnreadableSampleError:
        return False  # malformed, not blank: reading it raises an error
    if isinstance(sample, Chat):
        learnt = "".join(message["content"] for message in sample.messages if message["role"] == "assistant")
    else:
        learnt = sample.answer if isinstance(sample, Answered) else sample.first + (sample.second or "")
    return not learnt.strip()


def _text_sample(row: Mapping[str, Any], columns: Columns, index: int) -> TextSample:
    parts = columns.parts
    if "messages" in parts:
        return _chat(row[parts["messages"]], parts["messages"], index)
    if "prompt" in parts:
        return _answered(row, parts, index)
    texts = [_string(row[name], name, index) for name in parts.values()]
    task = None if columns.task is None else columns.task.name
    return Text(texts[0], texts[1] if len(texts) > 1 else None, tuple(parts.values()), task)


def _answered(row: Mapping[str, Any], parts: Mapping[str, str], index: int) -> Answered:
    """Join prompt and completion directly; put an answer to an instruction or a question on a line of its own."""
    prompt = _string(row[parts["prompt"]], parts["prompt"], index)
    context = row[parts["input"]] if "input" in parts else None
    if context:
        prompt = f"{prompt}\n\n{_string(context, parts['input'], index)}"
    answer = _string(row[parts["completion"]], parts["completion"], index)
    direct = parts["completion"] == "completion" or prompt[-1:].isspace() or answer[:1].isspace()
    return Answered(prompt if direct else f"{prompt}\n", answer)


def _chat(value: Any, name: str, index: int) -> Chat:
    try:
        messages = read_messages(value) if value is not None else []
    except (TypeError, ValueError, AttributeError):
        messages = []
    if not messages:
        raise _malformed(index, name, "no messages")
    if not all(isinstance(role, str) and isinstance(content, str) for role, content in messages):
        raise _malformed(index, name, "a message without a role or a text")
    return Chat(tuple({"role": _ROLES.get(role.lower(), role), "content": content} for role, content in messages))


def _string(value: Any, name: str, index: int) -> str:
    if not isinstance(value, str):
        raise _malformed(index, name, "no text" if value is None else f"a {type(value).__name__}, not a text")
    return value


def _malformed(index: int, name: str, what: str) -> UnreadableSampleError:
    return UnreadableSampleError(f"row {index} has {what} in column '{name}'", "remove or replace the row")
