"""How far a low-rank change goes from its base, where only some rows of the base are read."""

from __future__ import annotations

import pytest
import torch

from hf_bico.models.checkpoints import MemoryCheckpoint
from hf_bico.models.deltas import Deltas
from hf_bico.models.layout import Site, Slot
from hf_bico.models.low_rank import Factors
from hf_bico.porting.plausibility import IMPLAUSIBLE, implausible

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("rows", [40, 127, 1000])
@pytest.mark.parametrize("transposed", [False, True])
def test_some_rows_tell_the_size_of_a_weight(rows: int, transposed: bool) -> None:
    """All entries of the weight are one, so that its rows tell it exactly."""
    slot = Slot("w", transposed=transposed)
    site = Site("blocks.0.mlp.up", "mlp.up", 0, "blocks.0.mlp.in", (rows, 30), slot)
    base = MemoryCheckpoint({"w": slot.view(torch.ones(rows, 30))})
    change = Factors(torch.ones(rows, 1), torch.ones(1, 30))
    for ratio in (IMPLAUSIBLE - 0.01, IMPLAUSIBLE + 0.01):
        stored = ratio * (change.T if transposed else change)
        found = implausible(Deltas({"w": stored}), [site], base)
        assert (found is not None) == (ratio > IMPLAUSIBLE)
    assert found is not None
    assert "differs from its base by 91% of the weights' own norm" in found.cause
