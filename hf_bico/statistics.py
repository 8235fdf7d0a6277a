"""Statistics: streamed cross-covariances of what two models show at their matched sites.

Batch by batch, both models run forward and, where gradients are asked for, backward; what they show at every matched
site is paired row by row and added up in float64. No activation outlives its batch. Knows what a site is, but neither
the models' libraries nor the task.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_bico.environment import exact_float32
from hf_bico.errors import NonFiniteWeightsError, ObjectiveError
from hf_bico.pairing import TextRows, pair_rows, pair_tokens
from hf_bico.sites import Site, SitePair, Tokens


class Kind(StrEnum):
    """What can be added up over the samples.

    The first six are cross-covariances of paired rows of the two models. Expected gradients are those of the loss with
    each label in turn, weighted by how likely the label is; weighted inputs are inputs times the norm of the site's own
    expected gradient at that row. Target gradients are those of the target's parameters.
    """

    INPUTS = "inputs"
    OUTPUTS = "outputs"
    GRADIENTS = "gradients"
    INPUT_GRADIENTS = "input gradients"
    EXPECTED_GRADIENTS = "expected gradients"
    WEIGHTED_INPUTS = "weighted inputs"
    TARGET_GRADIENTS = "target gradients"


OF_INPUTS = frozenset({Kind.INPUTS, Kind.INPUT_GRADIENTS, Kind.WEIGHTED_INPUTS})
"""What maps of the input side are found from."""
OF_TASK_LOSS = frozenset({Kind.GRADIENTS, Kind.INPUT_GRADIENTS, Kind.TARGET_GRADIENTS})
OF_EXPECTED_LOSSES = frozenset({Kind.EXPECTED_GRADIENTS, Kind.WEIGHTED_INPUTS})


@dataclass
class Trace:
    """What one forward pass shows: each site's input, and its output while still in the graph."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def tap(self, site: Site, x: Tensor, y: Tensor) -> Tensor:
        """Note what `site` read and wrote; returns y, which requires grad from here on."""
        if site.name in self.outputs:
            raise ObjectiveError(
                f"the objective ran '{site.name}' more than once on one batch", "run the model once, on the whole batch"
            )
        self.inputs[site.input] = x.detach()
        if torch.is_grad_enabled() and not y.requires_grad:
            y.requires_grad_()
        self.outputs[site.name] = y
        return y


class Observable(Protocol):
    """A model whose sites can be watched during a forward pass."""

    def observed(self, sites: Sequence[Site]) -> AbstractContextManager[Trace]: ...

    def weight(self, name: str) -> Tensor:
        """The weight of a site as (out, in)."""


@dataclass(frozen=True)
class Losses:
    """What one forward pass over one batch gives, in the graph.

    `task` is the SUM of the samples' losses. `expected` has one entry for each rank of likelihood: the sum over the
    samples of the loss with the label of that rank, times the root of its probability. `text` says which rows of text
    sites are real tokens, where texts were read.
    """

    task: Tensor | None = None
    expected: tuple[Tensor, ...] = ()
    text: TextRows | None = None


Pass = Callable[[], Losses]
"""One forward pass of a model over one batch."""


@dataclass(frozen=True)
class Side:
    """One of the two models, as calibration sees it."""

    model: Observable
    tokens: Tokens | None


