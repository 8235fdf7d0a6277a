"""Draws a diagnosis as the figures of the paper, each a PNG. Knows findings, neither models nor measuring.

Every picture is None where there is nothing to draw, and has the same bytes for the same findings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from math import ceil, floor, isfinite, nan
from typing import TYPE_CHECKING, Any

from hf_bico.experiments.compare.cells import method_label
from hf_bico.experiments.compare.picture import REFERENCE_LINES, method_style
from hf_bico.experiments.diagnose.findings import UNTOUCHED_TARGET, DiagnosisData, Drift, SitePlace, by_place
from hf_bico.reports.pictures import BLUE, GREEN, INK, ORANGE, PINK, RED, SKY, alignment_picture, frame, png
from hf_bico.utils.text import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


_LETTER = 0.075
"""Inches of a letter of a label."""
_MARKER = 0.14
"""Inches between the markers of a line: closer ones would hide its dashes."""
_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500)


@dataclass(frozen=True)
class BlockAxis:
    """Positions of blocks on an x axis, and its length in inches."""

    positions: dict[SitePlace, float]
    inches: float

    @classmethod
    def of(cls, places: Iterable[SitePlace], inches: float) -> BlockAxis:
        """Place blocks one after the other, tower by tower, with a gap between towers."""
        unique = list(dict.fromkeys(places))
        towers = {tower: number for number, tower in enumerate(dict.fromkeys(place.tower for place in unique))}
        ordered = sorted(unique, key=lambda place: towers[place.tower])
        return cls({place: float(number + 2 * towers[place.tower]) for number, place in enumerate(ordered)}, inches)

    def line(self, axes: Axes, values: dict[SitePlace, float], first_marker: int = 0, **style: Any) -> Line2D | None:
        """Draw a line through each tower, with gaps at unknown values; return the first, which has the label."""
        every = ceil(_MARKER * len(self.positions) / self.inches)
        usual = {"linewidth": 1.5, "markersize": 4.5, "markevery": (first_marker % every, every), "clip_on": False}
        lines: list[Line2D] = []
        for tower in dict.fromkeys(place.tower for place in values):
            positions = {place: position for place, position in self.positions.items() if place.tower == tower}
            numbers = [values.get(place, nan) for place in positions]
            lines += axes.plot(list(positions.values()), numbers, **{**usual, **style})
            style["label"] = "_"  # once in the legend
        return lines[0] if lines else None

    def label(self, axes: Axes, of: str = "target") -> None:
        """Write as many block numbers as fit; a side tower's name stands below its first block."""
        last = max(self.positions.values())
        unit = self.inches / (1 + last)
        labels = {place: place._replace(tower="").label for place in self.positions}
        labelled = self.spread({place: _LETTER * (1 + len(label)) / unit for place, label in labels.items()})
        for first in self._first_of_towers():
            labels[first] = f"{labels[first]}\n{clean(first.tower, 14)}".strip()
        axes.set_xticks([self.positions[place] for place in labelled], [labels[place] for place in labelled])
        axes.set_xlim(-max(0.5, 0.03 * last), last + max(0.5, 0.03 * last))
        axes.set_xlabel(f"{of} block")

    def spread(self, widths: dict[SitePlace, float]) -> list[SitePlace]:
        """Choose places whose labels fit: the first of each tower, those outside of blocks, then round numbers.

        >>> axis = BlockAxis.of([*(SitePlace("", block) for block in range(24)), SitePlace("", None)], inches=3)
        >>> [place.label for place in axis.spread(dict.fromkeys(axis.positions, 4))]
        ['0', '5', '10', '15', '20', 'out']
        """
        widest = max((widths[place] for place in self.positions if place.block is not None), default=1)
        step = next((step for step in _STEPS if step >= widest), ceil(widest))
        outside = [place for place in self.positions if place.block is None]
        round_numbers = [place for place in self.positions if place.block is not None and place.block % step == 0]
        chosen: list[SitePlace] = []
        for place in dict.fromkeys([*self._first_of_towers(), *outside, *round_numbers]):
            apart = ((other, abs(self.positions[place] - self.positions[other])) for other in chosen)
            if all(distance >= (widths[place] + widths[other]) / 2 for other, distance in apart):
                chosen.append(place)
        return sorted(chosen, key=lambda place: self.positions[place])

    def _first_of_towers(self) -> list[SitePlace]:
        return list({place.tower: place for place in reversed(self.positions)}.values())


