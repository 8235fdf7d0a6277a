"""Carry a task vector without maps: as it is (`Naive`), or masked by gradient signs (`GradFix`).

Knows sites and tensors; not models or samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_bico.alignment.methods.base import Carrier, MethodInputs, SiteDelta, TransportedSite
from hf_bico.alignment.statistics import Kind, ParameterGradient
from hf_bico.errors import UnsuitableMethodError
from hf_bico.models.layout import Layout, SitePair
from hf_bico.models.low_rank import Factors, dense


class GradFix(Carrier):
    """Keeps the task vector only where its sign agrees with the target's negative gradient.

    The gradient's sign is that of the mean over the samples, or that of the majority of the samples.
    """

    kinds = frozenset({Kind.TARGET_GRADIENTS})
    keeps_factors = False
    by_site = True
    _gradients: Mapping[str, ParameterGradient]

    def require(self, source: Layout, target: Layout, pairs: Sequence[SitePair]) -> None:
        for pair in pairs:
            if pair.source.shape != pair.target.shape:
                shapes = [" x ".join(map(str, site.shape)) for site in (pair.source, pair.target)]
                raise UnsuitableMethodError(
                    f"gradfix needs two models of one architecture, and '{pair.target.name}' is {shapes[0]} in the "
                    f"source and {shapes[1]} in the target",
                    "use a method that finds maps between other shapes, such as --method bico",
                )

    def prepare(self, pairs: Sequence[SitePair], inputs: MethodInputs) -> None:
        self._gradients = {pair.target.name: inputs.statistics.target_gradients[pair.target.name] for pair in pairs}

    def carry(self, pair: SitePair, delta: SiteDelta) -> TransportedSite:
        gradient = self._gradients[pair.target.name]
        weight_signs, bias_signs = gradient.majority_signs if self.settings.signs == "majority" else gradient.mean_signs
        weight = None if delta.weight is None else dense(delta.weight)
        return TransportedSite(SiteDelta(_masked(weight, weight_signs), _masked(delta.bias, bias_signs)))


def _masked(change: Tensor | None, signs: Tensor) -> Tensor | None:
    """Zero the change where it does not have the sign of a step down the gradient."""
    if change is None:
        return None
    change = change.to(signs.device)
    return torch.where(change.sign() * signs.to(change.dtype) < 0, change, 0.0)


class Naive(Carrier):
    """Adds the task vector as it is: cropped where the target is narrower, zero-padded where it is wider."""

    def prepare(self, pairs: Sequence[SitePair], inputs: MethodInputs) -> None:
        """Do nothing: this method uses no statistics."""

    def carry(self, pair: SitePair, delta: SiteDelta) -> TransportedSite:
        rows, columns = pair.target.shape
        weight = delta.weight
        if isinstance(weight, Factors):
            weight = Factors(_fit(weight.left, (rows, weight.rank)), _fit(weight.right, (weight.rank, columns)))
        elif weight is not None:
            weight = _fit(weight, (rows, columns))
        bias = None if delta.bias is None else _fit(delta.bias, (rows,))
        return TransportedSite(SiteDelta(weight, bias))


def _fit(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    fitted = tensor.new_zeros(shape)
    overlap = tuple(slice(min(have, want)) for have, want in zip(tensor.shape, shape, strict=True))
    fitted[overlap] = tensor[overlap]
    return fitted
