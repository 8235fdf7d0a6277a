"""Sum cross-covariances of two models' activations and gradients at matched sites, in float64.

Knows sums and their keys; not the models, nor how they run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_bico.alignment.procrustes import PairedRows
from hf_bico.errors import NonFiniteWeightsError
from hf_bico.models.layout import SitePair


class Kind(StrEnum):
    """The statistics that can be summed over the samples.

    The first six are cross-covariances of paired rows of the two models. Expected gradients are those of the loss with
    each label in turn, weighted by the label's probability; weighted inputs are inputs times the norm of the site's own
    expected gradient at that row. Target gradients are those of the target's parameters with the signs of each sample.
    """

    INPUTS = "inputs"
    OUTPUTS = "outputs"
    GRADIENTS = "gradients"
    INPUT_GRADIENTS = "input gradients"
    EXPECTED_GRADIENTS = "expected gradients"
    WEIGHTED_INPUTS = "weighted inputs"
    TARGET_GRADIENTS = "target gradients"


OF_INPUTS = frozenset({Kind.INPUTS, Kind.INPUT_GRADIENTS, Kind.WEIGHTED_INPUTS})
"""Kinds whose rows are as wide as a site's input."""
OF_TARGET = frozenset({Kind.TARGET_GRADIENTS})
"""Kinds that need the target alone."""
OF_TASK_LOSS = frozenset({Kind.GRADIENTS, Kind.INPUT_GRADIENTS, *OF_TARGET})
OF_EXPECTED_LOSSES = frozenset({Kind.EXPECTED_GRADIENTS, Kind.WEIGHTED_INPUTS})


class CrossCovariance:
    """The sum X_A^T X_B over paired rows, with the energies of both sides, in float64.

    A few rows are kept as they are: their map is solved in the small space that they span. `mispaired`, if it is asked
    for, sums the same rows, each with one of another sample: it shows what a score is worth.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device, with_mispaired: bool = False) -> None:
        self.shape, self.device = shape, device
        self.mispaired = CrossCovariance(shape, device) if with_mispaired else None
        self._energies = [self._zeros(), self._zeros()]
        self._norms: tuple[list[Tensor], list[Tensor]] = ([], [])
        """Norms of batches whose energies are not summed yet."""
        self._rows: list[tuple[Tensor, Tensor]] | None = []
        self._total: Tensor | None = None

    def add(self, source_rows: Tensor, target_rows: Tensor) -> None:
        source, target = (rows.to(self.device, torch.float64) for rows in (source_rows, target_rows))
        for norms, rows in zip(self._norms, (source, target), strict=True):
            norms.append(torch.linalg.vector_norm(rows))
        if self._rows is not None and 2 * (len(source) + sum(len(one) for one, _ in self._rows)) < min(self.shape):
            self._rows.append((source, target))
        else:
            self.total.addmm_(source.T, target)

    @property
    def total(self) -> Tensor:
        if self._total is None:
            self._total = self._zeros(*self.shape)
            for source, target in self._rows or ():
                self._total.addmm_(source.T, target)
            self._rows = None
        return self._total

    @property
    def evidence(self) -> Tensor | PairedRows:
        """Input of the solver: the sum, or its few rows."""
        if not self._rows:
            return self.total
        source, target = zip(*self._rows, strict=True)
        return PairedRows(torch.cat(source), torch.cat(target))

    def less(self, other: CrossCovariance) -> CrossCovariance:
        """Return the difference, whose energies are those of the rows of both."""
        difference = CrossCovariance(self.shape, self.device)
        difference._total, difference._rows = self.total - other.total, None
        difference._energies = [one + two for one, two in zip(self.energies, other.energies, strict=True)]
        return difference

    @property
    def energies(self) -> tuple[Tensor, Tensor]:
        """|X_A|^2 and |X_B|^2."""
        for side, norms in enumerate(self._norms):
            if norms:
                self._energies[side] = self._energies[side] + torch.stack(norms).square().sum()
                norms.clear()
        return self._energies[0], self._energies[1]

    @property
    def tensors(self) -> list[Tensor]:
        others = [] if self.mispaired is None else self.mispaired.tensors
        return [self.total, *self.energies, *others]

    @property
    def norms(self) -> Tensor:
        """|X_A| |X_B|."""
        source, target = self.energies
        return (source * target).sqrt()

    @property
    def is_finite(self) -> Tensor:
        source, target = self.energies  # of all rows, also of those that are not in the total
        energy = source + target
        return torch.isfinite(energy if self._total is None else energy + self._total.sum())

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.device)


NEGLIGIBLE_GRADIENT = 1e-6
"""Below this share of a weight's largest gradient, a gradient of its site counts as zero."""


