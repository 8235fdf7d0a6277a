"""All that one run of the benchmarks has measured, kept as JSON. Knows not how it was measured, nor how it is shown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import log
from pathlib import Path
from typing import Any

CARRYING = ("calibrate", "align", "transport")
"""From loaded models to the transported task vector."""


@dataclass(frozen=True)
class Port:
    """One port: seconds by stage of ours, of the obvious implementation and of the floor.

    `fresh` are those of the whole command in a process of its own. `how` says how the obvious implementation's came
    about, and `difference` is the largest between the two changes, on directions well above the cut; None where the two
    did not see the same samples.
    """

    pair: str
    samples: int
    sites: int
    ours: Mapping[str, float]
    obvious: Mapping[str, float]
    floor: Mapping[str, float]
    how: str
    difference: float | None
    stored_bytes: int
    peak: int
    batch_size: int | None
    weights: int
    """Of both models, in the precision that they ran in."""
    preparing: float | None = None
    """Seconds of the models' own image processors, measured alone; they are a part of calibration."""
    fresh: Mapping[str, float] | None = None
    limit: str | None = None


@dataclass(frozen=True)
class Limited:
    """The same port within a limit of memory, and how far its change is from the one without."""

    pair: str
    samples: int
    limit: str
    enforced: bool
    peak: int
    seconds: Mapping[str, float]
    batch_size: int | None
    difference: float


@dataclass(frozen=True)
class Line:
    """Seconds of the stages while one thing grows."""

    what: str
    fixed: str
    values: Sequence[int]
    seconds: Sequence[Mapping[str, float]]

    def of(self, stages: Sequence[str]) -> list[float]:
        return [sum(found[stage] for stage in stages) for found in self.seconds]

    def exponent(self, stages: Sequence[str] = CARRYING) -> float:
        """Of the power of the value that the time grows with: the slope of a line through the logarithms."""
        points = [(log(value), log(time)) for value, time in zip(self.values, self.of(stages), strict=True)]
        middle = [sum(one) / len(points) for one in zip(*points, strict=True)]
        across = sum((x - middle[0]) ** 2 for x, _ in points)
        return sum((x - middle[0]) * (y - middle[1]) for x, y in points) / across


@dataclass
class Figures:
    """What a run measured, with the machine and the command."""

    command: str
    sizes: str
    device: str
    versions: Mapping[str, str]
    rates: Mapping[str, float] = field(default_factory=dict)
    ports: list[Port] = field(default_factory=list)
    limited: list[Limited] = field(default_factory=list)
    growth: list[Line] = field(default_factory=list)
    polar: list[Mapping[str, Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """The parts that did not come to their end."""

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Figures:
        found = json.loads(file.read_text(encoding="utf-8"))
        for name, kind in (("ports", Port), ("limited", Limited), ("growth", Line)):
            found[name] = [kind(**one) for one in found[name]]
        return cls(**found)


def carrying(seconds: Mapping[str, float]) -> float:
    """From loaded models to the transported task vector."""
    return sum(seconds[stage] for stage in CARRYING)
