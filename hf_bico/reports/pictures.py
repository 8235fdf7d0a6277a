"""Draw pictures: the style of all of them, and heat maps of how well sites align.

Knows records; neither models nor the page around a picture.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from importlib.util import find_spec
from io import BytesIO
from math import ceil, inf, isfinite, isnan
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hf_bico.models.layout import TEXT_SIDE
from hf_bico.reports.record import Record, SiteRecord
from hf_bico.reports.results import by_role
from hf_bico.runtime.turns import library_turn

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL import ImageDraw, ImageFont


# the colours of Okabe and Ito, which the colour-blind can tell apart; their yellow is too light for a line, ours is not
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#C9B800"
BLUE, RED, PINK = "#0072B2", "#D55E00", "#CC79A7"
INK, GRID = "#333333", "#E6E6E6"


def frame(axes: Axes) -> None:
    """Draw a light grid, and no line above or to the right."""
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=3, color=INK, labelsize=8.5, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)


def png(draw: Callable[[], Figure], dpi: int = 200) -> bytes:
    """Render a figure as PNG: the same bytes each time, whatever the user's own style."""
    return rendered(styled(draw), dpi)


def styled(draw: Callable[[], Figure]) -> Figure:
    """Draw a figure in our style, whatever the user's own; it shows itself in a notebook."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    with _style():
        figure = draw()
        for text in figure.findobj(Text):
            text.set_parse_math(False)  # a dollar in a name is a dollar
        FigureCanvasAgg(figure)
    # IPython itself shows only the figures of pyplot
    figure._repr_png_ = partial(rendered, figure, 100)  # type: ignore[attr-defined]
    return figure


def rendered(figure: Figure, dpi: int = 200) -> bytes:
    """Return a figure as PNG."""
    stream = BytesIO()
    with _style():
        figure.savefig(stream, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return stream.getvalue()


def picture_figure(content: bytes) -> Figure:
    """Return a figure that shows a PNG."""
    from matplotlib.figure import Figure
    from PIL import Image

    def draw() -> Figure:
        with Image.open(BytesIO(content)) as image:
            figure = Figure(figsize=(image.width / 200, image.height / 200))
            axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
            axes.imshow(image.convert("RGB"))
        axes.set_axis_off()
        return figure

    return styled(draw)


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with library_turn(), matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rc("font", family="DejaVu Sans")  # shipped with matplotlib, so the same on every machine
        matplotlib.rc("axes", labelcolor=INK, labelsize=9, titlecolor=INK, titlesize=9, titlelocation="left")
        matplotlib.rc("legend", frameon=False)
        warnings.filterwarnings("ignore", "Glyph .* missing")
        yield


ALIGNMENT_FILE = "alignment.png"
PANELS = {
    "score_in": "score in (1 is best)",
    "score_out": "score out (1 is best)",
    "unseen": "unseen energy (0 is best)",
}
MISPAIRED = {"score_in": "mispaired_in", "score_out": "mispaired_out"}
"""What the same values are for samples that do not belong together."""
SIDE_BY_SIDE = 16
"""Panels stand side by side up to so many blocks, else one above the other."""
MAX_NUMBERED = 13
"""Values are printed in the cells of up to so many columns."""
MAX_BLOCKS = 512
"""No model has so many: a record that says so is not drawn."""
_TEXT = f"{TEXT_SIDE}."
_BLOCK = re.compile(r"(?:^|\.)(\d{1,4})$")
_MAX_LABEL = 44
_NOT_CARRIED = "#e4e4e4"
_VIRIDIS = bytes.fromhex(
    "440154 48186a 472d7b 424086 3b528b 33638d 2c728e 26828e 21918c"
    "1fa088 28ae80 3fbc73 5ec962 84d44b addc30 d8e219 fde725"
)
"""Colours that the colour-blind can tell apart, as red, green, blue in equal steps."""
# sizes of the picture, its parts and its letters in pixels
_WIDTH, _ROW, _LOW_ROW, _ABOVE, _BELOW, _BETWEEN, _BAR, _GAP = 1440, 50, 40, 48, 76, 58, 25, 11
_TINY, _SMALL, _LARGE = 14, 21, 25
_STRIP = 34


def record_picture(record: Record) -> bytes | None:
    """Draw the alignment of a port; the same record gives the same bytes."""
    return alignment_picture(record.sites, len(record.method.layers))


def record_panels(record: Record) -> dict[str, str]:
    """Return the drawn values of a port with their titles; empty if calibration left nothing to draw."""
    return HeatMap(tuple(record.sites), len(record.method.layers)).panels


def alignment_picture(sites: Sequence[SiteRecord], blocks: int) -> bytes | None:
    """Draw how well each site aligns, as a PNG with a heat map of roles by target blocks for each of three values.

    Return None if calibration left nothing to draw. The same sites give the same bytes, drawn once per process.
    """
    return _draw(HeatMap(tuple(sites), blocks))


@dataclass(frozen=True)
class HeatMap:
    """Sites as cells of a table: a row per role, a column per target block and one for sites outside the blocks."""

    sites: tuple[SiteRecord, ...]
    blocks: int
    """The number of blocks of the target's main tower."""

    @cached_property
    def drawable(self) -> list[SiteRecord]:
        if self.blocks > MAX_BLOCKS:
            return []
        towers = {False: range(self.blocks), True: range(MAX_BLOCKS)}
        return [site for site in self.sites if _is_outside(site) or block_of(site) in towers[is_of_text_tower(site)]]

    @cached_property
    def panels(self) -> dict[str, str]:
        """The values to draw, with their titles: a method that aligns one side has no score for the other."""
        return {
            value: title
            for value, title in PANELS.items()
            if any(getattr(site, value) is not None for site in self.drawable)
        }

    @cached_property
    def rows(self) -> dict[str, list[SiteRecord]]:
        return by_role(self.drawable, lambda site: site.role)

    @cached_property
    def columns(self) -> list[int | None]:
        """The target blocks, as many as the deepest tower has, then None for sites outside of them."""
        outside = any(_is_outside(site) for site in self.drawable)
        return [*range(max(self.blocks, _depth(self.drawable))), *([None] if outside else [])]

    def mispaired(self, value: str) -> np.ndarray[Any, Any] | None:
        """Return what mispaired samples score in each row, as one column; None where nothing is known of it."""
        import numpy as np

        name = MISPAIRED.get(value)
        scores = [[_share(getattr(site, name)) for site in row] for row in self.rows.values()] if name else []
        known = [[score for score in row if score is not None] for row in scores]
        return np.array([[fmean(row) if row else np.nan] for row in known]) if any(known) else None

    def values(self, value: str) -> np.ndarray[Any, Any]:
        """Return rows by columns, the mean of several sites; NaN if none was carried, infinity if none can be there."""
        import numpy as np

        values = np.full((len(self.rows), len(self.columns)), np.inf)
        cells: dict[tuple[int, int], list[float]] = {}
        places = {block: column for column, block in enumerate(self.columns)}
        for row, sites in enumerate(self.rows.values()):
            outside = {_is_outside(site) for site in sites}
            depth = _depth(sites) if all(is_of_text_tower(site) for site in sites) else self.blocks
            possible = [
                True in outside if block is None else False in outside and block < depth for block in self.columns
            ]
            values[row, possible] = np.nan
            for site in sites:
                number = _share(getattr(site, value))
                if number is not None:
                    cell = (row, places[block_of(site)])
                    cells.setdefault(cell, []).append(number)
        for cell, numbers in cells.items():
            values[cell] = sum(numbers) / len(numbers)
        return values


