"""Defines the commands to begin with: demo, which runs the others on small models, and completion."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import chdir
from functools import partial
from pathlib import Path

import click

from hf_bico.cli.console import echo, echo_json
from hf_bico.cli.exit import HELD_BACK, exit_on_error
from hf_bico.cli.options import RUNNING, Choice, SectionedHelp, output_folder, output_options
from hf_bico.cli.progress import show_stages
from hf_bico.errors import UsageError
from hf_bico.experiments.compare.cells import method_label
from hf_bico.experiments.compare.comparison import Comparison
from hf_bico.reports.record import read_record
from hf_bico.settings import AUTO_METHODS
from hf_bico.utils.text import command_line, format_table, typed_path

SIZE, DRAWS = 100, 3
SHOWN_METHODS = "naive@1,theseus@1,bico@1,bico,bico-path"
PORTS_BY = AUTO_METHODS[0]
"""The method of a port by default: the small world's models predict classes."""


@click.command(cls=SectionedHelp, short_help="Run the whole job on two small models.")
@click.argument("folder", default="hf-bico-demo", type=click.Path(file_okay=False))
@RUNNING.option("--seed", default=0, show_default=True, help="Seed of the training and of the order of the data.")
@output_options
def demo(folder: str, seed: int, as_json: bool, quiet: bool) -> None:
    """Run the whole job on two small models that are trained on your machine: no account and no download.

    It trains two CLIPs of different width on captions of scikit-learn's digits, fine-tunes the narrow one on inverted
    digits, and ports that to the wide one with the commands that you would type, in FOLDER (./hf-bico-demo by default).
    Then it does the same for plain digits, which the wide model reads well already: there is little to gain, or the
    port is held back. It takes one or two minutes. If you run it again, existing models and numbers are reused, and the
    folder 'ported' is written again.

    \b
    Examples:
      hf-bico demo
      hf-bico demo another-folder --seed 1
    """
    silent = as_json or quiet
    with exit_on_error() as ending:
        from hf_bico.experiments.demo.digits import EASY_TASK, SHIFTED_TASKS
        from hf_bico.experiments.demo.world import build

        place = output_folder(folder, folder)
        ending.interrupted = "the same command goes on from what is made"
        hard, easy = SHIFTED_TASKS[0].name, EASY_TASK.name
        if not silent:
            echo(f"The small world, seed {seed}: two CLIPs trained on captions of digits, in {place}")
        with show_stages(silent) as progress:
            build(place, seed=seed, tasks=[hard, easy], progress=progress)
        with chdir(place):
            hf_bico = partial(_run, silent)
            hf_bico("plan", *_models(hard))
            written = hf_bico("port", *_models(hard), "-n", str(SIZE), "-o", "ported", "--overwrite")
            if written:
                hf_bico("eval", "ported", "--data", f"data/{hard}")
            elif not silent:
                echo("There is no port to measure, and no card of it: 'eval' and 'card' are left out.")
            for task, sizes in ((hard, f"10,{SIZE}"), (easy, str(SIZE))):
                grid = ["--methods", SHOWN_METHODS, "-n", sizes, "--seeds", str(DRAWS)]
                references = ["--fine-tuned", f"models/wide-{task}"]
                hf_bico("compare", *_models(task), *references, *grid, "-o", f"compared-{task}")
            if written:
                hf_bico("card", "ported")
        _print_results(place, seed, [hard, easy], written, as_json, quiet)


def _run(silent: bool, *words: str) -> bool:
    """Print a command line, unless silent, and run it; return False for a port that was held back."""
    if not silent:
        echo("", f"$ hf-bico {command_line(words)}", bold=True)
    group = click.get_current_context().find_root().command
    try:
        group.main([*words, *(["-q"] if silent else [])], prog_name="hf-bico", standalone_mode=False)
    except SystemExit as end:
        if end.code != HELD_BACK:
            raise
        return False
    return True


def _models(task: str) -> list[str]:
    return [f"models/narrow-{task}", "--base", "models/narrow", "--to", "models/wide", "--data", f"data/{task}"]


