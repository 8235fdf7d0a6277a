"""Samples of text, as a data set has them and before any tokenizer has seen them. Knows neither files nor models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class FilePart:
    """The row groups that were read of one parquet file, and how many rows they have in all."""

    file: str
    row_groups: list[int]
    rows: int


IMAGES, TEXTS = "images", "texts"
"""What a model reads."""


@dataclass(frozen=True)
class Text:
    """A text, or a pair of sentences; `names` are what the data set calls them, `task` a known data set's own name."""

    first: str
    second: str | None = None
    names: tuple[str, ...] = ()
    task: str | None = None


@dataclass(frozen=True)
class Answered:
    """A prompt and its answer: only the answer is learnt."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Chat:
    """Messages, each with a `role` and a `content`: only what the assistant says is learnt."""

    messages: tuple[Mapping[str, str], ...]


TextSample: TypeAlias = Text | Answered | Chat


@dataclass(frozen=True)
class Captioned:
    """An image with its caption."""

    image: Any
    caption: str
