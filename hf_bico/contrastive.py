"""The contrastive loss of images and their captions, over all pairs at once however they are batched.

Every pair's loss depends on all the others, so that the losses of batches do not add up. The gradient of the whole loss
with respect to each pair's features does: it is found once, from features alone, and the features of a batch times
their gradients then have the whole loss's gradients at every layer below. Knows matrices of features and captions;
neither models nor samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hf_bico.runtime.environment import sent


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
        some = sent(torch.tensor(numbers), self.images.device)
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
