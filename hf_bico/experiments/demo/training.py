"""Trains the models of the small world: pretraining on captions and fine-tuning on one task.

Knows nothing about folders. `quiet_torch` restores the state of torch after a training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import torch
from open_clip import CLIP
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from hf_bico.experiments.demo.digits import (
    CLASS_NAMES,
    CONTEXT_LENGTH,
    DOMAINS,
    IMAGE_SIZE,
    PLAIN_DOMAIN,
    POLARITIES,
    PROMPT,
    ROTATIONS,
    Digits,
    Domain,
    Wording,
    normalise,
)

IMAGES_PER_MODEL = 900
PLAIN_SHARE = 0.4
NAMED_SHARE = 0.4
PIXEL_NOISE = 0.15
STATE_WEIGHT = 0.5
WORDING_SIZE = 6
PHOTO_BIAS = 3.0
PRETRAINING_STEPS = 1400
PRETRAINING_BATCH = 128
PRETRAINING_RATE = 3e-3
WARM_UP_STEPS = 50
LARGEST_LOGIT_SCALE = math.log(100)
FINE_TUNING_STEPS = 60
FINE_TUNING_BATCH = 64
FINE_TUNING_RATE = 1e-3


@contextmanager
def quiet_torch(seed: int) -> Iterator[None]:
    """Use one thread, deterministic algorithms and a seeded generator inside; restore everything after.

    Models this small train fastest on one thread and without oneDNN.
    """
    threads = torch.get_num_threads()
    one_dnn = torch.backends.mkldnn.enabled
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.set_num_threads(1)
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
            torch.use_deterministic_algorithms(True)
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.mkldnn.enabled = one_dnn
        torch.set_num_threads(threads)


def pretrain_on_captions(
    model: CLIP,
    tokenizer: PreTrainedTokenizerFast,
    digits: Digits,
    wording: Wording,
    step_done: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Train both towers to recognise digit, polarity and rotation by captions in the given wording.

    The captions are biased, to leave something for fine-tuning: all plain images name their digit, but only some of
    the transformed ones; and among transformed images that are called photos, some digits are far more frequent than
    others, so that the zero-shot prompt prefers these.
    """
    corpus = _Corpus(digits, wording, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAINING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_up_then_cosine)
    model.train()
    for step in range(PRETRAINING_STEPS):
        batch = corpus.draw()
        texts = model.encode_text(batch.tokens, normalize=True)
        logits = model.logit_scale.exp() * model.encode_image(batch.pixels, normalize=True) @ texts.T
        optimizer.zero_grad()
        _caption_loss(logits, batch).backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=LARGEST_LOGIT_SCALE)
        step_done(step + 1, PRETRAINING_STEPS)
    model.eval()


def fine_tune_on_domain(model: CLIP, tokenizer: PreTrainedTokenizerFast, digits: Digits, domain: Domain) -> None:
    """Train the visual tower on one domain, against the model's own class embeddings, which stay fixed."""
    pixels = normalise(domain.transform(digits.images))
    tokens = _tokenize(tokenizer, [PROMPT.format(name) for name in CLASS_NAMES])
    with torch.no_grad():
        classes = model.encode_text(tokens, normalize=True)
        scale = model.logit_scale.exp()
    optimizer = torch.optim.AdamW(model.visual.parameters(), lr=FINE_TUNING_RATE, fused=True)
    model.train()
    for _ in range(FINE_TUNING_STEPS):
        batch = torch.randint(len(digits.labels), (FINE_TUNING_BATCH,))
        logits = scale * model.encode_image(pixels[batch], normalize=True) @ classes.T
        optimizer.zero_grad()
        functional.cross_entropy(logits, digits.labels[batch]).backward()
        optimizer.step()
    model.eval()


@dataclass(frozen=True)
class _Batch:
    """Images, captions, the labels of the images and the weights of their losses."""

    pixels: Tensor
    tokens: Tensor
    digits: Tensor
    polarities: Tensor
    rotations: Tensor
    digit_weights: Tensor
    photo_weights: Tensor


