"""Tell what of a checkpoint is no weight of its own: buffers that a model computes itself, and copies of tied weights.

Old files hold them, newer ones do not. Knows names, shapes and tensors; no kind of model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from hf_bico.models.name_matching import Overlap, overlap

if TYPE_CHECKING:
    from hf_bico.models.checkpoints import Checkpoint
    from hf_bico.models.model import Model

Shapes = Mapping[str, tuple[int, ...]]

_CAUSAL_MASK = re.compile(r"(^|\.)(attn|attention)\.bias$")
_MASKED_VALUE = re.compile(r"(^|\.)masked_bias$")
_COUNTED = re.compile(r"(^|\.)(position_ids|token_type_ids|inv_freq)$")
_SHARED = re.compile(
    r"(^|.*\.)(lm_head|embed_out|embed_tokens|word_embeddings|wte|shared|predictions\.decoder)\.weight"
    r"|(^|.*\.)(predictions|lm_head)\.(decoder\.)?bias"
)
"""Names of tensors that models use in two places, and files hold once or twice."""
_HEAD = re.compile(r"(^|.*\.)(lm_head|embed_out|predictions\.decoder)\.weight")
_EMBEDDED_TWICE = re.compile(r"(encoder|decoder)\.embed_tokens\.weight")


def is_buffer(name: str, shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor is a causal mask, the positions, or the frequencies of rotary ones, none of it learnt.

    >>> is_buffer("h.0.attn.bias", (1, 1, 16, 16)), is_buffer("h.0.attn.bias", (16,))
    (True, False)
    """
    if _CAUSAL_MASK.search(name):
        return len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]
    if _MASKED_VALUE.search(name):
        return prod(shape) == 1
    return bool(_COUNTED.search(name)) and (len(shape) < 2 or (len(shape) == 2 and shape[0] == 1))


def without_buffers(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the tensors that are weights."""
    return {name: shape for name, shape in shapes.items() if not is_buffer(name, shape)}


def weight_overlap(tuned: Checkpoint, base: Checkpoint) -> Overlap:
    """Match the weights of a fine-tuned model and its base; a tensor that repeats another one is not missed."""
    found = overlap(without_buffers(tuned.shapes), without_buffers(base.shapes))
    return replace(
        found,
        missing=tuple(name for name in found.missing if not _repeats(base, name)),
        extra=tuple(name for name in found.extra if not _repeats(tuned, name)),
    )


def planned_overlap(tuned: Model, base: Model) -> Overlap:
    """Match the same by shapes and configurations alone, which say whether a head is tied to the embeddings."""
    found = overlap(without_buffers(tuned.checkpoint.shapes), without_buffers(base.checkpoint.shapes))
    return replace(
        found,
        missing=tuple(name for name in found.missing if not _is_tied(base, name)),
        extra=tuple(name for name in found.extra if not _is_tied(tuned, name)),
    )


def _repeats(checkpoint: Checkpoint, name: str) -> bool:
    others = [other for other in _alike(checkpoint.shapes, name) if other != name]
    if not others:
        return False
    import torch

    own = checkpoint.tensor(name)
    return any(torch.equal(own, checkpoint.tensor(other)) for other in others)


def _is_tied(model: Model, name: str) -> bool:
    shapes = model.checkpoint.shapes
    if _EMBEDDED_TWICE.fullmatch(name) and "shared.weight" in shapes:  # T5 always shares them
        return True
    if _HEAD.fullmatch(name) is None or len(_alike(shapes, name)) < 2:
        return False
    return bool(model.filled(model.config).get("tie_word_embeddings"))


def _alike(shapes: Shapes, name: str) -> list[str]:
    """Return the tensors that may be the same one, itself among them."""
    if _SHARED.fullmatch(name) is None:
        return []
    return [other for other, shape in shapes.items() if shape == shapes[name] and _SHARED.fullmatch(other)]
