"""How well a port's outlook, the samples' mean gain, foretells its gain on held-out data.

    python benchmarks/foresight.py FOLDER [--first 10] [--worlds 5] [--workers 2] [--docs docs/small-world]

The ports are those of `loras.py`. Outlook and gain are those of the change as it would be written, before the veto: a
port that is held back counts with both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from ports import KINDS, SIZES, VARIANTS, MeasuredPort, command, markdown

from hf_bico.settings import VETO
from hf_bico.utils.text import format_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "foresight"
SHOWN = ("bico@1", "bico-path")
"""The variants of the picture."""


def rho(ports: Sequence[MeasuredPort]) -> float:
    """Return Spearman's correlation of outlook and gain."""
    from scipy.stats import spearmanr

    return float(spearmanr([one.outlook for one in ports], [one.gain for one in ports]).statistic)


def lines(ports: Sequence[MeasuredPort]) -> list[list[str]]:
    """Return one line for each number of samples and method; a port whose outlook is doubtful is flagged."""
    head = ["samples", "method", "ports", "rho", "harmful", "of them flagged", "others", "of them flagged"]
    table = [head]
    for n in SIZES:
        for variant in VARIANTS:
            some = [one for one in ports if (one.n, one.variant) == (n, variant)]
            if not some:
                continue
            harmful = [one for one in some if one.gain < -1]
            others = [one for one in some if one.gain >= -1]
            counts = [str(count) for part in (harmful, others) for count in (len(part), flagged(part))]
            table.append([str(n), f"`{variant}`", str(len(some)), f"{rho(some):.2f}", *counts])
    return table


def flagged(ports: Sequence[MeasuredPort]) -> int:
    """Return how many ports have a doubtful outlook."""
    return sum(one.outlook <= VETO * one.error for one in ports)


def picture(ports: Sequence[MeasuredPort]) -> bytes:
    """Draw the gain of every port with 100 samples against its outlook."""
    from hf_bico.reports.pictures import png

    return png(lambda: draw(ports))


def draw(ports: Sequence[MeasuredPort]) -> Figure:
    from matplotlib.figure import Figure

    from hf_bico.reports.pictures import BLUE, GREEN, INK, RED, frame

    styles = dict(zip(KINDS, ((BLUE, "o"), (GREEN, "^"), (RED, "x")), strict=True))
    figure = Figure(figsize=(8, 3.6))
    figure.set_layout_engine("constrained")
    for axes, variant in zip(figure.subplots(1, len(SHOWN), sharex=True, sharey=True), SHOWN, strict=True):
        frame(axes)
        axes.axhline(0, color=INK, linewidth=0.9)
        axes.axvline(0, color=INK, linewidth=0.9)
        for kind, (colour, marker) in styles.items():
            some = [one for one in ports if (one.n, one.variant, one.kind) == (max(SIZES), variant, kind)]
            where = [one.outlook for one in some], [one.gain for one in some]
            axes.plot(*where, marker, color=colour, markersize=3.2, alpha=0.55, label=kind, markeredgewidth=0.7)
        axes.set_title(variant)
        axes.set_xlabel("outlook, points")
    figure.axes[0].set_ylabel("gain, points of accuracy")
    figure.axes[0].legend(loc="upper left", fontsize=8.5)
    return figure


def write(ports: Sequence[MeasuredPort], docs: Path | None) -> None:
    """Print the table, and write it into the documentation's folder with the picture."""
    table = lines(ports)
    click.echo(format_table(table))
    if docs is not None:
        (docs / f"{NAME}.md").write_text(markdown(table), encoding="utf-8")
        (docs / f"{NAME}.png").write_bytes(picture(ports))


if __name__ == "__main__":
    command(__doc__, write)()
