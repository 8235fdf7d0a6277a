"""Draws how-it-works.svg beside itself: one linear layer of two models, the maps between them, the task vector turned.

Every matrix in the picture is computed as BiCo computes it, for a small layer: nothing is painted by hand. The same
script gives the same bytes. `python docs/pictures/how_it_works.py FILE.png` draws a PNG instead, to look at.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from drawing import picture_bytes, write_picture
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from numpy.typing import NDArray
from sklearn.datasets import load_digits

PICTURE = Path(__file__).with_name("how-it-works.svg")
WIDTH, HEIGHT = 1000, 600
NARROW, WIDE, SAMPLES = 4, 6, 8
CELL = 14
# Okabe and Ito's colours, which stay apart for colour-blind eyes; the purple darker, so that words in it are read
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#AA4480"
INK, FAINT = "#222222", "#666666"
STYLE = {"svg.hashsalt": "how-it-works", "mathtext.fontset": "dejavuserif"}
Matrix = NDArray[np.float64]


def polar(covariance: Matrix) -> Matrix:
    left, _, right = np.linalg.svd(covariance, full_matrices=False)
    return np.asarray(left @ right)


def layer() -> dict[str, Matrix]:
    """What the picture shows: a layer of A, one of B that is nearly A's in other coordinates, and what BiCo finds."""
    random = np.random.default_rng(4)

    def turn() -> Matrix:
        return np.asarray(np.linalg.qr(random.normal(size=(WIDE, NARROW)))[0].T)

    def nearly(rows: Matrix) -> Matrix:
        return np.asarray(rows + 0.1 * random.normal(size=rows.shape))

    q_in, q_out = turn(), turn()
    x_a, g_a, w_a = (random.normal(size=(rows, NARROW)) for rows in (SAMPLES, SAMPLES, NARROW))
    x_b, g_b = nearly(x_a @ q_in), nearly(g_a @ q_out)
    r_in, r_out = polar(x_a.T @ x_b), polar(g_a.T @ g_b)
    tau_a = -g_a.T @ x_a / SAMPLES
    return {
        **{"x_a": x_a, "x_b": x_b, "g_a": g_a, "g_b": g_b, "r_in": r_in, "r_out": r_out},
        **{"w_a": w_a, "w_b": nearly(q_out.T @ w_a @ q_in), "tau_a": tau_a, "tau_b": r_out.T @ tau_a @ r_in},
    }


class Sheet:
    """An empty sheet in units of its own, y downwards, and what is drawn on it."""

    def __init__(self) -> None:
        self.figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), facecolor="white")
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
        self.axes.axis("off")

    def text(self, x: float, y: float, words: str, color: str = INK, size: float = 11.5, **more: Any) -> None:
        self.axes.text(x, y, words, color=color, fontsize=size, **{"ha": "center", "va": "center", **more})

    def matrix(self, x: float, y: float, values: Matrix, color: str, cell: float = CELL) -> None:
        """Centred at (x, y); the darker, the larger."""
        rows, columns = values.shape
        left, top = x - columns * cell / 2, y - rows * cell / 2
        share = (values - values.min()) / (values.max() - values.min())
        hue = np.array(to_rgb(color))
        for (row, column), dark in np.ndenumerate(0.08 + 0.92 * share):
            place = (left + column * cell, top + row * cell)
            self.axes.add_patch(Rectangle(place, cell, cell, facecolor=1 - dark * (1 - hue), edgecolor="white", lw=0.6))
        self.axes.add_patch(Rectangle((left, top), columns * cell, rows * cell, fill=False, edgecolor=color, lw=1.1))

    def arrow(self, start: tuple[float, float], end: tuple[float, float], color: str = INK, **more: Any) -> None:
        look = {"arrowstyle": "-|>", "mutation_scale": 12, "lw": 1.5, "shrinkA": 0, "shrinkB": 0, **more}
        self.axes.add_patch(FancyArrowPatch(start, end, color=color, **look))

    def box(self, left: float, top: float, width: float, height: float, color: str, fill: float) -> None:
        hue = 1 - fill * (1 - np.array(to_rgb(color)))
        style = "round,pad=0,rounding_size=12"
        self.axes.add_patch(FancyBboxPatch((left, top), width, height, style, facecolor=hue, edgecolor=color, lw=1.2))


X, W, TAU, G, LOSS = 260, 455, 585, 785, 925
A, MAPS, B = 122, 300, 478
"""Where the columns and the three rows of the picture stand."""
HALF_BOX = 100


