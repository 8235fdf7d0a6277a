"""Statistics: streamed cross-covariances of what two models show at their matched sites.

Batch by batch, both models run forward and backward; their inputs and output gradients at every matched site
are paired row by row and added up in float64. No activation outlives its batch. Knows what a site is and how
tokens pair, but neither the models' libraries nor the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hf_bico.errors import ModelError, NonFiniteWeightsError, ObjectiveError
from hf_bico.sites import Site, SitePair, Tokens


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
        if not y.requires_grad:
            y.requires_grad_()
        self.outputs[site.name] = y
        return y


class Observable(Protocol):
    """A model whose sites can be watched during a forward pass."""

    def observed(self, sites: Sequence[Site]) -> AbstractContextManager[Trace]: ...


Loss = Callable[[], Tensor]
"""One forward pass of a model over one batch, to the SUM of its samples' losses."""


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

    @property
    def norms(self) -> float:
        """|X_A| |X_B|."""
        return float((self.energy_source * self.energy_target).sqrt())


@dataclass
class Statistics:
    """The cross-covariances of the matched sites, inputs by what the target site reads, outputs by its name."""

    inputs: dict[tuple[str, str], CrossCovariance] = field(default_factory=dict)
    gradients: dict[str, CrossCovariance] = field(default_factory=dict)

    def of_input(self, pair: SitePair) -> CrossCovariance:
        return self.inputs[pair.source.input, pair.target.input]

    def of_gradient(self, pair: SitePair) -> CrossCovariance:
        return self.gradients[pair.target.name]


def collect(
    pairs: Sequence[SitePair],
    source: Side,
    target: Side,
    batches: Iterable[tuple[Loss, Loss]],
) -> Statistics:
    """Run every batch through both models once, forward and backward, and add up the cross-covariances."""
    statistics = Statistics()
    source_sites = list({pair.source.name: pair.source for pair in pairs}.values())
    target_sites = [pair.target for pair in pairs]
    with exact_float32():
        for source_loss, target_loss in batches:
            seen_by_source = _observe(source.model, source_sites, source_loss)
            seen_by_target = _observe(target.model, target_sites, target_loss)
            _accumulate(statistics, pairs, (source.tokens, target.tokens), seen_by_source, seen_by_target)
    _require_finite(statistics)
    return statistics


@dataclass
class _Observation:
    inputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def _observe(model: Observable, sites: Sequence[Site], loss: Loss) -> _Observation:
    with torch.enable_grad(), model.observed(sites) as trace:
        value = loss()
        idle = [site.name for site in sites if site.name not in trace.outputs]
        if idle:
            raise ObjectiveError(
                f"the objective does not run '{idle[0]}'", "use the features that the whole model gives"
            )
        gradients = torch.autograd.grad(value, list(trace.outputs.values()), materialize_grads=True)
    return _Observation(trace.inputs, dict(zip(trace.outputs, gradients, strict=True)))


def _accumulate(
    statistics: Statistics,
    pairs: Sequence[SitePair],
    tokens: tuple[Tokens | None, Tokens | None],
    source: _Observation,
    target: _Observation,
) -> None:
    done = set()
    for pair in pairs:
        key = (pair.source.input, pair.target.input)
        if key not in done:  # q, k and v read the same rows: count them once
            done.add(key)
            rows = pair_rows(source.inputs[key[0]], target.inputs[key[1]], *tokens)
            _sum(statistics.inputs, key, *rows)
        rows = pair_rows(source.gradients[pair.source.name], target.gradients[pair.target.name], *tokens)
        _sum(statistics.gradients, pair.target.name, *rows)


def _sum(sums: dict[Any, CrossCovariance], key: Any, source_rows: Tensor, target_rows: Tensor) -> None:
    if key not in sums:
        sums[key] = CrossCovariance.zeros(source_rows.shape[1], target_rows.shape[1], source_rows.device)
    sums[key].add(source_rows, target_rows)


def pair_rows(
    source: Tensor, target: Tensor, source_tokens: Tokens | None, target_tokens: Tokens | None
) -> tuple[Tensor, Tensor]:
    """Rows of both models that belong together, flattened to (rows, width).

    Pooled activations (samples, width) pair by sample. Token activations (samples, tokens, width) pair by token:
    patches are resized bilinearly from the source's grid to the target's; prefix tokens are kept apart, and
    where their counts differ only the first (CLS) pairs. Without a known layout of tokens, all rows pair one by one.
    """
    if source_tokens is None or target_tokens is None:
        if source.shape[:-1] != target.shape[:-1]:
            raise ModelError(
                f"the source shows activations of {tuple(source.shape)} and the target of {tuple(target.shape)}, "
                "whose rows do not pair one by one",
                "give both models inputs of one size, and choose a target that cuts them into as many tokens",
            )
        return source.flatten(0, -2), target.flatten(0, -2)
    if source.ndim == 2:
        return source, target
    prefix = min(source_tokens.prefix, target_tokens.prefix)
    if source_tokens.prefix != target_tokens.prefix:
        prefix = min(prefix, 1)
    source_patches = resize(source[:, source_tokens.prefix :], source_tokens.grid, target_tokens.grid)
    source = torch.cat([source[:, :prefix], source_patches], dim=1)
    target = torch.cat([target[:, :prefix], target[:, target_tokens.prefix :]], dim=1)
    return source.flatten(0, 1), target.flatten(0, 1)


def resize(patches: Tensor, grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """(samples, h w, width) patches on another grid: bilinear in 2-D, align_corners=False, no antialiasing."""
    if grid == new_grid:
        return patches
    image = patches.double().transpose(1, 2).unflatten(2, grid)
    resized = functional.interpolate(image, size=new_grid, mode="bilinear", align_corners=False, antialias=False)
    return resized.flatten(2).transpose(1, 2)


@contextmanager
def exact_float32() -> Iterator[None]:
    """No TF32 and no autocast, whatever the caller has set: their rounding would show in the maps."""
    cudnn: Any = torch.backends.cudnn
    settings: list[tuple[Any, str, Any]] = [
        (cudnn, "deterministic", True),
        (cudnn.conv, "fp32_precision", "ieee"),
        (torch.backends.cuda.matmul, "fp32_precision", "ieee"),
    ]
    before = [(part, name, getattr(part, name)) for part, name, _ in settings]
    try:
        for part, name, value in settings:
            setattr(part, name, value)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        for part, name, value in before:
            setattr(part, name, value)


def _require_finite(statistics: Statistics) -> None:
    for kind, sums in (("inputs", statistics.inputs), ("gradients", statistics.gradients)):
        for key, covariance in sums.items():
            if not bool(torch.isfinite(covariance.total).all()):
                name = key if isinstance(key, str) else key[1]
                raise NonFiniteWeightsError(
                    f"the {kind} at '{name}' hold NaN or infinite values on the calibration samples",
                    "check the models' weights, or calibrate in float32 with --dtype float32",
                )
