"""Define an objective: a head per model, which computes the loss on a batch, and the metric at the end.

Knows live models, samples and labels; not files, sites or how samples are drawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_bico.errors import ObjectiveError
from hf_bico.models.families.live import ImageModel, LiveModel
from hf_bico.models.families.text_models import TextModel
from hf_bico.models.hooks import Losses
from hf_bico.models.inference import Batched, logits_of
from hf_bico.models.metrics import accuracy
from hf_bico.models.tokenization import TokenBatch
from hf_bico.runtime.environment import to_device

MOST_LABELS = 10
"""Most labels of a sample that are differentiated, one backward pass each."""


@dataclass(frozen=True)
class LikelyLabels:
    """The most likely labels of samples and their probabilities, both (samples, ranks), the likeliest first."""

    labels: Tensor
    probabilities: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> LikelyLabels:
        """Return the labels that the logits find likely, at most MOST_LABELS per sample."""
        top = logits.double().softmax(-1).topk(min(logits.shape[-1], MOST_LABELS), dim=-1)
        return cls(top.indices, top.values)

    def __getitem__(self, samples: slice) -> LikelyLabels:
        return LikelyLabels(self.labels[samples], self.probabilities[samples])


@dataclass(frozen=True)
class LossBatch:
    """A batch of samples to compute the loss on; unknown labels are -1.

    `likely` are the labels that the fine-tuned source finds likely, if requested; `first` is the number of the first
    sample among all calibration samples.
    """

    samples: Sequence[Any]
    labels: Sequence[int]
    likely: LikelyLabels | None = None
    first: int = 0


class Head(ABC):
    """Loss and metric of one model."""

    @property
    def metric(self) -> str:
        return "accuracy"

    @property
    def per(self) -> str | None:
        """What a loss is the mean of, where that is not a label token."""
        return None

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Parameters that identify the head."""
        return ()

    @abstractmethod
    def losses(self, model: LiveModel, batch: LossBatch) -> Losses:
        """Run one forward pass over a batch. Losses are SUMS, so that batches add up."""

    @abstractmethod
    def measure(self, model: LiveModel, samples: Batched, batch_size: int) -> float:
        """Return the value of `metric` on the samples."""


class Classifier(Head):
    """A head that classifies samples by their features."""

    def features(self, model: LiveModel, samples: Sequence[Any]) -> Tensor:
        """Return what it reads of a model."""
        return model.features(samples)

    @abstractmethod
    def logits(self, features: Tensor) -> Tensor:
        """Return logits of shape (samples, classes)."""

    def losses(self, model: LiveModel, batch: LossBatch) -> Losses:
        """Return cross-entropies: with the labels, if all are known, and with the likely ones."""
        logits = self.logits(self.features(model, batch.samples))
        losses = Losses(text=model.text_rows(batch.samples))
        if min(batch.labels) >= 0:
            classes = to_device(torch.tensor(batch.labels), logits.device)
            losses = replace(losses, task=functional.cross_entropy(logits, classes, reduction="sum"))
        if batch.likely is None:
            return losses
        ranks = to_device(batch.likely.labels, logits.device).T
        roots = to_device(batch.likely.probabilities.sqrt(), logits.device, logits.dtype).T
        each = (
            (root * functional.cross_entropy(logits, label, reduction="none")).sum()
            for label, root in zip(ranks, roots, strict=True)
        )
        return replace(losses, expected=tuple(each))

    def predictions(self, model: LiveModel, samples: Batched, batch_size: int) -> list[int]:
        """Return the predicted classes."""
        predicted: list[int] = logits_of(model, self, samples, batch_size).argmax(-1).tolist()
        return predicted

    def measure(self, model: LiveModel, samples: Batched, batch_size: int) -> float:
        return accuracy(self.predictions(model, samples, batch_size), samples.labels)


@dataclass(frozen=True)
class Heads:
    """Heads of the two pretrained models, and of the fine-tuned source."""

    source: Head
    target: Head
    tuned: Head


@dataclass(frozen=True)
class Batch:
    """A batch for a custom objective, on the model's device: `labels`, and `pixels` or `tokens` with their mask."""

    pixels: Tensor | None
    labels: Tensor
    tokens: TokenBatch | None = None


@dataclass(frozen=True)
class OwnHead(Head):
    """Computes the loss by the caller's function of the model and a batch; has no metric."""

    objective: Callable[..., Any]

    def losses(self, model: LiveModel, batch: LossBatch) -> Losses:
        pixels = model.pixels(batch.samples) if isinstance(model, ImageModel) else None
        tokens = model.tokens(batch.samples) if isinstance(model, TextModel) else None
        labels = to_device(torch.tensor(batch.labels), model.device)
        value = self.objective(model.module, Batch(pixels, labels, tokens))
        if not isinstance(value, Tensor) or value.ndim != 0:
            raise ObjectiveError(
                f"the objective gave {type(value).__name__} of shape {getattr(value, 'shape', '-')}, not one loss",
                "return a tensor of no dimensions: the sum of the samples' losses",
            )
        return Losses(value, text=None if tokens is None else tokens.rows)

    def measure(self, model: LiveModel, samples: Batched, batch_size: int) -> float:
        raise ObjectiveError("what the caller's own objective would measure is not known", "measure by a probe")
