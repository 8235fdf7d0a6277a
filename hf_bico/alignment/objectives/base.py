"""Losses and heads; the caller's own.

What every objective gives: for each model a head, which asks it about samples and measures it in the end.

Knows live models, samples and labels; not files, sites or how samples are drawn.

The caller's own objective: a function of the model and a prepared batch that gives a loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_bico.errors import ObjectiveError
from hf_bico.models.families.live import ImageModel, LiveModel
from hf_bico.models.families.text_models import TextModel
from hf_bico.models.hooks import Losses
from hf_bico.models.inference import Batched, accuracy, logits_of
from hf_bico.models.tokenization import TokenBatch
from hf_bico.runtime.environment import to_device

MOST_LABELS = 10
"""So many labels of each sample are differentiated, one backward pass each."""


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


@dataclass(frozen=True)
class LossBatch:
    """One batch of samples to ask a model about; unknown labels are -1.

    `likely` are the labels that the fine-tuned source finds likely, where they are asked for, and `first` is the number
    of the first sample among all that are asked about.
    """

    samples: Sequence[Any]
    labels: Sequence[int]
    likely: LikelyLabels | None = None
    first: int = 0


class Head(ABC):
    """How one model is asked about samples: a loss to differentiate, and a value to measure."""

    looks_inside: ClassVar[bool] = False
    """Whether the loss may be of what the model's blocks do not return, as attention weights."""

    @property
    def metric(self) -> str:
        return "accuracy"

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What tells it from other heads."""
        return ()

    @abstractmethod
    def losses(self, model: LiveModel, asked: LossBatch) -> Losses:
        """One forward pass over one batch. Losses are SUMS, so that batches add up."""

    @abstractmethod
    def measure(self, model: LiveModel, samples: Batched, batch_size: int) -> float:
        """The value of `metric` on the samples."""


class Classifier(Head):
    """A head that tells classes apart by the features of samples."""

    @abstractmethod
    def logits(self, features: Tensor) -> Tensor:
        """(samples, classes)."""

    def losses(self, model: LiveModel, asked: LossBatch) -> Losses:
        logits = self.logits(model.features(asked.samples))
        found = class_losses(logits, asked.labels, asked.likely)
        return replace(found, text=model.text_rows(asked.samples))

    def measure(self, model: LiveModel, samples: Batched, batch_size: int) -> float:
        """The share of samples whose most likely class is their label."""
        predicted = logits_of(model, self, samples, batch_size).argmax(-1)
        return accuracy(predicted.tolist(), samples.labels)


@dataclass(frozen=True)
class Heads:
    """Those of the two pretrained models, and of the fine-tuned source."""

    source: Head
    target: Head
    tuned: Head


def class_losses(logits: Tensor, labels: Sequence[int], likely: LikelyLabels | None) -> Losses:
    """Cross-entropies summed over the samples: with the labels, where all are known, and with the likely ones."""
    found = Losses()
    if min(labels) >= 0:
        wanted = to_device(torch.tensor(labels), logits.device)
        task = functional.cross_entropy(logits, wanted, reduction="sum")
        found = Losses(task, answers=torch.tensor(len(labels)), wrong=(logits.argmax(-1) != wanted).sum())
    if likely is None:
        return found
    ranks = to_device(likely.labels, logits.device).T
    roots = to_device(likely.probabilities.sqrt(), logits.device, logits.dtype).T
    each = (
        (root * functional.cross_entropy(logits, label, reduction="none")).sum()
        for label, root in zip(ranks, roots, strict=True)
    )
    return replace(found, expected=tuple(each))


@dataclass(frozen=True)
class Batch:
    """What an objective of the caller's own gets, on the model's device: `labels`, and `pixels` or `tokens`.

    Images are `pixels`, prepared for the model; texts are `tokens` with their mask.
    """

    pixels: Tensor | None
    labels: Tensor
    tokens: TokenBatch | None = None


@dataclass(frozen=True)
class OwnHead(Head):
    """Asks by the caller's function; what it would measure is not known."""

    objective: Callable[..., Any]
    looks_inside: ClassVar[bool] = True

    def losses(self, model: LiveModel, asked: LossBatch) -> Losses:
        pixels = model.pixels(asked.samples) if isinstance(model, ImageModel) else None
        tokens = model.tokens(asked.samples) if isinstance(model, TextModel) else None
        value = self.objective(model.module, Batch(pixels, to_device(torch.tensor(asked.labels), model.device), tokens))
        if not isinstance(value, Tensor) or value.ndim != 0:
            raise ObjectiveError(
                f"the objective gave {type(value).__name__} of shape {getattr(value, 'shape', '-')}, not one loss",
                "return a tensor of no dimensions: the sum of the samples' losses",
            )
        return Losses(value, text=None if tokens is None else tokens.rows)

    def measure(self, model: LiveModel, samples: Batched, batch_size: int) -> float:
        raise ObjectiveError("what the caller's own objective would measure is not known", "measure by a probe")