def draw() -> Figure:
    """The whole picture."""
    sheet, shown = Sheet(), layer()
    _model(sheet, A, "A", BLUE, shown)
    _model(sheet, B, "B", VERMILION, shown)
    _samples(sheet)
    _map(sheet, X, "in", GREEN, shown["r_in"])
    _map(sheet, G, "out", PURPLE, shown["r_out"])
    _task_vector(sheet)
    return sheet.figure


def _samples(sheet: Sheet) -> None:
    images = load_digits().images
    for place, number in enumerate((3, 2, 5)):
        sheet.matrix(68 + 12 * place, MAPS - 28 + 13 * place, images[number], INK, cell=6.5)
    sheet.text(80, MAPS + 40, "the same samples")
    sheet.text(80, MAPS + 58, "through both")
    for y, start, color, letter in ((A, MAPS - 62, BLUE, "A"), (B, MAPS + 72, VERMILION, "B")):
        bend = "angle,angleA=90,angleB=0,rad=14"
        sheet.arrow((80, start), (X - _half(letter) - 8, y), color, connectionstyle=bend)


def _half(letter: str) -> float:
    """Half the width of a model's matrices."""
    return (NARROW if letter == "A" else WIDE) * CELL / 2


def _model(sheet: Sheet, y: float, letter: str, color: str, shown: dict[str, Matrix]) -> None:
    """One linear layer: what it reads, its weight, its change, and the gradients at its outputs."""
    outwards, half, key = -1 if letter == "A" else 1, _half(letter), letter.lower()
    sheet.box(176, y - 94, 804, 188, color, fill=0.05)
    name = "model A" if letter == "A" else "model B, wider"
    sheet.text(180, y + 108 * outwards, name, color, 13.5, ha="left", weight="bold")
    words = {"x": f"inputs $X_{letter}$", "g": f"gradients $G_{letter}$", "w": f"base $W_{letter}$"}
    words["tau"] = r"task vector $\tau_A$" if letter == "A" else r"ported $\tau_B$"
    for x, what in ((X, "x"), (W, "w"), (TAU, "tau"), (G, "g")):
        values = shown[f"{what}_{key}"]
        sheet.matrix(x, y, values, color)
        sheet.text(x, y + (len(values) * CELL / 2 + 15) * outwards, words[what])
    sheet.text((W + TAU) / 2, y, "+", size=18)
    together = "together: your fine-tune" if letter == "A" else "together: what you get"
    sheet.text(W - 6, y - (half + 15) * outwards, together, FAINT, 10.5)
    sheet.arrow((X + half + 8, y), (W - half - 8, y), color)
    sheet.text((X + W) / 2, y - 13, "forward", FAINT, 10.5)
    sheet.arrow((LOSS - 22, y), (G + half + 8, y), color, linestyle=(0, (4, 2)))
    sheet.text((LOSS - 22 + G + half + 8) / 2, y - 13, "backward", FAINT, 10.5)
    sheet.text(LOSS + 8, y, "task\nloss")


def _map(sheet: Sheet, x: float, side: str, color: str, values: Matrix) -> None:
    """The map between what two matrices hold, and the way to the task vector."""
    sheet.matrix(x, MAPS, values, color)
    outwards, middle = -1 if side == "in" else 1, (X + G) / 2
    tall, wide = (length * CELL / 2 for length in values.shape)
    for y, way in ((A, 1), (B, -1)):
        sheet.arrow((x, y + way * (SAMPLES * CELL / 2 + 8)), (x, MAPS - way * (tall + 7)), color)
    sheet.text(x + outwards * (wide + 26), MAPS, rf"$R_{{\mathrm{{{side}}}}}$", color, 16)
    near, end = x - outwards * (wide + 8), middle + outwards * (HALF_BOX + 6)
    sheet.arrow((near, MAPS), (end, MAPS), color)
    rows = "X" if side == "in" else "G"
    sheet.text((near + end) / 2, MAPS - 15, rf"$\mathrm{{polar}}({rows}_A^{{\top}} {rows}_B)$", color, 11)


def _task_vector(sheet: Sheet) -> None:
    middle, half = (X + G) / 2, 36
    sheet.box(middle - HALF_BOX, MAPS - half, 2 * HALF_BOX, 2 * half, INK, fill=0.0)
    sheet.text(middle, MAPS - 10, r"$\tau_B = R_{\mathrm{out}}^{\top}\ \tau_A\ R_{\mathrm{in}}$", size=16)
    sheet.text(middle, MAPS + 19, "turned on both sides", FAINT, 10.5)
    sheet.arrow((TAU, A + _half("A") + 8), (TAU, MAPS - half - 5))
    sheet.arrow((TAU, MAPS + half + 5), (TAU, B - _half("B") - 8))


as_bytes = partial(picture_bytes, draw, STYLE)

if __name__ == "__main__":
    write_picture(as_bytes, PICTURE)
