"""Parts that run once more in the backward pass: the same gradients, and only what enters them is kept."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from hf_bico.models.hooks import Trace, recomputed

pytestmark = pytest.mark.quick

Part = Callable[..., Any]


def curved(x: Tensor, *others: Any, **options: Any) -> Tensor:
    scale = options.get("felt", {}).get("scale", 1.0)
    return x.sin().exp().mul(scale).cos()


def several(x: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
    return x.sin(), None, x.exp(), torch.ones_like(x)


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()


def kept(part: Part, *arguments: Any, **options: Any) -> int:
    """Bytes that the graph of a part keeps."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = part(*arguments, **options)
    assert made is not None
    return sum(found.values())


def test_nothing_inside_a_part_is_kept(x: Tensor) -> None:
    part = recomputed(curved, Trace())
    mask = torch.ones(3, dtype=torch.bool)
    assert torch.equal(part(x, mask), curved(x, mask))
    assert torch.equal(*gradients(part(x, mask, other=(mask, None)).sum(), x), *gradients(curved(x).sum(), x))
    assert kept(part, x, mask) == x.nbytes + mask.nbytes < kept(curved, x, mask)


def test_a_graph_that_is_kept_is_gone_through_again(x: Tensor) -> None:
    made = recomputed(curved, Trace())(x)
    first, second = (torch.autograd.grad(made.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_several_results_some_of_which_nobody_feels(x: Tensor) -> None:
    one, nothing, two, three = recomputed(several, Trace())(x)
    assert nothing is None
    plain = several(x)
    assert torch.equal(*gradients((one * two * three).sum(), x), *gradients((plain[0] * plain[2]).sum(), x))
    assert torch.equal(*gradients(recomputed(several, Trace())(x)[2].sum(), x), x.detach().exp())


@pytest.mark.parametrize("made", [dict, BaseModelOutput])
def test_results_in_a_mapping_are_felt(x: Tensor, made: Callable[..., Mapping[str, Tensor]]) -> None:
    def part(x: Tensor) -> Mapping[str, Any]:
        return made(last_hidden_state=x.sin(), hidden_states=(x.exp(), [x.cos()]))

    def loss(found: Mapping[str, Any]) -> Tensor:
        first, (second, [third]) = found["last_hidden_state"], found["hidden_states"]
        return (first * second * third).sum()

    found = recomputed(part, Trace())(x)
    assert type(found) is made
    assert torch.equal(*gradients(loss(found), x), *gradients(loss(part(x)), x))


def test_another_tensor_that_is_felt_gets_its_gradient(x: Tensor) -> None:
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    part = recomputed(curved, Trace())
    found, expected = (gradients(run(x, felt={"scale": scale}).sum(), x, scale) for run in (part, curved))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_without_gradients_it_is_the_function_itself(x: Tensor) -> None:
    with torch.no_grad():
        assert not recomputed(curved, Trace())(x).requires_grad


@pytest.mark.parametrize("shared", [dict, UserDict])
def test_what_is_left_in_an_argument_is_felt(x: Tensor, shared: Callable[[], Any]) -> None:
    """As keys and values that later blocks read."""

    def part(x: Tensor, shared: Any) -> Tensor:
        shared["key"] = x.exp()
        return x.sin()

    def loss(run: Part) -> Tensor:
        left = shared()
        return (run(x, shared=left) * left["key"]).sum()

    assert torch.equal(*gradients(loss(recomputed(part, Trace())), x), *gradients(loss(part), x))


def test_what_is_taken_out_on_the_way_is_felt(x: Tensor) -> None:
    """As by a hook of the caller's."""
    taken: list[Tensor] = []

    def part(x: Tensor) -> Tensor:
        taken[:] = [x.exp()]
        return x.sin()

    def loss(run: Part) -> Tensor:
        return (run(x) * taken[0]).sum()

    assert torch.equal(*gradients(loss(recomputed(part, Trace())), x), *gradients(loss(part), x))


def test_what_is_counted_enters_as_well(x: Tensor) -> None:
    def part(ids: Tensor, x: Tensor) -> Tensor:
        return x.sin()[ids]

    ids = torch.tensor([2, 0])
    assert torch.equal(*gradients(recomputed(part, Trace())(ids, x).sum(), x), *gradients(part(ids, x).sum(), x))
