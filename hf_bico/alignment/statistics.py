"""Statistics: cross-covariances of what two models show at their matched sites, added up in float64.

Knows sums, and under what they are kept; not the models, nor how they are run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from hf_bico.alignment.procrustes import Rows
from hf_bico.errors import NonFiniteWeightsError
from hf_bico.models.hooks import Losses
from hf_bico.models.layout import SitePair
from hf_bico.runtime.environment import to_device


class Kind(StrEnum):
    """What can be added up over the samples.

    The first six are cross-covariances of paired rows of the two models. Expected gradients are those of the loss with
    each label in turn, weighted by how likely the label is; weighted inputs are inputs times the norm of the site's own
    expected gradient at that row. Target gradients are those of the target's parameters, sample by sample; the descent
    is their sum alone, with the task loss itself.
    """

    INPUTS = "inputs"
    OUTPUTS = "outputs"
    GRADIENTS = "gradients"
    INPUT_GRADIENTS = "input gradients"
    EXPECTED_GRADIENTS = "expected gradients"
    WEIGHTED_INPUTS = "weighted inputs"
    TARGET_GRADIENTS = "target gradients"
    DESCENT = "descent"


OF_INPUTS = frozenset({Kind.INPUTS, Kind.INPUT_GRADIENTS, Kind.WEIGHTED_INPUTS})
"""What maps of the input side are found from."""
OF_TARGET = frozenset({Kind.TARGET_GRADIENTS, Kind.DESCENT})
"""What the target shows on its own."""
OF_TASK_LOSS = frozenset({Kind.GRADIENTS, Kind.INPUT_GRADIENTS, *OF_TARGET})
OF_EXPECTED_LOSSES = frozenset({Kind.EXPECTED_GRADIENTS, Kind.WEIGHTED_INPUTS})


class CrossCovariance:
    """The sum of x_A^T x_B over paired rows, with the energies of both sides, in float64.

    While the rows are few they are kept as they are: their map is found in the small space that they span.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.shape, self.device = shape, device
        self._energies = [self._zeros(), self._zeros()]
        self._norms: tuple[list[Tensor], list[Tensor]] = ([], [])
        """Of rows whose energies are not added up yet."""
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
        """The sum itself."""
        if self._total is None:
            self._total = self._zeros(*self.shape)
            for source, target in self._rows or ():
                self._total.addmm_(source.T, target)
            self._rows = None
        return self._total

    @property
    def evidence(self) -> Tensor | Rows:
        """What the map is found from: the sum, or its few rows."""
        if not self._rows:
            return self.total
        source, target = zip(*self._rows, strict=True)
        return Rows(torch.cat(source), torch.cat(target))

    def less(self, other: CrossCovariance) -> CrossCovariance:
        """The difference, which is a sum over the rows of both."""
        found = CrossCovariance(self.shape, self.device)
        found._total, found._rows = self.total - other.total, None
        found._energies = [one + two for one, two in zip(self.energies, other.energies, strict=True)]
        return found

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
        return [self.total, *self.energies]

    @property
    def norms(self) -> Tensor:
        """|X_A| |X_B|."""
        source, target = self.energies
        return (source * target).sqrt()

    @property
    def is_finite(self) -> Tensor:
        source, target = self.energies  # of which no row is left out
        found = source + target
        return torch.isfinite(found if self._total is None else found + self._total.sum())

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.device)


NEGLIGIBLE = 1e-6
"""Below this share of a weight's largest gradient, a gradient of its site counts as none."""