@dataclass
class CrossCovariance:
    """The sum of x_A^T x_B over paired rows, with the energies of both sides, in float64."""

    total: Tensor
    energy_source: Tensor
    energy_target: Tensor

    @classmethod
    def zeros(cls, source_width: int, target_width: int, device: torch.device) -> CrossCovariance:
        def make(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(make(source_width, target_width), make(), make())

    def add(self, source_rows: Tensor, target_rows: Tensor) -> None:
        source, target = source_rows.double(), target_rows.to(source_rows.device).double()
        self.total.addmm_(source.T, target)
        self.energy_source += source.square().sum()
        self.energy_target += target.square().sum()

    def less(self, other: CrossCovariance) -> CrossCovariance:
        """The difference, which is a sum over the rows of both."""
        return CrossCovariance(
            self.total - other.total,
            self.energy_source + other.energy_source,
            self.energy_target + other.energy_target,
        )

    @property
    def norms(self) -> float:
        """|X_A| |X_B|."""
        return float((self.energy_source * self.energy_target).sqrt())


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
        for x, g in zip(inputs.double(), gradients.double(), strict=True):
            rows = g.reshape(-1, g.shape[-1])
            weight, bias = rows.T @ x.reshape(-1, x.shape[-1]), rows.sum(0)
            self.weight += weight
            self.bias += bias
            least = NEGLIGIBLE * weight.abs().max()
            self.weight_votes += signs(weight, least)
            self.bias_votes += signs(bias, least)

    @property
    def mean_signs(self) -> tuple[Tensor, Tensor]:
        """Of the mean over the samples: weight and bias."""
        least = NEGLIGIBLE * self.weight.abs().max()
        return signs(self.weight, least), signs(self.bias, least)

    @property
    def majority_signs(self) -> tuple[Tensor, Tensor]:
        """Those that most samples have: weight and bias."""
        return self.weight_votes.sign(), self.bias_votes.sign()


def signs(gradient: Tensor, least: Tensor) -> Tensor:
    """Signs, 0 for what is rounding: a softmax does not feel the keys' bias, whose gradient is nothing else."""
    return torch.where(gradient.abs() > least, gradient.sign(), 0.0)


@dataclass
class Statistics:
    """What was added up: cross-covariances by kind, and the target's own gradients by site."""

    sums: dict[Kind, dict[Any, CrossCovariance]] = field(default_factory=dict)
    target_gradients: dict[str, ParameterGradient] = field(default_factory=dict)

    @property
    def kinds(self) -> set[Kind]:
        return {*self.sums, *([Kind.TARGET_GRADIENTS] if self.target_gradients else [])}

    def update(self, other: Statistics) -> None:
        """Take what another pass over the same samples has seen."""
        self.sums.update(other.sums)
        self.target_gradients.update(other.target_gradients)

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

    def add(self, kind: Kind, pair: SitePair, source_rows: Tensor, target_rows: Tensor) -> None:
        sums, key = self.sums.setdefault(kind, {}), key_of(kind, pair)
        if key not in sums:
            sums[key] = CrossCovariance.zeros(source_rows.shape[1], target_rows.shape[1], source_rows.device)
        sums[key].add(source_rows, target_rows)


def key_of(kind: Kind, pair: SitePair) -> Any:
    """Under what a pair's sum is kept: q, k and v read the same rows, which are counted once."""
    return (pair.source.input, pair.target.input) if kind is Kind.INPUTS else pair.target.name


def collect(
    pairs: Sequence[SitePair],
    source: Side,
    target: Side,
    batches: Iterable[tuple[Pass, Pass]],
    kinds: Collection[Kind],
) -> Statistics:
    """Run every batch through both models once, or the target alone where that is enough, and add up what is asked."""
    statistics = Statistics()
    source_sites = list({pair.source.name: pair.source for pair in pairs}.values())
    target_sites = [pair.target for pair in pairs]
    paired = set(kinds) - {Kind.TARGET_GRADIENTS}
    with exact_float32():
        for source_pass, target_pass in batches:
            of_source = _View.of(source, source_sites, source_pass, kinds) if paired else None
            of_target = _View.of(target, target_sites, target_pass, kinds)
            if of_source is not None:
                _add_paired(statistics, pairs, of_source, of_target, kinds)
                if OF_EXPECTED_LOSSES & paired:
                    _add_expected(statistics, pairs, of_source, of_target, kinds)
            if Kind.TARGET_GRADIENTS in kinds:
                _add_target(statistics, target_sites, of_target)
    _require_finite(statistics)
    return statistics


@dataclass(frozen=True)
class _View:
    """What one model shows on one batch."""

    side: Side
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    losses: Losses
    task_gradients: Mapping[str, Tensor]

    @classmethod
    def of(cls, side: Side, sites: Sequence[Site], run: Pass, kinds: Collection[Kind]) -> _View:
        of_task, of_expected = bool(OF_TASK_LOSS & set(kinds)), bool(OF_EXPECTED_LOSSES & set(kinds))
        with torch.set_grad_enabled(of_task or of_expected), side.model.observed(sites) as trace:
            losses = run()
            idle = [site.name for site in sites if site.name not in trace.outputs]
            if idle:
                raise ObjectiveError(
                    f"the objective does not run '{idle[0]}'", "use the features that the whole model gives"
                )
            gradients = _gradients(losses.task, trace.outputs, keep=of_expected) if of_task else {}
        if not of_expected:  # the graph is done with
            outputs = trace.outputs.items() if Kind.OUTPUTS in kinds else ()
            trace.outputs = {name: output.detach() for name, output in outputs}
            losses = Losses(text=losses.text)
        return cls(side, trace.inputs, trace.outputs, losses, gradients)


class _Together:
    """Which rows of the two views of one batch belong together."""

    def __init__(self, source: _View, target: _View) -> None:
        self.tokens = (source.side.tokens, target.side.tokens)
        self.texts = (source.losses.text, target.losses.text)
        one, other = self.texts
        self.text = None if one is None or other is None else pair_tokens(one, other)

    def rows(self, pair: SitePair, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Both flattened to (rows, width); of text sites real tokens alone, and pooled rows by sample."""
        if not pair.source.text:
            return pair_rows(source, target, *self.tokens)
        source, target = _by_text(source, self.texts[0]), _by_text(target, self.texts[1])
        if source.ndim == 2:
            return source, target
        if self.text is None:
            raise ObjectiveError(f"the objective does not say which tokens '{pair.source.name}' reads", "tell them")
        places = (place.to(rows.device) for place, rows in zip(self.text, (source, target), strict=True))
        first, second = (rows.flatten(0, 1)[place] for rows, place in zip((source, target), places, strict=True))
        return first, second


def _by_text(rows: Tensor, text: TextRows | None) -> Tensor:
    """(samples, tokens, width), also where a module takes the tokens of all texts as one list; pooled rows as they are.

    Where every text is one token, the two are the same.
    """
    if text is None or rows.ndim != 2 or len(rows) != text.ids.numel():
        return rows
    return rows.reshape(*text.ids.shape, -1)


def _gradients(loss: Tensor | None, outputs: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    if loss is None:
        raise ValueError("a pass gave no loss to differentiate")
    found = torch.autograd.grad(loss, list(outputs.values()), retain_graph=keep, materialize_grads=True)
    return dict(zip(outputs, found, strict=True))


def _add_paired(
    statistics: Statistics, pairs: Sequence[SitePair], source: _View, target: _View, kinds: Collection[Kind]
) -> None:
    together, done = _Together(source, target), set()
    for pair in pairs:
        names, reads = (pair.source.name, pair.target.name), (pair.source.input, pair.target.input)
        if Kind.INPUTS in kinds and reads not in done:
            done.add(reads)
            rows = together.rows(pair, source.inputs[reads[0]], target.inputs[reads[1]])
            statistics.add(Kind.INPUTS, pair, *rows)
        if Kind.OUTPUTS in kinds:
            rows = together.rows(pair, source.outputs[names[0]].detach(), target.outputs[names[1]].detach())
            statistics.add(Kind.OUTPUTS, pair, *rows)
        if {Kind.GRADIENTS, Kind.INPUT_GRADIENTS} & set(kinds):
            rows = together.rows(pair, source.task_gradients[names[0]], target.task_gradients[names[1]])
            if Kind.GRADIENTS in kinds:
                statistics.add(Kind.GRADIENTS, pair, *rows)
            if Kind.INPUT_GRADIENTS in kinds:  # what passes through this site to its input
                weights = [view.side.model.weight(name) for view, name in zip((source, target), names, strict=True)]
                passed = [one.double() @ weight.double() for one, weight in zip(rows, weights, strict=True)]
                statistics.add(Kind.INPUT_GRADIENTS, pair, *passed)


def _add_expected(
    statistics: Statistics, pairs: Sequence[SitePair], source: _View, target: _View, kinds: Collection[Kind]
) -> None:
    """Gradients with each label in turn, and inputs weighted by the norms of these gradients over all labels."""
    together = _Together(source, target)
    energies: dict[str, tuple[Tensor, Tensor]] = {}
    for losses in zip(source.losses.expected, target.losses.expected, strict=True):
        found = [_gradients(loss, view.outputs, keep=True) for loss, view in zip(losses, (source, target), strict=True)]
        for pair in pairs:
            rows = together.rows(pair, found[0][pair.source.name], found[1][pair.target.name])
            if Kind.EXPECTED_GRADIENTS in kinds:
                statistics.add(Kind.EXPECTED_GRADIENTS, pair, *rows)
            more = [one.double().square().sum(-1) for one in rows]
            so_far = energies.get(pair.target.name)
            energies[pair.target.name] = (
                (more[0], more[1]) if so_far is None else (so_far[0] + more[0], so_far[1] + more[1])
            )
    for pair in pairs if Kind.WEIGHTED_INPUTS in kinds else ():
        rows = together.rows(pair, source.inputs[pair.source.input], target.inputs[pair.target.input])
        weighted = [
            one.double() * energy.sqrt().unsqueeze(-1)
            for one, energy in zip(rows, energies[pair.target.name], strict=True)
        ]
        statistics.add(Kind.WEIGHTED_INPUTS, pair, *weighted)


def _add_target(statistics: Statistics, sites: Sequence[Site], target: _View) -> None:
    for site in sites:
        inputs, gradients = target.inputs[site.input], target.task_gradients[site.name]
        if site.text and target.losses.text is not None:
            inputs, gradients = (_by_text(rows, target.losses.text) for rows in (inputs, gradients))
            if gradients.ndim == 3:
                gradients = gradients * target.losses.text.mask.to(gradients).unsqueeze(-1)
        if site.name not in statistics.target_gradients:
            statistics.target_gradients[site.name] = ParameterGradient.zeros(*site.shape, gradients.device)
        statistics.target_gradients[site.name].add(inputs, gradients)


def _require_finite(statistics: Statistics) -> None:
    for kind, sums in statistics.sums.items():
        for key, covariance in sums.items():
            if not bool(torch.isfinite(covariance.total).all()):
                name = key if isinstance(key, str) else key[1]
                raise NonFiniteWeightsError(
                    f"the {kind} at '{name}' hold NaN or infinite values on the calibration samples",
                    "check the models' weights, or calibrate in float32 with --dtype float32",
                )
    for name, gradient in statistics.target_gradients.items():
        if not bool(torch.isfinite(gradient.weight).all()):
            raise NonFiniteWeightsError(
                f"the target's gradient at '{name}' holds NaN or infinite values on the calibration samples",
                "check the target's weights, or calibrate in float32 with --dtype float32",
            )
