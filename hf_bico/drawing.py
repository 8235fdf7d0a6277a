"""What our pictures have in common: font, colours, frame, and how a figure becomes bytes. Not what they show."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
