"""Rows of two models' activations that belong together. Knows tokens and tensors; not what the rows are for."""

from __future__ import annotations

from difflib import SequenceMatcher
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from hf_bico.errors import ModelError
from hf_bico.models.hooks import TextRows
from hf_bico.models.layout import Tokens


def pair_tokens(source: TextRows, target: TextRows) -> tuple[Tensor, Tensor]:
    """Where equal tokens of the same texts stand in the two models' batches, as positions in the flattened rows.

    They are in order, and in main memory. Padding pairs with nothing, on whatever side it stands. Where the two models
    were given the same tokens, all of them pair in order; where one has more around a text (another chat template),
    only what both have.
    """
    if len(source.ids) != len(target.ids):
        raise ValueError(f"{len(source.ids)} texts of the source and {len(target.ids)} of the target do not pair")
    masks = [side.mask.cpu() for side in (source, target)]
    ids = [side.ids.cpu() for side in (source, target)]
    if torch.equal(*masks) and torch.equal(ids[0] * masks[0], ids[1] * masks[1]):
        places = masks[0].flatten().nonzero().squeeze(1)
        return places, places
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for number, both in enumerate(zip(*masks, strict=True)):
        own = [mask.nonzero().squeeze(1) for mask in both]
        tokens = [side[number][place] for side, place in zip(ids, own, strict=True)]
        if not torch.equal(*tokens):
            own = [place[kept] for place, kept in zip(own, _in_both(*tokens), strict=True)]
        for side, place, all_found in zip(ids, own, found, strict=True):
            all_found.append(place + number * side.shape[1])
    return torch.cat(found[0]), torch.cat(found[1])


def _in_both(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    blocks = SequenceMatcher(None, source.tolist(), target.tolist(), autojunk=False).get_matching_blocks()
    pairs = [(block.a + step, block.b + step) for block in blocks for step in range(block.size)]
    if not pairs:
        raise ModelError(
            "the two models were given no token in common for a text", "choose a target with the same tokenizer"
        )
    first, second = zip(*pairs, strict=True)
    return torch.tensor(first), torch.tensor(second)


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
    if source_tokens.grid != target_tokens.grid:
        resizing = _resizing(source_tokens, prefix, target_tokens.grid, source.device)
        source = resizing @ source.double()
    else:
        source = _without_others(source, source_tokens, prefix)
    return source.flatten(0, 1), _without_others(target, target_tokens, prefix).flatten(0, 1)


def _without_others(rows: Tensor, tokens: Tokens, prefix: int) -> Tensor:
    """(samples, tokens, width) with so many of the prefix tokens alone."""
    return rows if tokens.prefix == prefix else torch.cat([rows[:, :prefix], rows[:, tokens.prefix :]], dim=1)


@lru_cache(maxsize=8)
def _resizing(tokens: Tokens, prefix: int, grid: tuple[int, int], device: torch.device) -> Tensor:
    """What turns all tokens of a sample into so many prefix tokens and patches on another grid, as a matrix."""
    count = tokens.prefix + tokens.grid[0] * tokens.grid[1]
    each = torch.eye(count, dtype=torch.float64, device=device)
    patches = resize(each[None, tokens.prefix :], tokens.grid, grid)[0]
    return torch.cat([each[:prefix], patches])


def resize(patches: Tensor, grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """(samples, h w, width) patches on another grid: bilinear in 2-D, align_corners=False, no antialiasing."""
    if grid == new_grid:
        return patches
    image = patches.double().transpose(1, 2).unflatten(2, grid)
    resized = functional.interpolate(image, size=new_grid, mode="bilinear", align_corners=False, antialias=False)
    return resized.flatten(2).transpose(1, 2)