_WIDTH = 7.2
# inches of an x axis: of one of two panels, beside a legend, and alone
_HALF, _MOST, _ALL = 2.8, 5.0, 6.4
_MOST_CHECKPOINTS = 9
_MOST_MARKED = 30
"""Most lines that get markers."""
_DASHES = (0, (4, 1.5))
_SECOND: dict[str, Any] = {"linestyle": _DASHES, "markerfacecolor": "white"}
"""Style of a cosine next to a CKA."""
_PAIRS = ((BLUE, "o"), (RED, "s"), (GREEN, "^"), (PINK, "D"), (ORANGE, "v"), (SKY, "P"))
_LIGHTEST = 0.8
"""End of viridis: lighter colours are hard to see on white."""
_DRIFTS: dict[tuple[str, str], Callable[[Drift], float]] = {
    ("direction", "1 \u2212 cos"): lambda one: one.direction,
    ("magnitude", "relative change of norm"): lambda one: one.magnitude,
}
_LAST_NUMBER = re.compile(r"(?<!\d)\d{1,12}$", re.ASCII)
_LEGEND: dict[str, Any] = {"handlelength": 2.3, "fontsize": 8.5, "labelcolor": INK}


def similarity_picture(diagnosis: DiagnosisData) -> bytes | None:
    """Draw figure 1: CKA and cosine of the inputs of each target block, before and after the input-side alignment."""
    return png(lambda: _draw_similarity(diagnosis)) if diagnosis.inputs else None


def initial_picture(diagnoses: Sequence[DiagnosisData]) -> bytes | None:
    """Draw figure B: CKA of several pairs before any alignment, and cosine if both models have the same width."""
    towers = _towers(diagnoses)
    return png(lambda: _draw_initial(towers)) if towers else None


def outputs_picture(diagnosis: DiagnosisData) -> bytes | None:
    """Draw figure 2: cosine of each model's outputs to those of the fine-tuned target."""
    return png(lambda: _draw_outputs(diagnosis)) if diagnosis.outputs else None


def drift_picture(diagnosis: DiagnosisData) -> bytes | None:
    """Draw figure A: drift of each block's inputs from the base, over checkpoints, or over blocks if there is one."""
    checkpoints = _checkpoints(diagnosis)
    if len(checkpoints) > 1:
        return png(lambda: _draw_drift(diagnosis))
    return png(lambda: _draw_only_drift(diagnosis)) if checkpoints else None


def sites_picture(diagnosis: DiagnosisData) -> bytes | None:
    """Draw score in, score out and unseen energy of every site, as on the card of a port."""
    return alignment_picture(diagnosis.sites, len(diagnosis.layers))


# Figure 1


