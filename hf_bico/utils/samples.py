"""Define the sample types of a data set (text, prompt and answer, chat, image with caption), and which rows were read.

Texts are not tokenized yet. Reads no file, and knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class FilePart:
    """The row groups read from one parquet file, and their number of rows."""

    file: str
    row_groups: list[int]
    rows: int


IMAGES, TEXTS = "images", "texts"
"""The input types of models."""


@dataclass(frozen=True)
class Text:
    """A text or a pair of texts; `names` are their columns, `task` is the name of a known data set."""

    first: str
    second: str | None = None
    names: tuple[str, ...] = ()
    task: str | None = None


@dataclass(frozen=True)
class Answered:
    """A prompt and its answer; the loss counts only the answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Chat:
    """Messages with `role` and `content`; the loss counts only the assistant's."""

    messages: tuple[Mapping[str, str], ...]


TextSample: TypeAlias = Text | Answered | Chat


@dataclass(frozen=True)
class Captioned:
    """An image with its caption."""

    image: Any
    caption: str
