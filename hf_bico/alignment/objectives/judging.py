"""Judge a target on the calibration samples, as the objective asks: one loss for each sample.

A judge sees one forward pass of a batch at a time, and turns what it saw of all batches into scores. Where it can, the
loss is the distance to the fine-tuned source's predictions, which needs no labels. Knows heads and live models; not how
the target was changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_bico.alignment.memory import WIDENED_ROWS
from hf_bico.alignment.objectives.base import Classifier, LossBatch, OwnHead
from hf_bico.alignment.objectives.classification import ClassHead, left_out_logits
from hf_bico.alignment.objectives.clip import contrastive_losses, images_and_captions, require_clip
from hf_bico.alignment.objectives.language import TokenHead
from hf_bico.alignment.scaling import SampleScores, class_scores
from hf_bico.models.families.live import LiveModel
from hf_bico.models.tokenization import UNLEARNT


class Judge(ABC):
    """Scores a target on the calibration samples."""

    asks_source: ClassVar[bool] = False
    """Whether `evidence` needs what the fine-tuned source says about the same batch."""

    def source_says(self, model: LiveModel, samples: Sequence[Any], labels: Sequence[int]) -> Tensor | None:
        """Run the fine-tuned source over a batch."""
        return None

    @abstractmethod
    def evidence(
        self, model: LiveModel, samples: Sequence[Any], labels: Sequence[int], source: Tensor | None
    ) -> Tensor:
        """Run the target over a batch; return one row for each sample, in float64 and in main memory."""

    @abstractmethod
    def scores(self, evidence: Tensor) -> SampleScores:
        """Score the samples by the evidence of all batches."""


@dataclass(frozen=True)
class ClassJudge(Judge):
    """Compares the classes that a head predicts with the fine-tuned source's predictions.

    `probabilities` has a row for each sample, the mean over its augmented `copies`.
    """

    head: Classifier
    probabilities: Tensor
    copies: int = 0

    def evidence(
        self, model: LiveModel, samples: Sequence[Any], labels: Sequence[int], source: Tensor | None
    ) -> Tensor:
        return self.head.logits(self.head.features(model, samples)).cpu().double()

    def scores(self, evidence: Tensor) -> SampleScores:
        return class_scores(evidence, self.probabilities, self.copies)


@dataclass(frozen=True)
class RefittedHeadJudge(Judge):
    """As `ClassJudge`, for a target whose head is refitted to the samples after every change.

    Each sample is judged by a head that was fitted to the others: to what the fine-tuned source's `head` gives on its
    own features of them, or to their labels where there is no such head.
    """

    probabilities: Tensor
    head: ClassHead | None
    source_features: Tensor | None
    labels: tuple[int, ...]
    reading: str | None = None
    """What the target's head reads, where that is not its features."""

    def evidence(
        self, model: LiveModel, samples: Sequence[Any], labels: Sequence[int], source: Tensor | None
    ) -> Tensor:
        return model.read_by(self.reading, samples).cpu().double()

    def scores(self, evidence: Tensor) -> SampleScores:
        classes = self.probabilities.shape[1]
        logits = left_out_logits(evidence, self.head, self.source_features, self.labels, classes)
        return class_scores(logits, self.probabilities)


@dataclass(frozen=True)
class TokenJudge(Judge):
    """Compares the predictions of the samples' tokens with the fine-tuned source's, averaged over each sample's tokens.

    Where the two vocabularies are padded to different widths, the tokens that both have count.
    """

    asks_source = True
    head: TokenHead

    def source_says(self, model: LiveModel, samples: Sequence[Any], labels: Sequence[int]) -> Tensor | None:
        return _predicted_tokens(self.head, model, samples, labels)[0]

    def evidence(
        self, model: LiveModel, samples: Sequence[Any], labels: Sequence[int], source: Tensor | None
    ) -> Tensor:
        if source is None:
            raise ValueError("the fine-tuned source was not asked")
        logits, owners, _ = _predicted_tokens(self.head, model, samples, labels)
        shared = min(logits.shape[1], source.shape[1])
        parts = zip(_parts(logits[:, :shared]), _parts(source[:, :shared]), strict=True)
        losses = [_divergences(ours, theirs.to(ours)) for ours, theirs in parts]
        return _by_owner(torch.cat(losses), owners, len(samples))

    def scores(self, evidence: Tensor) -> SampleScores:
        return SampleScores(evidence)