@dataclass
class ParameterGradient:
    """The gradient of a site's weight (out, in) and bias (out,), summed over samples, and the sum of its signs."""

    weight: Tensor
    bias: Tensor
    weight_votes: Tensor
    bias_votes: Tensor

    @classmethod
    def zeros(cls, rows: int, columns: int, device: torch.device) -> ParameterGradient:
        shapes = ((rows, columns), (rows,)) * 2
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def add(self, inputs: Tensor, gradients: Tensor) -> None:
        """The first dimension counts the samples."""
        for x, g in zip(inputs.to(self.weight), gradients.to(self.weight), strict=True):
            rows = g.reshape(-1, g.shape[-1])
            weight, bias = rows.T @ x.reshape(-1, x.shape[-1]), rows.sum(0)
            self.weight += weight
            self.bias += bias
            least = NEGLIGIBLE * weight.abs().max()
            self.weight_votes += signs(weight, least)
            self.bias_votes += signs(bias, least)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight, self.bias, self.weight_votes, self.bias_votes]

    @property
    def mean_signs(self) -> tuple[Tensor, Tensor]:
        """Of the mean over the samples: weight and bias."""
        least = NEGLIGIBLE * self.weight.abs().max()
        return signs(self.weight, least), signs(self.bias, least)

    @property
    def majority_signs(self) -> tuple[Tensor, Tensor]:
        """Those that most samples have: weight and bias."""
        return self.weight_votes.sign(), self.bias_votes.sign()


@dataclass
class LossGradient:
    """The gradient of a site's weight (out, in) and bias (out,), summed over samples, in float32.

    Once all is added up, a GPU keeps it in bfloat16: what is foretold from it needs no more. `energies` are theirs.
    """

    weight: Tensor
    bias: Tensor
    energies: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def zeros(cls, rows: int, columns: int, device: torch.device) -> LossGradient:
        return cls(torch.zeros((rows, columns), device=device), torch.zeros(rows, device=device))

    def add(self, inputs: Tensor, gradients: Tensor) -> None:
        x, g = (rows.to(self.weight).flatten(0, -2) for rows in (inputs, gradients))
        self.weight.addmm_(g.T, x)
        self.bias += g.sum(0)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight, self.bias]


@dataclass
class TaskLossTotals:
    """How the target does on the samples, summed: the loss, the answers that it is of, and how many are wrong.

    Where right and wrong cannot be told, there are no answers. The loss means nothing where it `stands_in` for another.
    """

    total: Tensor
    stands_in: bool = False

    @classmethod
    def zeros(cls, device: torch.device) -> TaskLossTotals:
        return cls(torch.zeros(3, dtype=torch.float64, device=device))

    def add(self, losses: Losses) -> None:
        self.stands_in = self.stands_in or losses.stands_in
        if losses.task is not None:
            parts = (losses.task.detach(), losses.answers, losses.wrong)
            self.total += torch.stack([_number(part, self.total) for part in parts])

    @property
    def loss(self) -> float | None:
        return None if self.stands_in else float(self.total[0])

    @property
    def answers(self) -> int:
        return int(self.total[1])

    @property
    def wrong(self) -> int:
        return int(self.total[2])


def _number(part: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like[0]) if part is None else to_device(part, like.device, like.dtype)


def signs(gradient: Tensor, least: Tensor) -> Tensor:
    """Signs, 0 for what is rounding: a softmax does not feel the keys' bias, whose gradient is nothing else."""
    return torch.where(gradient.abs() > least, gradient.sign(), 0.0)


