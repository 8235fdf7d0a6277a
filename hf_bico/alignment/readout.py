"""The readout: the final projection's change that brings a model's predictions closer to wanted ones, in closed form.

Knows matrices and the class head only: not where the samples come from, nor what the change is added to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_bico.alignment.objectives.clip import ZeroShotHead
from hf_bico.errors import NonFiniteWeightsError

STRENGTHS = tuple(10 ** (power / 2) for power in range(-8, 9))
"""The ridges that are tried, as shares of the Gram matrix's mean diagonal."""

LEAST_GAIN = 0.01
"""By what share the distance of left-out samples must fall: less is what the best of many ridges does by chance."""

CUT = 1e-5
"""Directions in which the classes differ by less than this share of their norm are taken for rounding."""


@dataclass(frozen=True)
class Readout:
    """A change of the final projection W, and what it does to samples that it was not made from."""

    change: Tensor
    """(embedding, width), float64, to be added to W; zero where it was not accepted."""
    accepted: bool
    """Whether the change brings left-out samples clearly closer to what is wanted."""
    strength: float | None
    """The ridge, as a share of the Gram matrix's mean diagonal; none where the change was not accepted."""
    before: float
    """The mean square of (wanted - own) logits, each centred over the classes, without the change."""
    left_out: float
    """The same for samples left out, each by the change that the others make, at the best strength."""


@torch.no_grad()
def solve_readout(
    hidden: Tensor, weight: Tensor, head: ZeroShotHead, wanted: Tensor, origins: Sequence[int]
) -> Readout:
    """The change of W, of shape (embedding, width), that moves the logits of f = W h towards `wanted`.

    The rows of `hidden` are h, the inputs of W. Each sample asks for the smallest move t of its own feature that would
    give the wanted logits to first order; one ridge over all samples, dW = T^T (H H^T + lambda I)^-1 H, makes one
    matrix of them. Lambda is the one under which samples left out come closest to what is wanted, by their true logits
    and not to first order. Rows of equal origin are copies of one sample and are left out together. Where no lambda
    does clearly better than no change, and where nothing can be left out, the change is zero.

    >>> head = ZeroShotHead(torch.eye(2), torch.tensor(10.0), None)
    >>> hidden, weight = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]).repeat(9, 1), torch.ones(2, 3)
    >>> found = solve_readout(hidden, weight, head, 5 * hidden[:, :2], range(18))
    >>> found.accepted, found.left_out < 0.01 * found.before
    (True, True)
    >>> head.logits(hidden[:2] @ (weight + found.change.float()).T).argmax(1)
    tensor([0, 1])
    """
    hidden, weight, wanted = (tensor.to(hidden.device, torch.float64) for tensor in (hidden, weight, wanted))
    head = _in_double(head, hidden.device)
    features, gram = hidden @ weight.T, hidden @ hidden.T
    if not all(bool(tensor.isfinite().all()) for tensor in (gram, features, head.logits(features), wanted)):
        raise NonFiniteWeightsError(
            "features or logits of the calibration samples hold NaN or infinite values",
            "check the models' weights, or run without the readout",
        )
    before = _distance(head, features, wanted)
    none = Readout(torch.zeros_like(weight), accepted=False, strength=None, before=before, left_out=before)
    if len(set(origins)) < 2 or not gram.any():
        return none
    moves = wanted_moves(features, head, wanted)
    left_out = {}
    for strength in STRENGTHS:
        foreseen = moves - left_out_residuals(gram, moves, strength, origins)
        left_out[strength] = _distance(head, features + foreseen, wanted)
    best = min(STRENGTHS, key=left_out.__getitem__)
    if left_out[best] >= (1 - LEAST_GAIN) * before:
        return Readout(none.change, accepted=False, strength=None, before=before, left_out=left_out[best])
    change = torch.cholesky_solve(moves, _factor(gram, best)).T @ hidden
    return Readout(change, accepted=True, strength=best, before=before, left_out=left_out[best])


def wanted_moves(features: Tensor, head: ZeroShotHead, wanted: Tensor) -> Tensor:
    """The smallest move of each feature f that gives the wanted logits, up to a constant, to first order.

    This is pinv(J) r with J = s P H (I - u u^T) / |f| and r = P (wanted - logits), where u = f / |f|, s is the logit
    scale, the rows of H are the classes and P centres over the classes. One decomposition of s P H = U S V^T serves
    all samples, and no J is formed.
    """
    lengths = features.norm(dim=1, keepdim=True)
    directions = features / lengths.clamp_min(torch.finfo(features.dtype).tiny)  # u; zero for a feature of zero
    left, values, right = torch.linalg.svd(head.scale * _centred(head.classes.T).T, full_matrices=False)
    seen = values > CUT * (head.scale * head.classes).norm()
    values, right = values[seen], right[seen]
    wished = (wanted - head.logits(features)) @ left[:, seen] / values  # S^-1 U^T r: the wanted part of V^T du
    along = directions @ right.T  # V^T u
    unseen = directions - along @ right  # what of u no class sees
    share = unseen.square().sum(1, keepdim=True)
    # a direction moves at right angles to itself: what is wished along u is made up for where no class sees it
    turned = wished @ right - _ratio((along * wished).sum(1, keepdim=True), share) * unseen
    # and where the classes see all of u, the closest of those wishes that are at right angles to u
    steep = along / values.square()
    excess = _ratio((along * wished).sum(1, keepdim=True), (along * steep).sum(1, keepdim=True))
    moves: Tensor = lengths * torch.where(share > CUT**2, turned, (wished - excess * steep) @ right)
    return moves


def left_out_residuals(gram: Tensor, wanted_rows: Tensor, strength: float, origins: Sequence[int]) -> Tensor:
    """By how much each row is missed by the ridge over all rows but those of its own origin.

    Exact and without solving again: with B = (K + lambda I)^-1 and a group g, the rows are B_gg^-1 (B T)_g. Lambda is
    `strength` times the mean of K's diagonal.
    """
    inverse = torch.cholesky_inverse(_factor(gram, strength))
    solved = inverse @ wanted_rows
    groups = defaultdict(list)
    for row, origin in zip(range(len(wanted_rows)), origins, strict=True):
        groups[origin].append(row)
    by_size = defaultdict(list)
    for group in groups.values():
        by_size[len(group)].append(group)
    residuals = torch.empty_like(solved)
    for equal in by_size.values():  # all groups of one size in one batch
        rows = torch.tensor(equal, device=gram.device)
        residuals[rows] = torch.linalg.solve(inverse[rows[:, :, None], rows[:, None, :]], solved[rows])
    return residuals


def _factor(gram: Tensor, strength: float) -> Tensor:
    """The Cholesky factor of K + lambda I."""
    ridge = strength * gram.diagonal().mean()
    factor: Tensor = torch.linalg.cholesky(gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    return factor


def _distance(head: ZeroShotHead, features: Tensor, wanted: Tensor) -> float:
    return float(_centred(wanted - head.logits(features)).square().mean())


def _centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """The quotient, and zero over zero."""
    return torch.where(below > 0, above / below.where(below > 0, torch.ones_like(below)), torch.zeros_like(above))


def _in_double(head: ZeroShotHead, device: torch.device) -> ZeroShotHead:
    def double(tensor: Tensor) -> Tensor:
        return tensor.to(device, torch.float64)

    return ZeroShotHead(double(head.classes), double(head.scale), None if head.bias is None else double(head.bias))
