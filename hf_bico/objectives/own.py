"""The caller's own objective: a function of the model and a prepared batch that gives a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_bico.errors import ObjectiveError
from hf_bico.models.families.live import ImageModel, LiveModel
from hf_bico.models.families.text_models import TextModel
from hf_bico.models.hooks import Losses
from hf_bico.models.inference import Batched
from hf_bico.models.tokenization import TokenBatch
from hf_bico.objectives.base import Head, Question
from hf_bico.runtime.environment import sent


@dataclass(frozen=True)
class Batch:
    """What an objective of the caller's own gets, on the model's device: `labels`, and `pixels` or `tokens`.

    Images are `pixels`, prepared for the model; texts are `tokens` with their mask.
    """

    pixels: Tensor | None
    labels: Tensor
    tokens: TokenBatch | None = None


@dataclass(frozen=True)
class OwnHead(Head):
    """Asks by the caller's function; what it would measure is not known."""

    objective: Callable[..., Any]
    looks_inside: ClassVar[bool] = True

    def losses(self, model: LiveModel, asked: Question) -> Losses:
        pixels = model.pixels(asked.samples) if isinstance(model, ImageModel) else None
        tokens = model.tokens(asked.samples) if isinstance(model, TextModel) else None
        value = self.objective(model.module, Batch(pixels, sent(torch.tensor(asked.labels), model.device), tokens))
        if not isinstance(value, Tensor) or value.ndim != 0:
            raise ObjectiveError(
                f"the objective gave {type(value).__name__} of shape {getattr(value, 'shape', '-')}, not one loss",
                "return a tensor of no dimensions: the sum of the samples' losses",
            )
        return Losses(value, text=None if tokens is None else tokens.rows)

    def measure(self, model: LiveModel, samples: Batched, batch_size: int) -> float:
        raise ObjectiveError("what the caller's own objective would measure is not known", "measure by a probe")
