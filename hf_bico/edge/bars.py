"""How far the work is: bars on a terminal that takes them, lines on one that does not. Computes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import click

from hf_bico.edge.screen import console_of, is_screen
from hf_bico.experiments.compare.cells import cell_line
from hf_bico.utils.progress import Progress, silent
from hf_bico.utils.text import size_text

if TYPE_CHECKING:
    from hf_bico.experiments.compare.cells import CellKey
    from hf_bico.experiments.compare.comparison import Comparison


class ShowsComparison(Protocol):
    """What shows the numbers so far: of one comparison, or of a part of several."""

    def __call__(self, comparison: Comparison, part: str | None = None) -> None: ...


@contextmanager
def shown_progress(off: bool) -> Iterator[Progress]:
    """Bars on stderr when it is a terminal; otherwise only what is downloaded is said, before it is."""
    with shown_with_words(off) as (progress, _):
        yield progress


@contextmanager
def shown_with_words(off: bool) -> Iterator[tuple[Progress, Callable[[str], None]]]:
    """The same, and a way to say something on stdout meanwhile: above the bars, which would else wipe it off."""
    if off:
        yield silent, lambda text: None
    elif not is_screen(sys.stderr):
        yield _announced, click.echo
    else:
        one_screen = is_screen(sys.stdout)
        with _bars() as bars:
            above = partial(bars.print, markup=False, highlight=False, soft_wrap=True)
            yield _shown_in(bars), above if one_screen else click.echo


@contextmanager
def shown_training(off: bool) -> Iterator[Progress]:
    """How far the making of models is: bars on a terminal, else a line when each piece of work begins."""
    if off or is_screen(sys.stderr):
        with shown_progress(off) as progress:
            yield progress
        return
    begun: set[str] = set()

    def say(stage: str, done: int, total: int) -> None:
        if stage not in begun:
            begun.add(stage)
            click.echo(f"  {stage}", err=True)

    yield say


@contextmanager
def shown_comparison(off: bool) -> Iterator[tuple[Progress, ShowsComparison]]:
    """The table as it fills, on stderr: with bars on a terminal, else a line for every number."""
    if off:
        yield silent, lambda comparison, part=None: None
        return
    if not is_screen(sys.stderr):
        known: set[tuple[str | None, CellKey]] = set()

        def say(comparison: Comparison, part: str | None = None) -> None:
            for cell in comparison.cells:
                if (part, cell.key) not in known:
                    known.add((part, cell.key))
                    click.echo(cell_line(cell) if part is None else f"{part}: {cell_line(cell)}", err=True)

        yield _announced, say
        return
    from rich.console import Group
    from rich.live import Live

    from hf_bico.experiments.compare.comparison import live_table

    bars = _bars()
    with Live(bars, console=console_of(sys.stderr), transient=True) as live:

        def show(comparison: Comparison, part: str | None = None) -> None:
            table = live_table(comparison.rows(), comparison.data_sets)
            live.update(Group(*([] if part is None else [part]), table, bars))

        yield _shown_in(bars), show


def _bars() -> Any:
    """Bars with the stage, how much of it is done, how long it has taken and how long it will take."""
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[count]}", justify="right"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    return Bars(*columns, console=console_of(sys.stderr), transient=True)


def _shown_in(bars: Any) -> Progress:
    tasks: dict[str, Any] = {}

    def show(stage: str, done: int, total: int) -> None:
        count = _counted(stage, done, total)
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, count=count)
        bars.update(tasks[stage], completed=done, total=total, count=count)

    return show


def _counted(stage: str, done: int, total: int) -> str:
    """How much of a stage is done; of one that is a single step, the bar says it."""
    if total <= 1:
        return ""
    return f"{size_text(done)}/{size_text(total)}" if stage == "download" else f"{done}/{total}"


def _announced(stage: str, done: int, total: int) -> None:
    if stage == "download" and done == 0 and total > 1:
        click.echo(f"Downloading {size_text(total)} of models", err=True)
