"""Train parameters with AdamW, accumulating gradients over batches that fit into memory.

Knows parameters and the losses of numbered samples; not models, sites or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor, nn

from hf_bico.alignment.scaling import SampleScores
from hf_bico.errors import DataError, NonFiniteWeightsError, ObjectiveError
from hf_bico.models.deltas import add_delta
from hf_bico.models.low_rank import Change, Factors, is_finite
from hf_bico.runtime.environment import halving_batches
from hf_bico.settings import Settings

LEFT, RIGHT = ".left", ".right"
"""Endings of the names of two factors that are trained in place of a weight."""
WEIGHT = "weight"
STEP, AVERAGES = "step", ("exp_avg", "exp_avg_sq")
"""Keys of a training state: a parameter's weight, and AdamW's entries as torch names them."""


@dataclass(frozen=True)
class TrainingTask:
    """What a training learns: parameters by name, and the loss of numbered samples.

    `parameters` are trained in place and restored afterwards. `loss` returns the summed loss of some samples, in the
    graph of one forward pass; `accuracy` the share that the model gets right now, None where the objective has no right
    answers. There are `size` samples, numbered from 0. `identity` is a fingerprint of models, samples and settings: a
    training resumes only with the task that it began with. `scores` says what the model does on each of some samples
    now. `start` are the changes to begin with, by parameter: where one is factors, these are trained, and the weight
    under them stays. `finish` returns a last change of the trained model, without training, from the same samples. If
    there are `judges`, these samples alone say what a brief training is worth, by two runs that leave half of
    them out each.
    """

    parameters: Mapping[str, nn.Parameter]
    loss: Callable[[Sequence[int]], Tensor]
    accuracy: Callable[[Sequence[int]], float] | None
    size: int
    identity: str = ""
    scores: Callable[[Sequence[int]], SampleScores] | None = None
    start: Mapping[str, Change] | None = None
    finish: Callable[[Sequence[int]], Mapping[str, Tensor]] | None = None
    judges: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 1:
            raise DataError("there is no sample to train on", "name another data set or split")


@dataclass(frozen=True)
class LeftOut:
    """What was seen of samples that were left out: their numbers, and their scores before and after the training."""

    samples: tuple[int, ...]
    before: SampleScores
    after: SampleScores


@dataclass(frozen=True)
class Trained:
    """Result of a training: `changes` are trained minus initial weights, in at least float32, or trained factors.

    `samples` counts those trained on; `validation` is the final accuracy on the others. Of a training that samples
    left out stopped, `rate` is the learning rate that they chose, and `left_out` what they say of it; it is `finished`
    if it has the task's last change.
    """

    changes: dict[str, Change]
    steps: int
    samples: int
    validation: float | None
    rate: float | None = None
    left_out: LeftOut | None = None
    finished: bool = False


class Learner:
    """Trains a task's parameters with AdamW.

    Parameters narrower than float32 are rounded from master weights in float32, in which small steps are not lost.
    A parameter whose change is a product of factors is the weight as it was, plus the product of the trained factors.
    """

    def __init__(self, training_task: TrainingTask, settings: Settings) -> None:
        self.training_task = training_task
        self.batch_size = settings.batch
        self.steps = 0
        self.before = {name: parameter.detach().clone() for name, parameter in training_task.parameters.items()}
        start = training_task.start or {}
        self.factored = {name for name, change in start.items() if isinstance(change, Factors)}
        self.weights = dict[str, Tensor]()
        for name, parameter in training_task.parameters.items():
            self.weights |= _variables(name, parameter, start.get(name))
        self._write_parameters()
        self.optimizer = torch.optim.AdamW(
            list(self.weights.values()),
            lr=settings.rate,
            weight_decay=settings.weight_decay,
            foreach=False,
            fused=all(weight.is_cuda for weight in self.weights.values()),
        )

    def step(self, samples: Sequence[int], rate: float) -> None:
        """Take one step at this learning rate on the mean loss of the samples."""
        loss = halving_batches(self.batch_size, lambda size: self._backward(samples, size))
        gradients = (weight.grad for weight in self.weights.values() if weight.grad is not None)
        if not isfinite(loss) or not _finite(gradients):
            what = "gradient" if isfinite(loss) else "loss"
            raise NonFiniteWeightsError(f"the {what} in training step {self.steps + 1} is not finite", self._remedy)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._write_parameters()
        self.steps += 1

    @torch.no_grad()
    def accuracy(self, samples: Sequence[int]) -> float | None:
        accuracy = self.training_task.accuracy
        if accuracy is None or not samples:
            return None

        def count(size: int) -> float:
            return sum(accuracy(part) * len(part) for part in _parts(samples, size))

        return halving_batches(self.batch_size, count) / len(samples)

    @torch.no_grad()
    def scores(self, samples: Sequence[int], last: Mapping[str, Tensor] | None = None) -> SampleScores:
        """Return what the model does now on each of some samples, with one `last` change if it is given."""
        scores, parameters = self.training_task.scores, self.training_task.parameters
        if scores is None:
            raise ValueError("the task does not score its samples")
        changed = {name: parameters[name].detach().clone() for name in last or {}}
        try:
            for name, before in changed.items():
                parameters[name].copy_(add_delta(before, (last or {})[name], name))
            return halving_batches(
                self.batch_size, lambda size: SampleScores.joined([scores(part) for part in _parts(samples, size)])
            )
        finally:
            for name, before in changed.items():
                parameters[name].copy_(before)

    @torch.no_grad()
    def changes(self) -> dict[str, Change]:
        """Return the trained minus the initial weights, or the trained factors."""
        changes = dict[str, Change]()
        for name, before in self.before.items():
            if name in self.factored:
                changes[name] = Factors(*(self.weights[f"{name}{end}"].clone() for end in (LEFT, RIGHT)))
            else:
                changes[name] = self.weights[name] - before.to(self.weights[name].dtype)
        if not all(is_finite(change) for change in changes.values()):
            raise NonFiniteWeightsError(f"the weights after training step {self.steps} are not finite", self._remedy)
        return changes

    def state(self) -> dict[str, Tensor]:
        """Return copies on the CPU of all that resuming needs, except the number of steps."""
        return {
            f"{kind}/{name}": tensor.to("cpu", copy=True).contiguous()
            for name, weight in self.weights.items()
            for kind, tensor in {WEIGHT: weight, **self.optimizer.state[weight]}.items()
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Continue from the state after so many steps; raise ValueError or KeyError if it has other parameters."""
        if {key.partition("/")[2] for key in state} != set(self.weights):
            raise ValueError("its parameters are not those that are trained")
        moments: dict[int, dict[str, Tensor]] = {}
        for number, (name, weight) in enumerate(self.weights.items()):
            weight.copy_(_laid_out_as(weight, state[f"{WEIGHT}/{name}"]))
            if f"{STEP}/{name}" in state:  # absent where the parameter never had a gradient
                averages = {kind: _laid_out_as(weight, state[f"{kind}/{name}"]) for kind in AVERAGES}
                moments[number] = {STEP: state[f"{STEP}/{name}"].clone(), **averages}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self._write_parameters()
        self.steps = steps

    def _backward(self, samples: Sequence[int], size: int) -> float:
        """Accumulate the gradient of the mean loss in batches of `size`; return that loss."""
        self.batch_size = size  # a size that ran out of memory is not tried again
        self.optimizer.zero_grad()
        parameters, mean = list(self.training_task.parameters.values()), 0.0
        for part in _parts(samples, size):
            loss = self.training_task.loss(part) / len(samples)
            if not loss.requires_grad:
                raise ObjectiveError("the loss depends on no trained parameter", "compute it from the model, in torch")
            mean += float(loss.detach())
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for name, gradient in zip(self.training_task.parameters, gradients, strict=True):
                if gradient is not None:
                    self._add_gradient(name, gradient)
        return mean

    @torch.no_grad()
    def _add_gradient(self, name: str, gradient: Tensor) -> None:
        """Add a parameter's gradient to that of its master weight, or by the chain rule to those of its factors."""
        parts = {name: gradient}
        if name in self.factored:
            left, right = self.weights[f"{name}{LEFT}"], self.weights[f"{name}{RIGHT}"]
            wide = gradient.to(left.dtype)
            parts = {f"{name}{LEFT}": wide @ right.T, f"{name}{RIGHT}": left.T @ wide}
        for own, part in parts.items():
            weight = self.weights[own]
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad.add_(part)

    @torch.no_grad()
    def _write_parameters(self) -> None:
        """Copy the master weights to the parameters that do not share their memory; multiply factors out."""
        for name, parameter in self.training_task.parameters.items():
            if name in self.factored:
                product = Factors(self.weights[f"{name}{LEFT}"], self.weights[f"{name}{RIGHT}"])
                parameter.copy_(add_delta(self.before[name], product, name))
            elif parameter.dtype != self.weights[name].dtype:
                parameter.copy_(self.weights[name])

    @property
    def _remedy(self) -> str:
        first = "check the model's weights and the samples, or use --dtype float32"
        return first if self.steps == 0 else "lower --learning-rate"


