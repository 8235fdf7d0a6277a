"""The contrastive objective of CLIP-like models: images with their captions, each pair against all the others.

Where a data set has classes and no captions, a class's prompt is the caption of its images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_bico.contrastive import PairGradients, mean_contrastive_loss
from hf_bico.errors import ObjectiveError
from hf_bico.models.families.live import ClipModel, LiveModel
from hf_bico.models.hooks import Losses, TextRows
from hf_bico.models.inference import Batched
from hf_bico.objectives.base import Head, Question
from hf_bico.objectives.zero_shot import zero_shot_head
from hf_bico.runtime.environment import halving_batches
from hf_bico.utils.samples import Captioned


@dataclass(frozen=True)
class ContrastHead(Head):
    """Measures by the contrastive loss of a pair among all of them; what it would teach depends on all pairs."""

    @property
    def metric(self) -> str:
        return "loss"

    def losses(self, model: LiveModel, asked: Question) -> Losses:
        raise ObjectiveError("the contrastive loss of a batch depends on all pairs", "make a head for all of them")

    def measure(self, model: LiveModel, samples: Batched, batch_size: int) -> float:
        clip = require_clip(model)
        images, texts, captions = all_features(clip, samples, batch_size, (), ())
        return mean_contrastive_loss(images, texts, *clip.logit_scale_and_bias(), captions)


@dataclass(frozen=True)
class CaptionHead(ContrastHead):
    """Asks by what all calibration pairs together would teach each of them.

    With classes, a model is measured zero-shot by its own text side as it then is; else by the contrastive loss of a
    held-out pair among all of them.
    """

    gradients: PairGradients
    class_names: tuple[str, ...]
    templates: tuple[str, ...]

    @property
    def metric(self) -> str:
        return "accuracy" if self.class_names else "loss"

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [self.gradients.images, self.gradients.texts]

    def losses(self, model: LiveModel, asked: Question) -> Losses:
        images, captions = split(asked.samples, asked.labels, self.class_names, self.templates)
        clip = require_clip(model)
        text = TextRows(*clip.text_tokens(captions))
        numbers = range(asked.first, asked.first + len(captions))
        features = clip.image_features(clip.pixels(images)), clip.text_features(captions)
        return Losses(self.gradients.surrogate(*features, numbers), text=text, stands_in=True)

    def measure(self, model: LiveModel, samples: Batched, batch_size: int) -> float:
        clip = require_clip(model)
        if self.class_names:
            head = zero_shot_head(clip, self.class_names, self.templates)
            return head.measure(clip, samples, batch_size)
        return super().measure(clip, samples, batch_size)


def caption_head(
    model: LiveModel, samples: Batched, batch_size: int, class_names: Sequence[str], templates: Sequence[str]
) -> CaptionHead:
    """The head of a pretrained model for these samples, all of whose features are looked at once."""
    clip = require_clip(model)
    images, texts, captions = all_features(clip, samples, batch_size, class_names, templates)
    gradients = PairGradients.of(images, texts, *clip.logit_scale_and_bias(), captions)
    return CaptionHead(gradients, tuple(class_names), tuple(templates))


def all_features(
    model: ClipModel, samples: Batched, batch_size: int, class_names: Sequence[str], templates: Sequence[str]
) -> tuple[Tensor, Tensor, list[str]]:
    """The features of all images and of all captions, and the captions."""

    def run(size: int) -> tuple[Tensor, Tensor, list[str]]:
        rows: tuple[list[Tensor], list[Tensor]] = ([], [])
        said: list[str] = []
        for some, labels in samples.batches(size):
            images, captions = split(some, labels, class_names, templates)
            rows[0].append(model.image_features(model.pixels(images)))
            rows[1].append(model.text_features(captions))
            said += captions
        return torch.cat(rows[0]), torch.cat(rows[1]), said

    with torch.no_grad(), model.quiet():
        return halving_batches(batch_size, run)


def split(
    samples: Sequence[Any], labels: Sequence[int], class_names: Sequence[str], templates: Sequence[str]
) -> tuple[list[Any], list[str]]:
    """Images and captions of a batch; a sample without a caption has its class's first prompt."""
    images, captions = [], []
    for sample, label in zip(samples, labels, strict=True):
        if isinstance(sample, Captioned):
            images.append(sample.image)
            captions.append(sample.caption)
        elif 0 <= label < len(class_names):
            images.append(sample)
            captions.append(templates[0].replace("{}", class_names[label]))
        else:
            raise ObjectiveError("an image has neither a caption nor a label", "use data with captions or labels")
    return images, captions


def require_clip(model: LiveModel) -> ClipModel:
    if not isinstance(model, ClipModel):
        raise ObjectiveError(f"a {type(model.module).__name__} has no text side", "choose another objective")
    return model
