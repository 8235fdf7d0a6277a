"""The words of the small world: captions for what an image shows, and the tokenizer that reads them.

Knows nothing about models or pixels.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hf_bico.demo.digits import CLASS_NAMES

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
    """The templates in which one model's pretraining captions are written."""

    digit: tuple[str, ...]
    state: tuple[str, ...]

    @classmethod
    def draw(cls, generator: random.Random, count: int) -> Wording:
        """A wording of `count` templates for each kind of caption."""
        return cls(
            digit=tuple(generator.sample(DIGIT_TEMPLATES, count)),
            state=tuple(generator.sample(STATE_TEMPLATES, count)),
        )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word tokenizer in CLIP's manner: lower case, start and end tokens, the end token's id the highest.

    open_clip finds the end of a text by its highest id.
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
