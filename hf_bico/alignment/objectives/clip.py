"""Zero-shot and contrastive.

The contrastive loss of images and their captions, over all pairs at once however they are batched.

Every pair's loss depends on all the others, so that the losses of batches do not add up. The gradient of the whole loss
with respect to each pair's features does: it is found once, from features alone, and the features of a batch times
their gradients then have the whole loss's gradients at every layer below. Knows matrices of features and captions;
neither models nor samples.

The zero-shot objective of CLIP-like models: classes are what the model's own text tower makes of their names.

The contrastive objective of CLIP-like models: images with their captions, each pair against all the others.

Where a data set has classes and no captions, a class's prompt is the caption of its images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_bico.alignment.objectives.base import Classifier, Head, LossBatch
from hf_bico.errors import ClassNamesError, ObjectiveError, UnsupportedModelError
from hf_bico.models.families.live import ClipModel, LiveModel
from hf_bico.models.hooks import Losses, TextRows
from hf_bico.models.inference import Batched
from hf_bico.runtime.environment import halving_batches, to_device
from hf_bico.utils.samples import Captioned


@dataclass(frozen=True)
class PairGradients:
    """The gradients of the summed contrastive loss with respect to the features, (pairs, width), in float64."""

    images: Tensor
    texts: Tensor

    @classmethod
    def of(
        cls, images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor | None, captions: Sequence[str]
    ) -> PairGradients:
        """From the features of all pairs, as the model gives them, and the model's own logit scale and bias."""
        leaves = [features.detach().double().requires_grad_() for features in (images, texts)]
        with torch.enable_grad():
            total = contrastive_losses(leaves[0], leaves[1], scale, bias, captions).sum()
            return cls(*torch.autograd.grad(total, leaves))

    def surrogate(self, images: Tensor, texts: Tensor, numbers: Sequence[int]) -> Tensor:
        """For a batch of the pairs, by their numbers among all: one value whose gradients are those of the whole loss.

        The value itself means nothing.
        """
        some = to_device(torch.tensor(numbers), self.images.device)
        sides = ((images, self.images[some]), (texts, self.texts[some]))
        forth, back = ((features * gradient.to(features)).sum() for features, gradient in sides)
        return forth + back


def contrastive_losses(
    images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor | None, captions: Sequence[str]
) -> Tensor:
    """One loss for each pair, in float64; features are not normalised yet.

    Half of it is the cross-entropy of the image over all captions, half that of the caption over all images; equal
    captions are right alike. A model with a bias has learnt by SigLIP's loss: each image with each caption is a
    question of its own, right or wrong, and an image's loss is the sum over all captions.
    """
    logits = _logits(images, texts, scale, bias)
    right = _right(captions, logits.device)
    if bias is not None:
        return -functional.logsigmoid(torch.where(right, logits, -logits)).sum(1)
    share = right / right.sum(1, keepdim=True)
    forth, back = (-(share * one.log_softmax(1)).sum(1) for one in (logits, logits.T))
    return (forth + back) / 2


def mean_contrastive_loss(
    images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor | None, captions: Sequence[str]
) -> float:
    """The loss of an average pair among all of these: lower is better, and more pairs are harder."""
    return float(contrastive_losses(images, texts, scale, bias, captions).mean())


def _logits(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    first, second = (functional.normalize(features.double(), dim=-1) for features in (images, texts))
    logits = scale.detach().to(first) * first @ second.T
    return logits if bias is None else logits + bias.detach().to(first)


def _right(captions: Sequence[str], device: torch.device) -> Tensor:
    """Which captions, in columns, are right for which images, in rows."""
    numbers = {caption: number for number, caption in enumerate(dict.fromkeys(captions))}
    kinds = torch.tensor([numbers[caption] for caption in captions], device=device)
    return kinds[:, None] == kinds[None, :]


PROMPT_BATCH = 256


@dataclass(frozen=True)
class ZeroShotHead(Classifier):
    """Class embeddings of a model's own text tower, with its logit scale and bias."""

    classes: Tensor
    scale: Tensor
    bias: Tensor | None

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [self.classes, self.scale]

    def logits(self, features: Tensor) -> Tensor:
        logits = self.scale * functional.normalize(features, dim=-1) @ self.classes.T
        return logits if self.bias is None else logits + self.bias


@torch.no_grad()
def zero_shot_head(model: LiveModel, class_names: Sequence[str], templates: Sequence[str]) -> ZeroShotHead:
    """Each class as the normalised mean, over the templates, of its normalised prompt embeddings."""
    if not isinstance(model, ClipModel):
        raise UnsupportedModelError(
            "this model has no text side to be asked by class names",
            "measure it by a linear probe: --evaluation probe, or 'hf-bico eval --probe N'",
        )
    prompts = [template.replace("{}", name) for name in class_names for template in templates]
    with model.quiet():
        features = torch.cat([model.text_features(batch) for batch in _chunks(prompts, PROMPT_BATCH)])
    by_class = functional.normalize(features, dim=-1).unflatten(0, (len(class_names), len(templates)))
    classes = functional.normalize(by_class.mean(1), dim=-1)
    if len(set(class_names)) > 1 and bool((classes == classes[0]).all()):
        raise ClassNamesError(
            "all classes get the same text embedding: the tokenizer cannot tell their names apart",
            "check the model's tokenizer files, or give other names with --class-names",
        )
    scale, bias = model.logit_scale_and_bias()
    return ZeroShotHead(classes, scale.detach(), None if bias is None else bias.detach())


def _chunks(items: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (items[start : start + size] for start in range(0, len(items), size))


@dataclass(frozen=True)
class ContrastHead(Head):
    """Measures by the contrastive loss of a pair among all of them; what it would teach depends on all pairs."""

    @property
    def metric(self) -> str:
        return "loss"

    def losses(self, model: LiveModel, asked: LossBatch) -> Losses:
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

    def losses(self, model: LiveModel, asked: LossBatch) -> Losses:
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