@torch.no_grad()
def _variables(name: str, parameter: nn.Parameter, start: Change | None) -> dict[str, Tensor]:
    """Return what is trained for a parameter: its weight, which shares its memory if it is float32, or two factors."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    if isinstance(start, Factors):
        ends = {LEFT: start.left, RIGHT: start.right}
        return {f"{name}{end}": part.to(parameter.device, wide, copy=True) for end, part in ends.items()}
    weight = parameter.detach().to(wide)
    if start is not None:
        weight.copy_(add_delta(weight, start, name))
    return {name: weight}


@contextmanager
def learner_for(training_task: TrainingTask, settings: Settings) -> Iterator[Learner]:
    """Make the task's parameters trainable inside the `with`, and restore them afterwards."""
    flags = {name: parameter.requires_grad for name, parameter in training_task.parameters.items()}
    learner = Learner(training_task, settings)
    try:
        for parameter in training_task.parameters.values():
            parameter.requires_grad_(True)
        with torch.enable_grad():
            yield learner
    finally:
        with torch.no_grad():
            for name, parameter in training_task.parameters.items():
                parameter.copy_(learner.before[name])
                parameter.requires_grad_(flags[name])


def _parts(samples: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (samples[start : start + size] for start in range(0, len(samples), size))


def _laid_out_as(weight: Tensor, saved: Tensor) -> Tensor:
    """Return the saved tensor with the weight's memory layout, which may decide how arithmetic rounds."""
    if (saved.shape, saved.dtype) != (weight.shape, weight.dtype):
        raise ValueError(f"{saved.dtype} of shape {tuple(saved.shape)} fits no weight of shape {tuple(weight.shape)}")
    return torch.empty_like(weight).copy_(saved)


def _finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all values are finite, with one synchronization."""
    verdicts = [tensor.isfinite().all() for tensor in tensors]
    return not verdicts or bool(torch.stack(verdicts).all())