@dataclass
class Statistics:
    """What was added up: cross-covariances by kind, and the target's own gradients by site."""

    sums: dict[Kind, dict[Any, CrossCovariance]] = field(default_factory=dict)
    target_gradients: dict[str, ParameterGradient] = field(default_factory=dict)
    descents: dict[str, LossGradient] = field(default_factory=dict)
    task: TaskLossTotals | None = None
    """Where descents are asked for."""

    @classmethod
    def zeros(
        cls,
        pairs: Iterable[SitePair],
        kinds: Collection[Kind],
        device: torch.device,
        descents_of: Collection[str] | None = None,
    ) -> Statistics:
        """Of these pairs, before anything was seen; descents are those `descents_of` some target sites, or all."""
        # in one order for all processes, which add them up: that of a set is each process's own
        found = cls({kind: {} for kind in Kind if kind in kinds and kind not in OF_TARGET})
        if Kind.DESCENT in kinds:
            found.task = TaskLossTotals.zeros(device)
        for pair in pairs:
            for kind, sums in found.sums.items():
                axis = 1 if kind in OF_INPUTS else 0
                if key_of(kind, pair) not in sums:
                    widths = pair.source.shape[axis], pair.target.shape[axis]
                    sums[key_of(kind, pair)] = CrossCovariance(widths, device)
            if Kind.TARGET_GRADIENTS in kinds:
                found.target_gradients[pair.target.name] = ParameterGradient.zeros(*pair.target.shape, device)
            if Kind.DESCENT in kinds and (descents_of is None or pair.target.name in descents_of):
                found.descents[pair.target.name] = LossGradient.zeros(*pair.target.shape, device)
        return found

    @property
    def kinds(self) -> set[Kind]:
        own = {Kind.TARGET_GRADIENTS: bool(self.target_gradients), Kind.DESCENT: self.task is not None}
        return {*self.sums, *(kind for kind, found in own.items() if found)}

    @property
    def tensors(self) -> list[Tensor]:
        """All sums: those of several passes over different samples are added to each other."""
        sums = [tensor for sums in self.sums.values() for one in sums.values() for tensor in one.tensors]
        own = [tensor for one in self.target_gradients.values() for tensor in one.tensors]
        own += [tensor for one in self.descents.values() for tensor in one.tensors]
        return sums + own + ([] if self.task is None else [self.task.total])

    @property
    def own_sites(self) -> set[str]:
        """The target's sites of which something is added up on their own."""
        return {*self.target_gradients, *self.descents}

    def add_own(self, site: str, inputs: Tensor, gradients: Tensor) -> None:
        """What the target's task loss says about one of its sites; the first dimension counts the samples."""
        for found in (self.target_gradients.get(site), self.descents.get(site)):
            if found is not None:
                found.add(inputs, gradients)

    def update(self, other: Statistics) -> None:
        """Take what another pass over the same samples has seen."""
        self.sums.update(other.sums)
        self.target_gradients.update(other.target_gradients)
        self.descents.update(other.descents)
        self.task = self.task or other.task

    def less(self, other: Statistics) -> Statistics:
        """The cross-covariances less those of another pass: what both have in common goes."""
        return Statistics(
            {
                kind: {key: one.less(other.sums[kind][key]) for key, one in sums.items()}
                for kind, sums in self.sums.items()
            }
        )

    def of(self, kind: Kind, pair: SitePair) -> CrossCovariance:
        return self.sums[kind][key_of(kind, pair)]

    def settle_descents(self) -> None:
        """Nothing is added any more: find their energies, and take half of the room on a GPU, where maps are next."""
        parts = [part for one in self.descents.values() for part in one.tensors]
        found = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        energies = torch.stack(found).square().unflatten(0, (-1, 2)).tolist() if found else []
        for (name, one), (of_weight, of_bias) in zip(self.descents.items(), energies, strict=True):
            kept = torch.bfloat16 if one.weight.is_cuda else torch.float32
            self.descents[name] = LossGradient(one.weight.to(kept), one.bias.to(kept), (of_weight, of_bias))

    def drop(self, pairs: Iterable[SitePair]) -> None:
        """Forget the sums of these pairs, which no other pair may read."""
        for pair in pairs:
            for kind, sums in self.sums.items():
                sums.pop(key_of(kind, pair), None)
            self.target_gradients.pop(pair.target.name, None)
            self.descents.pop(pair.target.name, None)

    def require_finite(self) -> None:
        """Refuse sums of activations or gradients that are NaN or infinite."""
        names, found = zip(*self._finite(), strict=True)
        finite = torch.stack(found).tolist()
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
        for name, descent in self.descents.items():
            yield f"the target's gradients at '{name}'", descent.weight.sum().isfinite()


def key_of(kind: Kind, pair: SitePair) -> Any:
    """Under what a pair's sum is kept: q, k and v read the same rows, which are counted once."""
    return (pair.source.input, pair.target.input) if kind is Kind.INPUTS else pair.target.name
