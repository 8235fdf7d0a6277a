"""The task losses that calibration differentiates. Knows features and labels; not files, sites or statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hf_bico.errors import ClassNamesError
from hf_bico.families import LiveModel
from hf_bico.statistics import Losses

PROMPT_BATCH = 256
MOST_LABELS = 10
"""So many labels of each sample are differentiated, one backward pass each."""


@dataclass(frozen=True)
class ZeroShotHead:
    """Class embeddings of a model's own text tower, with its logit scale and bias."""

    classes: Tensor
    scale: Tensor
    bias: Tensor | None

    def logits(self, features: Tensor) -> Tensor:
        logits = self.scale * functional.normalize(features, dim=-1) @ self.classes.T
        return logits if self.bias is None else logits + self.bias


@torch.no_grad()
def zero_shot_head(model: LiveModel, class_names: Sequence[str], templates: Sequence[str]) -> ZeroShotHead:
    """Each class as the normalised mean, over the templates, of its normalised prompt embeddings."""
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


@dataclass(frozen=True)
class LikelyLabels:
    """The most likely labels of samples and their probabilities, both (samples, ranks), the likeliest first."""

    labels: Tensor
    probabilities: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> LikelyLabels:
        """All labels of few classes; of many, the likeliest."""
        found = logits.double().softmax(-1).topk(min(logits.shape[-1], MOST_LABELS), dim=-1)
        return cls(found.indices, found.values)

    def __getitem__(self, samples: slice) -> LikelyLabels:
        return LikelyLabels(self.labels[samples], self.probabilities[samples])


def zero_shot_losses(logits: Tensor, labels: Tensor, likely: LikelyLabels | None) -> Losses:
    """Cross-entropies summed over the samples, so that batches add up: with the labels, and with the likely ones."""
    task = functional.cross_entropy(logits, labels, reduction="sum") if bool((labels >= 0).all()) else None
    if likely is None:
        return Losses(task)
    ranks = likely.labels.to(logits.device).T
    roots = likely.probabilities.to(logits.device).sqrt().to(logits.dtype).T
    each = (
        (root * functional.cross_entropy(logits, label, reduction="none")).sum()
        for label, root in zip(ranks, roots, strict=True)
    )
    return Losses(task, tuple(each))


def _chunks(items: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (items[start : start + size] for start in range(0, len(items), size))
