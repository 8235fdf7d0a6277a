"""A zero-shot task as a lesson for the methods that train: a model's visual tower against its own class embeddings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_bico.checkpoints import digest_of
from hf_bico.data.dataset import Samples
from hf_bico.families import TEXT_TOWER, LiveModel
from hf_bico.measuring import accuracy, logits_of
from hf_bico.methods.training import Lesson
from hf_bico.objectives import ZeroShotHead, zero_shot_losses

LOOKED_AT = 64
"""So many samples are looked at to tell their images from others; all of them by their rows and labels."""


def lesson_of(model: LiveModel, head: ZeroShotHead, samples: Samples) -> Lesson:
    """All of the model's tensors but the text tower's learn to tell the samples' classes apart.

    The model runs in evaluation mode, without dropout.
    """

    def some(numbers: Sequence[int]) -> Samples:
        return replace(
            samples,
            indices=tuple(samples.indices[number] for number in numbers),
            labels=tuple(samples.labels[number] for number in numbers),
        )

    def loss(numbers: Sequence[int]) -> Tensor:
        [(images, labels)] = some(numbers).batches(len(numbers))
        logits = head.logits(model.image_features(model.pixels(images)))
        found = zero_shot_losses(logits, torch.tensor(labels, device=model.device), None).task
        if found is None:
            raise ValueError("samples without labels give no loss")
        return found

    def right(numbers: Sequence[int]) -> float:
        chosen = some(numbers)
        return accuracy(logits_of(model, head, chosen, len(numbers)).argmax(-1).tolist(), chosen.labels)

    parameters = {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if model.layout.others.get(name) != TEXT_TOWER
    }
    seen = [model.pixels(images) for images, _ in some(range(min(LOOKED_AT, len(samples)))).batches(LOOKED_AT)]
    identity = {
        "weights": digest_of(parameters.values()),
        "classes": digest_of([head.classes, head.scale]),
        "images": digest_of(seen),
        "rows": hashlib.blake2b(repr((samples.indices, samples.labels)).encode(), digest_size=16).hexdigest(),
    }
    return Lesson(parameters, loss, right, len(samples), json.dumps(identity))
