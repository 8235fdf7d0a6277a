"""BiCo and its kin again, slow and obvious: one literal vision transformer, everything kept, a float64 SVD.

Works on weights in open_clip's names and shares no code with the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement

import torch
from torch import Tensor
from torch.nn import functional

from support.toys import Toy

ROLES = ("attn.q", "attn.k", "attn.v", "attn.out", "mlp.up", "mlp.down")
State = dict[str, Tensor]
Changes = dict[str, tuple[Tensor, Tensor | None]]
"""The change of the weight (out, in) and of the bias of every site."""


@dataclass
class Seen:
    """Rows (samples, tokens, width), or (samples, width) behind the pooling, by site."""

    inputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    input_gradients: dict[str, Tensor] = field(default_factory=dict)
    """What passes back through one layer alone to its input."""


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
        x = x.clone()  # of its own, so that q, k and v each have a gradient of their input
        x.requires_grad_() if not x.requires_grad else x.retain_grad()
        y = x @ weight.T if bias is None else x @ weight.T + bias
        y.retain_grad()
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
    functional.cross_entropy(logits_of(state, features, classes), labels, reduction="sum").backward()
    return Seen(
        {name: x.detach().double() for name, x in inputs.items()},
        {name: y.grad.double() for name, y in outputs.items() if y.grad is not None},
        {name: y.detach().double() for name, y in outputs.items()},
        {name: x.grad.double() for name, x in inputs.items() if x.grad is not None},
    )


def logits_of(state: State, features: Tensor, classes: Tensor) -> Tensor:
    return state["logit_scale"].exp() * functional.normalize(features, dim=-1) @ classes.T


def predictions(state: State, toy: Toy, pixels: Tensor, classes: Tensor) -> Tensor:
    """Probabilities (samples, classes)."""
    features, _, _ = vision_transformer(state, toy, pixels, toy.blocks)
    return logits_of(state, features, classes).softmax(-1).detach()


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

    def less(self, other: Alignment) -> Alignment:
        """That of the difference of the two covariances."""
        first, second = ((one.left * one.values) @ one.right for one in (self, other))
        return Alignment(*torch.linalg.svd(first - second, full_matrices=False))

    def source_projector(self, cut: float) -> Tensor:
        kept = self.values > cut * self.values[0]
        return self.left[:, kept] @ self.left[:, kept].T

    def target_projector(self, cut: float) -> Tensor:
        kept = self.values > cut * self.values[0]
        return self.right[kept].T @ self.right[kept]


def align(source: Tensor, target: Tensor, source_grid: int, target_grid: int) -> Alignment:
    a = resized(source, source_grid, target_grid)
    covariance = a.reshape(-1, a.shape[-1]).T @ target.reshape(-1, target.shape[-1])
    return Alignment(*torch.linalg.svd(covariance, full_matrices=False))


@dataclass(frozen=True)
class Labelling:
    """For every sample, labels with their probabilities: which losses are differentiated, and what they count."""

    labels: Tensor
    probabilities: Tensor

    @classmethod
    def likeliest(cls, probabilities: Tensor, most: int) -> Labelling:
        """The `most` likeliest labels, by a plain sort; their probabilities stay as they are."""
        order = probabilities.argsort(dim=-1, descending=True)[:, :most]
        return cls(order, probabilities.gather(1, order))


def label_gradients(
    state: State, toy: Toy, pixels: Tensor, classes: Tensor, labelling: Labelling
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs (samples, ...) and gradients (samples, labels, ...) of every site: one backward for a sample and label."""
    inputs: dict[str, list[Tensor]] = {}
    gradients: dict[str, list[Tensor]] = {}
    for image, labels in zip(pixels, labelling.labels, strict=True):
        found: dict[str, list[Tensor]] = {}
        for label in labels:
            features, read, written = vision_transformer(state, toy, image[None], toy.blocks)
            functional.cross_entropy(logits_of(state, features, classes), label[None]).backward()
            for name, y in written.items():
                assert y.grad is not None
                found.setdefault(name, []).append(y.grad[0].double())
        for name, x in read.items():
            inputs.setdefault(name, []).append(x[0].detach().double())
            gradients.setdefault(name, []).append(torch.stack(found[name]))
    stacked = [{name: torch.stack(rows) for name, rows in kept.items()} for kept in (inputs, gradients)]
    return stacked[0], stacked[1]


