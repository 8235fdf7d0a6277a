"""The readout: its shortcuts against solving again, its first order against autograd, and when it holds back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_bico.alignment.objectives.clip import ZeroShotHead
from hf_bico.alignment.readout import READOUT_STRENGTHS, Readout, Ridge, desired_shifts, solve_readout
from hf_bico.errors import NonFiniteWeightsError

pytestmark = pytest.mark.quick

COPIES = (0, 0, 1, 2, 3, 2, 2, 4, 5, 5)
"""Origins of ten rows: groups of one, two and three, not side by side."""


class Scene:
    """Random features, with what a model that differs by a planted change of W would say of them."""

    def __init__(self, n: int = 10, d: int = 7, e: int = 5, classes: int = 4, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.mixing = self.normal(d, d)  # features of a network are not independent
        self.weight = self.normal(e, d)
        self.head = ZeroShotHead(
            functional.normalize(self.normal(classes, e), dim=-1), self.number(20.0), self.number(-3.0)
        )
        self.planted = 0.5 * self.normal(e, d)
        self.hidden = self.draw(n)
        self.wanted = self.said(self.hidden)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def number(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64)

    def draw(self, n: int) -> Tensor:
        return self.normal(n, len(self.mixing)) @ self.mixing

    def said(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden @ (self.weight + self.planted).T)

    def solve(self, origins: Sequence[int] | None = None, judges: Sequence[int] = ()) -> Readout:
        origins = range(len(self.hidden)) if origins is None else origins
        return solve_readout(self.hidden, self.weight, self.head, self.wanted, origins, judges)


def centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


def ridge(hidden: Tensor, rows: Tensor, penalty: float) -> Tensor:
    """(e, d), by the normal equations in the width: the other way round than the module does it."""
    eye = torch.eye(hidden.shape[1], dtype=torch.float64)
    return torch.linalg.solve(hidden.T @ hidden + penalty * eye, hidden.T @ rows).T


def foreseen_by_solving_again(hidden: Tensor, rows: Tensor, strength: float, origins: Sequence[int]) -> Tensor:
    penalty = strength * float(hidden.square().sum(1).mean())
    foreseen = torch.empty_like(rows)
    for index, origin in enumerate(origins):
        others = [other for other, its in enumerate(origins) if its != origin]
        foreseen[index] = ridge(hidden[others], rows[others], penalty) @ hidden[index]
    return foreseen


@pytest.mark.parametrize("origins", [range(10), COPIES], ids=["single", "copies"])
@pytest.mark.parametrize("strength", [1e-2, 1.0, 1e3])
def test_left_out_residuals_equal_those_of_solving_again(strength: float, origins: Sequence[int]) -> None:
    scene = Scene()
    rows = scene.normal(10, 5)
    found = Ridge.of(scene.hidden).left_out_residuals(rows, strength, origins)
    expected = rows - foreseen_by_solving_again(scene.hidden, rows, strength, origins)
    assert torch.allclose(found, expected, rtol=0, atol=1e-9)


def test_every_row_needs_an_origin() -> None:
    scene = Scene()
    with pytest.raises(ValueError, match="shorter"):
        scene.solve(origins=range(9))


@pytest.mark.parametrize(("classes", "e"), [(3, 8), (8, 3), (4, 4), (5, 4), (6, 5), (2, 2), (1, 4), (30, 6)])
def test_moves_are_those_of_the_pseudo_inverse_of_autograds_jacobian(classes: int, e: int) -> None:
    """Few classes, of which some of each feature cannot be seen, and many, which see all of it."""
    scene = Scene(e=e, classes=classes, seed=10 * classes + e)
    features = scene.hidden @ scene.weight.T
    found = desired_shifts(features, scene.head, scene.wanted)
    for feature, wanted, move in zip(features, scene.wanted, found, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda at: centred(scene.head.logits(at)), feature)
        residual = centred(wanted - scene.head.logits(feature))
        assert torch.allclose(move, torch.linalg.pinv(jacobian, rtol=1e-10) @ residual, rtol=0, atol=1e-9)


def test_classes_that_are_equal_but_for_rounding_do_not_count_twice() -> None:
    scene = Scene(e=8)
    classes = torch.cat([scene.head.classes, scene.head.classes[:1]])
    wanted = torch.cat([scene.wanted, scene.wanted[:, :1] + 1.0], 1)  # no move can set the two apart
    rounded = classes + 1e-8 * scene.normal(*classes.shape)
    features = scene.hidden @ scene.weight.T
    exact, close = (
        desired_shifts(features, ZeroShotHead(each, scene.head.scale, None), wanted) for each in (classes, rounded)
    )
    assert torch.allclose(exact, close, atol=1e-5)


@pytest.mark.parametrize("origins", [range(10), COPIES], ids=["single", "copies"])
def test_criterion_is_that_of_the_literal_loop(origins: Sequence[int]) -> None:
    """Solve without the sample and its copies, apply to it, and look at its true logits."""
    scene = Scene()
    found = scene.solve(origins)
    features = scene.hidden @ scene.weight.T
    moves = desired_shifts(features, scene.head, scene.wanted)
    criteria = {}
    for strength in READOUT_STRENGTHS:
        foreseen = foreseen_by_solving_again(scene.hidden, moves, strength, origins)
        criteria[strength] = float(centred(scene.wanted - scene.head.logits(features + foreseen)).square().mean())
    assert found.before == pytest.approx(float(centred(scene.wanted - scene.head.logits(features)).square().mean()))
    assert found.accepted
    assert found.strength == min(criteria, key=criteria.__getitem__)
    assert found.left_out == pytest.approx(criteria[found.strength], rel=1e-9)
    penalty = found.strength * float(scene.hidden.square().sum(1).mean())
    assert torch.allclose(found.change, ridge(scene.hidden, moves, penalty), rtol=0, atol=1e-9)


def test_judges_alone_say_what_a_readout_is_worth() -> None:
    """Half of them are left out at a time; the other rows are learnt from and not looked at."""
    scene, judges = Scene(n=24), (0, 1, 2, 3, 4)
    found = scene.solve(judges=judges)
    looked_at, parts = list(judges), [-1 - row % 2 if row in judges else row for row in range(24)]
    features = scene.hidden @ scene.weight.T
    moves = desired_shifts(features, scene.head, scene.wanted)
    criteria = {}
    for strength in READOUT_STRENGTHS:
        said = scene.head.logits(features + foreseen_by_solving_again(scene.hidden, moves, strength, parts))
        criteria[strength] = float(centred(scene.wanted - said)[looked_at].square().mean())
    assert found.accepted
    assert found.before == pytest.approx(float(centred(scene.wanted - scene.head.logits(features))[:5].square().mean()))
    assert found.strength == min(criteria, key=criteria.__getitem__)
    assert found.left_out == pytest.approx(criteria[found.strength], rel=1e-9)
    penalty = found.strength * float(scene.hidden.square().sum(1).mean())
    assert torch.allclose(found.change, ridge(scene.hidden, moves, penalty), rtol=0, atol=1e-9)


def test_what_judges_do_not_gain_by_is_not_accepted() -> None:
    scene, judges = Scene(n=60), range(8)
    own = scene.head.logits(scene.hidden @ scene.weight.T)
    scene.wanted[8:] = 2 * own[8:] - scene.wanted[8:]  # the others want the opposite
    assert scene.solve().accepted
    assert not scene.solve(judges=judges).accepted


def test_planted_change_is_found_for_new_samples() -> None:
    """Nearly: the smallest move of a sample is not quite the one that the planted change makes."""
    scene = Scene(n=60)
    scene.planted *= 0.1
    scene.wanted = scene.said(scene.hidden)
    found = scene.solve()
    new = scene.draw(500)
    wanted = centred(scene.said(new))

    def missed(weight: Tensor) -> float:
        return float((wanted - centred(scene.head.logits(new @ weight.T))).square().mean())

    assert found.accepted
    assert missed(scene.weight + found.change) < 0.1 * missed(scene.weight)
    assert found.left_out < 0.1 * found.before


def test_samples_that_say_nothing_about_each_other_change_nothing() -> None:
    """Inputs at right angles: each sample left out is foreseen to stay where it is, whatever the others want."""
    scene = Scene(n=7)
    scene.hidden = torch.eye(7, dtype=torch.float64)
    found = scene.solve()
    assert (found.accepted, found.strength) == (False, None)
    assert found.left_out == pytest.approx(found.before)
    assert found.change.shape == scene.weight.shape
    assert not found.change.any()


def test_noise_is_refused() -> None:
    """Wanted logits that have nothing to do with the inputs: seldom accepted, and never for much."""
    found = []
    for seed in range(20):
        scene = Scene(n=50, d=20, seed=seed)
        features = scene.hidden @ scene.weight.T
        scene.wanted = scene.head.logits(features) + 5 * scene.normal(50, 4)
        found.append(scene.solve())
    assert sum(each.accepted for each in found) <= 4
    assert all(each.left_out > 0.95 * each.before for each in found)


def test_copies_are_no_evidence_for_each_other() -> None:
    """Each sample four times, and noise as what is wanted: taken one by one, the copies foretell each other."""
    scene = Scene(n=12, d=30)
    features = scene.hidden @ scene.weight.T
    scene.wanted = scene.head.logits(features) + scene.normal(12, 4)
    scene.hidden, scene.wanted = scene.hidden.repeat(4, 1), scene.wanted.repeat(4, 1)
    one_by_one, together = scene.solve(), scene.solve(origins=4 * list(range(12)))
    assert one_by_one.left_out < 0.5 * one_by_one.before
    assert together.left_out > 0.9 * together.before


def test_order_of_the_samples_does_not_matter() -> None:
    scene = Scene()
    found = scene.solve(COPIES)
    order = torch.randperm(10, generator=scene.generator)
    scene.hidden, scene.wanted = scene.hidden[order], scene.wanted[order]
    again = scene.solve([COPIES[index] for index in order])
    assert again.strength == found.strength
    assert again.left_out == pytest.approx(found.left_out)
    assert torch.allclose(again.change, found.change, rtol=0, atol=1e-9)


def test_constant_added_to_the_wanted_logits_does_not_matter() -> None:
    """The source and the target may have other biases."""
    scene = Scene()
    found = scene.solve()
    scene.wanted = scene.wanted + scene.normal(10, 1)
    assert torch.allclose(scene.solve().change, found.change, rtol=0, atol=1e-9)


@pytest.mark.parametrize("origins", [[0], [3, 3, 3]])
def test_one_sample_alone_changes_nothing(origins: list[int]) -> None:
    found = Scene(n=len(origins)).solve(origins)
    assert not found.accepted
    assert found.left_out == found.before > 0
    assert not found.change.any()


def test_one_class_changes_nothing() -> None:
    found = Scene(classes=1).solve()
    assert not found.accepted
    assert found.before == 0


def test_wishes_that_are_met_already_change_nothing() -> None:
    scene = Scene()
    scene.wanted = scene.head.logits(scene.hidden @ scene.weight.T)
    found = scene.solve()
    assert not found.accepted
    assert found.before == 0


def test_rows_of_zero_and_rows_that_repeat() -> None:
    scene = Scene()
    scene.hidden[4] = 0
    scene.hidden[7] = scene.hidden[8]
    found = scene.solve()
    assert found.accepted
    assert found.change.isfinite().all()
    scene.hidden[:] = 0
    assert not scene.solve().accepted


def test_features_that_are_not_finite_are_refused() -> None:
    scene = Scene()
    scene.wanted[2, 1] = float("nan")
    with pytest.raises(NonFiniteWeightsError, match="NaN"):
        scene.solve()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_in_double_whatever_is_given(dtype: torch.dtype) -> None:
    scene = Scene()
    head = ZeroShotHead(scene.head.classes.to(dtype), scene.head.scale.to(dtype), None)
    hidden, weight, wanted = (tensor.to(dtype) for tensor in (scene.hidden, scene.weight, scene.wanted))
    found = solve_readout(hidden, weight, head, wanted, COPIES)
    wide = ZeroShotHead(head.classes.double(), head.scale.double(), None)
    expected = solve_readout(hidden.double(), weight.double(), wide, wanted.double(), COPIES)
    assert found.change.dtype == torch.float64
    assert torch.equal(found.change, expected.change)
    assert hidden.dtype == dtype, "what was given stays as it was"


def test_parameters_are_taken_without_their_gradients() -> None:
    scene = Scene()
    scene.weight = torch.nn.Parameter(scene.weight)
    assert not scene.solve().change.requires_grad
