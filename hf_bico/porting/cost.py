"""Times training steps of the target, so that a report can say what a port cost in the same currency.

Restores the target bit for bit. Where a step cannot be timed honestly, nothing is: that is never an error of the port.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hf_bico.alignment.memory import FLOAT32, USUAL_TOKENS, ModelFootprint
from hf_bico.alignment.methods.base import Trainer
from hf_bico.alignment.methods.training import TrainingTask, learner_for
from hf_bico.alignment.objectives.base import Classifier, Head, LossBatch, OwnHead
from hf_bico.alignment.objectives.clip import ContrastHead
from hf_bico.alignment.objectives.language import TokenHead
from hf_bico.data.dataset import Samples
from hf_bico.errors import BicoError, ObjectiveError
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.prepare import PreparedPort
from hf_bico.porting.training_tasks import trained_parameters
from hf_bico.runtime.environment import available_memory

TIMED_STEPS = 3
"""Steps that are timed, after a first one that warms up."""
PATIENCE = 10.0
"""Seconds after which no further step begins; of a first step that takes longer, warming up is a small part."""
COPIES = 5
"""Copies of the weights, in at least float32, that a step takes beside the model.

AdamW's two averages, the gradients of a batch and their sum, and the weights to restore; where weights are narrower,
the last and the gradients take half, and master weights are added.
"""
LARGEST_SHARE = 0.5
"""Most of the memory that both models and the steps may take: the activations are only estimated."""


@dataclass(frozen=True)
class TrainingStep:
    """Seconds of one training step of the target, and the number of its samples."""

    seconds: float
    samples: int


def time_training_step(prepared: PreparedPort, calibration: Calibration, processes: int = 1) -> TrainingStep | None:
    """Time AdamW steps of the target on one calibration batch, in the calibration's loss; return the median.

    Returns None if the method itself trains, if there are no samples or not the labels that the loss needs, if the loss
    is the caller's own or contrastive, if the target is a module of the caller's, if several processes or devices share
    the work, and if memory is short.
    """
    models, settings = prepared.models, prepared.settings
    if prepared.drawn is None or prepared.heads is None or isinstance(prepared.method, Trainer) or processes > 1:
        return None
    if models.target.swapped or models.offloaded or settings.device_map is not None:
        return None
    if models.lineage.target.place is None:  # the caller's own module is not trained only to time it
        return None
    head = prepared.heads.target
    if isinstance(head, OwnHead | ContrastHead):  # the contrastive loss of a batch depends on all pairs
        return None
    samples = prepared.drawn.samples.first(calibration.batch_size or settings.batch)
    if not samples or (isinstance(head, Classifier) and min(samples.labels) < 0):
        return None
    with calibration.watch("time"), models.target.quiet():
        try:
            return _time_steps(prepared, head, samples)
        except (BicoError, RuntimeError):  # such as memory that runs out, which torch reports as a RuntimeError
            return None


def _time_steps(prepared: PreparedPort, head: Head, samples: Samples) -> TrainingStep | None:
    """Time steps on all of these samples, which are read and prepared once, before the clock starts."""
    model, settings, device = prepared.models.target, prepared.settings, prepared.models.device
    [(items, labels)] = samples.batches(len(samples))
    if not _fits(prepared, items, isinstance(head, TokenHead)):
        return None
    ready = model.ready(items)

    def loss(numbers: Sequence[int]) -> Tensor:
        batch = LossBatch([ready[number] for number in numbers], [labels[number] for number in numbers])
        value = head.losses(model, batch).task
        if value is None:
            raise ObjectiveError("the samples give no loss", "use data with labels")
        return value

    task, seconds = TrainingTask(trained_parameters(model), loss, None, len(samples)), list[float]()
    with learner_for(task, settings) as learner:
        while len(seconds) <= TIMED_STEPS and sum(seconds) < PATIENCE:
            _wait_for(device)
            started = time.perf_counter()
            learner.step(range(task.size), settings.rate)
            _wait_for(device)
            seconds.append(time.perf_counter() - started)
    return TrainingStep(round(median(seconds[1:] or seconds), 6), task.size)


def _fits(prepared: PreparedPort, items: Sequence[Any], language: bool) -> bool:
    """Return whether both models, the optimiser's state and a batch's activations leave enough memory free."""
    models, settings, model = prepared.models, prepared.settings, prepared.models.target
    held = sum(weight.nbytes for one in (models.source, model) for weight in one.module.parameters())
    wide = sum(weight.numel() * max(weight.itemsize, FLOAT32) for weight in trained_parameters(model).values())
    text = model.text_rows(items[: settings.batch])
    tokens = USUAL_TOKENS if text is None else text.ids.shape[1]
    footprint = ModelFootprint(model.layout, models.lineage.target.checkpoint.shapes, model.dtype.itemsize, tokens)
    of_sample = footprint.sample(model.layout.main_sites, language).graph
    needed = held + COPIES * wide + min(len(items), settings.batch) * of_sample
    return needed <= LARGEST_SHARE * (settings.memory or available_memory(models.device))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
