"""The blocks of a model along the axis of a picture: where they stand, which labels fit, and lines through them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, nan
from typing import TYPE_CHECKING, Any

from hf_bico.diagnosis.findings import Place
from hf_bico.reports.pictures import FONT
from hf_bico.utils.text import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

_LETTER = 0.075
"""Inches of a letter of a label."""
_MARKER = 0.14
"""Inches from one marker of a line to the next: nearer they would hide its dashes."""
_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500)


@dataclass(frozen=True)
class BlockAxis:
    """Where places stand on an axis that is so many inches long."""

    positions: dict[Place, float]
    inches: float

    @classmethod
    def of(cls, places: Iterable[Place], inches: float) -> BlockAxis:
        """One after the other, tower by tower, and towers further apart."""
        unique = list(dict.fromkeys(places))
        towers = {tower: number for number, tower in enumerate(dict.fromkeys(place.tower for place in unique))}
        ordered = sorted(unique, key=lambda place: towers[place.tower])
        return cls({place: float(number + 2 * towers[place.tower]) for number, place in enumerate(ordered)}, inches)

    def line(self, axes: Axes, values: dict[Place, float], first_marker: int = 0, **style: Any) -> Line2D | None:
        """A line through each tower, with a gap where nothing is known; returns the first, which has the label."""
        every = ceil(_MARKER * len(self.positions) / self.inches)
        shown = {"linewidth": 1.5, "markersize": 4.5, "markevery": (first_marker % every, every), "clip_on": False}
        lines: list[Line2D] = []
        for tower in dict.fromkeys(place.tower for place in values):
            here = {place: position for place, position in self.positions.items() if place.tower == tower}
            numbers = [values.get(place, nan) for place in here]
            lines += axes.plot(list(here.values()), numbers, **{**shown, **style})
            style["label"] = "_"  # once in the legend
        return lines[0] if lines else None

    def label(self, axes: Axes, of: str = "target") -> None:
        """Block numbers, not more than fit; the name of a tower that is not the main one stands below its first."""
        last = max(self.positions.values())
        unit = self.inches / (1 + last)
        labels = {place: place._replace(tower="").label for place in self.positions}
        shown = self.spread({place: _LETTER * (1 + len(label)) / unit for place, label in labels.items()})
        for first in self._first_of_towers():
            labels[first] = f"{labels[first]}\n{clean(first.tower, 14)}".strip()
        axes.set_xticks([self.positions[place] for place in shown], [labels[place] for place in shown])
        axes.set_xlim(-max(0.5, 0.03 * last), last + max(0.5, 0.03 * last))
        axes.set_xlabel(f"{of} block", fontsize=9, **FONT)

    def spread(self, widths: dict[Place, float]) -> list[Place]:
        """Those that have room beside each other: the first of each tower, what is outside of blocks, round numbers.

        >>> axis = BlockAxis.of([*(Place("", block) for block in range(24)), Place("", None)], inches=3)
        >>> [place.label for place in axis.spread(dict.fromkeys(axis.positions, 4))]
        ['0', '5', '10', '15', '20', 'out']
        """
        widest = max((widths[place] for place in self.positions if place.block is not None), default=1)
        step = next((step for step in _STEPS if step >= widest), ceil(widest))
        outside = [place for place in self.positions if place.block is None]
        round_numbers = [place for place in self.positions if place.block is not None and place.block % step == 0]
        shown: list[Place] = []
        for place in dict.fromkeys([*self._first_of_towers(), *outside, *round_numbers]):
            apart = ((other, abs(self.positions[place] - self.positions[other])) for other in shown)
            if all(distance >= (widths[place] + widths[other]) / 2 for other, distance in apart):
                shown.append(place)
        return sorted(shown, key=lambda place: self.positions[place])

    def _first_of_towers(self) -> list[Place]:
        return list({place.tower: place for place in reversed(self.positions)}.values())
