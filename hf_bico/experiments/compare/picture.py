"""Draws the rows of a comparison: accuracy against the number of calibration samples, one curve per method.

With a single number of samples, each method is one line of points instead. What the number of held-out samples leaves
uncertain is shaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp, log, sqrt
from typing import TYPE_CHECKING, Any

from hf_bico.experiments.compare.cells import CellKey, Row, split_method
from hf_bico.reports.pictures import BLUE, GREEN, INK, ORANGE, PINK, frame, rendered, styled
from hf_bico.settings import method_info
from hf_bico.utils.text import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


REFERENCE_STYLES = {
    "target": ("#333333", "s"),
    "source": ("#333333", "*"),
    "target fine-tuned": ("#888888", "*"),
}
_OTHERS = ((GREEN, "1"), (BLUE, "2"), (PINK, "3"), (ORANGE, "4"))
_SHADE = 0.15
REFERENCE_LINES = {"target": (0, (6, 3)), "source": (0, (1, 1.5)), "target fine-tuned": (0, (6, 2, 1, 2))}


def method_style(row: str) -> tuple[str, str]:
    """Return the colour and marker of a row's method; foreign methods share a few."""
    method, _ = split_method(row)
    return REFERENCE_STYLES.get(method) or method_info(method).style or _OTHERS[sum(method.encode()) % len(_OTHERS)]


@dataclass(frozen=True)
class _Line:
    """One method in one panel: a point for each number of samples, or one point if it takes none.

    `dots` counts the method's rows with an alpha of their own up to this one, and is 0 for a row without.
    """

    key: CellKey
    rows: tuple[Row, ...]
    dots: int = 0
    held_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def means(self) -> list[float]:
        return [self._scale * row.average.mean for row in self.rows if row.average is not None]

    @property
    def errors(self) -> list[float]:
        return [self._scale * (row.average.std or 0.0) for row in self.rows if row.average is not None]

    @property
    def interval(self) -> float | None:
        """Half of the 95% interval of the last mean, by the number of held-out samples; None of a loss."""
        values = self.rows[-1].values
        if self.rows[0].is_loss or not values.keys() <= self.held_out.keys():
            return None
        variances = [one.mean * (1 - one.mean) / self.held_out[data] for data, one in values.items()]
        return self._scale * 1.96 * sqrt(sum(variances)) / len(variances)

    @property
    def _scale(self) -> float:
        return 1.0 if self.rows[0].is_loss else 100.0

    @property
    def flat(self) -> bool:
        """True if it takes no samples."""
        return self.rows[0].size is None

    @property
    def style(self) -> dict[str, Any]:
        first = self.rows[0]
        colour, marker = method_style(self.key.method)
        variant = self.key.control or self.key.readout
        line = REFERENCE_LINES.get(self.key.method, "-") if first.is_reference else (0, (2, 2)) if self.flat else "-"
        line = (0, (6, 1.5, *(1, 1.5) * self.dots)) if self.dots else line
        return {
            "label": self.key.label,
            "color": colour,
            "linestyle": (0, (1, 1)) if self.key.control else (0, (4, 1.5)) if self.key.readout else line,
            "linewidth": 2.2 if self.key.method == "bico" and not variant else 0.9 if self.dots else 1.3,
            "marker": marker,
            "markersize": 6 if self.key.method == "bico" else 5,
            "markerfacecolor": "white" if variant or self.dots else colour,
            "zorder": 5 if self.key.method == "bico" and not variant else 2 if self.flat else 3,
        }


@dataclass(frozen=True)
class _Panel:
    protocol: str | None
    per_class: bool
    lines: tuple[_Line, ...]

    @property
    def is_loss(self) -> bool:
        return self.lines[0].rows[0].is_loss

    @property
    def sizes(self) -> list[int]:
        return sorted({row.size for line in self.lines for row in line.rows if row.size is not None})

    @property
    def height(self) -> float:
        """The inches that the legend, or the methods, need."""
        return max(3.6, 0.21 * len(self.lines)) if len(self.sizes) > 1 else 0.7 + 0.27 * len(self.lines)


def picture(
    rows: Sequence[Row], data_sets: Sequence[str], title: str, held_out: Mapping[str, int] | None = None
) -> bytes | None:
    """Draw a PNG with a panel for each protocol and way to count samples; None if no average is known.

    The same rows give the same bytes. `held_out` has the number of held-out samples of each data set.
    """
    figure = drawn(rows, data_sets, title, held_out)
    return None if figure is None else rendered(figure)


def drawn(
    rows: Sequence[Row], data_sets: Sequence[str], title: str, held_out: Mapping[str, int] | None = None
) -> Figure | None:
    """Draw the same as a figure."""
    panels = _panels([row for row in rows if row.average is not None], held_out or {})
    return styled(lambda: _draw(panels, data_sets, title)) if panels else None


def _panels(rows: Sequence[Row], held_out: Mapping[str, int]) -> list[_Panel]:
    sized = [row for row in rows if row.size is not None]
    # the rows are in order: protocols, then sizes in all before sizes of each class
    kinds = dict.fromkeys((row.protocol, row.per_class is not None) for row in sized or rows)
    dots, panels = _dots(rows), []
    for protocol, per_class in kinds:
        lines: dict[CellKey, list[Row]] = {}
        for row in rows:
            if row.protocol == protocol and (row.size is None or (row.per_class is not None) == per_class):
                lines.setdefault(replace(row.key, n=None, per_class=None), []).append(row)
        split = [
            _Line(key, part, dots.get(key.method, 0), held_out)
            for key, own in lines.items()
            for flat in (True, False)
            if (part := tuple(row for row in own if (row.size is None) == flat))
        ]
        panels.append(_Panel(protocol, per_class, tuple(split)))
    return panels