def _share(number: float | None) -> float | None:
    """Return a number within 0 and 1; None for one that is not finite."""
    return None if number is None or not isfinite(number) else min(max(number, 0.0), 1.0)


def is_of_text_tower(site: SiteRecord) -> bool:
    """Return True for a site of a text tower beside the main one, which numbers its own blocks."""
    return site.name.startswith(_TEXT) and site.role.startswith(_TEXT)


def block_of(site: SiteRecord) -> int | None:
    """Return the target block of a site, the number before its role in its name; None outside the blocks."""
    role = site.role.removeprefix(_TEXT) if is_of_text_tower(site) else site.role
    match = _BLOCK.search(site.name.removesuffix(f".{role}"))
    return int(match[1]) if match and not _is_outside(site) else None


def _is_outside(site: SiteRecord) -> bool:
    """Return True for a site outside the blocks, as a projection or a head: its role is its whole name."""
    return site.name == site.role


def _depth(sites: Sequence[SiteRecord]) -> int:
    return max((1 + (block_of(site) or 0) for site in sites if not _is_outside(site)), default=0)


@lru_cache(maxsize=32)
def _draw(heat_map: HeatMap) -> bytes | None:
    from PIL import Image, ImageDraw

    panels, columns = heat_map.panels, heat_map.columns
    if not panels:
        return None
    labels = [_printable(role) for role in heat_map.rows]
    beside = len(columns) - columns.count(None) <= SIDE_BY_SIDE
    down, across = (1, len(panels)) if beside else (len(panels), 1)
    height = (_ROW if beside else _LOW_ROW) * len(labels)
    left = 2 * _GAP + max(ceil(font(_SMALL).getlength(label)) for label in labels)
    right = _WIDTH - _BAR - 3 * _GAP - ceil(font(_SMALL).getlength("worst"))
    width = (right - left + 2 * _GAP) // across - 2 * _GAP
    strip = max(width // (len(columns) + 1), _STRIP)
    scores = {value: heat_map.mispaired(value) for value in panels}
    bottom = _ABOVE + down * (height + _BETWEEN) - _BETWEEN
    picture = Image.new("RGB", (_WIDTH, bottom + _BELOW), "white")
    pen = ImageDraw.Draw(picture)
    for number, (value, title) in enumerate(panels.items()):
        row, column = divmod(number, across)
        x, y = left + column * (width + 2 * _GAP), _ABOVE + row * (height + _BETWEEN)
        mispaired = scores[value]
        is_narrow = mispaired is not None or (down > 1 and any(one is not None for one in scores.values()))
        panel = _Panel(pen, x, y, width - (strip + _GAP if is_narrow else 0), height)
        panel.fill(heat_map.values(value), small_is_good=value == "unseen")
        panel.text(0, -_GAP, title, "ls", _LARGE)
        if mispaired is not None:
            beyond = _Panel(pen, x + width - strip, y, strip, height)
            beyond.fill(mispaired, small_is_good=False, of=len(columns))
            beyond.text(strip, -_GAP, "mispaired", "rs")
        if column == 0:
            for index, label in enumerate(labels):
                panel.text(-_GAP, (index + 0.5) * height / len(labels), label, "rm")
        if row == down - 1:
            panel.label_blocks(columns, "proj" if "proj" in heat_map.rows else "other")
    for y in range(_ABOVE, bottom):
        pen.line((right + _GAP, y, right + _GAP + _BAR, y), _colour((bottom - y) / (bottom - _ABOVE)))
    for y, word in ((_ABOVE, "best"), (bottom, "worst")):
        pen.text((right + 2 * _GAP + _BAR, y), word, INK, font(_SMALL), anchor="lm")
    stream = BytesIO()
    picture.save(stream, "png")
    return stream.getvalue()


@dataclass(frozen=True)
class _Panel:
    """One heat map of the picture: its place, and the pen that draws it."""

    pen: ImageDraw.ImageDraw
    x: int
    y: int
    width: int
    height: int

    def fill(self, values: np.ndarray[Any, Any], small_is_good: bool, of: int = 0) -> None:
        """Draw the cells, bright if good, grey if not carried, empty if no site can be there.

        Numbers are printed as they are in a map `of` so many columns, by default its own.
        """
        from numpy import ndenumerate

        rows, columns = values.shape
        across = of or columns
        line, size = (3 if across <= 30 else 2), (_SMALL if across <= 6 else _TINY)
        for (row, column), value in ndenumerate(values):
            if value == inf:
                continue
            goodness = 1 - value if small_is_good else value
            x, right = (at * self.width // columns for at in (column, column + 1))
            y, bottom = (at * self.height // rows for at in (row, row + 1))
            box = (self.x + x, self.y + y, self.x + right - line, self.y + bottom - line)
            self.pen.rectangle(box, _NOT_CARRIED if isnan(value) else _colour(goodness))
            if across <= MAX_NUMBERED and not isnan(value):
                text = f"{value:.2f}" if across <= 6 else f"{value:.2f}".lstrip("0")
                ink = "black" if goodness > 0.6 else "white"
                self.text((x + right - line) / 2, (y + bottom - line) / 2, text, "mm", size, ink)

    def label_blocks(self, columns: list[int | None], outside: str) -> None:
        """Print as many block numbers as fit, and a word for the column `outside` of them."""
        blocks = len(columns) - columns.count(None)
        step = max(1, ceil(blocks / (8 if blocks <= SIDE_BY_SIDE else 16)))
        for index in (*range(0, blocks, step), *range(blocks, len(columns))):
            label = outside if columns[index] is None else str(columns[index])
            self.text((index + 0.5) * self.width / len(columns), self.height + _GAP, label, "ma")
        self.text(self.width / 2, self.height + _GAP + 2 * _SMALL * 3 // 4, "target block", "ma")

    def text(self, x: float, y: float, text: str, anchor: str, size: int = _SMALL, ink: str = INK) -> None:
        self.pen.text((self.x + x, self.y + y), text, ink, font(size), anchor=anchor)


def _colour(goodness: float) -> tuple[int, ...]:
    """Return the colour between the worst, 0, and the best, 1."""
    steps = len(_VIRIDIS) // 3 - 1
    position = min(max(goodness, 0.0), 1.0) * steps
    below = min(int(position), steps - 1)
    pairs = zip(_VIRIDIS[3 * below : 3 * below + 3], _VIRIDIS[3 * below + 3 : 3 * below + 6], strict=True)
    return tuple(round(one + (position - below) * (other - one)) for one, other in pairs)


@cache
def font(size: int) -> ImageFont.FreeTypeFont:
    """Load DejaVu Sans from matplotlib's files, without importing matplotlib."""
    from PIL import ImageFont

    matplotlib = find_spec("matplotlib")
    assert matplotlib is not None
    assert matplotlib.origin is not None
    return ImageFont.truetype(
        str(Path(matplotlib.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"), size
    )


def _printable(label: str) -> str:
    """Replace unprintable letters, and keep the end of a long path, which tells more than its beginning."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in label)
    return printable if len(printable) <= _MAX_LABEL else f"...{printable[3 - _MAX_LABEL :]}"