def _draw_similarity(diagnosis: DiagnosisData) -> Figure:
    inputs = diagnosis.inputs
    cka, cosine = by_place(inputs, lambda one: one.cka), by_place(inputs, lambda one: one.cosine)
    aligned = by_place(inputs, lambda one: one.cka_aligned), by_place(inputs, lambda one: one.cosine_aligned)
    blocks = BlockAxis.of((one.place for one in inputs), _HALF)
    figure, (before, after) = _figure(2.9, 2, sharey=True)
    for axes, (first, second) in ((before, (cka, cosine)), (after, aligned)):
        blocks.line(axes, first, label="linear CKA", color=BLUE, marker="o")
        blocks.line(axes, second, label="mean cosine", color=RED, marker="s", **_SECOND)
        blocks.label(axes)
    before.set_title("before alignment")
    after.set_title("after input-side alignment")
    before.set_ylabel("similarity")
    _similarity_axis(before, _values_of(before, after))
    widths = dict.fromkeys("{} to {}".format(*one.widths) for one in inputs if one.cosine is None)
    if widths:
        named = ", ".join(list(widths)[:2]) + (", …" if len(widths) > 2 else "")
        note: dict[str, Any] = {"fontsize": 7.5, "color": "#777777", "linespacing": 1.3, "ha": "right", "va": "bottom"}
        # above the panel, where no line can be
        before.text(1.0, 1.02, f"cosine: n/a across widths\n{named}", transform=before.transAxes, **note)
    _legend_above(figure, after)
    return figure


# Figure B


@dataclass(frozen=True)
class _Tower:
    """One tower of one pair of models, before alignment."""

    name: str
    cka: dict[SitePlace, float]
    cosine: dict[SitePlace, float]


def _towers(diagnoses: Sequence[DiagnosisData]) -> list[_Tower]:
    titles = [diagnosis.title for diagnosis in diagnoses if diagnosis.inputs]
    towers = []
    for diagnosis in diagnoses:
        name = _shortened(diagnosis.title, 70)
        if titles.count(diagnosis.title) > 1:
            name = f"{_shortened(diagnosis.title, 48)} on {_shortened(diagnosis.data, 18)}"
        for tower in dict.fromkeys(one.tower for one in diagnosis.inputs):
            inputs = [one for one in diagnosis.inputs if one.tower == tower]
            cka, cosine = by_place(inputs, lambda one: one.cka), by_place(inputs, lambda one: one.cosine)
            towers.append(_Tower(f"{name}, {clean(tower, 12)}" if tower else name, cka, cosine))
    return towers


def _draw_initial(towers: Sequence[_Tower]) -> Figure:
    lines = sum(2 if tower.cosine else 1 for tower in towers)
    figure, (axes,) = _figure(2.9 + 0.2 * lines)
    depths = [[place.block for place in tower.cka if place.block is not None] for tower in towers]
    one_depth = all(depth == depths[0] for depth in depths)
    for tower, (colour, marker) in zip(towers, cycle(_PAIRS), strict=False):
        unit = 1 if one_depth else max(1, len(tower.cka) - 1)
        blocks = BlockAxis({place: number / unit for number, place in enumerate(tower.cka)}, _ALL)
        style: dict[str, Any] = {"color": colour, "marker": marker}
        blocks.line(axes, tower.cka, label=f"{tower.name}: CKA", **style)
        blocks.line(axes, tower.cosine, label=f"{tower.name}: cosine", **style, **_SECOND)
    if one_depth:
        longest = max(towers, key=lambda tower: len(tower.cka))
        BlockAxis.of((place._replace(tower="") for place in longest.cka), _ALL).label(axes)
    else:
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel("relative depth in the target (0: first block, 1: last)")
    axes.set_ylabel("similarity before alignment")
    _similarity_axis(axes, _values_of(axes))
    _legend_above(figure, axes, columns=1)
    return figure


# Figure 2