@dataclass(frozen=True)
class Fisher:
    """What both models show with every label in turn; sites by their target's name."""

    grids: tuple[int, int]
    inputs: tuple[dict[str, Tensor], dict[str, Tensor]]
    gradients: tuple[dict[str, Tensor], dict[str, Tensor]]
    labellings: tuple[Labelling, Labelling]

    def maps(self, origin: str, site: str) -> tuple[Alignment, Alignment]:
        """Of inputs and of outputs."""
        x = [resized(self.inputs[0][origin], *self.grids), self.inputs[1][site]]
        g = [self.gradients[0][origin], self.gradients[1][site]]
        g[0] = torch.stack([resized(g[0][:, label], *self.grids) for label in range(g[0].shape[1])], 1)
        # behind the pooling there is one row a sample
        x = [rows.reshape(len(rows), -1, rows.shape[-1]) for rows in x]
        g = [rows.reshape(*rows.shape[:2], -1, rows.shape[-1]) for rows in g]
        outside = torch.zeros(g[0].shape[-1], g[1].shape[-1], dtype=torch.float64)
        inside = torch.zeros(x[0].shape[-1], x[1].shape[-1], dtype=torch.float64)
        for sample in range(len(x[0])):
            squares = [torch.zeros(rows.shape[1], dtype=torch.float64) for rows in x]
            for label in range(g[0].shape[1]):
                p = [float(labelling.probabilities[sample, label]) for labelling in self.labellings]
                outside += (p[0] * p[1]) ** 0.5 * g[0][sample, label].T @ g[1][sample, label]
                for side in (0, 1):
                    squares[side] += p[side] * g[side][sample, label].square().sum(-1)
            for token in range(x[0].shape[1]):
                weight = squares[0][token].sqrt() * squares[1][token].sqrt()
                inside += weight * torch.outer(x[0][sample, token], x[1][sample, token])
        found = [Alignment(*torch.linalg.svd(one, full_matrices=False)) for one in (inside, outside)]
        return found[0], found[1]


def masked(change: Tensor, gradient: Tensor) -> Tensor:
    """One coordinate after the other: kept where it goes against the gradient."""
    kept = torch.zeros_like(change)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in change.shape)).reshape(-1, change.ndim):
        index = tuple(place.tolist())
        if float(change[index]) * float(gradient[index]) < 0:
            kept[index] = change[index]
    return kept


def parameter_gradients(state: State, toy: Toy, pixels: Tensor, labels: Tensor, classes: Tensor) -> Changes:
    """The gradient of the mean loss by the parameters of every site."""
    leaves = {name: tensor.clone().requires_grad_(tensor.is_floating_point()) for name, tensor in state.items()}
    features, _, _ = vision_transformer(leaves, toy, pixels, toy.blocks)
    functional.cross_entropy(logits_of(leaves, features, classes), labels).backward()
    found = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return site_weights(found, toy.blocks)


def fitted(change: Tensor, shape: Sequence[int]) -> Tensor:
    """Cropped where too large, padded with zeros where too small."""
    fit = torch.zeros(*shape, dtype=change.dtype)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in shape)).reshape(-1, len(shape)):
        index = tuple(place.tolist())
        if all(at < size for at, size in zip(index, change.shape, strict=True)):
            fit[index] = change[index]
    return fit


def cka(x: Tensor, y: Tensor) -> float:
    """Linear centred kernel alignment, by n x n kernels and the centring matrix."""
    n = len(x)
    centring = torch.eye(n, dtype=torch.float64) - torch.full((n, n), 1 / n, dtype=torch.float64)
    kernel_x, kernel_y = (centring @ (rows.double() @ rows.double().T) @ centring for rows in (x, y))
    norms = (kernel_x.square().sum() * kernel_y.square().sum()).sqrt()
    return float((kernel_x * kernel_y).sum() / norms)


def most_similar_blocks(source: Sequence[Tensor], target: Sequence[Tensor]) -> list[int]:
    """The source block of each target block: the best of all lists that never decrease."""
    scores = [[cka(x, y) for y in target] for x in source]

    def total(blocks: Sequence[int]) -> float:
        return sum(scores[block][place] for place, block in enumerate(blocks))

    return list(max(_rising(len(source), len(target)), key=total))


def _rising(source_blocks: int, target_blocks: int) -> Iterator[tuple[int, ...]]:
    return combinations_with_replacement(range(source_blocks), target_blocks)


def source_site(name: str, source_blocks: int, target_blocks: int) -> str:
    """The source site of a target site, blocks matched by index."""
    if not name.startswith("blocks."):
        return name
    _, block, role = name.split(".", 2)
    if target_blocks == 1:
        return f"blocks.{source_blocks - 1}.{role}"
    return f"blocks.{int(int(block) * (source_blocks - 1) / (target_blocks - 1) + 0.5)}.{role}"
