"""Provides the data of the small world: scikit-learn's digits in several domains, captions, and their tokenizer.

Knows nothing about models.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Image
from PIL.Image import fromarray
from sklearn.datasets import load_digits
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hf_bico.data.loading import no_progress_bars

CLASS_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
IMAGE_SIZE = 8
PIXEL_MEAN = 0.5
PIXEL_STD = 0.5
TRAIN_SIZE = 1200
PERMUTATION_SEED = 1797


@dataclass(frozen=True)
class Domain:
    """A transformation of images: quarter turns counter-clockwise, and perhaps an inversion."""

    quarter_turns: int
    inverted: bool

    def transform(self, images: Tensor) -> Tensor:
        """Transform plain images, of shape (..., height, width) and between 0 and 1, into this domain.

        >>> Domain(quarter_turns=1, inverted=True).transform(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
        tensor([[0., 1.],
                [1., 1.]])
        """
        turned = torch.rot90(images, self.quarter_turns, dims=(-2, -1))
        return 1 - turned if self.inverted else turned


@dataclass(frozen=True)
class Task:
    """Classification of the ten digits in one domain; the name serves as a folder name."""

    name: str
    domain: Domain


@dataclass(frozen=True)
class Digits:
    """Plain images, of shape (N, 8, 8) and between 0 and 1, with their labels."""

    images: Tensor
    labels: Tensor


PLAIN_DOMAIN = Domain(quarter_turns=0, inverted=False)
DOMAINS = tuple(Domain(turns, inverted) for inverted, turns in product((False, True), range(4)))
SHIFTED_TASKS = (
    Task("inverted", Domain(quarter_turns=0, inverted=True)),
    Task("rotated-90", Domain(quarter_turns=1, inverted=False)),
    Task("inverted-rotated-180", Domain(quarter_turns=2, inverted=True)),
    Task("rotated-270", Domain(quarter_turns=3, inverted=False)),
)
EASY_TASK = Task("plain", PLAIN_DOMAIN)
"""Digits as pretraining shows them most: targets classify them well already, so that a port gains nothing."""


def find_task(name: str) -> Task:
    known = {task.name: task for task in (*SHIFTED_TASKS, EASY_TASK)}
    if name not in known:
        raise ValueError(f"no task {name!r}; there are {', '.join(known)}")
    return known[name]


@cache
def load_splits() -> dict[str, Digits]:
    """Return the 1,797 plain digits as `train` (1,200) and `test` (597), always the same ones.

    Grey levels are rounded to what a PNG file holds, so that training and evaluation see equal pixels.
    """
    bunch = load_digits()
    order = np.random.RandomState(PERMUTATION_SEED).permutation(len(bunch.target))
    grey = np.round(bunch.images[order] * (255 / 16)) / 255
    images = torch.from_numpy(grey.astype(np.float32))
    labels = torch.from_numpy(bunch.target[order].astype(np.int64))
    return {
        "train": Digits(images[:TRAIN_SIZE], labels[:TRAIN_SIZE]),
        "test": Digits(images[TRAIN_SIZE:], labels[TRAIN_SIZE:]),
    }


def normalise(images: Tensor) -> Tensor:
    """Convert grey images between 0 and 1 to three channels between -1 and 1."""
    normalised = images.sub(PIXEL_MEAN).div(PIXEL_STD)
    return torch.stack([normalised] * 3, dim=-3)


def write_parquet(folder: Path, domain: Domain, *, seed: int) -> None:
    """Write a parquet file for each split: image (8x8 RGB PNG) and label, the rows shuffled by the seed."""
    features = Features({"image": Image(), "label": ClassLabel(names=list(CLASS_NAMES))})
    folder.mkdir()
    for split, digits in load_splits().items():
        order = np.random.RandomState(seed).permutation(len(digits.labels))
        levels = domain.transform(digits.images[order]).mul(255).round().to(torch.uint8)
        pictures = [fromarray(picture).convert("RGB") for picture in levels.numpy()]
        columns = {"image": pictures, "label": digits.labels[order].tolist()}
        rows = Dataset.from_dict(columns, features=features)
        with no_progress_bars():
            rows.to_parquet(folder / f"{split}-00000-of-00001.parquet")


PROMPT = "a photo of a {}."
CONTEXT_LENGTH = 16

DIGIT_TEMPLATES = (
    "the digit {}",
    "the number {}",
    "a drawing of the figure {}",
    "a handwritten {}",
    "somebody wrote {}",
    "a small scan of {}",
    "this says {}",
    "a picture showing {}",
    "{} in ink",
    "{} on paper",
    "read this as {}",
    "a blurry {} from a form",
)
STATE_TEMPLATES = (
    "a photo, {}",
    "a drawing, {}",
    "this is {}",
    "it was scanned {}",
    "a figure {} on a form",
    "the picture is {}",
    "somebody drew this {}",
    "{}",
)
POLARITIES = ("light on dark", "dark on light")
ROTATIONS = ("upright", "turned left", "upside down", "turned right")


@dataclass(frozen=True)
class Wording:
    """The templates of one model's pretraining captions."""

    digit: tuple[str, ...]
    state: tuple[str, ...]

    @classmethod
    def draw(cls, generator: random.Random, count: int) -> Wording:
        """Draw `count` templates for each kind of caption."""
        return cls(
            digit=tuple(generator.sample(DIGIT_TEMPLATES, count)),
            state=tuple(generator.sample(STATE_TEMPLATES, count)),
        )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a word tokenizer like CLIP's: lower case, with start and end tokens.

    The end token has the highest id, by which open_clip finds the end of a text.
    """
    texts = [PROMPT, *DIGIT_TEMPLATES, *STATE_TEMPLATES, *POLARITIES, *ROTATIONS, *CLASS_NAMES]
    splitter = Whitespace()
    words = {word for text in texts for word, _ in splitter.pre_tokenize_str(text.replace("{}", " "))}
    tokens = ["<pad>", "<unknown>", "<start>", *sorted(words), "<end>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = splitter
    tokenizer.post_processor = TemplateProcessing(
        single="<start> $A <end>",
        special_tokens=[(token, vocabulary[token]) for token in ("<start>", "<end>")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=CONTEXT_LENGTH,
        pad_token="<pad>",
        unk_token="<unknown>",
        bos_token="<start>",
        eos_token="<end>",
    )