@dataclass(frozen=True)
class LossJudge(Judge):
    """Judges each sample by the mean loss of its own tokens, where the source's predictions are of other tokens."""

    head: TokenHead

    def evidence(
        self, model: LiveModel, samples: Sequence[Any], labels: Sequence[int], source: Tensor | None = None
    ) -> Tensor:
        logits, owners, tokens = _predicted_tokens(self.head, model, samples, labels)
        losses = [
            functional.nll_loss(_log_likely(some), own, reduction="none")
            for some, own in zip(_parts(logits), tokens.split(WIDENED_ROWS), strict=True)
        ]
        return _by_owner(torch.cat(losses), owners, len(samples))

    def scores(self, evidence: Tensor) -> SampleScores:
        return SampleScores(evidence)


def _predicted_tokens(
    head: TokenHead, model: LiveModel, samples: Sequence[Any], labels: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits of predicted tokens, their samples, and the tokens."""
    logits, tokens, _ = head.run(model, samples, labels)
    counted = (tokens != UNLEARNT).to(logits.device)
    return logits[counted], counted.nonzero()[:, 0].cpu(), tokens.to(logits.device)[counted]


def _parts(logits: Tensor) -> Sequence[Tensor]:
    """Split logits over a vocabulary into parts of a size that may be widened."""
    found: Sequence[Tensor] = logits.split(WIDENED_ROWS)
    return found


def _divergences(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return KL(theirs || ours) for each row of logits."""
    each = functional.kl_div(_log_likely(ours), _log_likely(theirs), reduction="none", log_target=True)
    return each.sum(-1)


def _log_likely(logits: Tensor) -> Tensor:
    """Return the log-probabilities of all tokens, in single precision at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _by_owner(losses: Tensor, owners: Tensor, samples: int) -> Tensor:
    """Average the losses of tokens over the tokens of each sample."""
    counts = torch.bincount(owners, minlength=samples)
    sums = torch.zeros(samples, dtype=torch.float64).index_add(0, owners, losses.cpu().double())
    return sums / counts.clamp(min=1)


@dataclass(frozen=True)
class CaptionJudge(Judge):
    """Judges images and captions by the contrastive loss of all of them together."""

    captions: tuple[str, ...]
    class_names: tuple[str, ...]
    templates: tuple[str, ...]
    scale: Tensor
    bias: Tensor | None

    def evidence(
        self, model: LiveModel, samples: Sequence[Any], labels: Sequence[int], source: Tensor | None
    ) -> Tensor:
        clip = require_clip(model)
        images, captions = images_and_captions(samples, labels, self.class_names, self.templates)
        features = clip.image_features(clip.pixels(images)), clip.text_features(captions)
        return torch.stack([side.cpu().double() for side in features], 1)

    def scores(self, evidence: Tensor) -> SampleScores:
        images, texts = evidence.unbind(1)
        scale, bias = self.scale.cpu(), None if self.bias is None else self.bias.cpu()
        return SampleScores(contrastive_losses(images, texts, scale, bias, self.captions))


@dataclass(frozen=True)
class OwnJudge(Judge):
    """Judges each sample by the caller's own loss of it alone."""

    head: OwnHead

    def evidence(
        self, model: LiveModel, samples: Sequence[Any], labels: Sequence[int], source: Tensor | None
    ) -> Tensor:
        batches = (LossBatch([sample], [label]) for sample, label in zip(samples, labels, strict=True))
        values = [self.head.losses(model, batch).task for batch in batches]
        return torch.stack([value.detach().cpu().double() for value in values if value is not None])

    def scores(self, evidence: Tensor) -> SampleScores:
        return SampleScores(evidence)