class _Corpus:
    """The captioned images of one model; draws batches by torch's global generator."""

    def __init__(self, digits: Digits, wording: Wording, tokenizer: PreTrainedTokenizerFast) -> None:
        chosen = torch.randperm(len(digits.labels))[:IMAGES_PER_MODEL]
        self.views = _shifted_views(digits.images[chosen])
        self.labels = digits.labels[chosen]
        self.tokens = [_tokenize(tokenizer, captions) for captions in _caption_sets(wording)]
        self.polarities = torch.tensor([int(domain.inverted) for domain in DOMAINS])
        self.rotations = torch.tensor([domain.quarter_turns for domain in DOMAINS])
        self.photo_frequencies = _photo_frequencies()

    def draw(self) -> _Batch:
        size = (PRETRAINING_BATCH,)
        plain = DOMAINS.index(PLAIN_DOMAIN)
        image = torch.randint(IMAGES_PER_MODEL, size)
        domain = torch.where(torch.rand(size) < PLAIN_SHARE, plain, torch.randint(len(DOMAINS), size))
        named = ((domain == plain) | (torch.rand(size) < NAMED_SHARE)).float()
        view = self.views[torch.randint(len(self.views), size), domain, image]
        digits = self.labels[image]
        return _Batch(
            pixels=normalise(view + PIXEL_NOISE * torch.randn_like(view)),
            tokens=self.tokens[int(torch.randint(len(self.tokens), ()))],
            digits=digits,
            polarities=self.polarities[domain],
            rotations=self.rotations[domain],
            digit_weights=named,
            photo_weights=named * self.photo_frequencies[domain, digits],
        )


def _caption_sets(wording: Wording) -> list[list[str]]:
    """Return captions for each pair of templates: digits as photos, digits, polarities and rotations, in that order."""
    photos = [PROMPT.format(name) for name in CLASS_NAMES]
    return [
        photos
        + [digit.format(name) for name in CLASS_NAMES]
        + [state.format(phrase) for phrase in POLARITIES + ROTATIONS]
        for digit in wording.digit
        for state in wording.state
    ]


def _caption_loss(logits: Tensor, batch: _Batch) -> Tensor:
    """Add the cross-entropies within each kind of caption, in the order of `_caption_sets`."""
    sizes = [len(CLASS_NAMES), len(CLASS_NAMES), len(POLARITIES), len(ROTATIONS)]
    photo, digit, polarity, rotation = logits.split(sizes, dim=1)
    naming = batch.photo_weights * functional.cross_entropy(photo, batch.digits, reduction="none")
    naming = naming + batch.digit_weights * functional.cross_entropy(digit, batch.digits, reduction="none")
    state = functional.cross_entropy(polarity, batch.polarities)
    state = state + functional.cross_entropy(rotation, batch.rotations)
    return naming.mean() + STATE_WEIGHT * state


def _photo_frequencies() -> Tensor:
    """Draw how often a digit is called a photo in a domain, 1 on average: (domain, digit)."""
    preference = PHOTO_BIAS * torch.randn(len(DOMAINS), len(CLASS_NAMES))
    preference[DOMAINS.index(PLAIN_DOMAIN)] = 0
    return len(CLASS_NAMES) * preference.softmax(dim=1)


def _shifted_views(images: Tensor) -> Tensor:
    """Shift all images by up to a pixel, in every domain: (shift, domain, image, height, width)."""
    padded = functional.pad(images, (1, 1, 1, 1))
    corners = product(range(3), repeat=2)
    moved = [padded[:, top : top + IMAGE_SIZE, left : left + IMAGE_SIZE] for top, left in corners]
    return torch.stack([torch.stack([domain.transform(view) for domain in DOMAINS]) for view in moved])


def _tokenize(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    tokens: Tensor = tokenizer(texts, padding="max_length", max_length=CONTEXT_LENGTH, return_tensors="pt").input_ids
    return tokens


def _warm_up_then_cosine(step: int) -> float:
    done = (step - WARM_UP_STEPS) / (PRETRAINING_STEPS - WARM_UP_STEPS)
    return min((step + 1) / WARM_UP_STEPS, 0.5 * (1 + math.cos(math.pi * max(done, 0))))
