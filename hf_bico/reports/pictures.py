"""Pictures: style, heat strips.

What our pictures have in common: font, colours, frame, and how a figure becomes bytes. Not what they show.

Sites to a picture of how well they line up: heat strips of roles by blocks.

Knows sites and their scores; neither models nor the page around the picture. `blocks` is how many the target has.

The record to the picture of its alignment that stands on its card.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from io import BytesIO
from math import ceil, inf, isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_bico.models.layout import TEXT_SIDE
from hf_bico.reports.record import Record, SiteRecord
from hf_bico.reports.results import role_labels

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL import Image, ImageDraw, ImageFont


# the colours of Okabe and Ito, which the colour-blind can tell apart; their yellow is too light for a line, ours is not
ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    *("#E69F00", "#56B4E9", "#009E73", "#C9B800", "#0072B2", "#D55E00", "#CC79A7"),
)
INK, GRID = "#333333", "#E6E6E6"
FONT_FAMILY = "DejaVu Sans"
"""It comes with matplotlib: the same on every machine."""
FONT: dict[str, Any] = {"fontfamily": FONT_FAMILY, "color": INK}


def frame(axes: Axes) -> None:
    """A light grid, and no line above or to the right."""
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=3, color=INK, labelsize=8.5, labelcolor=INK, labelfontfamily=FONT_FAMILY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)


def png(draw: Callable[[], Figure], dpi: int = 200) -> bytes:
    """What `draw` returns as PNG: the same figure gives the same bytes, whatever the user's own style is."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure = draw()
        for text in figure.findobj(Text):
            text.set_parse_math(False)  # a dollar in a name is a dollar
        FigureCanvasAgg(figure)
        stream = BytesIO()
        figure.savefig(stream, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return stream.getvalue()


PANELS = {
    "score_in": "score in (1 is best)",
    "score_out": "score out (1 is best)",
    "unseen": "unseen energy (0 is best)",
}
SIDE_BY_SIDE = 16
"""Up to so many blocks the panels stand beside each other, above it one over the other."""
MOST_NUMBERS = 13
"""In so many columns the values are written too."""
MOST_BLOCKS = 512
"""No model has so many: a record that says so is not drawn."""
_TEXT = f"{TEXT_SIDE}."
_BLOCK = re.compile(r"(?:^|\.)(\d{1,4})$")
_LONGEST_LABEL = 44
_NOT_CARRIED = "#e4e4e4"
_SHADES = tuple(
    map(
        bytes.fromhex,
        (
            *("440154", "48186a", "472d7b", "424086", "3b528b", "33638d", "2c728e", "26828e", "21918c"),
            *("1fa088", "28ae80", "3fbc73", "5ec962", "84d44b", "addc30", "d8e219", "fde725"),
        ),
    )
)
"""The colours of viridis, which the colour-blind can tell apart, at every sixteenth of the way."""
_WIDTH, _ROW, _LOW_ROW, _ABOVE, _BELOW, _BETWEEN, _BAR, _GAP = 1440, 50, 40, 48, 76, 58, 25, 11
_TINY, _SMALL, _LARGE = 14, 21, 25
"""In pixels: the picture and its parts, and letters."""


def panels(sites: Sequence[SiteRecord], blocks: int) -> dict[str, str]:
    """The values that are drawn, with their titles: a method that lines up one side only has no score of the other."""
    drawn = _drawable(sites, blocks)
    return {value: title for value, title in PANELS.items() if any(getattr(site, value) is not None for site in drawn)}


def alignment_picture(sites: Sequence[SiteRecord], blocks: int) -> bytes | None:
    """PNG: how well each site lines up, as one heat strip of roles by target blocks for each of the three values.

    None where calibration left nothing to draw. The same sites give the same bytes, and are drawn once in a process.
    """
    return _drawn(tuple(sites), blocks) if panels(sites, blocks) else None


@lru_cache(maxsize=32)
def _drawn(sites: tuple[SiteRecord, ...], blocks: int) -> bytes:
    stream = BytesIO()
    _draw(sites, blocks).save(stream, "png")
    return stream.getvalue()


def _draw(sites: Sequence[SiteRecord], blocks: int) -> Image.Image:
    from PIL import Image, ImageDraw

    columns, roles = _columns(sites, blocks), _roles(sites, blocks)
    drawn, labels = panels(sites, blocks), [_short(role) for role in roles]
    beside = len(columns) - columns.count(None) <= SIDE_BY_SIDE
    down, across = (1, len(drawn)) if beside else (len(drawn), 1)
    height = (_ROW if beside else _LOW_ROW) * len(roles)
    left = 2 * _GAP + max(_width(label) for label in labels)
    right = _WIDTH - _BAR - 3 * _GAP - _width("worst")
    width = (right - left + 2 * _GAP) // across - 2 * _GAP
    bottom = _ABOVE + down * (height + _BETWEEN) - _BETWEEN
    picture = Image.new("RGB", (_WIDTH, bottom + _BELOW), "white")
    pen = ImageDraw.Draw(picture)
    for number, (value, title) in enumerate(drawn.items()):
        row, column = divmod(number, across)
        strip = _Strip(pen, left + column * (width + 2 * _GAP), _ABOVE + row * (height + _BETWEEN), width, height)
        strip.fill(_values(sites, blocks, value, roles, columns), small_is_good=value == "unseen")
        pen.text((strip.x, strip.y - _GAP), title, INK, _font(_LARGE), anchor="ls")
        if column == 0:
            strip.label_roles(labels)
        if row == down - 1:
            strip.label_blocks(columns, "proj" if "proj" in roles else "other")
    for y in range(_ABOVE, bottom):
        pen.line((right + _GAP, y, right + _GAP + _BAR, y), _colour((bottom - y) / (bottom - _ABOVE)))
    for y, word in ((_ABOVE, "best"), (bottom, "worst")):
        pen.text((right + 2 * _GAP + _BAR, y), word, INK, _font(_SMALL), anchor="lm")
    return picture


@dataclass(frozen=True)
class _Strip:
    """A panel of the picture: where it stands, and what draws it."""

    pen: ImageDraw.ImageDraw
    x: int
    y: int
    width: int
    height: int

    def fill(self, values: np.ndarray[Any, Any], small_is_good: bool) -> None:
        """Draw the cells, bright where it is good; what was not carried is grey, a place where no site can be empty."""
        from numpy import ndenumerate

        rows, columns = values.shape
        line, size = (3 if columns <= 30 else 2), (_SMALL if columns <= 6 else _TINY)
        for (row, column), value in ndenumerate(values):
            if value == inf:
                continue
            goodness = 1 - value if small_is_good else value
            x, end = (self.x + at * self.width // columns for at in (column, column + 1))
            y, below = (self.y + at * self.height // rows for at in (row, row + 1))
            self.pen.rectangle((x, y, end - line, below - line), _NOT_CARRIED if isnan(value) else _colour(goodness))
            if columns <= MOST_NUMBERS and not isnan(value):
                text = f"{value:.2f}" if columns <= 6 else f"{value:.2f}".lstrip("0")
                ink = "black" if goodness > 0.6 else "white"
                self.pen.text(((x + end - line) / 2, (y + below - line) / 2), text, ink, _font(size), anchor="mm")

    def label_roles(self, labels: Sequence[str]) -> None:
        for row, label in enumerate(labels):
            place = (self.x - _GAP, self.y + (row + 0.5) * self.height / len(labels))
            self.pen.text(place, label, INK, _font(_SMALL), anchor="rm")

    def label_blocks(self, columns: list[int | None], outside: str) -> None:
        """Block numbers, not more than fit, and a word for what is `outside` of them."""
        blocks = columns[: columns.index(None)] if None in columns else columns
        step = max(1, ceil(len(blocks) / (8 if len(blocks) <= SIDE_BY_SIDE else 16)))
        y = self.y + self.height + _GAP
        for place in (*range(0, len(blocks), step), *range(len(blocks), len(columns))):
            label = outside if columns[place] is None else str(columns[place])
            self.pen.text(
                (self.x + (place + 0.5) * self.width / len(columns), y), label, INK, _font(_SMALL), anchor="ma"
            )
        self.pen.text(
            (self.x + self.width / 2, y + 2 * _SMALL * 3 // 4), "target block", INK, _font(_SMALL), anchor="ma"
        )


def _colour(goodness: float) -> tuple[int, ...]:
    """From the worst, 0, to the best, 1."""
    place = min(max(goodness, 0.0), 1.0) * (len(_SHADES) - 1)
    below = min(int(place), len(_SHADES) - 2)
    pairs = zip(_SHADES[below], _SHADES[below + 1], strict=True)
    return tuple(round(one + (place - below) * (other - one)) for one, other in pairs)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib: the same on every machine, and nothing of matplotlib is imported."""
    from PIL import ImageFont

    matplotlib = find_spec("matplotlib")
    assert matplotlib is not None
    assert matplotlib.origin is not None
    return ImageFont.truetype(Path(matplotlib.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf", size)


def _width(label: str) -> int:
    return ceil(_font(_SMALL).getlength(label))


def _short(label: str) -> str:
    """The end of a long path, which tells more than its beginning; nothing that is not a letter."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in label)
    return shown if len(shown) <= _LONGEST_LABEL else f"...{shown[3 - _LONGEST_LABEL :]}"


def _drawable(sites: Sequence[SiteRecord], blocks: int) -> list[SiteRecord]:
    if blocks > MOST_BLOCKS:
        return []
    main, texts = range(blocks), range(MOST_BLOCKS)
    return [site for site in sites if _outside(site) or block_of(site) in (texts if is_of_text_tower(site) else main)]


def is_of_text_tower(site: SiteRecord) -> bool:
    """Whether a site is of a tower beside the main one, whose blocks have numbers of their own."""
    return site.name.startswith(_TEXT) and site.role.startswith(_TEXT)


def _outside(site: SiteRecord) -> bool:
    """Whether a site stands outside the blocks, as a projection or a head does: then its role is its whole name."""
    return site.name == site.role


def block_of(site: SiteRecord) -> int | None:
    """The target block of a site, which stands before its role in its name; None outside the blocks."""
    role = site.role.removeprefix(_TEXT) if is_of_text_tower(site) else site.role
    found = _BLOCK.search(site.name.removesuffix(f".{role}"))
    return int(found[1]) if found and not _outside(site) else None


def _labels(sites: Sequence[SiteRecord], blocks: int) -> dict[str, str]:
    """The row of each role."""
    return role_labels(site.role for site in _drawable(sites, blocks))


def _roles(sites: Sequence[SiteRecord], blocks: int) -> list[str]:
    return list(dict.fromkeys(_labels(sites, blocks).values()))


def _columns(sites: Sequence[SiteRecord], blocks: int) -> list[int | None]:
    """The target blocks, as many as the deepest tower has, then None for what stands outside of them."""
    drawn = _drawable(sites, blocks)
    outside = any(_outside(site) for site in drawn)
    deepest = max([blocks, *(1 + block for site in drawn if (block := block_of(site)) is not None)])
    return [*range(deepest), *([None] if outside else [])]


def _values(
    sites: Sequence[SiteRecord], blocks: int, value: str, roles: list[str], columns: list[int | None]
) -> np.ndarray[Any, Any]:
    """Rows by columns, the mean where several sites meet; NaN where none was carried, infinity where none can be."""
    import numpy as np

    labels, drawn = _labels(sites, blocks), _drawable(sites, blocks)
    values = np.full((len(roles), len(columns)), np.inf)
    for row, role in enumerate(roles):
        here = [site for site in drawn if labels[site.role] == role]
        places, depth = {_outside(site) for site in here}, blocks
        if all(is_of_text_tower(site) for site in here):  # how deep that tower is, its sites show
            depth = max(1 + (block_of(site) or 0) for site in here)
        can_be = [True in places if block is None else False in places and block < depth for block in columns]
        values[row, can_be] = np.nan
    cells: dict[tuple[int, int], list[float]] = {}
    for site in drawn:
        number = getattr(site, value)
        if number is not None and isfinite(number):
            cell = (roles.index(labels[site.role]), columns.index(block_of(site)))
            cells.setdefault(cell, []).append(min(max(number, 0.0), 1.0))
    for cell, numbers in cells.items():
        values[cell] = sum(numbers) / len(numbers)
    return values


PICTURE_FILE = "alignment.png"


def has_alignment(record: Record) -> bool:
    """Whether calibration left anything to draw: a method without statistics does not."""
    return bool(record_panels(record))


def record_panels(record: Record) -> dict[str, str]:
    """The values that are drawn, with their titles."""
    return panels(record.sites, len(record.method.layers))


def record_picture(record: Record) -> bytes | None:
    """PNG: the heat strips of the record's sites; the same record gives the same bytes."""
    return alignment_picture(record.sites, len(record.method.layers))
