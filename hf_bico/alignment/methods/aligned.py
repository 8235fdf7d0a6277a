"""Transport changes by two orthogonal maps per site: tau_B = R_out^T tau_A R_in.

The methods differ only in the rows that the maps align. A low-rank tau_A = B A stays low-rank: its factors become
R_out^T B and A R_in. Knows statistics and maps; not models or samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_bico.alignment.methods.base import Carrier, MapQuality, MethodInputs, SiteDelta, TransportedSite
from hf_bico.alignment.procrustes import OrthogonalMap, polar
from hf_bico.alignment.statistics import CrossCovariance, Kind, key_of
from hf_bico.models.layout import SitePair
from hf_bico.models.low_rank import between, energy


class Aligner(Carrier):
    """Aligns rows of `input_kind` for R_in and of `output_kind` for R_out; a side without a kind is padded or cropped.

    `maps` holds (R_in, R_out) of the pairs that were prepared last, by target site.
    """

    by_site = True
    input_kind: ClassVar[Kind | None]
    output_kind: ClassVar[Kind | None]
    early_output_kind: ClassVar[Kind | None] = None
    """The kind for R_out in the blocks before the last one, if it is another."""

    def __init_subclass__(cls) -> None:
        kinds = (cls.input_kind, cls.output_kind, cls.early_output_kind)
        cls.kinds = frozenset(kind for kind in kinds if kind is not None)

    def prepare(self, pairs: Sequence[SitePair], inputs: MethodInputs) -> None:
        def output_kind(pair: SitePair) -> Kind | None:
            if self.early_output_kind is None or pair.target.tower or pair.target.block is None:
                return self.output_kind
            is_last = pair.target.block == inputs.target.layout.blocks - 1
            return self.output_kind if is_last else self.early_output_kind

        wanted = {pair.target.name: (self.input_kind, output_kind(pair)) for pair in pairs}
        sums = {
            (kind, key_of(kind, pair)): inputs.statistics.of(kind, pair)
            for pair in pairs
            for kind in wanted[pair.target.name]
            if kind is not None
        }
        others = self._solved({key: one.mispaired for key, one in sums.items() if one.mispaired is not None})
        # a lone row meets no other: then nothing was summed
        scores: dict[Any, float] = {key: one.score for key, one in others.items() if one.rank}
        del others  # the matrices, before those that are wanted are solved for
        maps = self._solved(sums)

        def of(kind: Kind | None, pair: SitePair) -> tuple[OrthogonalMap, float | None] | None:
            key = None if kind is None else (kind, key_of(kind, pair))
            return None if key is None else (maps[key], scores.get(key))

        solved = {pair.target.name: [of(kind, pair) for kind in wanted[pair.target.name]] for pair in pairs}
        self.maps: dict[str, tuple[OrthogonalMap | None, OrthogonalMap | None]] = {}
        self._qualities: dict[str, tuple[MapQuality | None, MapQuality | None]] = {}
        for name, (first, second) in solved.items():
            self.maps[name] = (first and first[0], second and second[0])
            self._qualities[name] = (_quality(first), _quality(second))

    def _solved(self, sums: Mapping[Any, CrossCovariance]) -> dict[Any, OrthogonalMap]:
        """Return the map of each sum."""
        norms = torch.stack([one.norms for one in sums.values()]).tolist() if sums else []
        solved = polar([one.evidence for one in sums.values()], norms, self.settings.completion)
        return dict(zip(sums, solved, strict=True))

    def carry(self, pair: SitePair, delta: SiteDelta) -> TransportedSite:
        maps = self.maps[pair.target.name]
        known = next(one.matrix for one in maps if one is not None)
        delta = delta.to(known.device)
        (r_in, seen_in), (r_out, seen_out) = (
            _matrices(one, pair.source.shape[axis], pair.target.shape[axis], known)
            for one, axis in zip(maps, (1, 0), strict=True)
        )
        weight = bias = unseen = None
        if delta.weight is not None:
            weight = between(r_out.T, delta.weight, r_in)
            dropped = self.settings.completion == "drop"
            seen = weight if dropped else between(seen_out.T, delta.weight, seen_in)
            if None not in maps:  # without a map, nothing is known about the directions that are cropped
                unseen = max(0.0, 1.0 - energy(seen) / energy(delta.weight))
        if delta.bias is not None:
            bias = delta.bias.to(r_out) @ r_out
        return TransportedSite(SiteDelta(weight, bias), *self._qualities[pair.target.name], unseen)


def _quality(solved: tuple[OrthogonalMap, float | None] | None) -> MapQuality | None:
    return None if solved is None else MapQuality(solved[0].rank, solved[0].score, solved[1])


def _matrices(solved: OrthogonalMap | None, source: int, target: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a map and its seen part; without a map, the identity, cropped or zero-padded."""
    if solved is not None:
        return solved.matrix, solved.seen
    identity = torch.eye(source, target, dtype=like.dtype, device=like.device)
    return identity, identity


class BicoFisher(Aligner):
    """BiCo without labels: every label counts by its probability p under the fine-tuned source.

    R_out = polar(sum_i sum_c p(c | x_i) g_A(x_i, c)^T g_B(x_i, c)). R_in aligns the inputs, each row weighted by the
    norms of the layer's own gradients there: polar(sum_t |g_A,t| |g_B,t| x_A,t^T x_B,t).
    """

    needs_predictions = True
    input_kind = Kind.WEIGHTED_INPUTS
    output_kind = Kind.EXPECTED_GRADIENTS


class BicoPath(BicoFisher):
    """`BicoFisher` in K steps from base to fine-tuned, with new maps before each.

    d = 0; for k = 0 .. K-1, maps at (theta_A + (k/K) tau_A, theta_B + d), and d += alpha_k R_out^T tau_A R_in, with
    alpha_k chosen by the samples. A bold walk goes 0, 1/2, 0, 1/2 along the source instead. With a number for alpha,
    every step carries tau_A / K, and their sum is multiplied by alpha. Nothing is trained. The class embeddings of the
    loss stay those of the pretrained models.
    """

    @property
    def schedule(self) -> tuple[float, ...]:
        steps = self.settings.steps
        return tuple((step % 2) / 2 if self.settings.bold else step / steps for step in range(steps))

    @property
    def part(self) -> float:
        return 1.0 if self.settings.finds_alpha else 1 / self.settings.steps


class Bico(Aligner):
    """Bilinear Coordinate Alignment: R_in from the layers' inputs, R_out from the gradients at their outputs."""

    input_kind = Kind.INPUTS
    output_kind = Kind.GRADIENTS


class BicoLast(Bico):
    """BiCo in the last block; in the blocks before it, R_out comes from the layers' outputs, as in THESEUS."""

    early_output_kind = Kind.OUTPUTS


class GradientOnly(Aligner):
    """BiCo with gradients on both sides: R_in from the gradient at each layer's input, G W, and R_out from G."""

    input_kind = Kind.INPUT_GRADIENTS
    output_kind = Kind.GRADIENTS


class InputOnly(Aligner):
    """Ablation of BiCo: aligns only the inputs."""

    input_kind = Kind.INPUTS
    output_kind = None


class OutputOnly(Aligner):
    """Ablation of BiCo: aligns only the output gradients."""

    input_kind = None
    output_kind = Kind.GRADIENTS


class Theseus(Aligner):
    """THESEUS: aligns activations on both sides, inputs and outputs; no labels, no gradients."""

    input_kind = Kind.INPUTS
    output_kind = Kind.OUTPUTS
