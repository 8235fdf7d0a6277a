"""Checks how models read texts with the special tokens that a tokenizer puts around them, and without.

A tokenizer may begin every text with a token that a decoder was never trained with. Knows loaded models and samples;
neither data sets nor changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from torch.nn import functional

from hf_bico.errors import UnreadableSampleError, UsageError
from hf_bico.models.families.live import LiveModel
from hf_bico.models.families.text_models import CausalModel
from hf_bico.models.layout import Layout
from hf_bico.models.tokenization import UNLEARNT, TokenBatch, tokenise
from hf_bico.settings import Settings
from hf_bico.utils.samples import IMAGES, Chat

LANGUAGE = "language-modelling"
SAMPLES, FEWEST, TOKENS = 16, 4, 128
"""How many samples are read both ways, of how many at least a notice is made, and how much of each is read."""
CLEARLY, ERRORS = 0.05, 2
"""A loss is clearly lower by this share of it, and by this many standard errors."""


def require_unneeded(settings: Settings, layouts: Iterable[Layout]) -> None:
    """Refuse to leave special tokens out for models that read them: only decoders of language can do without."""
    for layout in () if settings.special_tokens else layouts:
        if LANGUAGE in layout.objectives:
            continue
        needs = "reads its special tokens: a head looks at [CLS], and an answer ends with </s>"
        reads = "reads images" if layout.reads == IMAGES else needs
        raise UsageError(
            "--no-special-tokens is for models that predict the next token, and one of the family "
            f"{layout.family} {reads}",
            "leave --no-special-tokens out",
        )


def require_no_chats(settings: Settings, items: Iterable[Any]) -> None:
    """Refuse to leave special tokens out of chats, whose template puts them in."""
    if not settings.special_tokens and any(isinstance(item, Chat) for item in items):
        raise UsageError(
            "--no-special-tokens is for plain texts and prompts, and the samples are chats: their template has special "
            "tokens",
            "leave --no-special-tokens out, or use data with prompt and completion columns",
        )


@dataclass(frozen=True)
class BothReadings:
    """The mean losses of the texts' own tokens behind special tokens, and without them."""

    behind: float
    without: float
    error: float
    """The standard error of their difference."""
    samples: int

    def lower(self, special: bool) -> bool:
        """Tell whether the loss is clearly lower with or without `special` tokens."""
        gain = self.without - self.behind if special else self.behind - self.without
        least = self.behind if special else self.without
        return gain > ERRORS * self.error and gain > CLEARLY * least


def special_token_notices(sides: Sequence[tuple[str, LiveModel]], items: Sequence[Any], special: bool) -> list[str]:
    """Return a notice for each model that clearly predicts the texts better when they are read the other way."""
    found = []
    for name, model in dict(sides).items():
        both = read_both_ways(model, items) if isinstance(model, CausalModel) else None
        if both is None or not both.lower(not special):
            continue
        if special:
            found.append(
                f"{name} predicts the texts' own tokens with a loss of {both.behind:.2f} behind the tokenizer's "
                f"special tokens, and of {both.without:.2f} without them, on {both.samples} samples: it reads these "
                "texts better without, see --no-special-tokens."
            )
        else:
            found.append(
                f"{name} predicts the texts' own tokens with a loss of {both.without:.2f} without the tokenizer's "
                f"special tokens, and of {both.behind:.2f} behind them, on {both.samples} samples: it reads these "
                "texts better with them, which --no-special-tokens leaves out."
            )
    return found


def read_both_ways(model: CausalModel, items: Sequence[Any]) -> BothReadings | None:
    """Measure the loss of the tokens that some texts have with and without special tokens.

    None if no special token stands before the texts, or few of them can be compared.
    """
    pairs = [pair for item in items[:SAMPLES] if (pair := _both(model, item)) is not None]
    if len(pairs) < FEWEST:
        return None
    with torch.no_grad(), model.quiet():
        losses = [(_loss(model, behind, plain, start), _loss(model, plain, plain, 0)) for behind, plain, start in pairs]
    behind, without = (fmean(column) for column in zip(*losses, strict=True))
    error = stdev(one - other for one, other in losses) / len(losses) ** 0.5
    return BothReadings(behind, without, error, len(losses))


def _both(model: CausalModel, item: Any) -> tuple[TokenBatch, TokenBatch, int] | None:
    """Tokenise a sample with and without special tokens; return where the text starts in the former."""
    longest = min(model.longest, TOKENS)
    around = model.tokenizer.num_special_tokens_to_add()
    if isinstance(item, Chat) or longest <= around:
        return None
    try:
        behind = tokenise(model.tokenizer, [item], longest)
        plain = tokenise(model.tokenizer, [item], longest - around, special=False)
    except UnreadableSampleError:  # too long an answer, or a text without tokens
        return None
    whole, own = behind.ids[0].tolist(), plain.ids[0].tolist()
    starts = (start for start in range(1, len(whole) - len(own) + 1) if whole[start : start + len(own)] == own)
    start = next(starts, None)
    learnt = bool((plain.labels[0, 1:] != UNLEARNT).any())
    return None if start is None or not learnt else (behind, plain, start)


def _loss(model: CausalModel, read: TokenBatch, plain: TokenBatch, start: int) -> float:
    """Return the mean loss of the text's own tokens but the first, which stands behind nothing without special ones."""
    batch = read.to(model.device)
    logits = model.logits(batch)[0, start : start + plain.ids.shape[1] - 1]
    labels = plain.labels[0, 1:].to(logits.device)
    return float(functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels))
