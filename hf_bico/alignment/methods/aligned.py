"""Bico, bico-fisher, bico-path, theseus and the ablations.

What the methods that turn a change through two maps have in common: tau_B = R_out^T tau_A R_in.

Which rows the maps line up is all that these methods differ in. A low-rank tau_A = B A stays low-rank: its factors
become R_out^T B and A R_in.

BiCo without labels, every label counted by how likely it is.

R_out lines up the gradients with every label in turn, weighted by the fine-tuned source's prediction p, the same for
both models: polar(sum_i sum_c p(c | x_i) g_A(x_i, c)^T g_B(x_i, c)). R_in lines up the inputs, each row weighted by the
norms of the layer's own gradients there: polar(sum_t |g_A,t| |g_B,t| x_A,t^T x_B,t).

`bico-fisher` along the way from base to fine-tuned: the maps are found anew before each part of the change.

tau_B^0 = 0; for k = 0 .. K-1, maps at (theta_A + (k/K) tau_A, theta_B + tau_B^k), and
tau_B^{k+1} = tau_B^k + R_out^T (tau_A / K) R_in. Nothing is trained: K passes instead of one. The class embeddings
that give the loss stay those of the pretrained models all along.

Bilinear Coordinate Alignment: R_in from the layers' inputs, R_out from the gradients at their outputs.

BiCo with gradients on both sides: R_in from what each layer passes back to its inputs, g W, and R_out from g.

Half of BiCo: only the inputs are lined up; the output side is padded or cropped.

Half of BiCo: only the output gradients are lined up; the input side is padded or cropped.

THESEUS: activations on both sides, inputs and outputs as the layers give them; no labels, no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_bico.alignment.methods.base import Carrier, MapFacts, MethodInputs, SiteDelta, TransportedSite
from hf_bico.alignment.procrustes import OrthogonalMap, polar
from hf_bico.alignment.statistics import Kind, key_of
from hf_bico.models.layout import SitePair
from hf_bico.models.low_rank import between, energy

Maps = tuple[OrthogonalMap | None, OrthogonalMap | None]


class Aligner(Carrier):
    """R_in from rows of `input_kind` and R_out from rows of `output_kind`; a side without a kind is padded or cropped.

    `maps` holds (R_in, R_out) by target site for the pairs that were prepared last.
    """

    by_site = True
    input_kind: ClassVar[Kind | None]
    output_kind: ClassVar[Kind | None]

    def __init_subclass__(cls) -> None:
        cls.kinds = frozenset(kind for kind in (cls.input_kind, cls.output_kind) if kind is not None)

    def prepare(self, pairs: Sequence[SitePair], seen: MethodInputs) -> None:
        wanted = {(kind, key_of(kind, pair)): seen.statistics.of(kind, pair) for pair in pairs for kind in self.kinds}
        sums = list(wanted.values())
        norms = torch.stack([one.norms for one in sums]).tolist()
        found = polar([one.evidence for one in sums], norms, self.settings.completion)
        maps: dict[Any, OrthogonalMap] = dict(zip(wanted, found, strict=True))

        def of(kind: Kind | None, pair: SitePair) -> OrthogonalMap | None:
            return None if kind is None else maps[kind, key_of(kind, pair)]

        self.maps: dict[str, Maps] = {
            pair.target.name: (of(self.input_kind, pair), of(self.output_kind, pair)) for pair in pairs
        }

    def carry(self, pair: SitePair, delta: SiteDelta) -> TransportedSite:
        maps = self.maps[pair.target.name]
        delta = delta.to(next(one.matrix.device for one in maps if one is not None))
        (r_in, seen_in), (r_out, seen_out) = (
            _matrices(found, pair.source.shape[axis], pair.target.shape[axis], maps)
            for found, axis in zip(maps, (1, 0), strict=True)
        )
        weight = bias = unseen = None
        if delta.weight is not None:
            weight = between(r_out.T, delta.weight, r_in)
            dropped = self.settings.completion == "drop"
            seen = weight if dropped else between(seen_out.T, delta.weight, seen_in)
            if None not in maps:  # what is cropped was not looked for
                unseen = max(0.0, 1.0 - energy(seen) / energy(delta.weight))
        if delta.bias is not None:
            bias = delta.bias.to(r_out) @ r_out
        of_input, of_output = (None if found is None else MapFacts(found.rank, found.score) for found in maps)
        return TransportedSite(SiteDelta(weight, bias), of_input, of_output, unseen)


def _matrices(found: OrthogonalMap | None, source: int, target: int, maps: Maps) -> tuple[Tensor, Tensor]:
    """The map and its seen part; without one, the identity, cut or padded with zeros, on the other map's device."""
    if found is not None:
        return found.matrix, found.seen
    other = next(one for one in maps if one is not None)
    identity = torch.eye(source, target, dtype=other.matrix.dtype, device=other.matrix.device)
    return identity, identity


class BicoFisher(Aligner):
    needs_predictions = True
    input_kind = Kind.WEIGHTED_INPUTS
    output_kind = Kind.EXPECTED_GRADIENTS


class BicoPath(BicoFisher):
    @property
    def steps(self) -> int:
        return self.settings.path_steps


class Bico(Aligner):
    input_kind = Kind.INPUTS
    output_kind = Kind.GRADIENTS


class GradientOnly(Aligner):
    input_kind = Kind.INPUT_GRADIENTS
    output_kind = Kind.GRADIENTS


class InputOnly(Aligner):
    input_kind = Kind.INPUTS
    output_kind = None


class OutputOnly(Aligner):
    input_kind = None
    output_kind = Kind.GRADIENTS


class Theseus(Aligner):
    input_kind = Kind.INPUTS
    output_kind = Kind.OUTPUTS
