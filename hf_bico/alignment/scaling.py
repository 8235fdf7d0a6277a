"""Choose by the calibration samples how much of a change to add, whether to add it at all, and what to expect of it.

The scale is the smallest one whose loss is not clearly above the best one's; the veto drops a change that the samples
do not clearly speak for; the outlook is the mean gain of the samples. Knows the samples' losses under each scale; not
models, nor how a change was made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

from hf_bico.settings import VETO

SCALES = (0.0, *(2.0 ** (power / 2) for power in range(-10, 3)))
"""The scales that are tried: nothing, and 1/32 to 2 in steps of the root of 2."""
SHOWN_SCALES = (0.25, 0.5, 0.75, 1.25, 1.5, 2.0)
"""Scales of a whole change of several steps at which it is shown, beside 0 and 1."""


@dataclass(frozen=True)
class SampleScores:
    """What a model does on each sample: its loss; where classes are predicted, also the class and its probability.

    `accuracies` are the probabilities that the fine-tuned source gives to the predicted classes, averaged over a
    sample's augmented copies: the accuracy to expect if the source is right. `predictions` are of the samples alone.
    """

    losses: Tensor
    accuracies: Tensor | None = None
    predictions: Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[SampleScores]) -> SampleScores:
        """Return the scores of several batches as one."""

        def all_of(values: Sequence[Tensor | None]) -> Tensor | None:
            known = [value for value in values if value is not None]
            return torch.cat(known) if known else None

        losses = torch.cat([part.losses for part in parts])
        return cls(losses, all_of([part.accuracies for part in parts]), all_of([part.predictions for part in parts]))

    def gains_over(self, other: SampleScores) -> Tensor:
        """Return the gain of each sample: in expected accuracy, or in loss where no classes are predicted."""
        if self.accuracies is not None and other.accuracies is not None:
            return self.accuracies - other.accuracies
        return other.losses - self.losses


@dataclass(frozen=True)
class Estimate:
    """A mean over the samples, and its standard error, which is None for a single sample."""

    mean: float
    error: float | None

    @classmethod
    def of(cls, values: Tensor) -> Estimate:
        wide = values.double()
        error = float(wide.std(correction=1)) / sqrt(len(wide)) if len(wide) > 1 else None
        return cls(float(wide.mean()), error)

    def is_above_zero(self, errors: float) -> bool:
        """Return True if the mean is more than so many standard errors above 0; never for a single sample."""
        return self.error is not None and self.mean > errors * self.error


@dataclass(frozen=True)
class CurvePoint:
    """The samples' mean loss at one scale; `error` is the standard error of its difference from the smallest one.

    `step` counts the steps of a walk from 1, and is None where the whole change is scaled; `accuracy` is the mean
    accuracy to expect, where classes are predicted.
    """

    alpha: float
    mean: float
    error: float | None
    accuracy: float | None = None
    step: int | None = None


def choose_scale(tried: Mapping[float, SampleScores], errors: float) -> float:
    """Return the smallest scale whose mean loss is at most so many standard errors above the smallest one.

    The standard error is that of the samples' differences from the best scale. Scales with losses that are not finite
    are never chosen; with a single sample no difference is clear, so it is 0.
    """
    best = _best(tried)
    for alpha in sorted(tried):
        above = Estimate.of(tried[alpha].losses - tried[best].losses)
        if alpha == best or above.error is None or above.mean <= errors * above.error:
            return alpha
    return best


def curve(tried: Mapping[float, SampleScores], step: int | None = None) -> list[CurvePoint]:
    """Return the mean loss at every scale, but for losses that are not finite."""
    best, points = _best(tried), []
    for alpha in sorted(tried):
        scores = tried[alpha]
        mean, above = float(scores.losses.mean()), Estimate.of(scores.losses - tried[best].losses)
        accuracy = None if scores.accuracies is None else float(scores.accuracies.mean())
        if isfinite(mean):
            points.append(CurvePoint(alpha, mean, above.error, accuracy, step))
    return points


def outlook(before: SampleScores, after: SampleScores) -> Estimate:
    """Return the mean gain of the samples, with its standard error."""
    return Estimate.of(after.gains_over(before))


def passes_veto(gain: Estimate) -> bool:
    """Return True if the samples speak for a change with this gain."""
    return gain.is_above_zero(VETO)


def _best(tried: Mapping[float, SampleScores]) -> float:
    """Return the scale of the smallest mean loss; the smaller one of two that are equal."""
    return min(sorted(tried), key=lambda alpha: _or_infinite(float(tried[alpha].losses.mean())))


def _or_infinite(value: float) -> float:
    return value if isfinite(value) else float("inf")


def by_sample(values: Tensor, copies: int) -> Tensor:
    """Average the values of each sample and its copies, which follow it."""
    return values if not copies else values.unflatten(0, (-1, 1 + copies)).mean(1)


def class_scores(logits: Tensor, probabilities: Tensor, copies: int = 0) -> SampleScores:
    """Score logits by the source's probabilities of the samples: KL(p || softmax z), and p of the class they choose.

    `logits` has a row for each sample and each copy, `probabilities` one for each sample.
    """
    logits, p = logits.double(), probabilities.double().repeat_interleave(1 + copies, 0)
    losses = (torch.special.xlogy(p, p) - p * logits.log_softmax(-1)).sum(-1)
    predicted = logits.argmax(-1)
    accuracies = p.gather(1, predicted[:, None]).squeeze(1)
    return SampleScores(by_sample(losses, copies), by_sample(accuracies, copies), predicted[:: 1 + copies])