@dataclass
class ParameterGradient:
    """Gradient of a site's weight (out, in) and bias (out,), summed over samples, and the sum of its signs."""

    weight: Tensor
    bias: Tensor
    weight_votes: Tensor
    bias_votes: Tensor

    @classmethod
    def zeros(cls, rows: int, columns: int, device: torch.device) -> ParameterGradient:
        shapes = ((rows, columns), (rows,)) * 2
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def add(self, inputs: Tensor, gradients: Tensor) -> None:
        """Add a batch whose first dimension counts the samples."""
        for x, g in zip(inputs.to(self.weight), gradients.to(self.weight), strict=True):
            rows = g.reshape(-1, g.shape[-1])
            weight, bias = rows.T @ x.reshape(-1, x.shape[-1]), rows.sum(0)
            self.weight += weight
            self.bias += bias
            weight_signs, bias_signs = _signs(weight, bias)
            self.weight_votes += weight_signs
            self.bias_votes += bias_signs

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight, self.bias, self.weight_votes, self.bias_votes]

    @property
    def mean_signs(self) -> tuple[Tensor, Tensor]:
        """Signs of the mean over the samples: weight and bias."""
        return _signs(self.weight, self.bias)

    @property
    def majority_signs(self) -> tuple[Tensor, Tensor]:
        """Signs that most samples have: weight and bias."""
        return self.weight_votes.sign(), self.bias_votes.sign()


def _signs(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return signs, 0 for rounding noise: a softmax ignores the keys' bias, whose gradient is nothing else."""
    least = NEGLIGIBLE_GRADIENT * weight.abs().max()
    return torch.where(weight.abs() > least, weight.sign(), 0.0), torch.where(bias.abs() > least, bias.sign(), 0.0)


@dataclass
class Statistics:
    """All sums of a calibration: cross-covariances by kind, and the target's own gradients by site."""

    sums: dict[Kind, dict[Any, CrossCovariance]] = field(default_factory=dict)
    target_gradients: dict[str, ParameterGradient] = field(default_factory=dict)

    @classmethod
    def zeros(
        cls, pairs: Iterable[SitePair], kinds: Collection[Kind], device: torch.device, compared: Collection[str] = ()
    ) -> Statistics:
        """Return empty sums of these pairs; those of the `compared` sites of the target are mispaired too."""
        # processes add their sums to each other in this order, and the order of a set differs between them
        statistics = cls({kind: {} for kind in Kind if kind in kinds and kind not in OF_TARGET})
        for pair in pairs:
            for kind, sums in statistics.sums.items():
                axis = 1 if kind in OF_INPUTS else 0
                widths = pair.source.shape[axis], pair.target.shape[axis]
                key, is_compared = key_of(kind, pair), pair.target.name in compared
                if key not in sums or (is_compared and sums[key].mispaired is None):
                    sums[key] = CrossCovariance(widths, device, is_compared)
            if Kind.TARGET_GRADIENTS in kinds:
                statistics.target_gradients[pair.target.name] = ParameterGradient.zeros(*pair.target.shape, device)
        return statistics

    @property
    def kinds(self) -> set[Kind]:
        return {*self.sums, *([Kind.TARGET_GRADIENTS] if self.target_gradients else [])}

    @property
    def tensors(self) -> list[Tensor]:
        """All sums; processes that ran different samples add theirs to each other."""
        parts: Iterator[CrossCovariance | ParameterGradient] = chain(
            *(sums.values() for sums in self.sums.values()), self.target_gradients.values()
        )
        return [tensor for part in parts for tensor in part.tensors]

    def update(self, other: Statistics) -> None:
        """Take over the sums of another pass over the same samples."""
        self.sums.update(other.sums)
        self.target_gradients.update(other.target_gradients)

    def less(self, other: Statistics) -> Statistics:
        """Return the cross-covariances minus those of another pass, which cancels what both have in common."""
        differences = {
            kind: {key: one.less(other.sums[kind][key]) for key, one in sums.items()}
            for kind, sums in self.sums.items()
        }
        return Statistics(differences)

    def of(self, kind: Kind, pair: SitePair) -> CrossCovariance:
        return self.sums[kind][key_of(kind, pair)]

    def mispaired(self, kind: Kind, pair: SitePair) -> CrossCovariance | None:
        """Return the sum of mispaired rows, where it is asked for."""
        sums = self.sums.get(kind, {}).get(key_of(kind, pair))
        return None if sums is None else sums.mispaired

    def drop(self, pairs: Iterable[SitePair]) -> None:
        """Delete the sums of these pairs, and with them those that they share with other pairs."""
        for pair in pairs:
            for kind, sums in self.sums.items():
                sums.pop(key_of(kind, pair), None)
            self.target_gradients.pop(pair.target.name, None)

    def require_finite(self) -> None:
        """Raise NonFiniteWeightsError if a sum is NaN or infinite."""
        names, flags = zip(*self._finite(), strict=True)
        finite = torch.stack(flags).tolist()
        if not all(finite):
            raise NonFiniteWeightsError(
                f"{names[finite.index(False)]} hold NaN or infinite values on the calibration samples",
                "check the models' weights, or calibrate in float32 with --dtype float32",
            )

    def _finite(self) -> Iterator[tuple[str, Tensor]]:
        for kind, sums in self.sums.items():
            for key, covariance in sums.items():
                yield f"the {kind} at '{key if isinstance(key, str) else key[1]}'", covariance.is_finite
        for name, gradient in self.target_gradients.items():
            yield f"the target's gradients at '{name}'", gradient.weight.sum().isfinite()


def key_of(kind: Kind, pair: SitePair) -> Any:
    """Return the key of a pair's sum; sites that share an input (q, k, v) share one."""
    return (pair.source.input, pair.target.input) if kind is Kind.INPUTS else pair.target.name
