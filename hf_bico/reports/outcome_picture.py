"""Draw the outcome of a port: what its samples expect of every alpha, beside what was measured.

Knows records; neither models nor the page around the picture. Draws with Pillow: a port does not load matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from math import ceil, floor, isfinite, log10
from typing import TYPE_CHECKING

from hf_bico.reports.pictures import BLUE, GRID, INK, RED, SKY, font
from hf_bico.reports.record import ACCURACY, LOSS, EvaluationRecord, Record
from hf_bico.reports.results import compared_entries, interval_of, is_trained, value_text

if TYPE_CHECKING:
    from PIL import ImageDraw

OUTCOME_FILE = "outcome.png"
MAX_POINTS = 100
"""No curve has so many: a record that says so is not drawn."""
_LARGEST = 1e9
"""Nor has any loss or alpha that can be read from a picture more than this."""
_GREY, _BAND = "#A6A6A6", "#CFE4F2"
_COLOURS = {"target": _GREY, "ported": RED, "base": _GREY, "source": BLUE}
_NAMES = {"base": "source's base"}
# sizes in pixels of a drawing of twice the size, which is reduced: so lines are smooth
_TWICE = 2
_WIDTH, _HEIGHT, _ABOVE, _BELOW, _BETWEEN, _GAP = (_TWICE * size for size in (1440, 400, 56, 84, 70, 12))
_SMALL, _LARGE, _LINE, _DOT, _MAX_BAR = (_TWICE * size for size in (21, 25, 4, 6, 80))


@dataclass(frozen=True)
class ExpectedCurve:
    """What the samples say of a change by its scale: the accuracy to expect, or their loss where nothing is predicted.

    `errors` are the standard errors of the losses, or of the accuracy at the scale that was `chosen`. With
    `of_whole_change`, all steps of a walk are scaled together, and 1 is what was written.
    """

    values: dict[float, float]
    errors: dict[float, float]
    unit: str
    chosen: float
    of_whole_change: bool

    @property
    def span(self) -> tuple[float, float]:
        """The values to show: of losses, not those that rise high above the target's own."""
        ends = [value + sign * self.errors.get(alpha, 0.0) for alpha, value in self.values.items() for sign in (-1, 1)]
        low, high = min(ends), max(ends)
        start = self.values.get(0.0)
        if self.unit == LOSS and start is not None and start > low:
            high = min(high, start + (start - low) / 2)
        return _widened(low, high)


@dataclass(frozen=True)
class Bar:
    """A measured value, with half of the interval in which it lies with 95%."""

    model: str
    name: str
    value: float
    text: str
    half: float | None


@dataclass(frozen=True)
class Outcome:
    """What there is to draw of a port."""

    curve: ExpectedCurve | None
    bars: tuple[Bar, ...]
    metric: str = ACCURACY
    """What the bars show: "accuracy" or "loss"."""
    probed: bool = False
    """True if a linear probe was measured."""

    @classmethod
    def of(cls, record: Record) -> Outcome:
        entries = {name: entry for name, entry in compared_entries(record).items() if _is_compared(name, entry)}
        metric = next((entry.metric for entry in entries.values()), ACCURACY)
        bars = [_bar(record, name, entry) for name, entry in entries.items() if entry.metric == metric]
        probed = any(entry.protocol is not None for entry in entries.values())
        return cls(_expected_curve(record), tuple(bars) if len(bars) > 1 else (), metric, probed)

    def __bool__(self) -> bool:
        return self.curve is not None or bool(self.bars)


def outcome_picture(record: Record) -> bytes | None:
    """Draw the outcome of a port as a PNG; None if there is nothing to draw. The same record gives the same bytes."""
    outcome = Outcome.of(record)
    return _draw(outcome) if outcome else None


def _expected_curve(record: Record) -> ExpectedCurve | None:
    method = record.method
    points = {point.alpha: point for point in method.curve if point.step is None}
    numbers = [number for point in points.values() for number in (point.alpha, point.mean)]
    if not 2 <= len(points) <= MAX_POINTS or not all(map(_is_readable, numbers)):
        return None
    walks = not isinstance(method.alpha, float)
    chosen = method.alpha if isinstance(method.alpha, float) else 1.0
    values = {alpha: point.accuracy for alpha, point in points.items() if point.accuracy is not None}
    known, unit = {chosen: None if method.veto is None else method.veto.error}, ACCURACY
    if len(values) < len(points) or not all(map(_is_share, values.values())):
        values = {alpha: point.mean for alpha, point in points.items()}
        known, unit = {alpha: point.error for alpha, point in points.items()}, LOSS
    errors = {alpha: abs(error) for alpha, error in known.items() if error is not None and _is_readable(error)}
    return ExpectedCurve(dict(sorted(values.items())), errors, unit, chosen, walks)


