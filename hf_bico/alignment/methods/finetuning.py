"""Fine-tune the target, as baselines: `Finetune` on the whole split, `Fewshot` by one step on the calibration samples.

Knows a training task; not models or data sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat
from math import cos, pi
from typing import Any

import torch

from hf_bico.alignment.methods.base import Trainer
from hf_bico.alignment.methods.saved_training import SavedTraining
from hf_bico.alignment.methods.training import Learner, Trained, TrainingTask, learner_for
from hf_bico.settings import Settings
from hf_bico.utils.progress import Progress

CHECKPOINT_EVERY = 100
"""Steps between two checkpoints."""

VALIDATION_PART = 10
"""One sample in this many is held out for validation."""


class Finetune(Trainer):
    """AdamW for `train_steps` steps with linear warm-up and cosine decay to 0, on nine samples in ten.

    With a checkpoint, an interrupted training resumes and gives the same result.
    """

    def train(self, training_task: TrainingTask, progress: Progress) -> Trained:
        settings, steps = self.settings, self.settings.training_steps
        generator = torch.Generator().manual_seed(settings.seed)
        training, validation = split_samples(training_task.size, generator)
        order = batches(training, settings.train_batch, generator)
        saved = None
        if settings.checkpoint is not None:
            saved = SavedTraining.of(training_task, settings.checkpoint, training_recipe(settings))
        with learner_for(training_task, settings) as learner:
            if saved is not None:
                _resume(learner, saved)
            progress("train", learner.steps, steps)
            for batch in islice(order, learner.steps, steps):
                learner.step(batch, learning_rate_at(learner.steps, settings))
                if saved is not None and (learner.steps % CHECKPOINT_EVERY == 0 or learner.steps == steps):
                    saved.save(learner.state(), steps=learner.steps)
                progress("train", learner.steps, steps)
            return Trained(
                learner.changes(),
                steps=steps,
                samples=min(len(training), steps * settings.train_batch),
                validation=learner.accuracy(validation),
            )


def training_recipe(settings: Settings) -> dict[str, Any]:
    """Return the settings that define a training; the micro-batch size does not."""
    own = {name: getattr(settings, name) for name in ("train_batch", "warmup", "weight_decay", "seed")}
    return {"train_steps": settings.training_steps, "learning_rate": settings.rate, **own}


def _resume(learner: Learner, saved: SavedTraining) -> None:
    """Load what was saved into the learner, if anything was."""
    found = saved.load()
    if found is None:
        return
    about, tensors = found
    try:
        learner.load_state(tensors, int(about["steps"]))
    except (TypeError, KeyError, ValueError) as error:
        raise saved.broken(error) from error


def split_samples(size: int, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """Return the numbers of the training and validation samples: the latter are the first tenth of a shuffle."""
    shuffled: list[int] = torch.randperm(size, generator=generator).tolist()
    held_out = size // VALIDATION_PART
    return shuffled[held_out:], shuffled[:held_out]


def batches(samples: Sequence[int], size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Yield batches without end, from one shuffle of the samples after another.

    A batch may span two shuffles; it is never larger than the number of samples.
    """
    shuffles = (torch.randperm(len(samples), generator=generator).tolist() for _ in repeat(None))
    stream = (samples[index] for index in chain.from_iterable(shuffles))
    size = min(size, len(samples))
    return (list(islice(stream, size)) for _ in repeat(None))


def learning_rate_at(step: int, settings: Settings) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then cosine decay to 0 after the last step.

    >>> settings = Settings(train_steps=4, warmup=2, learning_rate=1.0)
    >>> [round(learning_rate_at(step, settings), 3) for step in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    steps = settings.training_steps
    return scheduled_rate(step, steps, min(settings.warmup, steps), settings.rate)


def scheduled_rate(step: int, steps: int, warmup: int, rate: float) -> float:
    """Return the learning rate of a step, counted from 0, after `warmup` of `steps` steps with cosine decay to 0."""
    if step < warmup:
        return rate * (step + 1) / warmup
    return rate * 0.5 * (1 + cos(pi * (step - warmup) / (steps - warmup)))


class Fewshot(Trainer):
    """One step of AdamW on the mean loss of all calibration samples."""

    def train(self, training_task: TrainingTask, progress: Progress) -> Trained:
        with learner_for(training_task, self.settings) as learner:
            learner.step(range(training_task.size), self.settings.rate)
            progress("train", 1, 1)
            return Trained(learner.changes(), steps=1, samples=training_task.size, validation=None)
