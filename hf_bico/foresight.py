"""Whether a port will help, foretold from its one calibration pass. Knows sums and energies; measures nothing.

To first order, the calibration loss changes by the sum over sites of <gradient, tau_B>; sites of MLPs are left out,
which hold most of the weights and add little. How far that can go is bounded by what the target gets wrong, and what
lay where calibration saw nothing is as good as lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from torch import Tensor

from hf_bico.methods.base import SiteDelta, SiteDescent
from hf_bico.models.low_rank import Change, Factors, energy
from hf_bico.reports.record import ForesightRecord
from hf_bico.statistics import Descent, TaskSum

DOUBTFUL = 0.1
"""Below this outlook a port is called doubtful."""


def descent_along(delta: SiteDelta, descent: Descent) -> SiteDescent:
    """What a change of a site does to the loss that the gradient is of, to first order."""
    change = own = 0.0
    of_gradient = descent.energies[0]
    if delta.weight is not None:
        change += _inner(descent.weight.float(), delta.weight)
        own = energy(delta.weight)
    if delta.bias is not None:
        gradient = descent.bias.float()
        change += float((delta.bias.to(gradient) * gradient).sum())
        own += energy(delta.bias)
        of_gradient += descent.energies[1]  # where there is no bias, nothing learns this
    return SiteDescent(change, of_gradient, own)


def _inner(gradient: Tensor, change: Change) -> float:
    """<gradient, change>; of factors without their product."""
    if isinstance(change, Factors):
        left, right = (part.to(gradient) for part in (change.left, change.right))
        return float(((gradient @ right.T) * left).sum())
    return float((gradient * change.to(gradient)).sum())


def foresee(
    sites: Iterable[SiteDescent], task: TaskSum, samples: int, unseen: float | None, alpha: float
) -> ForesightRecord:
    """The outlook of a port: of changes that are added `alpha` times, to a target that does so well on its task.

    The loss is that of an answer, a sample or a token; where right and wrong cannot be told, of a sample.
    """
    found = list(sites)
    answers = task.answers or samples
    change = alpha * sum(site.change for site in found) / answers
    lengths = sqrt(sum(site.gradient for site in found) * sum(site.delta for site in found))
    agreement = -sum(site.change for site in found) / lengths if lengths else 0.0
    headroom = task.wrong / task.answers if task.answers else None
    gain = -change if headroom is None else min(-change, headroom)
    outlook = gain * (1 - (unseen or 0.0)) if gain > 0 else gain
    return ForesightRecord(
        outlook=outlook,
        helps=outlook >= DOUBTFUL,
        loss=None if task.loss is None else task.loss / answers,
        first_order=change,
        agreement=agreement if alpha >= 0 else -agreement,
        headroom=headroom,
        unseen=unseen,
    )
