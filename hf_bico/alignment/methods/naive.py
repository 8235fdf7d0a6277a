"""Naive, gradfix.

GradFix: the task vector as it is, but only where its sign agrees with the target's own negative gradient.

The gradient is the mean over the samples, or the sign that most of the samples' own gradients have.

The task vector added as it is: cropped where the target is narrower, padded with zeros where it is wider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_bico.alignment.methods.base import Carrier, MethodInputs, SiteDelta, TransportedSite, require_same_shapes
from hf_bico.alignment.statistics import Kind, ParameterGradient
from hf_bico.models.layout import Layout, SitePair
from hf_bico.models.low_rank import Change, Factors, dense


class GradFix(Carrier):
    kinds = frozenset({Kind.TARGET_GRADIENTS})
    keeps_factors = False
    by_site = True
    _gradients: Mapping[str, ParameterGradient]

    def require(self, source: Layout, target: Layout, pairs: Sequence[SitePair]) -> None:
        require_same_shapes("gradfix", pairs)

    def prepare(self, pairs: Sequence[SitePair], seen: MethodInputs) -> None:
        self._gradients = {pair.target.name: seen.statistics.target_gradients[pair.target.name] for pair in pairs}

    def carry(self, pair: SitePair, delta: SiteDelta) -> TransportedSite:
        found = self._gradients[pair.target.name]
        of_weight, of_bias = found.majority_signs if self.settings.signs == "majority" else found.mean_signs
        weight = None if delta.weight is None else dense(delta.weight)
        return TransportedSite(SiteDelta(_masked(weight, of_weight), _masked(delta.bias, of_bias)))


def _masked(change: Tensor | None, signs: Tensor) -> Tensor | None:
    """The change where a step down the gradient has its sign; zero elsewhere."""
    if change is None:
        return None
    change = change.to(signs.device)
    return torch.where(change.sign() * signs.to(change.dtype) < 0, change, 0.0)


class Naive(Carrier):
    def prepare(self, pairs: Sequence[SitePair], seen: MethodInputs) -> None:
        """Nothing to prepare: no sample is looked at."""

    def carry(self, pair: SitePair, delta: SiteDelta) -> TransportedSite:
        rows, columns = pair.target.shape
        weight = None if delta.weight is None else _fit_weight(delta.weight, rows, columns)
        bias = None if delta.bias is None else _fit(delta.bias, (rows,))
        return TransportedSite(SiteDelta(weight, bias))


def _fit_weight(change: Change, rows: int, columns: int) -> Change:
    if isinstance(change, Factors):
        return Factors(_fit(change.left, (rows, change.rank)), _fit(change.right, (change.rank, columns)))
    return _fit(change, (rows, columns))


def _fit(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    fitted = tensor.new_zeros(shape)
    shared = tuple(slice(min(have, want)) for have, want in zip(tensor.shape, shape, strict=True))
    fitted[shared] = tensor[shared]
    return fitted
