"""BiCo for language models and classifiers again, slow and obvious; shares no code with the package.

Plain forward hooks on the library's own modules, one sample at a time and so without any padding, everything kept, in
float64; cross-covariances by plain products, their polar factors by an SVD.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from support.rotated_language import InDouble

CUT = 1e-6
"""Singular values below this share of the largest count as unseen."""
PACKED = "attn.c_attn"
"""GPT-2 keeps q, k and v in one module: three sites."""
Loss = Callable[[Any, int], Tensor]
"""The loss of a model on the sample of a number."""


@dataclass(frozen=True)
class Seen:
    """By module, one entry (rows, width) for each sample: what it read, and the gradients at what it wrote."""

    inputs: dict[str, list[Tensor]]
    gradients: dict[str, list[Tensor]]

    def without_first(self, rows: int) -> Seen:
        """Without so many rows of each sample."""
        return self._of(lambda x: x[rows:])

    def rows_of(self, chosen: Tensor) -> Seen:
        """Some of the rows of each sample; where there are not as many, all of them."""
        return self._of(lambda x: x[chosen] if len(x) == len(chosen) else x)

    def _of(self, taken: Callable[[Tensor], Tensor]) -> Seen:
        kinds = (self.inputs, self.gradients)
        return Seen(*({name: [taken(x) for x in found] for name, found in kind.items()} for kind in kinds))


def linear_modules(model: nn.Module, stack: str, outside: Sequence[str] = ()) -> list[str]:
    """Those inside of the blocks, whose list is at the path `stack`, and some outside of them."""
    inside = [
        name
        for name, part in model.named_modules()
        if name.startswith(f"{stack}.") and isinstance(part, nn.Linear | Conv1D)
    ]
    return [*inside, *outside]


def observe(model: nn.Module, modules: Sequence[str], loss: Loss, samples: int) -> Seen:
    """Every sample on its own."""
    inputs: dict[str, list[Tensor]] = {name: [] for name in modules}
    gradients: dict[str, list[Tensor]] = {name: [] for name in modules}
    outputs: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, read: tuple[Tensor, ...], written: Tensor) -> None:
            inputs[name].append(read[0].detach().reshape(-1, read[0].shape[-1]))
            outputs[name] = written

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(note(name)) for name in modules]
    for number in range(samples):
        with InDouble():
            found = torch.autograd.grad(loss(model, number), [outputs[name] for name in modules])
        for name, gradient in zip(modules, found, strict=True):
            gradients[name].append(gradient.reshape(-1, gradient.shape[-1]))
    for hook in hooks:
        hook.remove()
    return Seen(inputs, gradients)


def polar(source: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
    """Of the sum of X_A^T X_B over the samples."""
    total = torch.zeros(source[0].shape[1], target[0].shape[1], dtype=torch.float64)
    for x, y in zip(source, target, strict=True):
        total += x.T @ y
    u, s, v = torch.linalg.svd(total, full_matrices=False)
    kept = s > CUT * s[0]
    return u[:, kept] @ v[kept]


def source_module(name: str, stack: str, blocks: tuple[int, int]) -> str:
    """The module of the source that a module of the target takes its change from."""
    found = re.fullmatch(rf"{re.escape(stack)}\.(\d+)\.(.*)", name)
    if found is None:
        return name
    source, target = blocks
    block = source - 1 if target == 1 else int(int(found[1]) * (source - 1) / (target - 1) + 0.5)
    return f"{stack}.{block}.{found[2]}"


def carried(changes: dict[str, Tensor], seen: tuple[Seen, Seen], stack: str, blocks: tuple[int, int]) -> dict:
    """What every parameter of the target's modules changes by, from the changes of the source's."""
    expected: dict[str, Tensor] = {}
    for name in seen[1].inputs:
        origin = source_module(name, stack, blocks)
        r_in = polar(seen[0].inputs[origin], seen[1].inputs[name])
        weight, bias = changes[f"{origin}.weight"].double(), changes.get(f"{origin}.bias")
        parts, transposed = (3, True) if name.endswith(PACKED) else (1, "transformer.h." in name)
        weight = weight.T if transposed else weight
        shares = [
            ([rows.chunk(parts, -1)[part] for rows in seen[0].gradients[origin]],
             [rows.chunk(parts, -1)[part] for rows in seen[1].gradients[name]])
            for part in range(parts)
        ]  # fmt: skip
        maps = [polar(*share) for share in shares]
        turned = torch.cat([r.T @ own @ r_in for r, own in zip(maps, weight.chunk(parts), strict=True)])
        expected[f"{name}.weight"] = turned.T if transposed else turned
        if bias is not None:
            expected[f"{name}.bias"] = torch.cat(
                [own @ r for r, own in zip(maps, bias.double().chunk(parts), strict=True)]
            )
    return expected
