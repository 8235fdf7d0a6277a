"""Exact copies of language models in other coordinates, and what calibration sees of a model; knows no hf_bico.

A norm of weight 1 that only divides by the root mean square commutes with every rotation. So the residual stream may be
turned as a whole, the neurons of an MLP may change places, and inside of the heads values and output turn together.
Queries and keys turn together too, unless positions are turned into them (RoPE).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

CUT = 1e-6
"""Of the eigenvalues of X^T X: smaller ones, as a share of the largest, count as unseen."""
FEED_FORWARD = ("mlp", "DenseReluDense")
UP = ("gate_proj", "up_proj", "wi", "wi_0", "wi_1")


@dataclass(frozen=True)
class Turn:
    """The new coordinates (row vectors, x' = x Q) of what a linear module reads and of what it writes."""

    reads: Tensor
    writes: Tensor

    def of_weight(self, weight: Tensor) -> Tensor:
        return self.writes.T @ weight @ self.reads

    def of_bias(self, bias: Tensor) -> Tensor:
        return bias @ self.writes


class InDouble(TorchFunctionMode):
    """Inside of the `with`, a float64 model stays one: transformers rounds to float32 in its norms."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and args[0].dtype != args[1].dtype:
            args = tuple(factor.double() for factor in args)  # positions, by frequencies in float64
        if func is Tensor.to and args[0].dtype == torch.float64:
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        if kwargs.get("dtype") is torch.float32 and args and isinstance(args[0], Tensor):
            kwargs["dtype"] = torch.float64 if args[0].dtype == torch.float64 else torch.float32
        return func(*args, **kwargs)


def with_plain_norms(model: Any) -> Any:
    """The model in float64 and all its norms of the residual stream with weight 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in name and not name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(1.0)
    return model.double().eval()


def rotated_copy(model: Any, seed: int) -> tuple[Any, dict[str, Turn]]:
    """The same function in new coordinates, and the turn of each of its linear modules by name."""
    generator = torch.Generator().manual_seed(seed)
    residual = _random_rotation(model.config.hidden_size, generator)
    turns = _turns(model, residual, generator)
    copy = deepcopy(model)
    embeddings = {
        id(part.weight): part.weight
        for name, part in copy.named_modules()
        if isinstance(part, nn.Embedding) and not name.endswith("relative_attention_bias")
    }
    with torch.no_grad():
        for weight in embeddings.values():
            weight.copy_(weight @ residual)
        for name, turn in turns.items():
            part = copy.get_submodule(name)
            if id(part.weight) not in embeddings:  # a tied head has turned with them
                part.weight.copy_(turn.of_weight(part.weight))
            if part.bias is not None:
                part.bias.copy_(turn.of_bias(part.bias))
    return copy, turns


def _turns(model: Any, residual: Tensor, generator: torch.Generator) -> dict[str, Turn]:
    config = model.config
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", heads)
    head_width = config.d_kv if config.model_type == "t5" else config.head_dim
    turns: dict[str, Turn] = {}
    for name, part in model.named_modules():
        if name.endswith(("self_attn", "SelfAttention", "EncDecAttention")):
            values = [_random_rotation(head_width, generator) for _ in range(groups)]
            of_queries = torch.eye(heads * head_width, dtype=torch.float64)
            of_keys = torch.eye(groups * head_width, dtype=torch.float64)
            if config.model_type == "t5":  # its positions are added to the scores, and turned into nothing
                of_queries = of_keys = torch.block_diag(
                    *(_random_rotation(head_width, generator) for _ in range(heads))
                )
            of_values = torch.block_diag(*values)
            of_heads = torch.block_diag(*(values[head * groups // heads] for head in range(heads)))
            ending = "" if config.model_type == "t5" else "_proj"
            turns[f"{name}.q{ending}"] = Turn(residual, of_queries)
            turns[f"{name}.k{ending}"] = Turn(residual, of_keys)
            turns[f"{name}.v{ending}"] = Turn(residual, of_values)
            turns[f"{name}.o{ending}"] = Turn(of_heads, residual)
        elif name.endswith(FEED_FORWARD):
            own = dict(part.named_children())
            down = own.get("down_proj", own.get("wo"))
            assert isinstance(down, nn.Linear)
            order = torch.randperm(down.in_features, generator=generator)
            neurons = torch.eye(len(order), dtype=torch.float64)[order]
            turns |= {f"{name}.{child}": Turn(residual, neurons) for child in own if child in UP}
            turns |= {f"{name}.{child}": Turn(neurons, residual) for child, found in own.items() if found is down}
        elif name == "lm_head":
            turns[name] = Turn(residual, torch.eye(part.out_features, dtype=torch.float64))
    return turns


def _random_rotation(size: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))[0]


@dataclass(frozen=True)
class Rows:
    """What each linear module of a model read, and the gradients at what it wrote: (rows, width) over real tokens."""

    inputs: dict[str, Tensor]
    gradients: dict[str, Tensor]

    def projectors(self, name: str) -> tuple[Tensor, Tensor]:
        """Onto the inputs of a module and onto the gradients at its outputs."""
        return _projector(self.inputs[name]), _projector(self.gradients[name])

    def unseen(self, name: str, change: Tensor) -> float:
        """The share of a change's energy that lies outside of both."""
        of_inputs, of_gradients = self.projectors(name)
        return 1 - float((of_gradients @ change @ of_inputs).square().sum() / change.square().sum())


def observe(model: Any, names: list[str], loss: Callable[[], Tensor], real: Tensor) -> Rows:
    """One pass over all samples at once; `real` (samples, tokens) says which tokens are no padding."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        def hook(_: nn.Module, read: tuple[Tensor, ...], written: Tensor) -> None:
            inputs[name], outputs[name] = read[0].detach(), written

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(note(name)) for name in names]
    try:
        with torch.enable_grad():
            gradients = torch.autograd.grad(loss(), [outputs[name] for name in names])
    finally:
        for hook in hooks:
            hook.remove()
    return Rows(
        {name: rows[real] for name, rows in inputs.items()},
        {name: rows[real] for name, rows in zip(names, gradients, strict=True)},
    )


def _projector(rows: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(rows.T @ rows)
    seen = vectors[:, values > CUT * values[-1]]
    return seen @ seen.T
