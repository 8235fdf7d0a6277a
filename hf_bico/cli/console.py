"""Prints plans, results and progress: tables and bars on a terminal, plain text anywhere else. Computes nothing.

All output goes through here: names, notices and errors may hold a stranger's text, which must not act on a terminal.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from hf_bico.experiments.compare.comparison import Comparison, less_is_better, live_table, text_table
from hf_bico.reports.cost import cost_sentence
from hf_bico.reports.record import JOINED, ChangeRecord, MethodRecord, OutlookRecord, Record, SourceLeadRecord
from hf_bico.reports.results import (
    Report,
    carries,
    control_sentence,
    few_samples_sentence,
    gain_of,
    headline,
    is_trained,
    is_worse,
    measured_on,
    pairing_sentence,
    readout_sentence,
    result_rows,
    results,
)
from hf_bico.reports.training import polish_sentence, situation_sentence, training_sentence
from hf_bico.reports.verdict import (
    alpha_sentence,
    candidates_sentence,
    held_back_remedy,
    held_back_sentence,
    lead_sentence,
    outlook_sentence,
)
from hf_bico.utils.text import (
    BETTER,
    WORSE,
    Line,
    Table,
    command_line,
    format_table,
    size_text,
    typed_path,
    visible,
    wrapped,
)

if TYPE_CHECKING:
    from rich.console import Console

    from hf_bico.hub.push import Pushed
    from hf_bico.porting.plan import Plan
    from hf_bico.porting.rerun import Rerun


NEXT = "Next:"
"""Stands before the command to run next, or before what else to do."""


def is_screen(stream: TextIO | None) -> bool:
    """Return True for an open terminal that can move its cursor."""
    return stream is not None and stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def is_plain(stream: TextIO | None) -> bool:
    """Return True where nothing may be coloured: outside of terminals, and everywhere with NO_COLOR."""
    return bool(os.environ.get("NO_COLOR")) or not is_screen(stream)


def console_of(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False)


def echo(*lines: str, err: bool = False, head: str = "", indent: int = 0, **style: Any) -> None:
    """Print each argument as one line, with whatever would break it, or turn or hide its text, made visible.

    The style is that of `head`, a word of ours before the first line, or of all lines. On a terminal, sentences wrap
    between words, and go on behind an `indent`; a command line stays whole, so that it can be copied.
    """
    shown = [visible(line) for line in lines]
    stream = sys.stderr if err else sys.stdout
    if is_screen(stream) and head != NEXT:
        width, taken = _columns(stream), [len(head) + 1 if head else 0, *(0 for _ in shown)]
        is_whole = [line.startswith((f"{NEXT} hf-bico ", " ")) for line in shown]
        shown = [
            line if whole else wrapped(line, width, indent, used)
            for line, whole, used in zip(shown, is_whole, taken, strict=False)
        ]
    text = "\n".join(shown)
    text = f"{click.style(head, **style)} {text}" if head else click.style(text, **style) if style else text
    click.echo(text, err=err, color=False if is_plain(stream) else None)


def _columns(stream: TextIO) -> int:
    """Return the width of a terminal."""
    with suppress(OSError, ValueError):
        return int(os.environ.get("COLUMNS") or os.get_terminal_size(stream.fileno()).columns) or 80
    return 80


def echo_json(content: Any) -> None:
    """Print one JSON object on one line of ASCII."""
    click.echo(json.dumps(content).replace("\x7f", "\\u007f"))


def print_plan(planned: Plan, command: str, needs_data: bool) -> None:
    for word, text in planned.rows():
        echo(f"{word:<11} {text}", indent=12)
    where = "this machine's memory" if planned.limits.memory is None else "--memory"
    problems = [] if planned.fits else [f"the models do not fit {where}"]
    if planned.lineage.other_function is not None:
        problems.append("the fine-tuned model and its base are configured differently (--base, --force)")
    if planned.head_refusal is not None:
        problems.append("the fine-tuned model's head cannot be carried")
    if planned.tokens is not None and planned.tokens.refusal is not None:
        problems.append("the two models' tokenizers have too little in common")
    if needs_data and planned.lineage.data is None:
        problems.append("the data set to calibrate on is not known (--data)")
    verdict = f"Not yet: {'; '.join(problems)}." if problems else "Ready to port."
    echo("", verdict, f"Next: {command}")


def print_outlook(
    method: MethodRecord, outlook: OutlookRecord | None, lead: SourceLeadRecord | None, write: Callable[[str], None]
) -> None:
    """Print what the samples chose and promise, before the measuring begins; a closed pipe does not stop the job."""
    sentences = [candidates_sentence(method), alpha_sentence(method)]
    sentences += [None if outlook is None else outlook_sentence(outlook, lead)]
    with suppress(BrokenPipeError):
        for sentence in filter(None, sentences):
            write(sentence)
        if outlook is not None:
            write("")


def print_held_back(record: Record, quiet: bool) -> None:
    """Print why nothing was written, and what to do; only the reason where little is to be printed."""
    echo(held_back_sentence(record), err=quiet)
    if quiet:
        return
    if lead := lead_sentence(record.source_lead):
        echo(lead)
    for notice in record.notices:
        echo(f"Notice: {notice}")
    echo("Nothing was written: the target stays as it is.")
    echo(f"Next: {held_back_remedy(record)}.")


def print_ported(record: Record, report: Report, folder: Path, pushing: bool) -> None:
    result = headline(record)
    if result:
        echo(result, "")
    if results(record):
        header, *rows = result_rows(record)
        lines = [Line(cells, mark) for cells, mark in zip(rows, _marks(record), strict=True)]
        _print_table(Table(header, lines), format_table([header, *rows]))
        echo(f"({measured_on(record)})", "")
    sentences = (
        pairing_sentence(record),
        control_sentence(record),
        polish_sentence(record),
        readout_sentence(record),
    )
    for sentence in (*sentences, few_samples_sentence(record)):
        if sentence:
            echo(sentence, "")
    if is_trained(record):
        echo(f"Trained, and nothing carried: {training_sentence(record) or record.method.name}")
    elif carries(record):
        columns, *layers = report.rows()
        _print_table(Table(columns, [Line(cells) for cells in layers]), report.table())
        echo("", report.summary())
    if record.output is not None and record.output.energy_kept is not None:
        change = "carried change" if carries(record) and not record.method.polished else "change"
        echo(f"The adapter holds {record.output.energy_kept:.2%} of the {change}'s energy.")
    for notice in record.notices:
        echo(f"Notice: {notice}")
    if situation := situation_sentence(record):
        echo("", situation)
    seconds = ", ".join(f"{stage} {value:.1f}" for stage, value in record.run.seconds.items() if value >= 0.05)
    if not is_screen(sys.stderr):  # there, each stage has shown them
        echo(f"seconds: {seconds}", err=True)  # what is on stdout is the same every time
    if cost := cost_sentence(record):
        echo(cost, err=True)
    echo("", f"Written to {folder}")
    if not pushing and not is_worse(record):
        echo(f"Next: {command_line(['hf-bico', 'push', typed_path(folder), 'REPO'])}")


def _marks(record: Record) -> list[str]:
    """Mark each port that is better or worse than its target."""
    entries = [result.entry for result in results(record)]
    targets = {entry.protocol: entry for entry in entries if entry.model == "target"}
    gains = [gain_of(e, targets.get(e.protocol, e)) if e.model == "ported" else 0.0 for e in entries]
    return [BETTER if gain > 0 else WORSE if gain < 0 else "" for gain in gains]


def print_compared(comparison: Comparison, folder: Path) -> None:
    rows, data_sets = comparison.rows(), comparison.data_sets
    echo(comparison.title, "")
    _print_table(live_table(rows, data_sets), text_table(rows, data_sets))
    losses = less_is_better(rows)
    if losses is not None:
        echo("", losses)
    if comparison.refusals:
        echo("", *comparison.refused().split("\n"))
    echo("", f"Written to {folder}")


def _print_table(table: Table, text: str) -> None:
    if is_screen(sys.stdout):
        console_of(sys.stdout).print(table)
    else:
        echo(*text.split("\n"))


def print_pushed(pushed: Pushed) -> None:
    visibility = "private" if pushed.private else "public"
    visibility += f", because {pushed.because}" if pushed.private and pushed.because else ""
    if pushed.pull_request:
        echo(f"Opened {pushed.pull_request}")
    elif pushed.changed:
        echo(f"Pushed to {pushed.url} ({visibility}), commit {pushed.commit[:12]}")
    else:
        echo(f"{pushed.url} ({visibility}) already has these files, commit {pushed.commit[:12]}")
    if pushed.edited_card:
        echo("Notice: README.md was edited by hand, and pushed as it is: it may name another repo.")


def print_change(record: ChangeRecord, folder: Path) -> None:
    if record.job == "apply":
        parts = [f" + {part.weight * record.alpha:g} x {part.model.id}" for part in record.parts]
        echo(f"{record.target.id}{''.join(parts)}")
    else:
        echo(f"{record.parts[0].model.id} over {record.target.id}:")
    if record.output.energy_kept is not None:
        _print_energy(record)
    for notice in record.notices:
        echo(f"Notice: {notice}")
    size = sum(file.stat().st_size for name in record.output.files if (file := folder / name).is_file())
    echo(f"Written to {folder} ({size_text(size)})" if size else f"Written to {folder}")


def _print_energy(record: ChangeRecord) -> None:
    ranks = sorted({layer.rank for layer in record.layers if layer.rank is not None})
    spans = "" if not ranks else f" at rank {ranks[0]}" if len(ranks) == 1 else f" at ranks {ranks[0]} to {ranks[-1]}"
    energy = sum(layer.energy for layer in record.layers)
    kept = sum(layer.energy * layer.kept for layer in record.layers) / energy if energy else 1.0
    verb = "Extracted" if record.job == "extract" else "Kept"
    echo(f"{verb} {kept:.2%} of the change of {len(record.layers)} tensors{spans}")
    if record.left:
        reasons = {entry.reason for entry in record.left}
        shares = [(reason, sum(e.energy for e in record.left if e.reason == reason)) for reason in reasons]
        listed = ", ".join(f"{reason} {share:.1%}" for reason, share in sorted(shares, key=lambda pair: -pair[1]))
        helps = "--everything" not in str(record.command) and any(e.reason != JOINED for e in record.left)
        more = " (--everything adds them)" if helps and record.job == "extract" else ""
        echo(f"Left out: {listed}{more}. {record.output.energy_kept:.2%} of the whole change is kept.")


def print_rerun(again: Rerun) -> None:
    different = [name for name, same in again.files.items() if not same]
    if different:
        echo(f"Different: {', '.join(different)}")
    else:
        echo(f"Same: {', '.join(again.files)} (same SHA-256 as recorded).")
    for name in again.replaced:
        echo(f"But the '{name}' beside the record is another file.")
    for difference in again.differences:
        echo(f"Note: {difference}")
