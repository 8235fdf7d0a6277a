"""Rows of two models' activations that belong together. Knows tokens and tensors; not what the rows are for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hf_bico.errors import ModelError
from hf_bico.sites import Tokens


def pair_rows(
    source: Tensor, target: Tensor, source_tokens: Tokens | None, target_tokens: Tokens | None
) -> tuple[Tensor, Tensor]:
    """Rows of both models that belong together, flattened to (rows, width).

    Pooled activations (samples, width) pair by sample. Token activations (samples, tokens, width) pair by token:
    patches are resized bilinearly from the source's grid to the target's; prefix tokens are kept apart, and
    where their counts differ only the first (CLS) pairs. Without a known layout of tokens, all rows pair one by one.
    """
    if source_tokens is None or target_tokens is None:
        if source.shape[:-1] != target.shape[:-1]:
            raise ModelError(
                f"the source shows activations of {tuple(source.shape)} and the target of {tuple(target.shape)}, "
                "whose rows do not pair one by one",
                "give both models inputs of one size, and choose a target that cuts them into as many tokens",
            )
        return source.flatten(0, -2), target.flatten(0, -2)
    if source.ndim == 2:
        return source, target
    prefix = min(source_tokens.prefix, target_tokens.prefix)
    if source_tokens.prefix != target_tokens.prefix:
        prefix = min(prefix, 1)
    source_patches = resize(source[:, source_tokens.prefix :], source_tokens.grid, target_tokens.grid)
    source = torch.cat([source[:, :prefix], source_patches], dim=1)
    target = torch.cat([target[:, :prefix], target[:, target_tokens.prefix :]], dim=1)
    return source.flatten(0, 1), target.flatten(0, 1)


def resize(patches: Tensor, grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """(samples, h w, width) patches on another grid: bilinear in 2-D, align_corners=False, no antialiasing."""
    if grid == new_grid:
        return patches
    image = patches.double().transpose(1, 2).unflatten(2, grid)
    resized = functional.interpolate(image, size=new_grid, mode="bilinear", align_corners=False, antialias=False)
    return resized.flatten(2).transpose(1, 2)
