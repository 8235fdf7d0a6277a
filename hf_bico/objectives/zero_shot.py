"""The zero-shot objective of CLIP-like models: classes are what the model's own text tower makes of their names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hf_bico.errors import ClassNamesError, UnsupportedModelError
from hf_bico.models.families.live import ClipModel, LiveModel
from hf_bico.objectives.base import Classifier

PROMPT_BATCH = 256


@dataclass(frozen=True)
class ZeroShotHead(Classifier):
    """Class embeddings of a model's own text tower, with its logit scale and bias."""

    classes: Tensor
    scale: Tensor
    bias: Tensor | None

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [self.classes, self.scale]

    def logits(self, features: Tensor) -> Tensor:
        logits = self.scale * functional.normalize(features, dim=-1) @ self.classes.T
        return logits if self.bias is None else logits + self.bias


@torch.no_grad()
def zero_shot_head(model: LiveModel, class_names: Sequence[str], templates: Sequence[str]) -> ZeroShotHead:
    """Each class as the normalised mean, over the templates, of its normalised prompt embeddings."""
    if not isinstance(model, ClipModel):
        raise UnsupportedModelError(
            "this model has no text side to be asked by class names",
            "measure it by a linear probe: --evaluation probe, or 'hf-bico eval --probe N'",
        )
    prompts = [template.replace("{}", name) for name in class_names for template in templates]
    with model.quiet():
        features = torch.cat([model.text_features(batch) for batch in _chunks(prompts, PROMPT_BATCH)])
    by_class = functional.normalize(features, dim=-1).unflatten(0, (len(class_names), len(templates)))
    classes = functional.normalize(by_class.mean(1), dim=-1)
    if len(set(class_names)) > 1 and bool((classes == classes[0]).all()):
        raise ClassNamesError(
            "all classes get the same text embedding: the tokenizer cannot tell their names apart",
            "check the model's tokenizer files, or give other names with --class-names",
        )
    scale, bias = model.logit_scale_and_bias()
    return ZeroShotHead(classes, scale.detach(), None if bias is None else bias.detach())


def _chunks(items: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (items[start : start + size] for start in range(0, len(items), size))