def _print_results(folder: Path, seed: int, tasks: list[str], written: bool, as_json: bool, quiet: bool) -> None:
    """Print the numbers of both tasks, the files to look at, and commands to try next."""
    comparisons = {task: Comparison.load(folder / f"compared-{task}") for task in tasks}
    if as_json:
        plain = {task: json.loads(comparison.to_json()) for task, comparison in comparisons.items()}
        record = json.loads(read_record(folder / "ported").to_json()) if written else None
        echo_json({"folder": str(folder), "seed": seed, "record": record, "comparisons": plain})
    if as_json or quiet:
        return
    echo("", f"Both tasks, in percent; {SIZE} samples, mean of {DRAWS} draws; models of seed {seed}:", "")
    echo(*_side_by_side(comparisons).split("\n"))
    echo("", f"What a port does by default, which is {PORTS_BY} with alpha by the samples:")
    for task, comparison in comparisons.items():
        echo(f"  {task}: {outcome(comparison)}")
    echo("", f"Look at, in {folder}:")
    if written:
        echo("  ported/README.md                  the model card, made from the record ported/bico.json")
        echo("  ported/alignment.png              how well each layer was lined up")
    echo(f"  {f'compared-{tasks[0]}/comparison.png':33} the methods side by side")
    again = command_line(["hf-bico", "port", *_models(tasks[0])])
    echo("", "Try next:", *_activation(), f"  {command_line(['cd', typed_path(folder)])}")
    echo(f"  {again} --method bico --alpha 1 -o as-in-the-paper", f"  {again} --rank 8 -o adapter")
    if written:
        echo("  hf-bico rerun ported")
    echo("  hf-bico port OWNER/YOUR-FINE-TUNE --to OWNER/NEWER-BASE")


def outcome(comparison: Comparison) -> str:
    """Return in words whether a port by default helped, hurt or was held back, on average over the draws."""
    row = next(row for row in comparison.rows() if row.method == PORTS_BY and row.n == SIZE)
    if row.held_back == row.draws:
        return "held back, the target stays as it is"
    points = round(100 * (row.gain or 0.0), 1) or 0.0  # -0.0 is 0
    effect = "helped" if points > 0 else "hurt" if points < 0 else "changed nothing"
    some = f"; held back in {row.held_back} of {row.draws} draws" if row.held_back else ""
    return f"{points:+.1f} points, {effect}{some}"


def _activation() -> list[str]:
    """Return the line that puts this command on the path, if it is not there."""
    script = Path(sys.prefix) / "bin" / "activate"
    if shutil.which("hf-bico") or not script.is_file():
        return []
    return [f"  {command_line(['.', os.path.relpath(script)])}"]


def _side_by_side(comparisons: Mapping[str, Comparison]) -> str:
    """Return a table with one column per task: the target, each method, and the target fine-tuned directly."""
    names = ("target", *SHOWN_METHODS.split(","), "target fine-tuned")
    columns = [
        {row.method: row.average for row in comparison.rows() if row.size in (None, SIZE)}
        for comparison in comparisons.values()
    ]
    means = [[f"{100 * mean.mean:.1f}" for column in columns if (mean := column[name])] for name in names]
    rows = ((method_label(name), *row) for name, row in zip(names, means, strict=True))
    return format_table([("model", *comparisons), *rows])


SHELLS = ("bash", "zsh", "fish")


@click.command(cls=SectionedHelp, short_help="Tab completion for your shell.")
@click.argument("shell", required=False, type=Choice(SHELLS))
@output_options
def completion(shell: str | None, as_json: bool, quiet: bool) -> None:
    """Print the script that completes commands, options, methods, folders and cached repos in your shell.

    SHELL is bash, zsh or fish; by default the one of $SHELL. Put the line below into your ~/.bashrc or ~/.zshrc; for
    fish, write the script to a file once.

    \b
    Examples:
      eval "$(hf-bico completion bash)"
      eval "$(hf-bico completion zsh)"
      hf-bico completion fish > ~/.config/fish/completions/hf-bico.fish
    """
    with exit_on_error():
        from click.shell_completion import get_completion_class

        path, known = os.environ.get("SHELL", ""), f"name one of: {', '.join(SHELLS)}"
        shell = shell or Path(path).name
        if shell not in SHELLS:
            raise UsageError(f"the shell is not known by $SHELL, which is '{path}'", known)
        completion_class = get_completion_class(shell)
        if completion_class is None:
            raise UsageError(f"this release of click knows no completion for {shell}", known)
        group = click.get_current_context().find_root().command
        script = completion_class(group, {}, "hf-bico", "_HF_BICO_COMPLETE").source()
        # click's own would cut a value at its first comma: --methods naive,theseus
        script = script.replace('string split ","', 'string split --max 1 ","')
        if as_json:
            echo_json({"shell": shell, "script": script})
        elif not quiet:
            echo(*script.rstrip("\n").split("\n"))
