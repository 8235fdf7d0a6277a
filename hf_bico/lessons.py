"""An objective as a lesson for the methods that train: a model learns what its head asks it about samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hf_bico.alignment.methods.training import Lesson
from hf_bico.alignment.objectives.base import Head, Question
from hf_bico.data.dataset import Samples
from hf_bico.models.checkpoints import digest_of
from hf_bico.models.families.base import TEXT_TOWER
from hf_bico.models.families.live import ImageModel, LiveModel

LOOKED_AT = 64
"""So many samples are looked at to tell what they are from others; all of them by their rows and labels."""


def lesson_of(model: LiveModel, head: Head, samples: Samples) -> Lesson:
    """All of the model's tensors but a CLIP's text tower learn what the head asks about the samples.

    The model runs in evaluation mode, without dropout.
    """

    def some(numbers: Sequence[int]) -> Samples:
        return samples.some(numbers)

    def loss(numbers: Sequence[int]) -> Tensor:
        [(chosen, labels)] = some(numbers).batches(len(numbers))
        found = head.losses(model, Question(chosen, labels)).task
        if found is None:
            raise ValueError("samples without labels give no loss")
        return found

    def right(numbers: Sequence[int]) -> float:
        return head.measure(model, some(numbers), len(numbers))

    layout = model.layout
    texts = {name for name, reason in layout.others.items() if reason == TEXT_TOWER}
    texts |= {slot.tensor for site in layout.sites if site.tower for slot in site.slots}
    parameters = {name: parameter for name, parameter in model.module.named_parameters() if name not in texts}
    looked_at = some(range(min(LOOKED_AT, len(samples)))).batches(LOOKED_AT)
    identity = {
        "weights": digest_of(parameters.values()),
        "classes": digest_of(head.tensors),
        "samples": digest_of(_as_read(model, chosen) for chosen, _ in looked_at),
        "rows": hashlib.blake2b(repr((samples.indices, samples.labels)).encode(), digest_size=16).hexdigest(),
    }
    measured = right if head.metric == "accuracy" else None
    return Lesson(parameters, loss, measured, len(samples), json.dumps(identity))


def _as_read(model: LiveModel, samples: Sequence[Any]) -> Tensor:
    """What the model is given of samples."""
    text = model.text_rows(samples)
    if text is not None:
        return text.ids
    return model.pixels(samples) if isinstance(model, ImageModel) else model.features(samples)
