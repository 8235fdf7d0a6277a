"""Whether a port will help, foretold from its one calibration pass. Knows sums and energies; measures nothing.

To first order, the calibration loss changes by the sum over sites of <gradient, tau_B>; sites of MLPs are left out,
which hold most of the weights and add little. How far that can go is bounded by what the target gets wrong, and what
lay where calibration saw nothing is as good as lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from hf_bico.alignment.methods.base import SiteDescent
from hf_bico.alignment.statistics import TaskSum
from hf_bico.reports.record import ForesightRecord

DOUBTFUL = 0.1
"""Below this outlook a port is called doubtful."""


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
