"""Scale, veto, outlook and walk again, slow and literal: plain Python numbers, weights really changed, and one forward
pass of one sample at a time. Shares no code with the package."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

GRID = [0.0] + [2 ** (j / 2) for j in range(-10, 3)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def standard_error(values: Sequence[float]) -> float:
    middle = mean(values)
    variance = sum((value - middle) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance) / math.sqrt(len(values))


def divergence(p: Sequence[float], logits: Sequence[float]) -> float:
    """KL(p || softmax(logits))."""
    top = max(logits)
    total = math.log(sum(math.exp(value - top) for value in logits)) + top
    return sum(share * (math.log(share) - (value - total)) for share, value in zip(p, logits, strict=True) if share > 0)


def expected_accuracy(p: Sequence[float], logits: Sequence[float]) -> float:
    best = max(range(len(logits)), key=lambda place: (logits[place], -place))
    return p[best]


def chosen(losses: dict[float, Sequence[float]], errors: float) -> float:
    """S: the smallest alpha that is not clearly worse than the best."""
    best = min(sorted(losses), key=lambda alpha: mean(losses[alpha]))
    for alpha in sorted(losses):
        above = [one - other for one, other in zip(losses[alpha], losses[best], strict=True)]
        if mean(above) <= errors * standard_error(above):
            return alpha
    raise AssertionError("the best is not above itself")


def passes(gains: Sequence[float]) -> bool:
    """V."""
    return mean(gains) > 0.5 * standard_error(gains)


def changed(model: nn.Module, changes: dict[str, Tensor], alpha: float) -> Any:
    """A copy of the model whose weights are really others."""
    copy = deepcopy(model)
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            if name in changes:
                parameter += alpha * changes[name].to(parameter)
    return copy


def losses_at(
    model: nn.Module, changes: dict[str, Tensor], loss: Callable[[Any, int], float], samples: int
) -> dict[float, list[float]]:
    """Of every sample, alone, with the model changed by every alpha of the grid."""
    found: dict[float, list[float]] = {}
    for alpha in GRID:
        copy = changed(model, changes, alpha)
        with torch.no_grad():
            found[alpha] = [loss(copy, sample) for sample in range(samples)]
    return found


def left_out_predictions(features: Tensor, targets: Tensor) -> list[list[float]]:
    """Of every sample, by a ridge regression that was fitted to all others; the strength that does best in this."""
    energy = float((features - features.mean(0)).square().sum()) / len(features)
    best: tuple[float, list[list[float]]] | None = None
    for power in range(-6, 4):
        found = []
        for sample in range(len(features)):
            rest = [place for place in range(len(features)) if place != sample]
            x, y = features[rest], targets[rest]
            x_mean, y_mean = x.mean(0), y.mean(0)
            gram = (x - x_mean).T @ (x - x_mean) + 10.0**power * energy * torch.eye(x.shape[1], dtype=x.dtype)
            weight = torch.linalg.solve(gram, (x - x_mean).T @ (y - y_mean))
            found.append(((features[sample] - x_mean) @ weight + y_mean).tolist())
        error = float((torch.tensor(found, dtype=targets.dtype) - targets).square().sum())
        if best is None or error < best[0]:
            best = error, found
    assert best is not None
    return best[1]
