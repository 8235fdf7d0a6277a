"""GradFix: the task vector as it is, but only where its sign agrees with the target's own negative gradient.

The gradient is the mean over the samples, or the sign that most of the samples' own gradients have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_bico.methods.base import Carried, Carrier, Seen, SiteDelta, require_same_shapes
from hf_bico.models.layout import Layout, SitePair
from hf_bico.models.low_rank import dense
from hf_bico.statistics import Kind, ParameterGradient


class GradFix(Carrier):
    kinds = frozenset({Kind.TARGET_GRADIENTS})
    keeps_factors = False
    by_site = True
    _gradients: Mapping[str, ParameterGradient]

    def require(self, source: Layout, target: Layout, pairs: Sequence[SitePair]) -> None:
        require_same_shapes("gradfix", pairs)

    def prepare(self, pairs: Sequence[SitePair], seen: Seen) -> None:
        self._gradients = {pair.target.name: seen.statistics.target_gradients[pair.target.name] for pair in pairs}

    def carry(self, pair: SitePair, delta: SiteDelta) -> Carried:
        found = self._gradients[pair.target.name]
        of_weight, of_bias = found.majority_signs if self.settings.signs == "majority" else found.mean_signs
        weight = None if delta.weight is None else dense(delta.weight)
        return Carried(SiteDelta(_masked(weight, of_weight), _masked(delta.bias, of_bias)))


def _masked(change: Tensor | None, signs: Tensor) -> Tensor | None:
    """The change where a step down the gradient has its sign; zero elsewhere."""
    if change is None:
        return None
    change = change.to(signs.device)
    return torch.where(change.sign() * signs.to(change.dtype) < 0, change, 0.0)
