"""What the command line shows: plans, results and progress, as text. Computes nothing."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_bico.adapters.adapter import Adapter
from hf_bico.comparison.cells import cell_line
from hf_bico.models import Model
from hf_bico.progress import Progress, silent
from hf_bico.record import JOINED
from hf_bico.report import Report, format_table
from hf_bico.results import (
    control_sentence,
    headline,
    is_probed,
    is_trained,
    is_worse,
    readout_sentence,
    results,
    training_sentence,
)
from hf_bico.sizes import size_text

if TYPE_CHECKING:
    from hf_bico.comparison import CellKey, Comparison
    from hf_bico.planning import Plan
    from hf_bico.pushing import Pushed
    from hf_bico.record import Made, Record
    from hf_bico.rerunning import Rerun


def print_plan(planned: Plan, command: str) -> None:
    lineage = planned.lineage
    click.echo(f"source  {_known(lineage.source)}")
    click.echo(f"base    {_known(lineage.base)}")
    click.echo(f"target  {_known(lineage.target)}")
    click.echo(f"data    {_data(planned)}")
    for notice in lineage.notices:
        click.echo(f"note    {notice}")
    click.echo(
        f"blocks  {lineage.base.layout.blocks} -> {lineage.target.layout.blocks}, taken from {list(planned.blocks)}"
    )
    tokens = [model.layout.tokens for model in (lineage.base, lineage.target)]
    grids = [" x ".join(map(str, known.grid)) for known in tokens if known is not None]
    if len(grids) == 2:
        click.echo(f"tokens  {grids[0]} -> {grids[1]} patches")
    roles = Counter(pair.target.role for pair in planned.pairs)
    click.echo(f"carried {len(planned.pairs)} sites: " + ", ".join(f"{role} x{count}" for role, count in roles.items()))
    click.echo(f"shapes  {_shapes(planned)}")
    reasons = Counter(planned.left.values())
    click.echo("left    " + (", ".join(f"{reason} ({count})" for reason, count in reasons.items()) or "nothing"))
    if planned.missing:
        click.echo(f"missing {len(planned.missing)} tensors of the base are not in the source: taken as unchanged")
    if planned.extra:
        click.echo(
            f"extra   {len(planned.extra)} tensors of the source are not in the base: {', '.join(planned.extra[:3])}"
        )
    samples = ", and samples" if lineage.data_repo else ""
    click.echo(f"fetches {size_text(planned.download_bytes)} of models{samples}")
    fits = "fits" if planned.fits else "does NOT fit"
    click.echo(f"memory  about {size_text(planned.memory_bytes)} and a batch's activations: {fits} this machine")
    forms = {"full": "as a full model", "adapter": f"as an adapter{_ranks(planned)}", "delta": "as the change alone"}
    size = "" if planned.output_bytes is None else f"{size_text(planned.output_bytes)} "
    click.echo(f"writes  {size}{forms[planned.format]}")
    click.echo(f"\n{_verdict(planned)}\nNext: {command}")


def _ranks(planned: Plan) -> str:
    asked = planned.asked_rank
    if isinstance(asked, float):
        return f" that keeps {asked:g} of each layer's energy"
    ranks = sorted(set(planned.ranks.values())) if asked is None else [asked]
    if not ranks:
        return ", exact"
    return f" of rank {ranks[0]}" if len(ranks) == 1 else f" of ranks {ranks[0]} to {ranks[-1]}"


def _known(model: Model | Adapter) -> str:
    commit = "" if model.commit is None else f" at {model.commit[:12]}"
    licence = f", licence {model.origin.license}" if model.origin.license else ""
    kind = model.family.name if isinstance(model, Model) else f"{model.config.kind} adapter"
    return f"{model.name}{commit} ({kind}{licence})"


def _data(planned: Plan) -> str:
    lineage = planned.lineage
    if lineage.data_repo is not None:
        return f"{lineage.data_repo.id} at {lineage.data_repo.commit[:12]}"
    if lineage.data is None:
        return "not known"
    return Path(str(lineage.data)).name if isinstance(lineage.data, str | Path) else "rows"


def _shapes(planned: Plan) -> str:
    """The shape of each role, source to target."""
    shapes = {
        pair.target.role: f"{pair.target.role} {_by(pair.source.shape)} -> {_by(pair.target.shape)}"
        for pair in planned.pairs
    }
    return ", ".join(shapes.values())


def _by(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def _verdict(planned: Plan) -> str:
    problems = [] if planned.fits else ["the models do not fit this machine's memory"]
    if planned.lineage.data is None:
        problems.append("the data set to calibrate on is not known (--data)")
    return f"Not yet: {'; '.join(problems)}." if problems else "Ready to port."


def print_ported(record: Record, report: Report, folder: Path, pushing: bool) -> None:
    result = headline(record)
    if result:
        click.echo(result + "\n")
        _print_results(record)
    for sentence in (control_sentence(record), readout_sentence(record)):
        if sentence:
            click.echo(f"{sentence}\n")
    if is_trained(record):
        click.echo(f"Trained, and nothing carried: {training_sentence(record) or record.method.name}")
    else:
        click.echo(report.table())
        click.echo(f"\n{report.summary()}")
    if record.output is not None and record.output.energy_kept is not None:
        change = "change" if is_trained(record) else "carried change"
        click.echo(f"The adapter holds {record.output.energy_kept:.2%} of the {change}'s energy.")
    for notice in record.notices:
        click.echo(f"Notice: {notice}")
    seconds = ", ".join(f"{stage} {value:.1f}" for stage, value in record.run.seconds.items() if value >= 0.05)
    click.echo(f"seconds: {seconds}", err=True)  # what is on stdout is the same every time
    click.echo(f"\nWritten to {folder}")
    if not pushing and not is_worse(record):
        click.echo(f"Next: hf-bico push {shlex.quote(str(folder))} REPO")


def _print_results(record: Record) -> None:
    """Every measurement, with its protocol where that is not zero-shot throughout."""
    measured = results(record)
    first = measured[0].entry
    rows = [("model", "protocol", first.metric)]
    rows += [(row.name, row.protocol, f"{row.entry.value:.1%}") for row in measured]
    probed = is_probed(record)
    click.echo(format_table([row if probed else (row[0], row[2]) for row in rows]))
    click.echo(f"({first.n} samples of split {first.split} of {first.data})\n")


def print_pushed(pushed: Pushed) -> None:
    seen = "public" if not pushed.private else f"private, because {pushed.because}" if pushed.because else "private"
    if pushed.pull_request:
        click.echo(f"Opened {pushed.pull_request}")
    elif pushed.changed:
        click.echo(f"Pushed to {pushed.url} ({seen}), commit {pushed.commit[:12]}")
    else:
        click.echo(f"{pushed.url} ({seen}) holds these files already, commit {pushed.commit[:12]}")
    if pushed.edited_card:
        click.echo("Notice: README.md was edited by hand, and pushed as it is: it may name another repo.")


def print_made(record: Made, folder: Path) -> None:
    click.echo(_sum(record) if record.job == "apply" else f"{record.parts[0].model.id} over {record.target.id}:")
    if record.output.energy_kept is not None:
        _print_held(record)
    for notice in record.notices:
        click.echo(f"Notice: {notice}")
    size = sum(file.stat().st_size for name in record.output.files if (file := folder / name).is_file())
    click.echo(f"Written to {folder} ({size_text(size)})" if size else f"Written to {folder}")


def _sum(record: Made) -> str:
    parts = [(part.weight * record.alpha, part.model.id) for part in record.parts]
    return f"{record.target.id}" + "".join(f" + {weight:g} x {name}" for weight, name in parts)


def _print_held(record: Made) -> None:
    """What an adapter holds of the layers, what it leaves out, and both together."""
    ranks = sorted({layer.rank for layer in record.layers if layer.rank is not None})
    spans = "" if not ranks else f" at rank {ranks[0]}" if len(ranks) == 1 else f" at ranks {ranks[0]} to {ranks[-1]}"
    energy = sum(layer.energy for layer in record.layers)
    kept = sum(layer.energy * layer.kept for layer in record.layers) / energy if energy else 1.0
    click.echo(f"{kept:.2%} of the change of {len(record.layers)} tensors is held{spans}")
    if record.left:
        reasons = {entry.reason for entry in record.left}
        shares = [(reason, sum(e.energy for e in record.left if e.reason == reason)) for reason in reasons]
        listed = ", ".join(f"{reason} {share:.1%}" for reason, share in sorted(shares, key=lambda pair: -pair[1]))
        helps = "--everything" not in str(record.command) and any(e.reason != JOINED for e in record.left)
        more = " (--everything holds them too)" if helps and record.job == "extract" else ""
        click.echo(f"left out: {listed}{more}; in all {record.output.energy_kept:.2%} is held")


def print_rerun(again: Rerun) -> None:
    different = [name for name, same in again.files.items() if not same]
    if different:
        click.echo(f"Different: {', '.join(different)}")
    else:
        click.echo(f"Same: {', '.join(again.files)} came out with the recorded SHA-256.")
    for name in again.replaced:
        click.echo(f"But the '{name}' beside the record is another file.")
    for difference in again.differences:
        click.echo(f"Note: {difference}")


@contextmanager
def shown_progress(off: bool) -> Iterator[Progress]:
    """Bars on stderr when it is a terminal; otherwise only what is downloaded is said, before it is."""
    if off:
        yield silent
    elif not sys.stderr.isatty():
        yield _announced
    else:
        with _bars() as bars:
            yield _shown_in(bars)


@contextmanager
def shown_comparison(off: bool) -> Iterator[tuple[Progress, Callable[[Comparison], None]]]:
    """The table as it fills, on stderr: with bars on a terminal, else a line for every number."""
    if off:
        yield silent, lambda comparison: None
        return
    if not sys.stderr.isatty():
        known: set[CellKey] = set()

        def say(comparison: Comparison) -> None:
            for cell in comparison.cells:
                if cell.key not in known:
                    known.add(cell.key)
                    click.echo(cell_line(cell), err=True)

        yield _announced, say
        return
    from rich.console import Console, Group
    from rich.live import Live

    from hf_bico.comparison import live_table

    bars = _bars()
    with Live(bars, console=Console(stderr=True), transient=True) as live:
        yield (
            _shown_in(bars),
            lambda comparison: live.update(Group(live_table(comparison.rows(), comparison.data_sets), bars)),
        )


def _bars() -> Any:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import SpinnerColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), *Bars.get_default_columns(), TimeElapsedColumn())
    return Bars(*columns, console=Console(stderr=True), transient=True)


def _shown_in(bars: Any) -> Progress:
    tasks: dict[str, Any] = {}

    def show(stage: str, done: int, total: int) -> None:
        label = f"{stage} {size_text(total)}" if stage == "download" and total > 1 else stage
        if stage not in tasks:
            tasks[stage] = bars.add_task(label)
        bars.update(tasks[stage], description=label, completed=done, total=total)

    return show


def _announced(stage: str, done: int, total: int) -> None:
    if stage == "download" and done == 0 and total > 1:
        click.echo(f"Downloading {size_text(total)} of models", err=True)
