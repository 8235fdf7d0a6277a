"""Classify by a head on a model's features: fitted by ridge or logistic regression, or carried from the source.

Knows features and labels; not which tensors a head lives in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_bico.alignment.objectives.base import Classifier
from hf_bico.errors import UnsuitableMethodError
from hf_bico.models.families.base import HeadModules
from hf_bico.models.families.live import LiveModel

RIDGE_STRENGTHS = tuple(10.0**power for power in range(-6, 4))
"""Ridge strengths to try, as shares of the features' mean energy."""
SCALES = (1.0, 2.0, 4.0, 8.0)
"""Factors to try that turn the ridge's predictions, which are near 0 and 1, into logits.

Where classes separate well, larger ones would be more likely; but then a few samples dominate the gradient.
"""
TANH_LINEAR = 1e-3
"""Up to this value, tanh is the identity in single precision."""


@dataclass(frozen=True)
class ClassHead(Classifier):
    """logits = W f + b; with a hidden layer, f passes through it and its activation ("tanh" or "relu") first.

    `reading` says what of a model f is, where that is not its features; `fitted_to` counts the samples that the head
    was fitted to by their labels.
    """

    weight: Tensor
    bias: Tensor
    hidden: tuple[Tensor, Tensor] | None = None
    activation: str | None = None
    reading: str | None = None
    fitted_to: int | None = None

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [self.weight, self.bias, *(self.hidden or ())]

    @property
    def width(self) -> int:
        """Width of the features that it reads."""
        return (self.weight if self.hidden is None else self.hidden[0]).shape[1]

    @property
    def first_layer(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the layer that reads the features."""
        return (self.weight, self.bias) if self.hidden is None else self.hidden

    def first_outputs(self, features: Tensor) -> Tensor:
        """Return what the first layer gives, before its activation, in float64."""
        weight, bias = (part.to(features).double() for part in self.first_layer)
        return features.double() @ weight.T + bias

    def after_first(self, outputs: Tensor) -> Tensor:
        """Return the logits that follow from the first layer's outputs."""
        if self.hidden is None or self.activation is None:
            return outputs
        hidden: Tensor = getattr(torch, self.activation)(outputs)
        return hidden @ self.weight.to(outputs).T + self.bias.to(outputs)

    def features(self, model: LiveModel, samples: Sequence[Any]) -> Tensor:
        return model.read_by(self.reading, samples)

    def logits(self, features: Tensor) -> Tensor:
        x = features.to(torch.promote_types(features.dtype, torch.float32))
        weight, bias = (part.to(x) for part in self.first_layer)
        return self.after_first(x @ weight.T + bias)

    def in_order(self, rows: Sequence[int]) -> ClassHead:
        """Return the head with its classes in another order."""
        return replace(self, weight=self.weight[list(rows)], bias=self.bias[list(rows)])


def ridge_head(features: Tensor, labels: Sequence[int], classes: int) -> ClassHead:
    """Fit a head by ridge regression in closed form; choose strength and scale by exact leave-one-out.

    Rotated features give a rotated head: two models that differ by a rotation get the same losses.
    """
    targets = torch.tensor(labels, device=features.device)
    weight, bias, left_out = _ridge(features, functional.one_hot(targets, classes))
    scale = _scale(left_out, targets)
    return ClassHead((scale * weight).to(features.dtype), (scale * bias).to(features.dtype), fitted_to=len(labels))


def carried_head(head: ClassHead, own: Tensor, other: Tensor) -> ClassHead:
    """Carry a head to another model, from both models' features of the same samples.

    Its first layer is refitted by ridge regression from the other model's features to what it gives on its own ones;
    leave-one-out chooses the strength. Needs no labels, and rotated features give a rotated head.
    """
    weight, bias = head.first_layer
    fitted, offset, _ = _ridge(other, head.first_outputs(own))
    weight, bias = fitted.to(weight), offset.to(bias)
    return replace(head, weight=weight, bias=bias) if head.hidden is None else replace(head, hidden=(weight, bias))


def left_out_logits(
    features: Tensor, head: ClassHead | None, own: Tensor | None, labels: Sequence[int], classes: int
) -> Tensor:
    """Return the logits of each sample by a head that was fitted to all others, exactly.

    The head is that of `carried_head` from a model with features `own`, or without one that of `ridge_head`.
    """
    if head is None or own is None:
        targets = torch.tensor(labels)
        left_out = _ridge(features, functional.one_hot(targets, classes))[2]
        return _scale(left_out, targets) * left_out
    return head.after_first(_ridge(features, head.first_outputs(own))[2])


def _scale(left_out: Tensor, targets: Tensor) -> float:
    """Return the factor that makes the ridge's predictions of left-out samples the likeliest logits."""
    return min(SCALES, key=lambda scale: float(functional.cross_entropy(scale * left_out, targets)))


def _ridge(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight, bias and leave-one-out predictions, in double, of the ridge that predicts left-out rows best."""
    x, y = features.double(), targets.to(features.device).double()
    x_mean, y_mean = x.mean(0), y.mean(0)
    u, s, v = torch.linalg.svd(x - x_mean, full_matrices=False)
    projected = u.T @ (y - y_mean)
    energy = s.square().sum() / max(1, len(x))
    if energy == 0:  # all samples have the same features
        return y.new_zeros(y.shape[1], x.shape[1]), y_mean, y_mean.expand_as(y)
    fits: list[tuple[float, Tensor, Tensor]] = []
    for strength in RIDGE_STRENGTHS:
        shrinkage = s.square() / (s.square() + strength * energy)
        leverage = (u.square() * shrinkage).sum(1, keepdim=True) + 1 / len(x)
        left_out = y - (y - y_mean - u @ (shrinkage[:, None] * projected)) / (1 - leverage).clamp(min=1e-9)
        error = float((y - left_out).square().sum())
        fits.append((error, v.T @ ((s / (s.square() + strength * energy))[:, None] * projected), left_out))
    _, weight, left_out = min(fits, key=lambda fit: fit[0])
    return weight.T, y_mean - weight.T @ x_mean, left_out


def logistic_head(features: Tensor, labels: Sequence[int], classes: int) -> ClassHead:
    """Fit a head by logistic regression on standardised features, and express it for the features as they are."""
    from sklearn.linear_model import LogisticRegression

    x = features.double().cpu()
    mean, spread = x.mean(0), x.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1.0)
    weight, bias = torch.zeros(classes, x.shape[1], dtype=x.dtype), torch.full((classes,), -1e4, dtype=x.dtype)
    present = sorted(set(labels))
    if len(present) == 1:
        bias[present[0]] = 0.0
        return ClassHead(weight.to(features.dtype), bias.to(features.dtype), fitted_to=len(labels))
    fitted = LogisticRegression(max_iter=1000).fit(((x - mean) / spread).numpy(), list(labels))
    rows, offset = torch.from_numpy(fitted.coef_), torch.from_numpy(fitted.intercept_)
    if len(present) == 2:  # scikit-learn fits one row for two classes
        rows, offset = torch.cat([-rows / 2, rows / 2]), torch.cat([-offset / 2, offset / 2])
    rows = rows / spread
    weight[present], bias[present] = rows, offset - rows @ mean
    return ClassHead(weight.to(features), bias.to(features), fitted_to=len(labels))


def in_form(head: ClassHead, place: HeadModules, width: int) -> ClassHead:
    """Rewrite a head for a model class: linear, or with a hidden layer of `width` units.

    A linear head passes through the hidden layer unchanged: through tanh where that is the identity, through relu as
    the difference of two units. A hidden layer is padded with unused units.
    """
    if head.hidden is not None:
        place.require_room(len(head.hidden[0]), head.activation, width)
    if place.activation is None:
        return head
    linear = head.hidden is None
    weight, inner, offset = _linear_layers(head, place.activation) if linear else (head.weight, *head.first_layer)
    missing = width - len(inner)
    if missing < 0:
        raise UnsuitableMethodError(
            f"the head's hidden layer has {len(inner)} units, and one of the target's class has room for {width}",
            "choose a wider target",
        )
    hidden = functional.pad(inner, (0, 0, 0, missing)), functional.pad(offset, (0, missing))
    padded = functional.pad(weight, (0, missing))
    return replace(head, weight=padded, hidden=hidden, activation=place.activation)


def _linear_layers(head: ClassHead, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Split a linear head: return the weight of its output layer, and weight and bias of its hidden layer."""
    weight, bias, unit = head.weight, torch.zeros_like(head.bias), torch.eye(len(head.weight)).to(head.weight)
    if activation == "tanh":
        return unit / TANH_LINEAR, TANH_LINEAR * weight, bias
    return torch.cat([unit, -unit], 1), torch.cat([weight, -weight]), torch.cat([bias, bias])
