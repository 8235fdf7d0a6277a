"""Shows how far a job is: its stages and one bar on a terminal, a few lines of plain text anywhere else.

Knows the names of stages, not what they do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hf_bico.cli.console import console_of, echo, is_screen
from hf_bico.experiments.compare.comparison import Comparison, live_table
from hf_bico.utils.progress import Progress, silent
from hf_bico.utils.text import size_text, visible

if TYPE_CHECKING:
    from hf_bico.experiments.compare.cells import CellKey

STAGES = {
    "import": "loading torch",
    "sample": "reading samples",
    "download": "downloading",
    "read": "reading weights",
    "load": "loading models",
    "generate": "letting the source write samples",
    "calibrate": "running both models on the samples",
    "align": "finding the maps",
    "transport": "applying the maps",
    "choose": "choosing alpha",
    "readout": "fitting the final projection",
    "train": "training",
    "polish": "polishing",
    "form": "preparing the result",
    "evaluate": "measuring",
    "time": "timing a training step",
    "record": "writing the record",
    "sum": "adding the changes",
    "fit": "fitting the adapter",
    "compare": "comparing",
    "similarity": "comparing the layers",
    "outputs": "comparing the outputs",
    "drift": "comparing the checkpoints",
}
"""What each stage does, in words."""
PORT_SHARES = {
    "import": 4,
    "sample": 2,
    "read": 1,
    "load": 4,
    "calibrate": 8,
    "align": 4,
    "transport": 1,
    "choose": 2,
    "form": 1,
    "evaluate": 8,
    "time": 1,
    "record": 1,
}
"""The stages of every port, with their usual shares of its time, to guess how far it is."""

EVALUATION_SHARES = {"import": 1, "evaluate": 1}


@contextmanager
def status(off: bool, text: str) -> Iterator[None]:
    """Show what is being done until it is done, on a terminal."""
    if off or not is_screen(sys.stderr):
        yield
        return
    with console_of(sys.stderr).status(text):
        yield


@contextmanager
def progress_bars(off: bool) -> Iterator[Progress]:
    """Show stages on stderr if it is a terminal; otherwise announce downloads only."""
    with progress_bars_and_text(off) as (progress, _):
        yield progress


@contextmanager
def progress_bars_and_text(
    off: bool, shares: dict[str, int] | None = None
) -> Iterator[tuple[Progress, Callable[[str], None]]]:
    """Show progress, and yield a function that prints on stdout above it; with `shares`, one bar for all stages."""
    if off:
        yield silent, lambda text: None
    elif not is_screen(sys.stderr):
        yield _announce_download, echo
    else:
        one_screen = is_screen(sys.stdout)
        stages = _Stages(shares or {})
        with stages.bars as bars:

            def above(text: str) -> None:
                bars.print(visible(text), markup=False, highlight=False)

            try:
                yield stages.update, above if one_screen else echo
            finally:
                stages.end()


@contextmanager
def show_stages(off: bool) -> Iterator[Progress]:
    """Show stages on a terminal, otherwise a line when each of them begins."""
    if off or is_screen(sys.stderr):
        with progress_bars(off) as progress:
            yield progress
        return
    begun: set[str] = set()

    def announce(stage: str, done: int, total: int) -> None:
        if stage not in begun:
            begun.add(stage)
            echo(f"  {STAGES.get(stage, stage)}", err=True)

    yield announce


@contextmanager
def show_comparison(off: bool) -> Iterator[tuple[Progress, Callable[[Comparison, str | None], None]]]:
    """Show a growing table and the stages on stderr, or a line for every number if it is no terminal.

    The second function takes the numbers so far, and the name of their part if several comparisons are run.
    """
    if off:
        yield silent, lambda comparison, part: None
        return
    if not is_screen(sys.stderr):
        known: set[tuple[str | None, CellKey]] = set()

        def print_new(comparison: Comparison, part: str | None) -> None:
            for cell in comparison.cells:
                if (part, cell.key) not in known:
                    known.add((part, cell.key))
                    echo(str(cell) if part is None else f"{part}: {cell}", err=True)

        yield _announce_download, print_new
        return
    from rich.console import Group
    from rich.live import Live

    stages = _Stages({"compare": 1})
    with Live(stages.bars, console=console_of(sys.stderr), transient=True) as live:

        def update_table(comparison: Comparison, part: str | None) -> None:
            table = live_table(comparison.rows(), comparison.data_sets)
            live.update(Group(*([] if part is None else [visible(part)]), table, stages.bars))

        yield stages.update, update_table


class _Stages:
    """The stages of one job on a terminal: each with its count or its seconds, and one bar for all of them."""

    def __init__(self, shares: dict[str, int]) -> None:
        self.bars = _bars()
        self._shares = shares
        self._reached = dict.fromkeys(shares, 0.0)
        self._tasks: dict[str, Any] = {}
        self._begun: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._whole = self.bars.add_task("", total=sum(shares.values()), visible=bool(shares), whole=True)

    def update(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage not in self._tasks:
            words = visible(STAGES.get(stage, stage))
            self._tasks[stage] = self.bars.add_task(words, count="", whole=False)
        if stage not in self._begun:
            self._begun[stage] = now
        count = f"{size_text(done)}/{size_text(total)}" if stage == "download" else f"{done}/{total}"
        if done >= total:  # it may begin again
            self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._begun.pop(stage)
            count = f"{self._seconds[stage]:.1f} s"
        self.bars.update(
            self._tasks[stage], completed=done, total=total, count=count if total > 1 or "s" in count else ""
        )
        if stage in self._shares:
            self._reached[stage] = max(self._reached[stage], done / max(total, 1))
            reached = sum(share * self._reached[name] for name, share in self._shares.items())
            self.bars.update(self._whole, completed=reached)

    def end(self) -> None:
        """Leave the stages on the screen, without the bar."""
        self.bars.update(self._whole, visible=False)


def _bars() -> Any:
    from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    done: Sequence[ProgressColumn] = (
        SpinnerColumn(finished_text="\N{CHECK MARK}"),
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[count]}", justify="right"),
    )
    bar: Sequence[ProgressColumn] = (BarColumn(bar_width=30), TimeRemainingColumn(), TextColumn("left"))

    class Bars(RichProgress):
        """A row for each stage, and a bar below."""

        def get_renderables(self) -> Iterable[Any]:
            for columns, whole in ((done, False), (bar, True)):
                rows: list[Task] = [task for task in self.tasks if task.fields["whole"] is whole]
                if any(task.visible for task in rows):
                    self.columns = tuple(columns)
                    yield self.make_tasks_table(rows)

    return Bars(console=console_of(sys.stderr))


def _announce_download(stage: str, done: int, total: int) -> None:
    if stage == "download" and done == 0 and total > 1:
        echo(f"Downloading {size_text(total)} of models", err=True)
