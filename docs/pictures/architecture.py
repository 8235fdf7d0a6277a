"""Draws architecture.svg beside itself: the packages of hf_bico on their floors, and who imports whom.

The arrows are read from the import statements; one that others imply is left out. The same tree gives the same bytes.
"""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path

from drawing import picture_bytes, write_picture
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

PICTURE = Path(__file__).with_name("architecture.svg")
PACKAGE = Path(__file__).resolve().parents[2] / "hf_bico"
WIDTH, HEIGHT = 1000, 700
BOX = (250, 58)
INK, FAINT, BLUE = "#222222", "#666666", "#0072B2"
STYLE = {"svg.hashsalt": "architecture"}
FLOORS = (
    {"cli": "parse, call, print"},
    {"experiments": "compare, diagnose,\nreproduce, demo"},
    {"porting": "plan, port, rerun,\nextract, apply, evaluate"},
    {
        "alignment": "calibration pass, statistics,\nmaps, methods, objectives",
        "reports": "bico.json, sentences,\npictures, model cards",
    },
    {"models": "checkpoints, deltas, families,\nadapters, tokenizers, hooks", "data": "data sets to samples"},
    {
        "runtime": "device, processes,\noutput folder, library errors",
        "hub": "repos found, pinned,\nfetched, pushed",
        "settings": "every option and method,\ndeclared once",
    },
    {"utils": "text, files, progress,\nsample types", "errors": "cause and remedy"},
)
ROOMS = tuple(name for floor in FLOORS for name in floor)


def arrows() -> set[tuple[str, str]]:
    """Return (importer, imported) for every two rooms, without those that follow from others."""
    found = {(own, other) for own in ROOMS for other in _imported(own) if other in ROOMS and other != own}
    reached = {start: {end for first, end in found if first == start} for start in ROOMS}
    for room in reversed(ROOMS):  # those below are complete
        for other in list(reached[room]):
            reached[room] |= reached[other]
    implied = {(a, c) for a, c in found if any((a, b) in found and c in reached[b] for b in ROOMS if b != c)}
    return found - implied


def _imported(room: str) -> set[str]:
    files = [PACKAGE / f"{room}.py"] if (PACKAGE / f"{room}.py").is_file() else sorted((PACKAGE / room).rglob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {module.split(".")[1] for module in modules if module.startswith("hf_bico.")}


def places() -> dict[str, tuple[float, float]]:
    """Return the middle of each box."""
    found = {}
    for height, floor in enumerate(FLOORS):
        for number, name in enumerate(floor):
            x = WIDTH / 2 + (number - (len(floor) - 1) / 2) * (BOX[0] + 60)
            found[name] = (x, 50 + height * 100)
    return found


def draw() -> Figure:
    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), facecolor="white")
    axes: Axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.axis("off")
    at = places()
    for start, end in sorted(arrows()):
        (x, y), (to_x, to_y) = at[start], at[end]
        line = ((x + (to_x - x) * 0.18, y + BOX[1] / 2), (to_x + (x - to_x) * 0.18, to_y - BOX[1] / 2))
        bend = 0.0
        if to_y - y > 100:  # around what stands between
            line, bend = ((x + BOX[0] / 2, y), (to_x + BOX[0] / 2, to_y)), -0.55
        patch = FancyArrowPatch(*line, arrowstyle="-|>", mutation_scale=12, color=FAINT, linewidth=1.0)
        patch.set_connectionstyle("arc3", rad=bend)
        axes.add_patch(patch)
    for floor in FLOORS:
        for name, job in floor.items():
            x, y = at[name]
            corner = (x - BOX[0] / 2, y - BOX[1] / 2)
            style = "round,pad=0,rounding_size=7"
            axes.add_patch(FancyBboxPatch(corner, *BOX, boxstyle=style, facecolor="#F3F7FA", edgecolor=BLUE))
            axes.text(x, y - 15, name, ha="center", va="center", color=INK, size=12, weight="bold")
            axes.text(x, y + 11, job, ha="center", va="center", color=FAINT, size=8.5, linespacing=1.25)
    return figure


as_bytes = partial(picture_bytes, draw, STYLE)

if __name__ == "__main__":
    write_picture(as_bytes, PICTURE)