def _draw_outputs(diagnosis: DiagnosisData) -> Figure:
    figure, (axes,) = _figure(3.2)
    blocks = BlockAxis.of((one.place for one in diagnosis.outputs), _MOST)
    ends = []
    for number, model in enumerate(diagnosis.models):
        cosines = by_place([one for one in diagnosis.outputs if one.model == model], lambda one: one.cosine)
        colour, marker = method_style(model)
        style: dict[str, Any] = {
            "label": "target, pretrained" if model == UNTOUCHED_TARGET else clean(method_label(model), 28),
            "linestyle": REFERENCE_LINES[UNTOUCHED_TARGET] if model == UNTOUCHED_TARGET else "-",
            "linewidth": 2.2 if model == "bico" else 1.3,
            "zorder": 5 if model == "bico" else 3,
        }
        line = blocks.line(axes, cosines, number, color=colour, marker=marker, **style)
        ends.append((list(cosines.values())[-1], line))
    blocks.label(axes)
    axes.set_ylabel("mean cosine to the fine-tuned target")
    low, high = min(_values_of(axes)), max(_values_of(axes))
    room = 0.06 * (high - low) or 0.001
    axes.set_ylim(low - room, high + room if high + room < 1 else max(high, 1.0))
    axes.ticklabel_format(axis="y", useOffset=False)
    top_down = [line for _, line in sorted(ends, key=lambda end: -end[0])]
    axes.legend(handles=top_down, loc="center left", bbox_to_anchor=(1.02, 0.5), **_LEGEND)
    return figure


# Figure A


def _checkpoints(diagnosis: DiagnosisData) -> list[str]:
    """Return the checkpoints with known drift, in order."""
    known = {one.checkpoint for one in diagnosis.drift}
    return [name for name in dict.fromkeys(diagnosis.checkpoints) if name in known]


def _draw_only_drift(diagnosis: DiagnosisData) -> Figure:
    (checkpoint,) = _checkpoints(diagnosis)
    drift = [one for one in diagnosis.drift if one.checkpoint == checkpoint]
    blocks = BlockAxis.of((one.place for one in drift), _HALF)
    figure, grid = _figure(2.6, 2)
    for axes, (names, value) in zip(grid, _DRIFTS.items(), strict=True):
        blocks.line(axes, by_place(drift, value), color=BLUE, marker="o")
        blocks.label(axes, of="source")
        _drift_axis(axes, *names)
    return figure


def _draw_drift(diagnosis: DiagnosisData) -> Figure:
    from matplotlib.lines import Line2D

    checkpoints = _checkpoints(diagnosis)
    numbers = _numbers(checkpoints)
    towers: dict[str, list[SitePlace]] = {}
    for place in dict.fromkeys(one.place for one in diagnosis.drift):
        towers.setdefault(place.tower, []).append(place)
    styles = _depth_styles(towers)
    figure, grid = _figure(2.8 if numbers else 3.2, 2)
    for axes, (names, value) in zip(grid, _DRIFTS.items(), strict=True):
        drifts = [by_place([one for one in diagnosis.drift if one.checkpoint == name], value) for name in checkpoints]
        for place, style in styles.items():
            values = [0.0, *(drift.get(place, nan) for drift in drifts)]
            axes.plot([0, *(numbers or range(1, len(values)))], values, clip_on=False, **style)
        _drift_axis(axes, *names)
        _label_checkpoints(axes, checkpoints, numbers)
    if len(styles) > len(towers):
        _depth_bar(figure, grid, {place: styles[place]["color"] for place in max(towers.values(), key=len)})
    if len(towers) > 1:
        lines = [Line2D([], [], **{**styles[places[0]], "color": INK, "marker": ""}) for places in towers.values()]
        labels = [f"{clean(tower, 12) or 'main'} tower" for tower in towers]
        figure.legend(lines, labels, loc="outside upper center", ncols=3, **_LEGEND)
    return figure


def _depth_styles(towers: dict[str, list[SitePlace]]) -> dict[SitePlace, dict[str, Any]]:
    """Return line styles: the colour tells the depth, dashes tell the tower; the base, at zero, has no marker."""
    import matplotlib

    viridis = matplotlib.colormaps["viridis"]
    last = max(1, *(len(places) - 1 for places in towers.values()))
    marked = sum(map(len, towers.values())) <= _MOST_MARKED
    usual = {"linewidth": 1.2, "marker": "o", "markersize": 2.5} if marked else {"linewidth": 0.8}
    styles: dict[SitePlace, dict[str, Any]] = {}
    for dashes, places in zip(cycle(("-", _DASHES, (0, (1, 1.5)))), towers.values(), strict=False):
        for number, place in enumerate(places):
            colour = viridis(_LIGHTEST * number / last)
            styles[place] = {**usual, "color": colour, "linestyle": dashes, "markevery": slice(1, None)}
    return styles


