"""Correct the final projection in closed form, so that predictions come closer to given ones (the readout).

Knows matrices and the zero-shot head; not where the samples come from, nor what the correction is added to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_bico.alignment.objectives.clip import ZeroShotHead
from hf_bico.errors import NonFiniteWeightsError

READOUT_STRENGTHS = tuple(10 ** (power / 2) for power in range(-8, 9))
"""Ridge strengths to try, as shares of the Gram matrix's mean diagonal."""

LEAST_GAIN = 0.01
"""By what share the distance of left-out samples must fall: the best of many ridges gains less than this by chance."""

CLASS_CUT = 1e-5
"""Directions in which the classes differ by less than this share of their norm count as rounding."""


@dataclass(frozen=True)
class Readout:
    """A change of the final projection W, and its effect on left-out samples."""

    change: Tensor
    """(embedding, width), float64, to be added to W; zero where it was not accepted."""
    accepted: bool
    """Whether the change brings left-out samples clearly closer to the desired logits."""
    strength: float | None
    """The ridge, as a share of the Gram matrix's mean diagonal; None where the change was not accepted."""
    before: float
    """Mean square of (desired - own) logits, centred over the classes, without the change."""
    left_out: float
    """The same for left-out samples, with the change that the others give at the best strength."""


@dataclass(frozen=True)
class ReadoutProblem:
    """What a readout is solved from: the inputs of the final projection W, a row each, and the desired logits.

    Rows of equal origin are copies of one sample. If there are `judges`, these origins alone say what a readout from
    all rows is worth, by two that leave half of them out each.
    """

    hidden: Tensor
    weight: Tensor
    head: ZeroShotHead
    desired: Tensor
    origins: tuple[int, ...]
    judges: tuple[int, ...] = ()

    def solve(self, rows: Sequence[int] | None = None) -> Readout:
        """Solve for the change of W, from some rows alone if they are given."""
        if rows is None:
            return solve_readout(self.hidden, self.weight, self.head, self.desired, self.origins, self.judges)
        chosen = list(rows)
        origins = [self.origins[row] for row in chosen]
        return solve_readout(self.hidden[chosen], self.weight, self.head, self.desired[chosen], origins)


@torch.no_grad()
def solve_readout(
    hidden: Tensor,
    weight: Tensor,
    head: ZeroShotHead,
    desired: Tensor,
    origins: Sequence[int],
    judges: Collection[int] = (),
) -> Readout:
    """Return the change of W, (embedding, width), that moves the logits of f = W h towards `desired`.

    The rows of `hidden` are h, the inputs of W. For each sample, T holds the smallest shift of its feature that gives
    the desired logits to first order; a ridge regression over all samples, dW = T^T (H H^T + lambda I)^-1 H, fits them
    with one matrix. Lambda is chosen by the true logits of left-out samples. Rows of equal origin are copies of one
    sample and are left out together; with `judges`, half of these origins are, and no others are looked at. Where
    no lambda is clearly better than no change, or where nothing can be left out, the change is zero.

    >>> head = ZeroShotHead(torch.eye(2), torch.tensor(10.0), None)
    >>> hidden, weight = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]).repeat(9, 1), torch.ones(2, 3)
    >>> readout = solve_readout(hidden, weight, head, 5 * hidden[:, :2], range(18))
    >>> readout.accepted, readout.left_out < 0.01 * readout.before
    (True, True)
    >>> head.logits(hidden[:2] @ (weight + readout.change.float()).T).argmax(1)
    tensor([0, 1])
    """
    hidden, weight, desired = (tensor.to(hidden.device, torch.float64) for tensor in (hidden, weight, desired))
    classes, scale = head.classes.to(hidden), head.scale.to(hidden)
    head = ZeroShotHead(classes, scale, None if head.bias is None else head.bias.to(hidden))
    features = hidden @ weight.T
    if not all(bool(tensor.isfinite().all()) for tensor in (hidden, features, head.logits(features), desired)):
        raise NonFiniteWeightsError(
            "features or logits of the calibration samples hold NaN or infinite values",
            "check the models' weights, or run without the readout",
        )
    looked_at = [row for row, origin in enumerate(origins) if origin in judges or not judges]
    origins = [-1 - origin % 2 if origin in judges else origin for origin in origins]
    wanted = desired[looked_at]
    before = _distance(head, features[looked_at], wanted)
    none = Readout(torch.zeros_like(weight), accepted=False, strength=None, before=before, left_out=before)
    if len(set(origins)) < 2 or not hidden.any():
        return none
    shifts, ridge = desired_shifts(features, head, desired), Ridge.of(hidden)
    left_out = {}
    for strength in READOUT_STRENGTHS:
        predicted = shifts - ridge.left_out_residuals(shifts, strength, origins)
        left_out[strength] = _distance(head, (features + predicted)[looked_at], wanted)
    best = min(READOUT_STRENGTHS, key=left_out.__getitem__)
    if left_out[best] >= (1 - LEAST_GAIN) * before:
        return replace(none, left_out=left_out[best])
    return Readout(ridge.solution(shifts, best).T, accepted=True, strength=best, before=before, left_out=left_out[best])


