"""Fine-tune the target, as baselines: `Finetune` on the whole split, `Fewshot` by one step on the calibration samples.

Knows a training task and its checkpoint file; not models or data sets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_bico.alignment.methods.base import Trainer
from hf_bico.alignment.methods.training import Learner, Trained, TrainingTask, learner_for
from hf_bico.errors import OutputError, UsageError
from hf_bico.settings import Settings
from hf_bico.utils.progress import Progress

CHECKPOINT_EVERY = 100
"""Steps between two checkpoints."""

CHECKPOINT_FILE = "training.safetensors"
CHECKPOINT_ENTRY = "hf_bico_training"
"""The file of a checkpoint, and the JSON in its header: identity, recipe and number of steps."""

VALIDATION_PART = 10
"""One sample in this many is held out for validation."""

TRAINING_RECIPE = ("train_steps", "train_batch", "warmup", "learning_rate", "weight_decay", "seed")
"""The settings that define a training; the micro-batch size does not."""

_REMEDY = "name another folder with --checkpoint, or remove that file to train from the beginning"


class Finetune(Trainer):
    """AdamW for `train_steps` steps with linear warm-up and cosine decay to 0, on nine samples in ten.

    With a checkpoint, an interrupted training resumes and gives the same result.
    """

    def train(self, training_task: TrainingTask, progress: Progress) -> Trained:
        settings, steps = self.settings, self.settings.train_steps
        generator = torch.Generator().manual_seed(settings.seed)
        training, validation = split_samples(training_task.size, generator)
        order = batches(training, settings.train_batch, generator)
        saved = None if settings.checkpoint is None else SavedTraining.of(training_task, settings)
        with learner_for(training_task, settings) as learner:
            if saved is not None:
                saved.resume(learner)
            progress("train", learner.steps, steps)
            for batch in islice(order, learner.steps, steps):
                learner.step(batch, learning_rate_at(learner.steps, settings))
                if saved is not None and (learner.steps % CHECKPOINT_EVERY == 0 or learner.steps == steps):
                    saved.save(learner)
                progress("train", learner.steps, steps)
            return Trained(
                learner.changes(),
                steps=steps,
                samples=min(len(training), steps * settings.train_batch),
                validation=learner.accuracy(validation),
            )


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
    steps, warmup = settings.train_steps, min(settings.warmup, settings.train_steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    return settings.learning_rate * 0.5 * (1 + cos(pi * (step - warmup) / (steps - warmup)))


def remove_checkpoint(folder: Path) -> None:
    """Remove a training's checkpoint, and its folder if that is then empty."""
    file = folder / CHECKPOINT_FILE
    if file.is_file():
        file.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()


@dataclass(frozen=True)
class SavedTraining:
    """Checkpoint of one training: a single file, replaced atomically."""

    file: Path
    identity: str
    recipe: dict[str, Any]

    @classmethod
    def of(cls, training_task: TrainingTask, settings: Settings) -> SavedTraining:
        """Return the checkpoint of this task and recipe, and create its folder."""
        folder = Path(str(settings.checkpoint))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"no checkpoint can be written into '{folder}': {error.strerror}",
                "name another folder with --checkpoint",
            ) from error
        recipe = {name: getattr(settings, name) for name in TRAINING_RECIPE}
        return cls(folder / CHECKPOINT_FILE, training_task.identity, {**recipe, "samples": training_task.size})

    def resume(self, learner: Learner) -> None:
        """Load the saved state into the learner, if there is one."""
        if not self.file.exists():
            return
        try:
            with safe_open(self.file, framework="pt") as file:
                about = json.loads(file.metadata()[CHECKPOINT_ENTRY])
                self._require_same(about["identity"], about["recipe"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
                learner.load_state(tensors, int(about["steps"]))
        except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
            raise UsageError(f"the checkpoint '{self.file}' is broken: {error}", _REMEDY) from error

    def save(self, learner: Learner) -> None:
        """Write a new checkpoint, then replace the last one."""
        about = {"identity": self.identity, "recipe": self.recipe, "steps": learner.steps}
        part = self.file.with_suffix(".part")
        try:
            save_file(learner.state(), part, metadata={CHECKPOINT_ENTRY: json.dumps(about)})
            with part.open("r+b") as written:
                os.fsync(written.fileno())
            part.replace(self.file)
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"the checkpoint '{self.file}' cannot be written: {error}",
                "free some space, or name another folder with --checkpoint",
            ) from error
        finally:
            part.unlink(missing_ok=True)

    def _require_same(self, identity: str, recipe: dict[str, Any]) -> None:
        other = [
            f"{name} is {recipe.get(name)} there and {value} here"
            for name, value in self.recipe.items()
            if recipe.get(name) != value
        ]
        if identity != self.identity:
            other.append("its models, samples or settings are others")
        if other:
            raise UsageError(f"the checkpoint '{self.file}' is of another training: {other[0]}", _REMEDY)


class Fewshot(Trainer):
    """One step of AdamW on the mean loss of all calibration samples."""

    def train(self, training_task: TrainingTask, progress: Progress) -> Trained:
        with learner_for(training_task, self.settings) as learner:
            learner.step(range(training_task.size), self.settings.learning_rate)
            progress("train", 1, 1)
            return Trained(learner.changes(), steps=1, samples=training_task.size, validation=None)