def _numbers(checkpoints: Sequence[str]) -> list[int] | None:
    """Return the numbers at the end of the checkpoints' names; None if one is missing, or if they do not grow.

    >>> _numbers(["step-100", "run@step300"]), _numbers(["step-100", "final"])
    ([100, 300], None)
    """
    numbers = [int(number[0]) for name in checkpoints if (number := _LAST_NUMBER.search(name))]
    grow = all(before < after for before, after in pairwise([0, *numbers]))
    return numbers if grow and len(numbers) == len(checkpoints) else None


def _label_checkpoints(axes: Axes, checkpoints: Sequence[str], numbers: list[int] | None) -> None:
    """Label the base at zero, then round numbers, or as many names as fit."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    axes.set_xlim(0, numbers[-1] if numbers else len(checkpoints))
    axes.set_xlabel("checkpoint")
    if numbers:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        thousands = EngFormatter(sep="")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda number, _: thousands(number) if number else "base"))
        return
    known = (clean(name, 2000) for name in checkpoints)
    # long names differ at their end
    names = ["base", *(name if len(name) <= 14 else f"…{name[-13:].lstrip()}" for name in known)]
    ticks = range(0, len(names), ceil(len(names) / _MOST_CHECKPOINTS))
    slanted: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(ticks, [names[tick] for tick in ticks], fontsize=8, **slanted)


def _drift_axis(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_ylabel(unit)
    axes.yaxis.get_offset_text().set_fontsize(8)
    if min(_values_of(axes)) >= 0:
        axes.set_ylim(bottom=0)


def _depth_bar(figure: Figure, grid: Sequence[Axes], colours: dict[SitePlace, Any]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    number = len(colours)
    edges = BoundaryNorm([edge - 0.5 for edge in range(number + 1)], number)
    shades = ScalarMappable(edges, ListedColormap(list(colours.values())))
    bar = figure.colorbar(shades, ax=list(grid), fraction=0.03, pad=0.015, aspect=28)
    blocks = BlockAxis.of((place._replace(tower="") for place in colours), 0)
    ticks = blocks.spread(dict.fromkeys(blocks.positions, number / 8))
    bar.set_ticks([blocks.positions[place] for place in ticks], labels=[place.label for place in ticks])
    bar.ax.minorticks_off()
    bar.ax.tick_params(length=0, labelsize=8, labelcolor=INK)
    bar.set_label("block")
    bar.outline.set_visible(False)


# What they share


def _figure(height: float, panels: int = 1, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height))
    figure.set_layout_engine("constrained", w_pad=0.06)
    grid = figure.subplots(1, panels, squeeze=False, sharey=sharey)
    for axes in grid.flat:
        frame(axes)
    return figure, list(grid.flat)


def _values_of(*panels: Axes) -> list[float]:
    """Return the finite values of all lines."""
    import numpy as np

    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for axes in panels for line in axes.lines])
    return [float(value) for value in values if isfinite(value)] or [0.0]


def _similarity_axis(axes: Axes, values: Sequence[float]) -> None:
    """Scale from 0, or from the lowest cosine, to 1."""
    axes.set_ylim(min(0.0, floor(20 * min(values)) / 20), max(1.0, *values))


def _legend_above(figure: Figure, axes: Axes, columns: int = 2) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, **_LEGEND)


def _shortened(text: str, limit: int) -> str:
    """Cut the middle of a long name: names differ at their beginning and end."""
    name = clean(text, 2000)
    half = (limit - 1) // 2
    return name if len(name) <= limit else f"{name[: limit - 1 - half].rstrip()}…{name[-half:].lstrip()}"
