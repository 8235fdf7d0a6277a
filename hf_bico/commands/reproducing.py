"""The command that repeats the paper's experiments: reproduce."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_bico.edge.completing import complete_model
from hf_bico.edge.ending import edge
from hf_bico.edge.options import (
    device_option,
    dtype_option,
    eval_samples_option,
    folder_option,
    hub_options,
    memory_options,
    output_options,
    training_options,
)
from hf_bico.edge.sections import MODELS, RUNNING, SAMPLES, TRAINING, SectionedHelp
from hf_bico.errors import UsageError
from hf_bico.settings import read_size

if TYPE_CHECKING:
    from hf_bico.experiments.compare.comparison import Comparison


@click.command(cls=SectionedHelp, short_help="Repeat a table of the paper, beside its own numbers.")
@click.argument("table", required=False)
@SAMPLES.option("--tasks", help="Some of the table's, such as eurosat,mnist; all by default.")
@SAMPLES.option("--seeds", type=int, help="Draws of the samples; by default as many as the paper has.")
@MODELS.option(
    "--source-of",
    multiple=True,
    metavar="TASK=MODEL",
    shell_complete=complete_model,
    help="A fine-tuned source for a task; what is not given is fine-tuned by the paper's recipe.",
)
@MODELS.option(
    "--target-of", multiple=True, metavar="TASK=MODEL", help="A target that was fine-tuned directly, for its own line."
)
@SAMPLES.option("--data-of", multiple=True, metavar="TASK=DATA", help="Another copy of a task's data set.")
@TRAINING.option("--train-target", is_flag=True, help="Fine-tune the target too, for its own line.")
@training_options
@SAMPLES.option("--max-download", default="20GB", show_default=True, help="Most to download of a data set.")
@eval_samples_option
@memory_options
@device_option
@dtype_option
@folder_option("Folder of all tables and fine-tunes; ./reproduced by default.")
@RUNNING.option("--dry-run", is_flag=True, help="Only show the table, and what it would take.")
@hub_options
@output_options
def reproduce(table: str | None, **options: Any) -> None:
    """Repeat one of the paper's tables, 1 to 5 or A to H, on its own models and data sets.

    First says what it will download and about how long it will take. Everything is kept as it comes: the same command
    goes on with an interrupted run, and tables share the models that were fine-tuned. Without TABLE, lists the tables.

    \b
    Examples:
      hf-bico reproduce
      hf-bico reproduce 1 --tasks eurosat,mnist --dry-run
      hf-bico reproduce 1 --tasks eurosat,mnist
      hf-bico reproduce 3 --source-of eurosat=user/vit-b16-datacomp-eurosat --tasks eurosat
    """
    as_json, quiet = options.pop("as_json"), options.pop("quiet")
    with edge() as at:
        from hf_bico.experiments.reproduce import paper

        if table is None:
            _list(as_json)
            return
        output, dry_run = options.pop("output"), options.pop("dry_run")
        token, allow_pickle = options.pop("token"), options.pop("allow_pickle")
        tasks = None if options["tasks"] is None else [word.strip() for word in options["tasks"].split(",")]
        given = {name: _by_task(options.pop(name), name) for name in ("source_of", "target_of", "data_of")}
        seeds, train_target = options.pop("seeds"), options.pop("train_target")
        options.pop("tasks")
        for name in ("max_download", "memory"):
            if options[name] is not None:
                options[name] = read_size(options[name], f"--{name.replace('_', '-')}")
        from hf_bico.settings import Settings

        settings, folder = Settings(**options), Path(output or "reproduced").expanduser()
        paper.table(table)  # what is mistyped is said before what takes seconds to import
        from hf_bico.experiments.reproduce.run import Given, Job, carry_out, estimate

        job = Job.of(table, tasks, folder, Given(*given.values()), seeds, train_target)
        expected = estimate(job, settings, token, allow_pickle)
        silent = quiet or as_json
        if not silent:
            click.echo("\n".join(expected.lines()), err=not dry_run)
        if dry_run:
            from hf_bico.experiments.reproduce.reproduction import Reproduction

            known = Reproduction(job.table, tuple(one.name for one in job.tasks))
            if as_json:
                click.echo(json.dumps({"expected": expected.as_dict(), "table": json.loads(known.to_json())}))
            elif not quiet:
                click.echo(f"\n{known.text()}")
            return
        from hf_bico.edge.bars import shown_comparison

        at.interrupted = "nothing was measured yet"
        with shown_comparison(silent) as (progress, show):

            def measured(part: str, comparison: Comparison) -> None:
                at.interrupted = f"what was measured is in {folder}, and the same command goes on from there"
                show(comparison, part)

            found = carry_out(job, settings, token, allow_pickle, progress, measured)
        if as_json:
            click.echo(json.dumps({"folder": str(job.results), "reproduction": json.loads(found.to_json())}))
        elif not quiet:
            click.echo(f"{found.text()}\n\nWritten to {job.results}")


def _list(as_json: bool) -> None:
    from hf_bico.experiments.reproduce import paper

    tables = [paper.table(name) for name in paper.TABLES]
    if as_json:
        fields = ("name", "title", "source", "target", "tasks", "protocol", "seeds")
        click.echo(json.dumps({"tables": [{name: getattr(one, name) for name in fields} for one in tables]}))
        return
    click.echo("\n".join(f"{one.name}  {one.title}" for one in tables))
    click.echo("\nNext: hf-bico reproduce TABLE --dry-run")


def _by_task(texts: tuple[str, ...], option: str) -> dict[str, str]:
    """What is typed as TASK=NAME."""
    found = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name or not value:
            raise UsageError(f"--{option.replace('_', '-')} is '{text}'", "give TASK=NAME, such as eurosat=user/model")
        found[name.strip()] = value.strip()
    return found
