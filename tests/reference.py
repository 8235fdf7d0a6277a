"""BiCo again, slow and obvious: one literal vision transformer, every activation and gradient kept, a float64 SVD.

Works on weights in open_clip's names and shares no code with the package.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from toys import Toy

ROLES = ("attn.q", "attn.k", "attn.v", "attn.out", "mlp.up", "mlp.down")


@dataclass
class Seen:
    """Rows (samples, tokens, width), or (samples, width) behind the pooling, by site."""

    inputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def site_weights(state: dict[str, Tensor], blocks: int) -> dict[str, tuple[Tensor, Tensor | None]]:
    """(out, in) weight and bias of every site."""
    sites: dict[str, tuple[Tensor, Tensor | None]] = {}
    for block in range(blocks):
        stem = f"visual.transformer.resblocks.{block}."
        packed = zip(
            state[stem + "attn.in_proj_weight"].chunk(3), state[stem + "attn.in_proj_bias"].chunk(3), strict=True
        )
        for role, (weight, bias) in zip(ROLES[:3], packed, strict=True):
            sites[f"blocks.{block}.{role}"] = (weight, bias)
        for role, module in zip(ROLES[3:], ("attn.out_proj", "mlp.c_fc", "mlp.c_proj"), strict=True):
            sites[f"blocks.{block}.{role}"] = (state[f"{stem}{module}.weight"], state[f"{stem}{module}.bias"])
    sites["proj"] = (state["visual.proj"].T, None)
    return sites


def vision_transformer(
    state: dict[str, Tensor], toy: Toy, pixels: Tensor, blocks: int
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Image features, and the input and output of every site."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    sites = site_weights(state, blocks)

    def linear(name: str, x: Tensor) -> Tensor:
        weight, bias = sites[name]
        y = x @ weight.T if bias is None else x @ weight.T + bias
        y.requires_grad_() if not y.requires_grad else y.retain_grad()
        inputs[name], outputs[name] = x, y
        return y

    def norm(name: str, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    x = functional.conv2d(pixels, state["visual.conv1.weight"], stride=toy.patch).flatten(2).transpose(1, 2)
    cls = state["visual.class_embedding"].expand(len(x), 1, -1)
    x = norm("visual.ln_pre", torch.cat([cls, x], 1) + state["visual.positional_embedding"])
    for block in range(blocks):
        stem = f"visual.transformer.resblocks.{block}."
        site = f"blocks.{block}."
        y = norm(stem + "ln_1", x)
        q, k, v = (linear(site + role, y).unflatten(-1, (toy.heads, -1)).transpose(1, 2) for role in ROLES[:3])
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + linear(site + "attn.out", (weights @ v).transpose(1, 2).flatten(2))
        hidden = functional.gelu(linear(site + "mlp.up", norm(stem + "ln_2", x)))
        x = x + linear(site + "mlp.down", hidden)
    return linear("proj", norm("visual.ln_post", x)[:, 0]), inputs, outputs


def observe(state: dict[str, Tensor], toy: Toy, pixels: Tensor, labels: Tensor, classes: Tensor) -> Seen:
    """One pass over all samples at once, with the zero-shot loss summed."""
    features, inputs, outputs = vision_transformer(state, toy, pixels, toy.blocks)
    logits = state["logit_scale"].exp() * functional.normalize(features, dim=-1) @ classes.T
    functional.cross_entropy(logits, labels, reduction="sum").backward()
    return Seen(
        {name: x.detach().double() for name, x in inputs.items()},
        {name: y.grad.double() for name, y in outputs.items() if y.grad is not None},
    )


def resized(rows: Tensor, grid: int, new_grid: int) -> Tensor:
    """CLS kept, patches interpolated bilinearly one target cell at a time."""
    if rows.ndim == 2 or grid == new_grid:
        return rows
    patches = rows[:, 1:].unflatten(1, (grid, grid))
    cells = []
    for i in range(new_grid):
        for j in range(new_grid):
            y, x = ((index + 0.5) * grid / new_grid - 0.5 for index in (i, j))
            y, x = (min(max(value, 0.0), grid - 1.0) for value in (y, x))
            top, left = int(y), int(x)
            down, right = min(top + 1, grid - 1), min(left + 1, grid - 1)
            a, b = y - top, x - left
            cell = (1 - a) * ((1 - b) * patches[:, top, left] + b * patches[:, top, right])
            cells.append(cell + a * ((1 - b) * patches[:, down, left] + b * patches[:, down, right]))
    return torch.cat([rows[:, :1], torch.stack(cells, 1)], 1)


@dataclass
class Alignment:
    """The singular triplets of one site's cross-covariance."""

    left: Tensor
    values: Tensor
    right: Tensor

    def map(self, cut: float) -> Tensor:
        kept = self.values > cut * self.values[0]
        return self.left[:, kept] @ self.right[kept]

    def source_projector(self, cut: float) -> Tensor:
        kept = self.values > cut * self.values[0]
        return self.left[:, kept] @ self.left[:, kept].T


def align(source: Tensor, target: Tensor, source_grid: int, target_grid: int) -> Alignment:
    a = resized(source, source_grid, target_grid)
    covariance = a.reshape(-1, a.shape[-1]).T @ target.reshape(-1, target.shape[-1])
    return Alignment(*torch.linalg.svd(covariance, full_matrices=False))


def source_site(name: str, source_blocks: int, target_blocks: int) -> str:
    """The source site of a target site, blocks matched by index."""
    if not name.startswith("blocks."):
        return name
    _, block, role = name.split(".", 2)
    if target_blocks == 1:
        return f"blocks.{source_blocks - 1}.{role}"
    return f"blocks.{int(int(block) * (source_blocks - 1) / (target_blocks - 1) + 0.5)}.{role}"
