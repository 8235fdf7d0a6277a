"""A rotated copy of a model is the same function in other coordinates: porting to it must be exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_bico.models.model import Model
from support.rotated_clips import (
    TOY,
    Rotated,
)

pytestmark = pytest.mark.quick


def test_rotated_copy_is_the_same_function(tmp_path: Path) -> None:
    case = Rotated(tmp_path, torch.float64)
    ours, theirs = (case.logits(case.load(folder)) for folder in (case.base, case.target))
    assert (ours - theirs).abs().max() < 1e-10
    assert ours.std() > 0.1, "a model whose logits do not vary would prove nothing"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-8)])
def test_seen_task_vector_is_recovered_exactly(dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    case = Rotated(tmp_path, dtype)
    changes = {}
    for name, (p_x, p_g) in case.projectors().items():
        weight, bias = case.random_changes()[name]
        changes[name] = (p_g @ weight @ p_x, None if bias is None else bias @ p_g)
    ported = case.port(changes)

    layout = Model.open(case.target, "the target").layout
    for name, (weight, bias) in changes.items():
        q_in, q_out = case.coordinates.of_site(name)
        site = layout.site(name)
        found = site.weight.view(ported.task_vector[site.weight.tensor]).double()
        error = (found - q_out.T @ weight @ q_in).norm() / weight.norm()
        assert error < tolerance, f"{name}: {error:.1e}"
        if bias is not None:
            assert site.bias is not None
            found = site.bias.view(ported.task_vector[site.bias.tensor]).double()
            error = (found - bias @ q_out).norm() / bias.norm()
            assert error < tolerance, f"{name}: bias {error:.1e}"

    tuned = case.load(case.tuned)
    target = case.load(case.target)
    untouched = case.logits(target)
    ported.task_vector.apply_to(target.module)
    assert (case.logits(tuned) - untouched).norm() > 0.1 * untouched.norm(), "the change must matter"
    difference = (case.logits(tuned) - case.logits(target)).norm() / case.logits(tuned).norm()
    assert difference < tolerance


def test_unseen_energy_is_what_the_projectors_lose(tmp_path: Path) -> None:
    case = Rotated(tmp_path, torch.float64)
    changes = case.random_changes()
    projectors = case.projectors()
    report = case.port(changes).report
    assert len(report.sites) == 6 * TOY.blocks + 1
    for site in report.sites:
        weight = changes[site.name][0]
        p_x, p_g = projectors[site.name]
        expected = 1 - float((p_g @ weight @ p_x).square().sum() / weight.square().sum())
        assert site.unseen == pytest.approx(expected, abs=1e-6)
        if not site.name.startswith(f"blocks.{TOY.blocks - 1}."):
            assert site.unseen < 0.3, f"{site.name}: calibration saw only {1 - site.unseen:.0%}"


def test_energy_shares_add_up_to_one(tmp_path: Path) -> None:
    case = Rotated(tmp_path, torch.float64)
    report = case.port(case.random_changes()).report
    total = sum(site.energy for site in report.sites) + sum(entry.energy for entry in report.left)
    assert total == pytest.approx(1.0)
