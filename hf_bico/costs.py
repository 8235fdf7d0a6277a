"""What a port costs in floating-point operations, by the paper's formulas. Knows shapes; runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_bico.diagnosis.findings import Cost
from hf_bico.models.layout import SitePair

FORWARD, BACKWARD, UPDATE = 2, 4, 10
"""For each parameter: of a forward pass, of a backward pass, and of a step of AdamW."""
TRAINING_STEPS = 2000
"""Of the paper's fine-tuning."""


def cost_of(
    pairs: Sequence[SitePair],
    parameters: tuple[int, int],
    rows: tuple[int, int],
    paired: int,
    seconds: Mapping[str, float],
) -> Cost:
    """Of carrying these pairs between models of so many `parameters`, which ran over so many `rows` of samples.

    `paired` rows of each site met in its two cross-covariances.

    >>> cost_of([], (10, 20), (3, 4), 0, {}).a_pass
    180
    """
    source, target = parameters
    both_passes = FORWARD + BACKWARD
    maps = [(pair.source.shape[axis], pair.target.shape[axis]) for pair in pairs for axis in (0, 1)]
    return Cost(
        parameters=parameters,
        rows=rows,
        a_pass=both_passes * (source + target),
        training=TRAINING_STEPS * (both_passes + UPDATE) * target,
        calibration=both_passes * (source * rows[0] + target * rows[1]),
        covariances=sum(paired * one * other for one, other in maps),
        maps=sum(min(both) ** 2 * max(both) for both in maps),
        products=sum(_products(pair) for pair in pairs),
        seconds=dict(seconds),
    )


def _products(pair: SitePair) -> int:
    """R_out^T tau_A, and that times R_in."""
    (out_a, in_a), (out_b, in_b) = pair.source.shape, pair.target.shape
    return out_b * out_a * in_a + out_b * in_a * in_b
