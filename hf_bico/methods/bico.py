"""Bilinear Coordinate Alignment: tau_B = R_out^T tau_A R_in, with R_in from inputs, R_out from output gradients.

A low-rank tau_A = B A stays low-rank: its factors become R_out^T B and A R_in.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_bico.factors import between, energy
from hf_bico.methods.base import Carried, Method, SiteDelta
from hf_bico.procrustes import OrthogonalMap, polar
from hf_bico.settings import Settings
from hf_bico.sites import SitePair
from hf_bico.statistics import Statistics


class Bico(Method):
    """`maps` holds (R_in, R_out) by target site once prepared."""

    needs_statistics = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.maps: dict[str, tuple[OrthogonalMap, OrthogonalMap]] = {}

    def prepare(self, pairs: Sequence[SitePair], statistics: Statistics | None) -> None:
        if statistics is None:
            raise ValueError("bico needs the statistics of a calibration pass")
        inputs = list(statistics.inputs)
        covariances = [statistics.inputs[key] for key in inputs]
        covariances += [statistics.of_gradient(pair) for pair in pairs]
        maps = polar([c.total for c in covariances], [c.norms for c in covariances], self.settings.completion)
        input_map = dict(zip(inputs, maps[: len(inputs)], strict=True))
        self.maps = {
            pair.target.name: (input_map[pair.source.input, pair.target.input], output_map)
            for pair, output_map in zip(pairs, maps[len(inputs) :], strict=True)
        }

    def carry(self, pair: SitePair, delta: SiteDelta) -> Carried:
        r_in, r_out = self.maps[pair.target.name]
        weight = bias = unseen = None
        if delta.weight is not None:
            weight = between(r_out.matrix.T, delta.weight, r_in.matrix)
            dropped = self.settings.completion == "drop"
            seen = weight if dropped else between(r_out.seen.T, delta.weight, r_in.seen)
            unseen = max(0.0, 1.0 - energy(seen) / energy(delta.weight))
        if delta.bias is not None:
            bias = delta.bias.to(r_out.matrix) @ r_out.matrix
        return Carried(SiteDelta(weight, bias), r_in, r_out, unseen)
