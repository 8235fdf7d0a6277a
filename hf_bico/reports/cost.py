"""Say what a port cost, in training steps of the target on the same machine.

Reads records; measures nothing.
"""

from __future__ import annotations

from math import isfinite

from hf_bico.reports.record import Record
from hf_bico.reports.results import is_trained
from hf_bico.utils.text import count_text

CARRYING = ("calibrate", "align", "transport", "choose", "readout", "polish", "train")
"""Stages that make a port, as the stopwatch names them: not the download, loading, evaluation or writing."""
MEASURING = ("evaluate", "time")
"""Stages that only measure what was made, and what it cost."""


def cost_sentence(record: Record, where: str = "on this machine") -> str | None:
    """Compare the time to carry the change with training steps; None if none was timed, or the target was trained."""
    run = record.run
    stages = [run.seconds[stage] for stage in CARRYING if stage in run.seconds]
    if is_trained(record) or not stages or not run.training_step or not run.training_batch:
        return None
    seconds = sum(stages)
    steps = seconds / run.training_step
    if not isfinite(steps):
        return None
    samples = count_text(run.training_batch, "sample")
    if steps < 1:
        comparison = f"less than one training step of the target on {samples}"
    elif round(steps) == 1:
        comparison = f"as long as one training step of the target on {samples}"
    else:
        comparison = f"as long as {round(steps):,} training steps of the target on {samples} each"
    return f"Carrying it took {_duration(seconds)} {where}, {comparison}."


def _duration(seconds: float) -> str:
    if seconds < 0.05:
        return "less than 0.1 s"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
