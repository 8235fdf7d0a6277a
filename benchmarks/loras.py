"""What can be expected of a port, above all of a LoRA: gains and harm by kind of source, samples and method.

    python benchmarks/loras.py FOLDER [--first 10] [--worlds 5] [--workers 2] [--docs docs/small-world]

Full fine-tunes, gentle LoRAs (60 steps) and hard ones (400 steps, far beyond what the task needs) between four pairs of
small models, on four tasks, one of them near its ceiling, over pretrainings that nothing was chosen on. `NAME@1` is a
method at that alpha, `NAME` as `port` runs it: alpha by the samples, and held back where they do not speak for it. A
port is harmful if it leaves the target more than one point below its own accuracy; a port that is held back leaves it
as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import click
from ports import KINDS, SIZES, VARIANTS, MeasuredPort, command, markdown

from hf_bico.utils.text import format_table

NAME = "loras"


def lines(ports: Sequence[MeasuredPort]) -> list[list[str]]:
    """Return one line for each number of samples and method: all kinds of source together, then each kind."""
    table = [["samples", "method", "ports", "gain", "harmful", "worst", "held back", *(f"{kind}s" for kind in KINDS)]]
    for n in SIZES:
        for variant in VARIANTS:
            some = [one for one in ports if (one.n, one.variant) == (n, variant)]
            if some:
                held_back = str(sum(one.held_back for one in some))
                kinds = [_short([one for one in some if one.kind == kind]) for kind in KINDS]
                table.append([str(n), f"`{variant}`", str(len(some)), *_numbers(some), held_back, *kinds])
    return table


def _numbers(ports: Sequence[MeasuredPort]) -> list[str]:
    gains = [one.written_gain for one in ports]
    return [f"{fmean(gains):+.1f}", str(sum(one.harmful for one in ports)), f"{min(gains):+.1f}"]


def _short(ports: Sequence[MeasuredPort]) -> str:
    gain, harmful, _ = _numbers(ports)
    return f"{gain} ({harmful})"


def write(ports: Sequence[MeasuredPort], docs: Path | None) -> None:
    """Print the table, and write it into the documentation's folder."""
    table = lines(ports)
    click.echo(format_table(table))
    if docs is not None:
        (docs / f"{NAME}.md").write_text(markdown(table), encoding="utf-8")


if __name__ == "__main__":
    command(__doc__, write)()