def desired_shifts(features: Tensor, head: ZeroShotHead, desired: Tensor) -> Tensor:
    """Return the smallest shift of each feature f that gives the desired logits, up to a constant, to first order.

    This is pinv(J) r with J = s P H (I - u u^T) / |f| and r = P (desired - logits), where u = f / |f|, s is the logit
    scale, the rows of H are the classes and P centres over the classes. One decomposition of s P H = U S V^T serves
    all samples, and no J is formed.
    """
    lengths = features.norm(dim=1, keepdim=True)
    directions = features / lengths.clamp_min(torch.finfo(features.dtype).tiny)  # u; zero for a feature of zero
    left, values, right = torch.linalg.svd(head.scale * _centred(head.classes.T).T, full_matrices=False)
    kept = values > CLASS_CUT * (head.scale * head.classes).norm()
    values, right = values[kept], right[kept]
    step = (desired - head.logits(features)) @ left[:, kept] / values  # S^-1 U^T r: the desired V^T du
    along = directions @ right.T  # V^T u
    outside = directions - along @ right  # the part of u that is orthogonal to all classes
    share = outside.square().sum(1, keepdim=True)
    # du must be orthogonal to u: the step along u is balanced outside the classes' span, where logits do not change
    balanced = step @ right - _ratio((along * step).sum(1, keepdim=True), share) * outside
    # and where u lies in that span, the step is replaced by the closest one orthogonal to u
    steep = along / values.square()
    excess = _ratio((along * step).sum(1, keepdim=True), (along * steep).sum(1, keepdim=True))
    shifts: Tensor = lengths * torch.where(share > CLASS_CUT**2, balanced, (step - excess * steep) @ right)
    return shifts


@dataclass(frozen=True)
class Ridge:
    """Ridge regressions from the rows H = U S V^T, of all strengths by one decomposition.

    Lambda is `strength` times the mean of the diagonal of K = H H^T, so that it does not depend on the rows' scale.
    """

    left: Tensor
    values: Tensor
    right: Tensor

    @classmethod
    def of(cls, hidden: Tensor) -> Ridge:
        return cls(*torch.linalg.svd(hidden, full_matrices=False))

    def _share(self, strength: float) -> Tensor:
        """Return S^2 / (S^2 + lambda): how much of each direction is fitted."""
        squares = self.values.square()
        return squares / (squares + strength * squares.sum() / len(self.left))

    def solution(self, targets: Tensor, strength: float) -> Tensor:
        """Return W^T = H^T (K + lambda I)^-1 T."""
        inner = _ratio(self._share(strength), self.values)
        fitted: Tensor = self.right.T @ (inner[:, None] * (self.left.T @ targets))
        return fitted

    def left_out_residuals(self, targets: Tensor, strength: float, origins: Sequence[int]) -> Tensor:
        """Return the residual of each row under the ridge over all rows except those of its own origin.

        Exact and without solving again: with the hat matrix A = K (K + lambda I)^-1 and a group g of rows of one
        origin, they are (I - A_gg)^-1 (T - A T)_g.
        """
        share = self._share(strength)
        solved = targets - self.left @ (share[:, None] * (self.left.T @ targets))
        residuals = torch.empty_like(solved)
        for equal in _groups_by_size(origins, len(targets)):  # all groups of one size in one batch
            rows = torch.tensor(equal, device=targets.device)
            some = self.left[rows]
            inside = torch.eye(rows.shape[1]).to(some) - (some * share) @ some.mT
            residuals[rows] = torch.linalg.solve(inside, solved[rows])
        return residuals


def _groups_by_size(origins: Sequence[int], rows: int) -> Iterable[list[list[int]]]:
    """Return the rows of each origin, groups of equal size together."""
    groups, by_size = defaultdict[int, list[int]](list), defaultdict[int, list[list[int]]](list)
    for row, origin in zip(range(rows), origins, strict=True):
        groups[origin].append(row)
    for group in groups.values():
        by_size[len(group)].append(group)
    return by_size.values()


def _distance(head: ZeroShotHead, features: Tensor, desired: Tensor) -> float:
    return float(_centred(desired - head.logits(features)).square().mean())


def _centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Divide, with 0 / 0 = 0."""
    return torch.where(below > 0, above / below.where(below > 0, torch.ones_like(below)), torch.zeros_like(above))
