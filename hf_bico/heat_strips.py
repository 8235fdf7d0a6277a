"""Sites to a picture of how well they line up: heat strips of roles by blocks.

Knows sites and their scores; neither models nor the page around the picture. `blocks` is how many the target has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil, isfinite
from typing import TYPE_CHECKING, Any

from hf_bico.drawing import FONT, FONT_FAMILY, INK, png
from hf_bico.record import SiteRecord
from hf_bico.sites import TEXT_SIDE, role_labels

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def panels(sites: Sequence[SiteRecord], blocks: int) -> dict[str, str]:
    """The values that are drawn, with their titles: a method that lines up one side only has no score of the other."""
    drawn = _drawable(sites, blocks)
    return {value: title for value, title in PANELS.items() if any(getattr(site, value) is not None for site in drawn)}


def alignment_picture(sites: Sequence[SiteRecord], blocks: int) -> bytes | None:
    """PNG: how well each site lines up, as one heat strip of roles by target blocks for each of the three values.

    None where calibration left nothing to draw. The same sites give the same bytes.
    """
    return png(lambda: _draw(sites, blocks), dpi=180) if panels(sites, blocks) else None


def _draw(sites: Sequence[SiteRecord], blocks: int) -> Figure:
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    columns, roles = _columns(sites, blocks), _roles(sites, blocks)
    beside = len(columns) - columns.count(None) <= SIDE_BY_SIDE
    drawn = panels(sites, blocks)
    rows_of_panels, panels_a_row = (1, len(drawn)) if beside else (len(drawn), 1)
    height = 0.62 + 0.28 * len(roles) if beside else 1.2 + len(drawn) * (0.42 + 0.22 * len(roles))
    figure = Figure(figsize=(8, height))
    figure.set_layout_engine("constrained")
    grid = figure.subplots(rows_of_panels, panels_a_row, sharex=True, sharey=True, squeeze=False)
    strips = list(grid.flat)
    for axes, (value, title) in zip(strips, drawn.items(), strict=True):
        _panel(axes, _values(sites, blocks, value, roles, columns), "viridis_r" if value == "unseen" else "viridis")
        axes.set_title(title, fontsize=10, loc="left", **FONT)
    for axes in grid[-1, :]:
        _label_blocks(axes, columns, "proj" if "proj" in roles else "other")
    for axes in grid[:, 0]:
        axes.set_yticks(range(len(roles)), [_short(role) for role in roles], fontsize=8.5, **FONT)
        axes.tick_params(which="major", labelleft=True)
    bar = figure.colorbar(ScalarMappable(cmap="viridis"), ax=strips, fraction=0.03, pad=0.015, ticks=[0, 1])
    bar.set_ticklabels(["worst", "best"])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8.5, labelcolor=INK, labelfontfamily=FONT_FAMILY)
    return figure


def _panel(axes: Axes, values: np.ndarray[Any, Any], colours: str) -> None:
    """One strip, bright where it is good; what was not carried is grey, a place where no site can be is empty."""
    import numpy as np
    from matplotlib.colors import ListedColormap

    height, width = values.shape
    style: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
    axes.set_facecolor("white")
    axes.imshow(np.where(np.isinf(values), np.nan, 0.0), cmap=ListedColormap([_NOT_CARRIED]), **style)
    axes.imshow(np.ma.masked_invalid(values), cmap=colours, vmin=0, vmax=1, **style)
    if width <= MOST_NUMBERS:
        bright = values if colours == "viridis" else 1 - values
        for row, column in np.argwhere(np.isfinite(values)):
            colour = "black" if bright[row, column] > 0.6 else "white"
            size = 8 if width <= 6 else 5.5
            text = f"{values[row, column]:.2f}".lstrip("0") if width > 6 else f"{values[row, column]:.2f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=size, **{**FONT, "color": colour})
    axes.set_xticks(np.arange(-0.5, width), minor=True)
    axes.set_yticks(np.arange(-0.5, height), minor=True)
    axes.grid(which="minor", color="white", linewidth=1.0 if width <= 30 else 0.5, linestyle="-")
    axes.grid(which="major", visible=False)
    axes.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _label_blocks(axes: Axes, columns: list[int | None], outside: str) -> None:
    """Block numbers, not more than fit, and a word for what is `outside` of them."""
    blocks = columns[: columns.index(None)] if None in columns else columns
    step = max(1, ceil(len(blocks) / (8 if len(blocks) <= SIDE_BY_SIDE else 16)))
    places = [*range(0, len(blocks), step), *range(len(blocks), len(columns))]
    labels = [outside if columns[place] is None else str(columns[place]) for place in places]
    axes.set_xticks(places, labels, fontsize=8.5, **FONT)
    axes.tick_params(which="major", labelbottom=True)
    axes.set_xlabel("target block", fontsize=8.5, **FONT)


def _short(label: str) -> str:
    """The end of a long path, which tells more than its beginning."""
    return label if len(label) <= _LONGEST_LABEL else f"...{label[3 - _LONGEST_LABEL :]}"


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
