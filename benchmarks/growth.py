"""How the time of a port grows with samples, width and depth: timed, and drawn. Knows no other implementation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import CARRYING, Line
from pairs import clip_pair
from sizes import Growth
from timing import Run, timed_port

_INK, _GRID, _PAPER = "#333333", "#E6E6E6", "#FFFFFF"
_STYLES = {
    "in all": (CARRYING, "#333333", "o"),
    "calibrate": (("calibrate",), "#0072B2", "s"),
    "align": (("align",), "#D55E00", "^"),
}
# the font comes with matplotlib: the same on every machine
_FONT: dict[str, Any] = {"fontfamily": "DejaVu Sans", "color": _INK}


def timed_growth(growth: Growth, place: Path) -> Iterator[Line]:
    """One line for each of samples, width and depth; what does not grow is as in the second of the others' points."""
    samples, width, depth = growth.samples[1], growth.widths[1], growth.depths[1]
    pair = clip_pair(place / "samples", "samples", *growth.shapes(width, depth))
    timed_port(pair, pair.rows(growth.samples[0]), save=False)  # the device's libraries are loaded by the first port
    found = [timed_port(pair, pair.rows(count), save=False)[0] for count in growth.samples]
    yield _line("samples", f"{width} to {width * 7 // 6} wide, {depth} blocks", growth.samples, found)
    found = [_timed(growth, own, depth, samples, place / f"width-{own}") for own in growth.widths]
    yield _line("width", f"{samples} samples, {depth} blocks", growth.widths, found)
    found = [_timed(growth, width, own, samples, place / f"depth-{own}") for own in growth.depths]
    yield _line("depth", f"{samples} samples, {width} to {width * 7 // 6} wide", growth.depths, found)


def _timed(growth: Growth, width: int, depth: int, samples: int, place: Path) -> Run:
    pair = clip_pair(place, f"{width} wide, {depth} blocks", *growth.shapes(width, depth))
    return timed_port(pair, pair.rows(samples), save=False)[0]


def _line(what: str, fixed: str, values: tuple[int, ...], found: list[Run]) -> Line:
    return Line(what, fixed, values, [{stage: run.seconds[stage] for stage in CARRYING} for run in found])


def draw(lines: list[Line], file: Path, device: str) -> None:
    """Seconds against what grows, both by their logarithms, with the slopes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(3.6 * len(lines), 3.5), dpi=150, facecolor=_PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(lines), sharey=True, squeeze=False)[0]
    for axes, line in zip(panels, lines, strict=True):
        for name, (stages, colour, marker) in _STYLES.items():
            label = f"{name}, exponent {line.exponent(stages):.2f}"
            axes.loglog(line.values, line.of(stages), color=colour, marker=marker, markersize=5, label=label)
        axes.set_xticks(list(line.values), [str(value) for value in line.values], **_FONT)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(line.what, **_FONT)
        axes.set_title(line.fixed, fontsize=8, **_FONT)
        axes.grid(True, color=_GRID)
        axes.tick_params(colors=_INK, labelsize=8)
        axes.legend(fontsize=7, frameon=False, labelcolor=_INK)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].set_ylabel("seconds", **_FONT)
    figure.suptitle(f"From loaded models to the carried change, {device}", fontsize=10, **_FONT)
    figure.savefig(file, metadata={"Software": None})
