"""Fewshot, finetune.

Fine-tuning of the target itself, as a reference: what training on all of the split gives.

AdamW with a linear warm-up and a cosine decay to 0, on nine samples in ten. With a checkpoint, an interrupted training
goes on where it was last saved, and ends as if nothing had happened.

One step of fine-tuning on the calibration samples: what the same samples give without a source.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from math import cos, pi
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_bico.alignment.methods.base import Trainer
from hf_bico.alignment.methods.training import Learner, Trained, TrainingTask, learning
from hf_bico.errors import OutputError, UsageError
from hf_bico.settings import Settings
from hf_bico.utils.progress import Progress

CHECKPOINT_EVERY = 100
"""After so many steps the training is saved."""

CHECKPOINT_FILE = "training.safetensors"
CHECKPOINT_ENTRY = "hf_bico_training"
"""The file of a checkpoint, and the JSON in its header: of what training, and after how many steps."""

VALIDATION_PART = 10
"""One sample in so many is kept for validation."""

RECIPE = ("train_steps", "train_batch", "warmup", "learning_rate", "weight_decay", "seed")
"""The settings that a training is; in how many parts a batch runs is none of them."""


class Finetune(Trainer):
    """Trains for `train_steps` steps on batches of `train_batch` samples."""

    whole_split: ClassVar[bool] = True

    def train(self, training_task: TrainingTask, progress: Progress) -> Trained:
        settings, steps = self.settings, self.settings.train_steps
        generator = torch.Generator().manual_seed(settings.seed)
        training, validation = split(training_task.size, generator)
        order = batches(training, settings.train_batch, generator)
        saved = None if settings.checkpoint is None else SavedTraining.of(training_task, settings)
        with learning(training_task, settings) as learner:
            if saved is not None:
                saved.resume(learner)
            progress("train", learner.steps, steps)
            for batch in islice(order, learner.steps, steps):
                learner.step(batch, rate_of(learner.steps, settings))
                if saved is not None and (learner.steps % CHECKPOINT_EVERY == 0 or learner.steps == steps):
                    saved.save(learner)
                progress("train", learner.steps, steps)
            return Trained(
                learner.changes(),
                steps=steps,
                samples=min(len(training), steps * settings.train_batch),
                validation=learner.accuracy(validation),
            )


def split(size: int, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """The numbers of the training and of the validation samples: the latter are the first tenth of a shuffle."""
    shuffled: list[int] = torch.randperm(size, generator=generator).tolist()
    held = size // VALIDATION_PART
    return shuffled[held:], shuffled[:held]


def batches(samples: Sequence[int], size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Batches without end: one shuffle of the samples after the other, cut into pieces, none of them dropped.

    A batch may hold the end of one shuffle and the beginning of the next; it is never larger than all the samples.
    """
    shuffles = (torch.randperm(len(samples), generator=generator).tolist() for _ in repeat(None))
    stream = (samples[place] for place in chain.from_iterable(shuffles))
    size = min(size, len(samples))
    return (list(islice(stream, size)) for _ in repeat(None))


def rate_of(step: int, settings: Settings) -> float:
    """The learning rate of a step, counted from 0: up in a line, then down along a cosine, to 0 after the last one.

    >>> settings = Settings(train_steps=4, warmup=2, learning_rate=1.0)
    >>> [round(rate_of(step, settings), 3) for step in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    steps, warmup = settings.train_steps, min(settings.warmup, settings.train_steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    return settings.learning_rate * 0.5 * (1 + cos(pi * (step - warmup) / (steps - warmup)))


def remove_checkpoint(folder: Path) -> None:
    """Remove what a training left there to go on from, and the folder if it held nothing else."""
    file = folder / CHECKPOINT_FILE
    if file.is_file():
        file.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()


@dataclass(frozen=True)
class SavedTraining:
    """One training's checkpoint: a single file, so that it is there whole or not at all."""

    folder: Path
    identity: str
    recipe: dict[str, Any]

    @classmethod
    def of(cls, training_task: TrainingTask, settings: Settings) -> SavedTraining:
        """The checkpoint of this lesson and recipe, in a folder that can be written to."""
        recipe = {name: getattr(settings, name) for name in RECIPE}
        saved = cls(Path(str(settings.checkpoint)), training_task.identity, {**recipe, "samples": training_task.size})
        try:
            saved.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"no checkpoint can be written into '{saved.folder}': {error.strerror}",
                "name another folder with --checkpoint",
            ) from error
        return saved

    @property
    def file(self) -> Path:
        return self.folder / CHECKPOINT_FILE

    def resume(self, learner: Learner) -> None:
        """Bring the learner to where the training was saved; nothing is done where it never was."""
        if not self.file.exists():
            return
        try:
            with safe_open(self.file, framework="pt") as file:
                about = json.loads(file.metadata()[CHECKPOINT_ENTRY])
                self._require_same(about["identity"], about["recipe"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
                learner.go_on(tensors, int(about["steps"]))
        except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
            raise UsageError(f"the checkpoint '{self.file}' is broken: {error}", self._way_out) from error

    def save(self, learner: Learner) -> None:
        """Write beside the last checkpoint, then put the new one in its place."""
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
            raise UsageError(f"the checkpoint '{self.file}' is of another training: {other[0]}", self._way_out)

    @property
    def _way_out(self) -> str:
        return "name another folder with --checkpoint, or remove that file to train from the beginning"


class Fewshot(Trainer):
    """One step of AdamW on the mean loss over all samples."""

    whole_split: ClassVar[bool] = False

    def train(self, training_task: TrainingTask, progress: Progress) -> Trained:
        with learning(training_task, self.settings) as learner:
            learner.step(range(training_task.size), self.settings.learning_rate)
            progress("train", 1, 1)
            return Trained(learner.changes(), steps=1, samples=training_task.size, validation=None)
