"""Classification by a head on a model's features: fitted in closed form, carried over, or fitted by regression.

A head that the fine-tuned source has and the target lacks is carried by a map of the target's features to those that
it reads in the source.
Knows features and labels; not which tensors a head lives in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_bico.alignment.objectives.base import Classifier
from hf_bico.errors import UnsuitableMethodError

STRENGTHS = tuple(10.0**power for power in range(-6, 4))
"""Of the ridge, as shares of the features' mean energy."""
SCALES = (1.0, 2.0, 4.0, 8.0)
"""What the ridge's answers, which are near 0 and 1, may be multiplied by to become logits.

Where classes separate well, larger ones would be more likely; but then a few samples have all of the gradient.
"""
SMALL = 1e-3
"""So far from 0, tanh is the identity in single precision."""


@dataclass(frozen=True)
class ClassHead(Classifier):
    """logits = W f + b; or, with a hidden layer, f is first taken through it and its activation ("tanh" or "relu")."""

    weight: Tensor
    bias: Tensor
    hidden: tuple[Tensor, Tensor] | None = None
    activation: str | None = None

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [self.weight, self.bias, *(self.hidden or ())]

    @property
    def width(self) -> int:
        """Of the features that it reads."""
        return (self.weight if self.hidden is None else self.hidden[0]).shape[1]

    def logits(self, features: Tensor) -> Tensor:
        x = features.to(torch.promote_types(features.dtype, torch.float32))
        if self.hidden is not None and self.activation is not None:
            inner, offset = (part.to(x) for part in self.hidden)
            x = getattr(torch, self.activation)(x @ inner.T + offset)
        return x @ self.weight.to(x).T + self.bias.to(x)

    def in_order(self, rows: Sequence[int]) -> ClassHead:
        """The same head with its classes in another order."""
        return replace(self, weight=self.weight[list(rows)], bias=self.bias[list(rows)])

    def first_layer(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the layer that reads the features."""
        return (self.weight, self.bias) if self.hidden is None else self.hidden

    def reading_by(self, weight: Tensor, bias: Tensor) -> ClassHead:
        """The same head with another layer that reads the features."""
        if self.hidden is None:
            return replace(self, weight=weight, bias=bias)
        return replace(self, hidden=(weight, bias))


def ridge_head(features: Tensor, labels: Sequence[int], classes: int) -> ClassHead:
    """Ridge regression to the classes, in closed form: strength and scale by exact leave-one-out.

    Turning the features turns the head with them, so that two models that differ by a rotation get the same losses.
    """
    right = torch.tensor(labels, device=features.device)
    found = _ridge(features, torch.nn.functional.one_hot(right, classes))
    scale = _best_scale(found.left_out, right)
    return ClassHead((scale * found.weight).to(features.dtype), (scale * found.bias).to(features.dtype))


def carried_head(head: ClassHead, own: Tensor, other: Tensor) -> ClassHead:
    """The head of one model for the features of another one, from those of the same samples: W M, with its bias moved.

    The affine map M takes the other model's features to the head's own. It is ridge regression, its strength chosen by
    leave-one-out for what the head reads. No label is asked, and features that are turned get a head that is turned.
    """
    weight, bias = head.first_layer()
    read = own.double() @ weight.to(own).double().T + bias.to(own).double()
    found = _ridge(other, read)
    return head.reading_by(found.weight.to(weight), found.bias.to(bias))


@dataclass(frozen=True)
class _Ridge:
    weight: Tensor
    bias: Tensor
    left_out: Tensor
    """The prediction for each sample by all others."""


def _ridge(features: Tensor, answers: Tensor) -> _Ridge:
    """Linear regression in double precision, its strength that of the least leave-one-out error."""
    x, wanted = features.double(), answers.to(features.device).double()
    mean, usual = x.mean(0), wanted.mean(0)
    u, s, v = torch.linalg.svd(x - mean, full_matrices=False)
    targets = u.T @ (wanted - usual)
    size = s.square().sum() / max(1, len(x))
    if size == 0:  # all samples look the same
        return _Ridge(wanted.new_zeros(wanted.shape[1], x.shape[1]), usual, usual.expand_as(wanted))
    tried: list[tuple[float, Tensor, Tensor]] = []
    for strength in STRENGTHS:
        kept = s.square() / (s.square() + strength * size)
        # what the sample itself adds to its own prediction; the mean counts too
        itself = (u.square() * kept).sum(1, keepdim=True) + 1 / len(x)
        left_out = wanted - (wanted - usual - u @ (kept[:, None] * targets)) / (1 - itself).clamp(min=1e-9)
        error = float((wanted - left_out).square().sum())
        tried.append((error, v.T @ ((s / (s.square() + strength * size))[:, None] * targets), left_out))
    _, found, left_out = min(tried, key=lambda one: one[0])
    return _Ridge(found.T, usual - found.T @ mean, left_out)


def _best_scale(left_out: Tensor, labels: Tensor) -> float:
    def loss(scale: float) -> float:
        return float(torch.nn.functional.cross_entropy(scale * left_out, labels))

    return min(SCALES, key=loss)


def logistic_head(features: Tensor, labels: Sequence[int], classes: int) -> ClassHead:
    """Logistic regression on standardised features, written for the features as they are."""
    from sklearn.linear_model import LogisticRegression

    x = features.double().cpu()
    mean, spread = x.mean(0), x.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1.0)
    weight, bias = torch.zeros(classes, x.shape[1], dtype=x.dtype), torch.full((classes,), -1e4, dtype=x.dtype)
    present = sorted(set(labels))
    if len(present) == 1:
        bias[present[0]] = 0.0
        return ClassHead(weight.to(features.dtype), bias.to(features.dtype))
    fitted = LogisticRegression(max_iter=1000).fit(((x - mean) / spread).numpy(), list(labels))
    found, offset = torch.from_numpy(fitted.coef_), torch.from_numpy(fitted.intercept_)
    if len(present) == 2:  # one row tells two classes apart
        found, offset = torch.cat([-found / 2, found / 2]), torch.cat([-offset / 2, offset / 2])
    found = found / spread
    weight[present], bias[present] = found, offset - found @ mean
    return ClassHead(weight.to(features), bias.to(features))


def in_form(head: ClassHead, activation: str | None, width: int) -> ClassHead:
    """The head in the form that a model's class has: linear, or with a hidden layer of so many units.

    What is linear goes through the hidden layer unchanged: through tanh where that is the identity, through relu as
    the difference of its two signs. A hidden layer is padded by units that nothing reads.
    """
    if activation is None:
        if head.hidden is not None:
            raise UnsuitableMethodError(
                "the source's head has a hidden layer, and a head of the target's class has none",
                "fit one to the calibration samples with --probe",
            )
        return head
    if head.hidden is not None and head.activation != activation:
        raise UnsuitableMethodError(
            "the two models' classes have heads with different activations",
            "fit a head to the calibration samples with --probe",
        )
    inside = head if head.hidden is not None else _with_hidden(head, activation)
    if inside.hidden is not None and len(inside.hidden[0]) > width:
        raise UnsuitableMethodError(
            f"the head's hidden layer has {len(inside.hidden[0])} units, and one of the target's class has room for "
            f"{width}",
            "choose a wider target" if head.hidden is None else "fit a head to the calibration samples with --probe",
        )
    return inside if inside.hidden is None else _padded(inside, *inside.hidden, width)


def _with_hidden(head: ClassHead, activation: str) -> ClassHead:
    weight, bias = head.weight, torch.zeros_like(head.bias)
    if activation == "tanh":
        unit = torch.eye(len(weight)).to(weight) / SMALL
        return ClassHead(unit, head.bias, (SMALL * weight, bias), activation)
    unit = torch.eye(len(weight)).to(weight)
    return ClassHead(
        torch.cat([unit, -unit], 1), head.bias, (torch.cat([weight, -weight]), torch.cat([bias, bias])), activation
    )


def _padded(head: ClassHead, inner: Tensor, offset: Tensor, width: int) -> ClassHead:
    missing = width - len(inner)
    pad = torch.nn.functional.pad
    hidden = pad(inner, (0, 0, 0, missing)), pad(offset, (0, missing))
    return replace(head, weight=pad(head.weight, (0, missing)), hidden=hidden)