def _is_compared(name: str, entry: EvaluationRecord) -> bool:
    """Return True for target, port and source, and for a target that was changed from the same samples otherwise."""
    can_be_drawn = {ACCURACY: _is_share, LOSS: _is_readable}.get(entry.metric, lambda value: False)
    return can_be_drawn(entry.value) and (name in _COLOURS or name.startswith("target, "))


def _bar(record: Record, name: str, entry: EvaluationRecord) -> Bar:
    label = "trained" if name == "ported" and is_trained(record) else _NAMES.get(name, name)
    return Bar(name, label, entry.value, value_text(entry), interval_of(entry))


def _is_readable(number: float) -> bool:
    return isfinite(number) and abs(number) < _LARGEST


def _is_share(number: float) -> bool:
    return 0 <= number <= 1


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return an interval with some room around it, and no narrower than what can be told apart."""
    room = max(0.08 * (high - low), 0.01 * max(abs(low), abs(high)), 1e-6)
    return low - room, high + room


def _draw(outcome: Outcome) -> bytes:
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (_WIDTH, _ABOVE + _HEIGHT + _BELOW), "white")
    pen = ImageDraw.Draw(picture)
    panels = int(outcome.curve is not None) + int(bool(outcome.bars))
    width, left = (_WIDTH - (panels - 1) * _BETWEEN) // panels, 0
    if outcome.curve is not None:
        _draw_curve(pen, outcome.curve, left, left + width)
        left += width + _BETWEEN
    if outcome.bars:
        _draw_bars(pen, outcome, left, left + width)
    stream = BytesIO()
    picture.reduce(_TWICE).save(stream, "png")
    return stream.getvalue()


def _draw_curve(pen: ImageDraw.ImageDraw, curve: ExpectedCurve, left: int, right: int) -> None:
    alphas = list(curve.values)
    across = _widened(alphas[0], alphas[-1])
    panel = _Panel.beside_labels(pen, left, right, across, curve.span, curve.unit)
    panel.grid()
    if curve.unit == LOSS:
        ends = [[curve.values[alpha] + sign * curve.errors.get(alpha, 0.0) for alpha in alphas] for sign in (1, -1)]
        upper, lower = (list(zip(alphas, values, strict=True)) for values in ends)
        pen.polygon([panel.at(*point) for point in (*upper, *reversed(lower))], _BAND)
    is_known = curve.chosen in curve.values
    x, _ = panel.at(curve.chosen if is_known else 0.0, 0.0)
    for y in range(_ABOVE, _ABOVE + _HEIGHT, 4 * _LINE) if is_known else ():
        pen.line((x, y, x, y + 2 * _LINE), RED, _LINE // 2)
    pen.line([panel.at(*point) for point in curve.values.items()], BLUE, _LINE, joint="curve")
    for point in curve.values.items():
        panel.dot(*point, BLUE, _DOT)
    if is_known:
        value = curve.values[curve.chosen]
        if curve.unit == ACCURACY and curve.chosen in curve.errors:
            panel.whisker(x, value, curve.errors[curve.chosen], RED)
        panel.dot(curve.chosen, value, RED, 2 * _DOT)
    panel.cover_outside()
    better = " (lower is better)" if curve.unit == LOSS else ""
    panel.title(f"calibration samples: {'expected accuracy' if curve.unit == ACCURACY else 'loss'}{better}")
    panel.label_scales("all steps together, 1: as written" if curve.of_whole_change else "alpha")
    if is_known:
        word = "as written" if curve.of_whole_change else f"alpha {curve.chosen:.2g}"
        beside, side = (_GAP, "l") if x < (panel.left + panel.right) // 2 else (-_GAP, "r")
        # where the curve is not: below a high accuracy, above a low loss
        y, end = (_ABOVE + _HEIGHT, "d") if curve.unit == ACCURACY else (_ABOVE, "a")
        pen.text((x + beside, y), word, RED, font(_SMALL), anchor=side + end)


def _draw_bars(pen: ImageDraw.ImageDraw, outcome: Outcome, left: int, right: int) -> None:
    bars, metric = outcome.bars, outcome.metric
    ends = [0.0, *(bar.value + (bar.half or 0.0) for bar in bars)]
    down = (min(ends), max(*ends, 1e-6))
    panel = _Panel.beside_labels(pen, left, right, (0.0, float(len(bars))), (down[0], 1.15 * down[1]), metric)
    panel.grid()
    for number, bar in enumerate(bars):
        (x, y), (_, bottom) = panel.at(number + 0.5, bar.value), panel.at(number, 0.0)
        half = min(_MAX_BAR, (panel.right - panel.left) // (3 * len(bars)))
        pen.rectangle((x - half, min(y, bottom), x + half, max(y, bottom)), _COLOURS.get(bar.model, SKY))
        top = y if bar.half is None else panel.whisker(x, bar.value, bar.half, INK)
        pen.text((x, top - _GAP // 2), bar.text[:12], INK, font(_SMALL), anchor="md")
        for line, word in enumerate(bar.name.split(", ")):
            pen.text((x, _ABOVE + _HEIGHT + _GAP + line * _LARGE), word, INK, font(_SMALL), anchor="ma")
    how = " (lower is better)" if metric == LOSS else ", 95% interval"
    panel.title(f"held-out {'linear-probe ' if outcome.probed else ''}{metric}{how}")


@dataclass(frozen=True)
class _Panel:
    """A part of the picture with two axes, and the pen that draws in it."""

    pen: ImageDraw.ImageDraw
    left: int
    right: int
    across: tuple[float, float]
    down: tuple[float, float]
    labels: dict[float, str]
    """The labelled values of the upright axis."""

    @classmethod
    def beside_labels(
        cls,
        pen: ImageDraw.ImageDraw,
        left: int,
        right: int,
        across: tuple[float, float],
        down: tuple[float, float],
        unit: str,
    ) -> _Panel:
        """Leave room on the left for the labels of the upright axis."""
        labels = dict(_labels(*down, unit))
        room = max((ceil(font(_SMALL).getlength(label)) for label in labels.values()), default=0)
        return cls(pen, left + room + 2 * _GAP, right - _GAP, across, down, labels)

    def at(self, x: float, y: float) -> tuple[int, int]:
        """Return the pixel of a point; one that is far outside is moved nearer."""
        (low, high), (bottom, top) = self.across, self.down
        part = min(max((y - bottom) / (top - bottom), -4.0), 5.0)
        column = self.left + (x - low) / (high - low) * (self.right - self.left)
        return round(column), round(_ABOVE + (1 - part) * _HEIGHT)

    def grid(self) -> None:
        for value, label in self.labels.items():
            _, y = self.at(self.across[0], value)
            self.pen.line((self.left, y, self.right, y), GRID, _LINE // 2)
            self.pen.text((self.left - _GAP, y), label, INK, font(_SMALL), anchor="rm")

    def dot(self, x: float, y: float, colour: str, radius: int) -> None:
        column, row = self.at(x, y)
        self.pen.ellipse((column - radius, row - radius, column + radius, row + radius), colour)

    def whisker(self, x: int, value: float, half: float, colour: str) -> int:
        """Draw an interval with two caps, and return the row of the upper one."""
        rows = [self.at(0.0, value + sign * half)[1] for sign in (1, -1)]
        self.pen.line((x, rows[0], x, rows[1]), colour, _LINE)
        for row in rows:
            self.pen.line((x - 2 * _DOT, row, x + 2 * _DOT, row), colour, _LINE)
        return rows[0]

    def cover_outside(self) -> None:
        """Erase what was drawn above and below the panel."""
        self.pen.rectangle((self.left, 0, self.right, _ABOVE - _DOT), "white")
        self.pen.rectangle((self.left, _ABOVE + _HEIGHT + _DOT, self.right, _ABOVE + _HEIGHT + _BELOW), "white")

    def title(self, text: str) -> None:
        self.pen.text((self.left, _ABOVE - _GAP), text, INK, font(_LARGE), anchor="ls")

    def label_scales(self, name: str) -> None:
        """Print the values of the level axis, and its name below."""
        bottom = _ABOVE + _HEIGHT
        for value, _ in _labels(*self.across, ""):
            self.pen.text((self.at(value, 0.0)[0], bottom + _GAP), f"{value:.4g}", INK, font(_SMALL), anchor="ma")
        middle = (self.left + self.right) // 2
        self.pen.text((middle, bottom + _GAP + _LARGE + _GAP // 2), name, INK, font(_SMALL), anchor="ma")


def _labels(low: float, high: float, unit: str, most: int = 6) -> Iterator[tuple[float, str]]:
    """Yield round values between two others, and how they are written; accuracies in percent.

    >>> [label for _, label in _labels(0.48, 0.63, "accuracy")]
    ['50%', '55%', '60%']
    """
    least = (high - low) / most
    power = 10.0 ** floor(log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    digits = max(0, -floor(log10(step) + 1e-9) - (2 if unit == ACCURACY else 0))
    for value in (number * step for number in range(ceil(low / step), floor(high / step) + 1)):
        if unit != ACCURACY:
            yield value, f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.3g}"
        elif 0 <= value < 1 + step / 2:
            yield value, f"{100 * value:.{digits}f}%"
