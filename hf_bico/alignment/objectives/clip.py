"""Compute the zero-shot and the contrastive objective of CLIP-like models.

Zero-shot classes are the text tower's embeddings of their prompts. In the contrastive loss every pair of image and
caption depends on all others, so that losses of batches do not add up. The gradient of the whole loss with respect to
each pair's features is therefore computed once, from features alone; a batch's features times these gradients then have
the whole loss's gradients at every layer below. Knows live models; not sites or files.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Gradients of the summed contrastive loss with respect to the features, (pairs, width), in float64."""

    images: Tensor
    texts: Tensor

    @classmethod
    def of(
        cls, images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor | None, captions: Sequence[str]
    ) -> PairGradients:
        """Differentiate the loss of all pairs, from their features and the model's logit scale and bias."""
        leaves = [features.detach().double().requires_grad_() for features in (images, texts)]
        with torch.enable_grad():
            total = contrastive_losses(leaves[0], leaves[1], scale, bias, captions).sum()
            return cls(*torch.autograd.grad(total, leaves))

    def surrogate(self, images: Tensor, texts: Tensor, numbers: Sequence[int]) -> Tensor:
        """Return a value of some pairs, by their numbers: meaningless, but with the gradients of the whole loss."""
        rows = to_device(torch.tensor(numbers), self.images.device)
        sides = ((images, self.images[rows]), (texts, self.texts[rows]))
        forth, back = ((features * gradient.to(features)).sum() for features, gradient in sides)
        return forth + back


def contrastive_losses(
    images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor | None, captions: Sequence[str]
) -> Tensor:
    """Return one loss per pair, in float64, from features before normalisation.

    It is the mean of the cross-entropies of the image over all captions and of the caption over all images; equal
    captions are equally right. A model with a bias has SigLIP's loss instead: a binary one for each image and caption,
    summed over the captions.
    """
    first, second = (functional.normalize(features.double(), dim=-1) for features in (images, texts))
    logits = scale.detach().to(first) * first @ second.T
    numbers = {caption: number for number, caption in enumerate(captions)}
    ids = torch.tensor([numbers[caption] for caption in captions], device=logits.device)
    matches = ids[:, None] == ids[None, :]  # which captions (columns) are right for which images (rows)
    if bias is not None:
        logits = logits + bias.detach().to(first)
        return -functional.logsigmoid(torch.where(matches, logits, -logits)).sum(1)
    share = matches / matches.sum(1, keepdim=True)
    forth, back = (-(share * one.log_softmax(1)).sum(1) for one in (logits, logits.T))
    return (forth + back) / 2


PROMPT_BATCH = 256


@dataclass(frozen=True)
class ZeroShotHead(Classifier):
    """Class embeddings of a model's text tower, with its logit scale and bias."""

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
    """Embed each class as the normalised mean, over the templates, of its normalised prompt embeddings."""
    if not isinstance(model, ClipModel):
        raise UnsupportedModelError(
            "this model has no text encoder, so it cannot classify by class names",
            "measure it by a linear probe: --evaluation probe, or 'hf-bico eval --probe N'",
        )
    prompts = [template.replace("{}", name) for name in class_names for template in templates]
    with model.quiet():
        starts = range(0, len(prompts), PROMPT_BATCH)
        features = torch.cat([model.text_features(prompts[start : start + PROMPT_BATCH]) for start in starts])
    by_class = functional.normalize(features, dim=-1).unflatten(0, (len(class_names), len(templates)))
    classes = functional.normalize(by_class.mean(1), dim=-1)
    if len(set(class_names)) > 1 and bool((classes == classes[0]).all()):
        raise ClassNamesError(
            "all classes get the same text embedding: the tokenizer cannot tell their names apart",
            "check the model's tokenizer files, or give other names with --class-names",
        )
    scale, bias = model.logit_scale_and_bias()
    return ZeroShotHead(classes, scale.detach(), None if bias is None else bias.detach())


@dataclass(frozen=True)
class ContrastHead(Head):
    """Gives each batch the gradients of the contrastive loss of all calibration pairs, which must be known.

    With classes, it measures zero-shot accuracy with the model's current text tower; else the mean contrastive loss.
    """

    gradients: PairGradients | None = None
    class_names: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()

    @property
    def metric(self) -> str:
        return "accuracy" if self.class_names else "loss"

    @property
    def tensors(self) -> Sequence[Tensor]:
        return () if self.gradients is None else (self.gradients.images, self.gradients.texts)

    def losses(self, model: LiveModel, batch: LossBatch) -> Losses:
        if self.gradients is None:
            raise ObjectiveError("the contrastive loss of a batch depends on all pairs", "make a head for all of them")
        images, captions = images_and_captions(batch.samples, batch.labels, self.class_names, self.templates)
        clip = require_clip(model)
        text = TextRows(*clip.text_tokens(captions))
        numbers = range(batch.first, batch.first + len(captions))
        features = clip.image_features(clip.pixels(images)), clip.text_features(captions)
        return Losses(self.gradients.surrogate(*features, numbers), text=text)

    def measure(self, model: LiveModel, samples: Batched, batch_size: int) -> float:
        clip = require_clip(model)
        if self.class_names:
            return zero_shot_head(clip, self.class_names, self.templates).measure(clip, samples, batch_size)
        images, texts, captions = all_features(clip, samples, batch_size, (), ())
        return float(contrastive_losses(images, texts, *clip.logit_scale_and_bias(), captions).mean())


def caption_head(
    model: LiveModel, samples: Batched, batch_size: int, class_names: Sequence[str], templates: Sequence[str]
) -> ContrastHead:
    """Return the head of a pretrained model for these samples, from the features of all of them."""
    clip = require_clip(model)
    images, texts, captions = all_features(clip, samples, batch_size, class_names, templates)
    gradients = PairGradients.of(images, texts, *clip.logit_scale_and_bias(), captions)
    return ContrastHead(gradients, tuple(class_names), tuple(templates))


def all_features(
    model: ClipModel, samples: Batched, batch_size: int, class_names: Sequence[str], templates: Sequence[str]
) -> tuple[Tensor, Tensor, list[str]]:
    """Return the features of all images and of all captions, and the captions."""

    def run(size: int) -> tuple[Tensor, Tensor, list[str]]:
        image_rows, text_rows = list[Tensor](), list[Tensor]()
        all_captions: list[str] = []
        for batch, labels in samples.batches(size):
            images, captions = images_and_captions(batch, labels, class_names, templates)
            image_rows.append(model.image_features(model.pixels(images)))
            text_rows.append(model.text_features(captions))
            all_captions += captions
        return torch.cat(image_rows), torch.cat(text_rows), all_captions

    with torch.no_grad(), model.quiet():
        return halving_batches(batch_size, run)


def images_and_captions(
    samples: Sequence[Any], labels: Sequence[int], class_names: Sequence[str], templates: Sequence[str]
) -> tuple[list[Any], list[str]]:
    """Split a batch into images and captions; a sample without a caption has its class's first prompt."""
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
        raise ObjectiveError(f"a {type(model.module).__name__} has no text encoder", "choose another objective")
    return model