def _dots(rows: Sequence[Row]) -> dict[str, int]:
    """Count the rows of each method that have an alpha of their own, from 1."""
    counts: Counter[str] = Counter()
    dots: dict[str, int] = {}
    for row in rows:
        name, alpha = split_method(row.method)
        if alpha is not None and row.method not in dots:
            counts[name] += 1
            dots[row.method] = counts[name]
    return dots


def _draw(panels: Sequence[_Panel], data_sets: Sequence[str], title: str) -> Figure:
    from matplotlib.figure import Figure

    heights = [panel.height for panel in panels]
    figure = Figure(figsize=(7.2, sum(heights) + 0.3))
    figure.set_layout_engine("constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    where = f"mean of {len(data_sets)} data sets" if len(data_sets) > 1 else clean(data_sets[0], 40)
    for axes, panel in zip(grid.flat, panels, strict=True):
        accuracy = "accuracy (%)" if panel.protocol is None else f"{panel.protocol} accuracy (%)"
        quantity = f"{f'held-out {panel.protocol}' if panel.is_loss else accuracy}, {where}"
        frame(axes)
        draw = _draw_curves if len(panel.sizes) > 1 else _draw_points
        draw(axes, panel, quantity)
    grid[0, 0].set_title(clean(title, 90))
    return figure


def _draw_curves(axes: Axes, panel: _Panel, quantity: str) -> None:
    """Draw accuracy against the number of samples; the legend names the curves from top to bottom."""
    sizes = panel.sizes
    curves = [line for line in panel.lines if not line.flat]
    # curves are shifted a little, so that their error bars do not cover each other
    width = min(0.12, 0.16 * min(log(after / before) for before, after in pairwise(sizes)))
    handles: list[tuple[_Line, Any]] = []
    for number, line in enumerate(curves):
        shift = exp(width * ((number + 0.5) / len(curves) - 0.5))
        positions = [row.size * shift for row in line.rows if row.size is not None]
        bars: dict[str, Any] = {"yerr": line.errors, "capsize": 1.8, "elinewidth": 0.8, "markeredgewidth": 1.0}
        handles.append((line, axes.errorbar(positions, line.means, **bars, **line.style)))
    flat = [line for line in panel.lines if line.flat]
    handles += [(line, axes.axhline(line.means[0], **{**line.style, "marker": ""})) for line in flat]
    shaded = [line for line in flat if line.key.method == "target" and line.interval]
    for line in shaded:
        low, high = (line.means[0] + sign * (line.interval or 0.0) for sign in (-1, 1))
        axes.axhspan(low, high, color=line.style["color"], alpha=_SHADE, linewidth=0, zorder=1)
    handles.sort(key=lambda pair: -pair[0].means[-1])
    axes.set_xscale("log")
    axes.margins(y=0.06)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xticks([], minor=True)
    note = "; bars: standard deviation over draws" if any(any(line.errors) for line in curves) else ""
    note += f"\nshaded: the target's {_interval(shaded[0])}" if shaded else ""
    axes.set_xlabel(f"calibration samples{' of each class' if panel.per_class else ''}{note}")
    axes.set_ylabel(quantity)
    labels = [line.key.label for line, _ in handles]
    style: dict[str, Any] = {"handlelength": 2.8, "fontsize": 8, "labelcolor": INK}
    axes.legend([handle for _, handle in handles], labels, loc="center left", bbox_to_anchor=(1.02, 0.5), **style)


def _draw_points(axes: Axes, panel: _Panel, quantity: str) -> None:
    """Draw a line for each method, the best on top."""
    ordered = sorted(panel.lines, key=lambda line: line.means[-1], reverse=panel.is_loss)
    for number, line in enumerate(ordered):
        style = {**line.style, "linestyle": "none"}
        axes.errorbar(line.means, [number], xerr=line.errors, capsize=2, elinewidth=1.0, markeredgewidth=1.0, **style)
        if line.interval:
            low, width = line.means[0] - line.interval, 2 * line.interval
            axes.barh(number, width, 0.5, low, color=line.style["color"], alpha=_SHADE, linewidth=0, zorder=1)
        if line.rows[0].is_reference:
            axes.axvline(line.means[0], **{**line.style, "marker": "", "linewidth": 0.9, "zorder": 1})
    axes.use_sticky_edges = False
    axes.set_yticks(range(len(ordered)), [line.key.label for line in ordered])
    axes.set_ylim(-0.6, len(ordered) - 0.4)
    axes.tick_params(axis="y", length=0)
    unit = " of each class" if panel.per_class else ""
    samples = f"; {panel.sizes[0]} calibration samples{unit}" if panel.sizes else ""
    shaded = next((f"\nshaded: {_interval(line)}" for line in ordered if line.interval), "")
    axes.set_xlabel(quantity + samples + shaded)


def _interval(line: _Line) -> str:
    """Say what is shaded.

    Two models that are measured on the same samples often err alike: of their difference, less is uncertain.
    """
    counts = [line.held_out[data] for data in line.rows[-1].values]
    unit = "" if len(counts) == 1 else " in all"
    return f"95% interval for {sum(counts):,} held-out samples{unit}"
